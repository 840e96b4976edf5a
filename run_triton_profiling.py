#!/usr/bin/env python3
"""Profile each Triton kernel of tiny_llama_v3.py against PyTorch: time, error, memory, bandwidth or arithmetic.

    python run_triton_profiling.py                                   sizes of a small model
    python run_triton_profiling.py --only rmsnorm --hidden-dim 4096  one kernel, another width
    python run_triton_profiling.py --json profile.json               all figures as a file

The cases are those of benchmarks.kernels, at the sizes of one model. "ms" is the device's time of one call, without
launches as the call is captured in a graph, after flushing the cache. The error is that of the worst output, relative
to its norm; twice that of PyTorch in the same precision, plus a rounding, is allowed. Bandwidth counts the least bytes
that must be moved. Its ceiling is measured by a kernel that reads and writes, and the ceiling of arithmetic by a large
matrix product. Without a GPU Triton's interpreter runs the kernels at small sizes: the errors are valid, the times are
not.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met or the file not be written, 130 interrupted,
141 the pipe of the output was closed.
"""

import functools
import os
import sys
from pathlib import Path

import pandas as pd
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
import tiny_llama_v3 as llama  # noqa: E402
from benchmarks import kernels  # noqa: E402
from measure.accuracy import compare  # noqa: E402
from measure.command_line import Parser, program  # noqa: E402
from measure.device import kernel_device  # noqa: E402
from measure.results import header, write_json  # noqa: E402
from measure.timing import Bench, measure_ceilings  # noqa: E402
from offline.architectures import CHIPS, occupancy  # noqa: E402
from tiny_llama import hardware  # noqa: E402

SIZES = {  # model sizes for each type of device; each is an option
    "cuda": dict(batch_size=16, seq_len=512, hidden_dim=1024, num_heads=16, vocab_size=32000),
    "cpu": dict(batch_size=1, seq_len=32, hidden_dim=64, num_heads=4, vocab_size=96),
}
CASES = {  # {of --only: title, cases of benchmarks.kernels, their arguments}
    "rmsnorm": ("RMSNorm", kernels.rmsnorm_cases, "tokens_per_step hidden_dim"),
    "swiglu": ("SwiGLU Activation", kernels.swiglu_cases, "tokens_per_step ffn_dim"),
    "attention": ("Attention", kernels.attention_cases, "batch_size seq_len num_heads num_kv_heads head_dim"),
    "cross-entropy": ("Cross-Entropy", kernels.cross_entropy_cases, "tokens_per_step vocab_size"),
}


def figures(bench, call):
    """Return the time of a call, and the memory that it allocates at its peak."""
    ms = bench.flushed_ms(call)
    if not bench.on_gpu:
        return {"ms": ms, "memory_mib": None}
    with bench.on_stream():
        # What the call finds allocated, its inputs, does not count.
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peak = torch.cuda.max_memory_allocated()
    return {"ms": ms, "memory_mib": (peak - before) / 2**20}


def profile(bench, case, ceilings):
    """Measure and print all figures of a Case. Return them."""
    with bench.on_stream():
        verdict = compare(*case.evidence(case.outputs("triton")))
    error, allowed = verdict.errors[verdict.worst], verdict.allowed[verdict.worst]
    # Only what is compared: other peers are those of benchmarks.kernels.
    ours, theirs = (figures(bench, call) for call in (case.calls(name)[0] for name in ("triton", "torch")))
    if case.unit == "TB/s":
        label, unit, rate = "Bandwidth", "GB/s", case.work.bytes / ours["ms"] / 1e6
    else:
        label, unit, rate = "Arithmetic", "TFLOP/s", case.work.flop / ours["ms"] / 1e9
    share = rate / ceilings[unit]
    print(f"  Triton {case.name}: {ours['ms']:.3f} ms")
    print(f"  PyTorch {case.name}: {theirs['ms']:.3f} ms")
    print(f"  Speedup: {theirs['ms'] / ours['ms']:.2f}x")
    print(f"  Max error: {error:.2e} (allowed {allowed:.2e}){'' if error <= allowed else ' WRONG'}")
    if bench.on_gpu:
        print(f"  Memory: {ours['memory_mib']:.1f} MiB (PyTorch {theirs['memory_mib']:.1f})")
    print(f"  {label}: {rate:.4g} {unit}, {100 * share:.0f} % of the {ceilings[unit]:.4g} {unit} measured here\n")
    return {
        "name": case.name,
        "error": error,
        "allowed": allowed,
        "bytes": case.work.bytes,
        "flop": case.work.flop,
        "triton": ours,
        "torch": theirs,
    }


def resources(arch, compiled, warps):
    """Return {"registers" of a thread, "occupancy": the share of warps that fit}; None where it is not known."""
    registers = getattr(compiled, "n_regs", None)  # an interpreted kernel has none
    if registers is None or arch not in CHIPS:
        return {"registers": registers, "occupancy": None}
    fits = occupancy(arch, registers, compiled.metadata.shared, warps)
    return {"registers": registers, "occupancy": fits["share"]}


def sweep_block_sizes(bench, config):
    """Time RMSNorm forward with blocks of columns smaller than a row, equal to it, and larger. Print and return it."""
    x, weight = bench.randn(config.tokens_per_step, config.hidden_dim), bench.randn(config.hidden_dim)
    rows = []
    # A block as wide as a row loads it once. Narrow ones take several rounds, wide ones registers that stay empty.
    for size in (64, 128, 256, 512, 1024):
        llama.COMPILED.clear()  # so that the kernel below is the only one
        ms = bench.flushed_ms(functools.partial(llama.rmsnorm_forward, x, None, weight, kernels.EPS, size))
        tile = llama.norm_tile(*x.shape, False, bench.device.type, size)
        (compiled,) = llama.COMPILED.values()
        row = {"block_size": size, "rows": tile.rows, "warps": tile.warps}
        row |= resources(bench.device.arch, compiled, tile.warps)
        rows.append(row | {"ms": ms, "GB/s": 2 * x.nbytes / ms / 1e6})
    print(pd.DataFrame(rows).fillna("-").to_string(index=False, float_format="{:.4g}".format), flush=True)
    return rows


def parse(argv):
    parser = Parser("run_triton_profiling.py", __doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="kernels (default: all)")
    for name, value in SIZES["cuda"].items():
        default = f"default: {value}, on a CPU {SIZES['cpu'][name]}"
        default += "; for another --hidden-dim as many as keep their width" * (name == "num_heads")
        parser.add_argument(llama.flag_of(name), type=int, metavar="N", help=default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    options = parser.parse_args(argv)
    if options.json is not None and options.json.is_dir():
        raise llama.UsageError(f"--json {options.json} is a folder: name a file")
    return options


def config_of(options, device):
    """Return the Config of the given sizes, and of the usual ones where none is given."""
    usual = SIZES[device.type]
    given = {name: getattr(options, name) for name in usual}
    sizes = usual | {name: value for name, value in given.items() if value is not None}
    if options.num_heads is None:  # heads of the usual width
        sizes["num_heads"] = max(1, sizes["hidden_dim"] * usual["num_heads"] // usual["hidden_dim"])
    # No case has the weights of layers: an error of memory should not count them.
    return llama.Config(**sizes, num_layers=1)


@program("run_triton_profiling.py")
def main(argv):
    options, device = parse(argv), kernel_device()
    return hardware.remedied(config_of(options, device), measure, argv, options, device)


def measure(config, argv, options, device):
    """Measure, print and write what the options ask for. Return the exit code."""
    hardware.require_host_memory(config, device)
    torch.manual_seed(0)
    bench = Bench(device)
    if not bench.on_gpu:
        print("There is no GPU: Triton's interpreter runs the kernels, and times mean nothing here.", file=sys.stderr)
    result = header("", device, argv) | {"dtype": str(bench.dtype).removeprefix("torch."), "kernels": []}
    # header() takes the name of a benchmark; this program is started by its path.
    result["command"] = result["command"].replace("-m benchmarks.", "run_triton_profiling.py", 1)
    result["sizes"] = {name: getattr(config, name) for name in SIZES["cuda"]}
    result["ceilings"] = measure_ceilings(bench)
    print("=== Triton Kernel Performance Analysis ===\n")
    for number, key in enumerate(options.only, 1):
        title, cases, arguments = CASES[key]
        print(f"{number}. {title} Kernel Profiling")
        for case in cases(bench, *(getattr(config, name) for name in arguments.split())):
            result["kernels"].append(profile(bench, case, result["ceilings"]))
    if "rmsnorm" in options.only:
        print("Block Sizes of RMSNorm")
        result["block_sizes"] = sweep_block_sizes(bench, config)
    print(f"\n{device.name} ({device.arch}), PyTorch {torch.__version__}, {result['dtype']}: {result['sizes']}")
    if options.json is not None:
        write_json(options.json, result, follow=True)
        print(f"Results: {options.json}")
    # Not a number is not within what is allowed either.
    wrong = [case["name"] for case in result["kernels"] if not case["error"] <= case["allowed"]]
    if wrong:
        print(f"run_triton_profiling.py: wrong: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
