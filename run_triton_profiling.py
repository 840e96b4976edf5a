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

import os
import sys
from datetime import datetime
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
from measure.results import write_json  # noqa: E402
from measure.timing import Bench, measure_ceilings  # noqa: E402
from offline.architectures import CHIPS, occupancy  # noqa: E402
from tiny_llama import hardware, tiles  # noqa: E402

SIZES = {  # model sizes for each type of device; each is an option
    "cuda": dict(batch_size=16, seq_len=512, hidden_dim=1024, num_heads=16, vocab_size=32000),
    "cpu": dict(batch_size=1, seq_len=32, hidden_dim=64, num_heads=4, vocab_size=96),
}
CASES = {  # {group of benchmarks.kernels: its title, and fields of the Config, the arguments of its cases}
    "rmsnorm": ("RMSNorm", "tokens_per_step hidden_dim"),
    "swiglu": ("SwiGLU Activation", "tokens_per_step ffn_dim"),
    "attention": ("Attention", "batch_size seq_len num_heads num_kv_heads head_dim"),
    "cross-entropy": ("Cross-Entropy", "tokens_per_step vocab_size"),
}


def figures(bench, call):
    """Return the time of a call, and on a GPU the memory that it allocates at its peak."""
    ms, memory = bench.flushed_ms(call), None
    if bench.on_gpu:
        with bench.on_stream():
            # What the call finds allocated, its inputs, does not count.
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"ms": ms, "memory_mib": memory}


def profile(bench, case, ceilings):
    """Measure and print all figures of a Case. Return them."""
    with bench.on_stream():
        verdict = compare(*case.evidence(case.outputs("triton")))
    error, allowed = verdict.errors[verdict.worst], verdict.allowed[verdict.worst]
    # Only what is compared: other peers are those of benchmarks.kernels.
    ours, theirs = (figures(bench, case.calls(name)[0]) for name in ("triton", "torch"))
    label, unit, amount = "Arithmetic", "TFLOP/s", case.work.flop / 1e9
    if case.unit == "TB/s":  # what memory limits
        label, unit, amount = "Bandwidth", "GB/s", case.work.bytes / 1e6
    rate, ceiling = amount / ours["ms"], ceilings[unit]
    print(f"""\
  Triton {case.name}: {ours["ms"]:.3f} ms
  PyTorch {case.name}: {theirs["ms"]:.3f} ms
  Speedup: {theirs["ms"] / ours["ms"]:.2f}x
  Max error: {error:.2e} (allowed {allowed:.2e}){"" if error <= allowed else " WRONG"}""")
    if bench.on_gpu:
        print(f"  Memory: {ours['memory_mib']:.1f} MiB (PyTorch {theirs['memory_mib']:.1f})")
    print(f"  {label}: {rate:.4g} {unit}, {100 * rate / ceiling:.0f} % of the {ceiling:.4g} {unit} measured here\n")
    own = {"name": case.name, "error": error, "allowed": allowed, "triton": ours, "torch": theirs}
    return own | case.work._asdict()


def resources(arch, compiled, warps):
    """Return {"registers" of a thread, "occupancy": the share of warps that fit}; None where it is not known."""
    registers, share = getattr(compiled, "n_regs", None), None  # an interpreted kernel has none
    if registers and arch in CHIPS:
        share = occupancy(arch, registers, compiled.metadata.shared, warps)["share"]
    return {"registers": registers, "occupancy": share}


def sweep_block_sizes(bench, config):
    """Time RMSNorm forward with blocks of columns smaller than a row, equal to it, and larger. Print and return it."""
    shape = config.tokens_per_step, config.hidden_dim
    x, weight = bench.randn(*shape), bench.randn(config.hidden_dim)
    print("Block Sizes of RMSNorm")
    rows = []
    # A block as wide as a row loads it once. Narrow ones take several rounds, wide ones registers that stay empty.
    for size in (64, 128, 256, 512, 1024):
        llama.COMPILED.clear()  # so that the kernel below is the only one
        ms = bench.flushed_ms(lambda size=size: llama.rmsnorm_forward(x, None, weight, kernels.EPS, size))
        tile = llama.norm_tile(*shape, False, bench.device.type, size)
        (compiled,) = llama.COMPILED.values()
        rows.append(
            {
                "block_size": size,
                "rows": tile.rows,
                "warps": tile.warps,
                **resources(llama.get_gpu(bench.device.type).arch, compiled, tile.warps),
                "ms": ms,
                "GB/s": 2 * x.nbytes / ms / 1e6,
            }
        )
    print(pd.DataFrame(rows).fillna("-").to_string(index=False, float_format="{:.4g}".format), flush=True)
    return rows


def parse(argv, usual):
    """Return the options; `sizes` are those given, and the usual ones where none is given."""
    parser = Parser("run_triton_profiling.py", __doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="kernels (default: all)")
    for name, value in usual.items():
        parser.add_argument(llama.flag_of(name), type=int, metavar="N", help=f"(default here: {value})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    options = parser.parse_args(argv)
    given = {name: value for name, value in vars(options).items() if name in usual and value is not None}
    options.sizes = usual | given
    if "num_heads" not in given:  # heads of the usual width
        width = usual["hidden_dim"] // usual["num_heads"]
        options.sizes["num_heads"] = max(1, options.sizes["hidden_dim"] // width)
    return options


@program("run_triton_profiling.py")
def main(argv):
    device = kernel_device()
    options = parse(argv, SIZES[device.type])
    # No case has the weights of layers: an error of memory should not count them.
    return hardware.remedied(llama.Config(**options.sizes, num_layers=1), measure, options, device)


def measure(config, options, device):
    """Measure, print and write what the options ask for. Return the exit code."""
    hardware.require_host_memory(config, device)
    torch.manual_seed(0)
    bench, gpu = Bench(device), llama.get_gpu(device.type)
    if not bench.on_gpu:
        print("There is no GPU: Triton's interpreter runs the kernels, and times mean nothing here.", file=sys.stderr)
    if llama.own_tiles(device.type):
        print(tiles.describe(device.type))
    ceilings, cases, dtype = measure_ceilings(bench), [], str(bench.dtype).removeprefix("torch.")
    print("=== Triton Kernel Performance Analysis ===\n")
    for number, group in enumerate(options.only, 1):
        title, fields = CASES[group]
        print(f"{number}. {title} Kernel Profiling")
        arguments = [getattr(config, name) for name in fields.split()]
        cases += [profile(bench, case, ceilings) for case in kernels.GROUPS[group].cases(bench, *arguments)]
    block_sizes = sweep_block_sizes(bench, config) if "rmsnorm" in options.only else []
    print(
        f"\n{gpu.name} ({gpu.arch}), PyTorch {torch.__version__}, {dtype}: batch {config.batch_size} x "
        f"{config.seq_len} tokens, hidden {config.hidden_dim}, {config.num_heads} heads, vocab {config.vocab_size}"
    )
    if options.json:
        # What profilers.plot and run_rocprof_triton.sh read.
        result = {
            "date": datetime.now().isoformat(timespec="seconds"),
            "environment": hardware.environment(device),
            "sizes": options.sizes,
            "dtype": dtype,
            "ceilings": ceilings,
            "kernels": cases,
            "block_sizes": block_sizes,
        }
        write_json(options.json, result, follow=True)
        print(f"Results: {options.json}")
    # Not a number is not within what is allowed either.
    return int(not all(case["error"] <= case["allowed"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
