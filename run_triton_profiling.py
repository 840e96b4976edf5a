#!/usr/bin/env python3
"""Profile each Triton kernel of tiny_llama_v3.py against PyTorch: time, error, memory, bandwidth or arithmetic.

    python run_triton_profiling.py                                   sizes of a small model
    python run_triton_profiling.py --only rmsnorm --hidden-dim 4096  one kernel, another width
    python run_triton_profiling.py --json profile.json               all figures as a file

The cases are those of benchmarks.kernels, at the sizes of one model. "ms" is the device's time of one call, without
launches as the call is captured in a graph, after flushing the cache. Wall time is that of consecutive calls, including
launches. The error is that of the worst output, relative to its norm; twice that of PyTorch in the same precision, plus
a rounding, is allowed. Bandwidth counts the least bytes that must be moved. Its ceiling is measured by a kernel that
reads and writes, and the ceiling of arithmetic by a large matrix product. Without a GPU Triton's interpreter runs the
kernels at small sizes: the errors are valid, the times are not.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met or the file not be written, 130 interrupted,
141 the pipe of the output was closed.
"""

import dataclasses
import functools
import os
import sys
from pathlib import Path
from unittest import mock

import pandas as pd
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
import tiny_llama_v3 as llama  # noqa: E402
from benchmarks import kernels  # noqa: E402
from measure import work  # noqa: E402
from measure.accuracy import compare  # noqa: E402
from measure.command_line import Parser, program  # noqa: E402
from measure.device import kernel_device  # noqa: E402
from measure.results import describe, header, write_json  # noqa: E402
from measure.timing import Bench, copy_calls, wall_seconds  # noqa: E402
from offline.architectures import CHIPS, occupancy  # noqa: E402
from tiny_llama import hardware  # noqa: E402

BLOCK_SIZES = (64, 128, 256, 512, 1024)
SIZES = {  # model sizes for each type of device; each is an option
    "cuda": dict(batch_size=16, seq_len=512, hidden_dim=1024, num_heads=16, vocab_size=32000),
    "cpu": dict(batch_size=1, seq_len=32, hidden_dim=64, num_heads=4, vocab_size=96),
}


def heads_of(width, usual):
    """Return how many heads a hidden dimension has: as wide as those of the usual sizes, or narrower to divide it."""
    least = max(1, -(-width * usual["num_heads"] // usual["hidden_dim"]))
    return next((heads for heads in range(least, least + 1000) if width % (2 * heads) == 0), least)


# ----------------------------------------------------------------------------------------------------------------------
# Cases of a llama.Config


def naive_matmul_cases(bench, config):
    rows = min(config.tokens_per_step, 1024 if bench.on_gpu else 2)
    x = bench.randn(rows, config.hidden_dim)
    weight = bench.randn(2 * config.ffn_dim, config.hidden_dim) / config.hidden_dim**0.5
    cost = work.swiglu_matmul(x, weight, *llama.swiglu_naive_matmul(x, weight))

    def plain(x, weight):
        return kernels.torch_activation(torch.nn.functional.linear(x, weight))

    ours, peers = [lambda: llama.swiglu_naive_matmul(x, weight)[1]], {"torch": lambda: plain}
    names = "SwiGLU matrix product, naive", "", cost, "TFLOP/s", plain
    yield kernels.Case(bench, *names, [(x, weight)], [], ours, peers)


def attention_shape(config):
    return config.batch_size, config.seq_len, config.num_heads, config.num_kv_heads, config.head_dim


CASES = {
    "rmsnorm": ("RMSNorm", lambda bench, c: kernels.rmsnorm_cases(bench, c.tokens_per_step, c.hidden_dim)),
    "swiglu": ("SwiGLU Activation", lambda bench, c: kernels.swiglu_cases(bench, c.tokens_per_step, c.ffn_dim)),
    "naive-matmul": ("Naive SwiGLU Matrix Product", naive_matmul_cases),
    "attention": ("Attention", lambda bench, c: kernels.attention_cases(bench, *attention_shape(c))),
    "cross-entropy": (
        "Cross-Entropy",
        lambda bench, c: kernels.cross_entropy_cases(bench, c.tokens_per_step, c.vocab_size),
    ),
}

# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def figures(bench, call):
    """Return the time of a call alone and among others, and the memory that it allocates at its peak."""
    ms = bench.flushed_ms(call)
    if not bench.on_gpu:
        return {"ms": ms, "wall_ms": ms, "memory_mib": None}
    with bench.on_stream():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        memory = torch.cuda.max_memory_allocated() - before
        return {"ms": ms, "wall_ms": wall_seconds([call], 100, bench.device) * 1e3, "memory_mib": memory / 2**20}


def measure_ceilings(bench):
    """Return {"GB/s", "TFLOP/s"}, the ceilings of this device: the best of three measurements."""
    copies, moved = copy_calls(bench, 2**28 if bench.on_gpu else 2**23)  # more than any cache holds
    size = 8192 if bench.on_gpu else 1024
    product = functools.partial(torch.mm, bench.randn(size, size), bench.randn(size, size))
    copy_us, product_us = (min(bench.microseconds(calls) for _ in range(3)) for calls in (copies, [product]))
    return {"GB/s": moved / copy_us / 1e3, "TFLOP/s": 2 * size**3 / product_us / 1e6}


def profile(bench, case, ceilings):
    """Measure and print all figures of a Case. Return them."""
    with bench.on_stream():
        verdict = compare(*case.evidence(case.ours[0]()))
    error, allowed = verdict.errors[verdict.worst], verdict.allowed[verdict.worst]
    ours, theirs = (figures(bench, call) for call in (case.ours[0], case.build(case.peers["torch"])[0]))
    ms, by_bytes = ours["ms"], case.unit == "TB/s"
    label, unit = ("Bandwidth", "GB/s") if by_bytes else ("Arithmetic", "TFLOP/s")
    rate = case.work.bytes / ms / 1e6 if by_bytes else case.work.flop / ms / 1e9
    speedup, share = theirs["ms"] / ms, rate / ceilings[unit]
    print(f"  Triton {case.name}: {ms:.3f} ms")
    print(f"  PyTorch {case.name}: {theirs['ms']:.3f} ms")
    print(f"  Speedup: {speedup:.2f}x")
    print(f"  Max error: {error:.2e} (allowed {allowed:.2e}){'' if error <= allowed else ' WRONG'}")
    if ours["memory_mib"] is not None:
        print(f"  Memory: {ours['memory_mib']:.1f} MiB (PyTorch {theirs['memory_mib']:.1f})")
    print(f"  {label}: {rate:.4g} {unit}, {100 * share:.0f} % of the {ceilings[unit]:.4g} {unit} measured here")
    print(f"  Wall time, launches included: {ours['wall_ms']:.3f} ms (PyTorch {theirs['wall_ms']:.3f})", flush=True)
    result = {"name": case.name, "error": error, "allowed": allowed, "bytes": case.work.bytes, "flop": case.work.flop}
    return result | dict(triton=ours, torch=theirs, speedup=speedup, unit=unit, rate=rate, share=share)


def sweep_block_sizes(bench, config):
    """Time RMSNorm forward with blocks of columns smaller than a row, equal to it, and larger."""
    x, weight = bench.randn(config.tokens_per_step, config.hidden_dim), bench.randn(config.hidden_dim)
    results = []
    for size in BLOCK_SIZES:
        llama.COMPILED.clear()  # so that the kernel below is the only one
        ms = bench.flushed_ms(functools.partial(llama.rmsnorm_forward, x, None, weight, kernels.EPS, size))
        tile = llama.norm_tile(*x.shape, False, bench.device.type, size)
        (compiled,) = llama.COMPILED.values()
        row = {"block_size": size, "rows": tile.rows, "warps": tile.warps}
        row |= resources(bench.device.arch, compiled, tile.warps)
        results.append(row | {"ms": ms, "GB/s": 2 * x.nbytes / ms / 1e6})
    return results


def resources(arch, compiled, warps):
    """Return {"registers" of a thread, "occupancy" as in compiled.architectures}; None where it is not known."""
    registers = getattr(compiled, "n_regs", None)  # an interpreted kernel has none
    if registers is None or arch not in CHIPS:
        return {"registers": registers, "occupancy": None}
    return {"registers": registers, "occupancy": occupancy(arch, registers, compiled.metadata.shared, warps)}


def sweep_tiles(bench, config):
    """Time attention forward with tiles of queries x keys; a tile that does not fit has an error."""
    batch, seq_len, heads, kv_heads, head_dim = attention_shape(config)
    q, k, v = (bench.randn(batch, seq_len, number, head_dim) for number in (heads, kv_heads, kv_heads))
    flop = work.attention(q, k, v, q, None).flop
    block_d, precision = llama.next_power_of_2(head_dim), llama.dot_precision(bench.device)
    usual = llama.attention_tile("forward", q.element_size(), block_d, precision, bench.device.type)
    edges, results = (32, 64, 128) if bench.on_gpu else (16, 32), []
    for m, n in ((m, n) for m in edges for n in edges):
        ms = error = None
        tile = usual._replace(BLOCK_M=m, BLOCK_N=n)
        llama.attention_launch.cache_clear()  # they depend on the tile
        with mock.patch.object(llama, "attention_tile", lambda *_, tile=tile: tile):
            try:
                ms = bench.flushed_ms(functools.partial(llama.flash_attention_forward, q, k, v))
            except Exception as exception:  # the other tiles can still be timed
                error = describe(exception)
        row = {"queries": m, "keys": n, "usual": (m, n) == (usual.BLOCK_M, usual.BLOCK_N)}
        results.append(row | {"ms": ms, "TFLOP/s": ms and flop / ms / 1e9, "error": error})
    llama.attention_launch.cache_clear()
    return results


def print_sweep(rows):
    """Print a table; what is not known is a dash."""
    table = pd.DataFrame(rows)
    if "occupancy" in table:
        table["occupancy"] = [cell and f"{cell['share']:.0%}" for cell in table["occupancy"]]
    known = table.astype(object).where(table.notna(), "-")
    print(known.to_string(index=False, float_format="{:.4g}".format), flush=True)


SWEEPS = {  # {what of CASES it belongs to: title, field of the JSON, function}
    "rmsnorm": ("Block Sizes of RMSNorm", "block_sizes", sweep_block_sizes),
    "attention": ("Tiles of Attention", "tiles", sweep_tiles),
}


def parse(argv):
    parser = Parser("run_triton_profiling.py", __doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="kernels (default: all)")
    parser.add_argument("--no-sweeps", action="store_true", help="leave out block sizes and tiles")
    for name, value in SIZES["cuda"].items():
        default = f"default: {value}, on a CPU {SIZES['cpu'][name]}"
        default += "; for another --hidden-dim as many as keep their width" * (name == "num_heads")
        parser.add_argument(llama.flag_of(name), type=int, metavar="N", help=default)
    parser.add_argument("--json", metavar="FILE", help="also write all figures here")
    return parser.parse_args(argv)


@program("run_triton_profiling.py")
def main(argv):
    options = parse(argv)
    device = kernel_device()
    given = {name: getattr(options, name) for name in SIZES["cuda"] if getattr(options, name) is not None}
    sizes = SIZES[device.type] | given
    if "num_heads" not in given:
        sizes["num_heads"] = heads_of(sizes["hidden_dim"], SIZES[device.type])
    config = llama.Config(**sizes)
    if options.json is not None:
        if os.path.isdir(options.json):
            raise llama.UsageError(f"--json {options.json} is a folder: name a file")
        replaced = os.path.lexists(options.json)
        llama.writable_folder("--json", os.path.dirname(os.path.abspath(options.json)) if replaced else options.json)
    # The other sizes of a model are no options here: an error of memory must neither name nor count them.
    kernel = dataclasses.replace(config, num_layers=1, ffn_dim=1)
    return hardware.remedied(kernel, measure, argv, options, config, device)


def measure(kernel, argv, options, config, device):
    """Measure, print and write what the options ask for. Return the exit code."""
    weighs = "naive-matmul" in options.only  # the one kernel with a matrix of weights
    hardware.require_host_memory(dataclasses.replace(config, num_layers=1) if weighs else kernel, device)
    torch.manual_seed(0)
    bench = Bench(device)
    if not bench.on_gpu:
        print("There is no GPU: Triton's interpreter runs the kernels, and times mean nothing here.", file=sys.stderr)
    ceilings = measure_ceilings(bench)
    result = header("", device, argv) | {"dtype": str(bench.dtype).removeprefix("torch.")}
    result["command"] = result["command"].replace("-m benchmarks.", "run_triton_profiling.py", 1)
    names = *SIZES["cuda"], "num_kv_heads", "ffn_dim"
    result |= {"sizes": {name: getattr(config, name) for name in names}, "ceilings": ceilings, "kernels": []}
    print("=== Triton Kernel Performance Analysis ===")
    for number, key in enumerate(options.only, 1):
        title, cases = CASES[key]
        print(f"\n{number}. {title} Kernel Profiling")
        for index, case in enumerate(cases(bench, config)):
            print(end="\n" * bool(index))
            result["kernels"].append(profile(bench, case, ceilings))
    for key in (key for key in SWEEPS if key in options.only and not options.no_sweeps):
        title, field, sweep = SWEEPS[key]
        number += 1
        print(f"\n{number}. {title}")
        result[field] = sweep(bench, config)
        print_sweep(result[field])
    described = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["sizes"].items())
    print(f"\n{device.name} ({device.arch}), PyTorch {torch.__version__}, {result['dtype']}: {described}")
    if not bench.on_gpu:
        print("Times mean nothing: this was Triton's interpreter on a CPU.")
    if options.json is not None:
        write_json(Path(options.json), result, follow=True)
        print(f"Results: {options.json}")
    wrong = [case["name"] for case in result["kernels"] if not case["error"] <= case["allowed"]]
    for name in wrong:
        reason = "differs from PyTorch in higher precision by more than is allowed"
        print(f"run_triton_profiling.py: {name} {reason}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
