#!/usr/bin/env python3
"""Profile each Triton kernel of tiny_llama_v3.py against PyTorch: time, error, memory, bandwidth or arithmetic.

    python run_triton_profiling.py                                   sizes of a small model
    python run_triton_profiling.py --only rmsnorm --hidden-dim 4096  one kernel, another width
    python run_triton_profiling.py --json profile.json               all figures as a file

"ms" is the device's time of one call, without launches as the call is captured in a graph, after flushing the cache.
Wall time is that of consecutive calls, including launches. The error is the largest deviation of an element, relative
to the largest element of the result; twice that of PyTorch in the same precision, plus a rounding, is allowed.
Bandwidth counts the least bytes that must be moved. Its ceiling is measured by a kernel that reads and writes, and the
ceiling of arithmetic by a large matrix product. Without a GPU Triton's interpreter runs the kernels at small sizes: the
errors are valid, the times are not.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met or the file not be written, 130 interrupted,
141 the pipe of the output was closed.
"""

import dataclasses
import functools
import math
import os
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
import tiny_llama_v3 as llama  # noqa: E402
from benchmarks import kernels  # noqa: E402
from compiled.architectures import CHIPS, occupancy  # noqa: E402
from measure import accuracy, work  # noqa: E402
from measure.accuracy import promoted  # noqa: E402
from measure.command_line import Parser, program  # noqa: E402
from measure.device import kernel_device  # noqa: E402
from measure.results import describe, write_json  # noqa: E402
from measure.timing import Bench, copy_calls, gradient_call, wall_seconds  # noqa: E402
from tiny_llama import hardware  # noqa: E402

BLOCK_SIZES = (64, 128, 256, 512, 1024)
MEASURED_SECONDS = 0.1
SIZES = {  # model sizes for each type of device; each is an option
    "cuda": dict(batch_size=16, seq_len=512, hidden_dim=1024, num_heads=16, vocab_size=32000),
    "cpu": dict(batch_size=1, seq_len=32, hidden_dim=64, num_heads=4, vocab_size=96),
}


def heads_of(width, usual):
    """Return how many heads a hidden dimension has: as wide as those of the usual sizes, or narrower to divide it."""
    least = -(-width * usual["num_heads"] // usual["hidden_dim"])
    return next((heads for heads in range(least, least + 1000) if width % (2 * heads) == 0), least)


class Case(NamedTuple):
    """One direction of one operation; the calls return tuples of corresponding tensors."""

    name: str  # of the operation, as in profilers.kernel_names
    ours: object
    theirs: object
    exact: object  # the same in float64
    work: work.Work
    by_bytes: bool  # whether its speed is a bandwidth; otherwise it is in FLOP/s


# ----------------------------------------------------------------------------------------------------------------------
# Cases: each generator yields the Cases of one operation, forward and backward


def directions(bench, name, function, inputs, upstream, forward, backward, costs, by_bytes=True):
    """Cases of function(*inputs), a tensor, and its gradients; costs: the Work of each direction."""

    def exact_forward():
        return (function(*promoted(inputs)).detach(),)

    def exact_backward():
        exact = promoted(inputs)
        return torch.autograd.grad(function(*exact), [x for x in exact if x.requires_grad], *promoted([upstream]))

    yield Case(name, forward, lambda: (function(*inputs),), exact_forward, costs[0], by_bytes)
    with bench.on_stream():
        theirs = gradient_call(function, inputs, upstream)
    yield Case(f"{name} backward", backward, theirs, exact_backward, costs[1], by_bytes)


def rmsnorm_cases(bench, config):
    x = bench.randn(config.tokens_per_step, config.hidden_dim).requires_grad_()
    weight = bench.randn(config.hidden_dim).requires_grad_()
    upstream = bench.randn(*x.shape)
    plain = x.detach(), None, weight.detach()
    _, y, rstd = llama.rmsnorm_forward(*plain, kernels.EPS)
    costs = work.rmsnorm(x, weight, y, rstd), work.rmsnorm_backward(y, x, weight, rstd, x)
    yield from directions(
        bench, "RMSNorm", kernels.torch_norm, (x, weight), upstream,
        lambda: llama.rmsnorm_forward(*plain, kernels.EPS)[1:2],
        lambda: kernels.rmsnorm_backward(upstream, None, plain[0], plain[2], rstd), costs,
    )  # fmt: skip


def swiglu_cases(bench, config):
    gate_up = bench.randn(config.tokens_per_step, 2 * config.ffn_dim).requires_grad_()
    upstream = bench.randn(config.tokens_per_step, config.ffn_dim)
    overwritten = gate_up.detach().clone()

    def backward():  # in place: a second call reads a gradient, which takes the same time
        llama.swiglu_activation_backward_(upstream, overwritten)
        return (overwritten,)

    costs = work.swiglu_activation(gate_up, upstream), work.swiglu_activation_backward(upstream, gate_up)
    yield from directions(
        bench, "SwiGLU", kernels.torch_activation, (gate_up,), upstream,
        lambda: (llama.swiglu_activation(gate_up.detach()),), backward, costs,
    )  # fmt: skip


def naive_matmul_cases(bench, config):
    rows = min(config.tokens_per_step, 1024 if bench.on_gpu else 2)
    x = bench.randn(rows, config.hidden_dim)
    weight = bench.randn(2 * config.ffn_dim, config.hidden_dim) / config.hidden_dim**0.5

    def function(x, weight):
        return (kernels.torch_activation(F.linear(x, weight)),)

    gate_up, hidden = llama.swiglu_naive_matmul(x, weight)
    yield Case(
        "SwiGLU matrix product, naive", lambda: llama.swiglu_naive_matmul(x, weight)[1:], lambda: function(x, weight),
        lambda: function(*promoted((x, weight))), work.swiglu_matmul(x, weight, gate_up, hidden), by_bytes=False,
    )  # fmt: skip


def attention_cases(bench, config):
    q, upstream = (bench.randn(config.batch_size, config.seq_len, config.num_heads, config.head_dim) for _ in range(2))
    k, v = (bench.randn(config.batch_size, config.seq_len, config.num_kv_heads, config.head_dim) for _ in range(2))
    o, lse = llama.flash_attention_forward(q, k, v)
    gradients = [torch.empty_like(x) for x in (q, k, v)]

    def function(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def backward():
        llama.flash_attention_backward(upstream, (q, k, v, o, lse), gradients)
        return gradients

    costs = work.attention(q, k, v, o, lse), work.attention_backward(q, k, v, o, upstream, lse, q, k, v)
    yield from directions(
        bench, "attention", function, [x.clone().requires_grad_() for x in (q, k, v)], upstream,
        lambda: llama.flash_attention_forward(q, k, v)[:1], backward,
        costs, by_bytes=False,
    )  # fmt: skip


def cross_entropy_cases(bench, config):
    logits = bench.randn(config.tokens_per_step, config.vocab_size).requires_grad_()
    targets = torch.randint(config.vocab_size, (config.tokens_per_step,), device=logits.device)
    overwritten = logits.detach().clone()

    def ours():
        losses = llama.cross_entropy_(overwritten, targets, 1.0 / len(targets))
        return losses[0].mean(), overwritten

    def function(logits):
        loss = F.cross_entropy(logits, targets)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    def theirs():
        # A new leaf: autograd keeps the stream on which a leaf was first used, and capturing uses another one.
        return function(logits.detach().requires_grad_())

    yield Case(
        "cross-entropy", ours, theirs, lambda: function(*promoted((logits,))),
        work.cross_entropy(logits, targets, logits[:, 0].float()), by_bytes=True,
    )  # fmt: skip


CASES = {
    "rmsnorm": ("RMSNorm", rmsnorm_cases),
    "swiglu": ("SwiGLU Activation", swiglu_cases),
    "naive-matmul": ("Naive SwiGLU Matrix Product", naive_matmul_cases),
    "attention": ("Attention", attention_cases),
    "cross-entropy": ("Cross-Entropy", cross_entropy_cases),
}

# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def verdict_of(case, dtype):
    """The Verdict on the largest deviation of an element of each output, relative to its largest element."""
    # Copies, as the next call overwrites results that are computed in place or in a reused buffer.
    outputs = (
        {number: x.detach().double() for number, x in enumerate(call())}
        for call in (case.ours, case.theirs, case.exact)
    )
    return accuracy.compare(*outputs, torch.finfo(dtype).eps, order=math.inf)


def wall_ms(bench, call):
    """The time of a call among many consecutive ones, including launches."""
    if not bench.on_gpu:
        return bench.flushed_ms(call)
    with bench.on_stream():
        seconds = wall_seconds([call], 1, bench.device)
        count = max(5, min(200, int(MEASURED_SECONDS / seconds)))
        return wall_seconds([call], count, bench.device) * 1e3


def memory_mib(bench, call):
    """The memory that a call allocates at its peak; None on a CPU."""
    if not bench.on_gpu:
        return None
    with bench.on_stream():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_ceilings(bench):
    """Measures {"GB/s", "TFLOP/s"}, the ceilings of this device: the best of three measurements."""
    copies, moved = copy_calls(bench, 2**28 if bench.on_gpu else 2**23)  # more than any cache holds
    size = 8192 if bench.on_gpu else 1024
    product = functools.partial(torch.mm, bench.randn(size, size), bench.randn(size, size))
    copy_us, product_us = (min(bench.microseconds(calls) for _ in range(3)) for calls in (copies, [product]))
    return {"GB/s": moved / copy_us / 1e3, "TFLOP/s": 2 * size**3 / product_us / 1e6}


def profile(bench, case, ceilings):
    """Measures all figures of a Case. Returns a dict."""
    with bench.on_stream():
        verdict = verdict_of(case, bench.dtype)
    error, allowed = verdict.errors[verdict.worst], verdict.allowed[verdict.worst]
    result = {"name": case.name, "error": error, "allowed": allowed, "bytes": case.work.bytes, "flop": case.work.flop}
    for contender, call in (("triton", case.ours), ("torch", case.theirs)):
        result[contender] = {
            "ms": bench.flushed_ms(call),
            "wall_ms": wall_ms(bench, call),
            "memory_mib": memory_mib(bench, call),
        }
    unit = "GB/s" if case.by_bytes else "TFLOP/s"
    ms = result["triton"]["ms"]
    rate = case.work.bytes / ms / 1e6 if case.by_bytes else case.work.flop / ms / 1e9
    result |= {"speedup": result["torch"]["ms"] / ms, "unit": unit, "rate": rate, "share": rate / ceilings[unit]}
    return result


def sweep_block_sizes(bench, config):
    """Times RMSNorm forward with blocks of columns smaller than a row, equal to it, and larger."""
    x, weight = bench.randn(config.tokens_per_step, config.hidden_dim), bench.randn(config.hidden_dim)
    results = []
    for block_size in BLOCK_SIZES:
        llama.COMPILED.clear()  # so that the kernel below is the only one
        ms = bench.flushed_ms(lambda size=block_size: llama.rmsnorm_forward(x, None, weight, kernels.EPS, size))
        tile = llama.norm_tile(*x.shape, False, bench.device.type, block_size)
        row = {
            "block_size": block_size,
            "rows": tile.rows,
            "warps": tile.warps,
            "ms": ms,
            "GB/s": 2 * x.nbytes / ms / 1e6,
        }
        (compiled,) = llama.COMPILED.values()
        results.append(row | resources(bench.device.arch, compiled, tile.warps))
    return results


def resources(arch, compiled, warps):
    """{"registers" of a thread, "occupancy" as in compiled.architectures} of a kernel; None where it is not known."""
    registers = getattr(compiled, "n_regs", None)  # an interpreted kernel has none
    if registers is None or arch not in CHIPS:
        return {"registers": registers, "occupancy": None}
    return {"registers": registers, "occupancy": occupancy(arch, registers, compiled.metadata.shared, warps)}


def sweep_tiles(bench, config):
    """Times attention forward with tiles of queries x keys; a tile that does not fit has an error."""
    q = bench.randn(config.batch_size, config.seq_len, config.num_heads, config.head_dim)
    k, v = (bench.randn(config.batch_size, config.seq_len, config.num_kv_heads, config.head_dim) for _ in range(2))
    flop = work.attention(q, k, v, q, None).flop
    block_d, precision = llama.next_power_of_2(config.head_dim), llama.dot_precision(bench.device)
    usual = llama.attention_tile("forward", q.element_size(), block_d, precision, bench.device.type)
    results = []
    for m in (32, 64, 128) if bench.on_gpu else (16, 32):
        for n in (32, 64, 128) if bench.on_gpu else (16, 32):
            row = {
                "queries": m,
                "keys": n,
                "usual": (m, n) == (usual.BLOCK_M, usual.BLOCK_N),
                "ms": None,
                "TFLOP/s": None,
                "error": None,
            }
            tile = usual._replace(BLOCK_M=m, BLOCK_N=n)
            llama.attention_launch.cache_clear()  # they depend on the tile
            with mock.patch.object(llama, "attention_tile", lambda *_, tile=tile: tile):
                try:
                    row["ms"] = bench.flushed_ms(lambda: llama.flash_attention_forward(q, k, v))
                    row["TFLOP/s"] = flop / row["ms"] / 1e9
                except Exception as error:  # the other tiles can still be timed
                    row["error"] = describe(error)
            results.append(row)
    llama.attention_launch.cache_clear()
    return results


# ----------------------------------------------------------------------------------------------------------------------
# Report


def print_case(result, ceilings):
    ours, theirs, name = result["triton"], result["torch"], result["name"]
    print(f"  Triton {name}: {ours['ms']:.3f} ms")
    print(f"  PyTorch {name}: {theirs['ms']:.3f} ms")
    print(f"  Speedup: {result['speedup']:.2f}x")
    verdict = "" if result["error"] <= result["allowed"] else " WRONG"
    print(f"  Max error: {result['error']:.2e} (allowed {result['allowed']:.2e}){verdict}")
    if ours["memory_mib"] is not None:
        print(f"  Memory: {ours['memory_mib']:.1f} MiB (PyTorch {theirs['memory_mib']:.1f})")
    label = "Bandwidth" if result["unit"] == "GB/s" else "Arithmetic"
    ceiling = f"{ceilings[result['unit']]:.4g} {result['unit']} measured here"
    print(f"  {label}: {result['rate']:.4g} {result['unit']}, {100 * result['share']:.0f} % of the {ceiling}")
    print(f"  Wall time, launches included: {ours['wall_ms']:.3f} ms (PyTorch {theirs['wall_ms']:.3f})", flush=True)


def print_block_sizes(rows):
    print("  block  rows a program  warps  registers  occupancy        ms      GB/s")
    for row in rows:
        registers = "-" if row["registers"] is None else row["registers"]
        occupied = "-" if row["occupancy"] is None else f"{row['occupancy']['share']:.0%}"
        print(
            f"  {row['block_size']:5d}  {row['rows']:14d}  {row['warps']:5d}  {registers:>9}  {occupied:>9}  "
            f"{row['ms']:8.3f}  {row['GB/s']:8.4g}"
        )


def print_tiles(rows):
    print("  queries  keys        ms   TFLOP/s")
    for row in rows:
        result = row["error"] or f"{row['ms']:8.3f}  {row['TFLOP/s']:8.3g}" + "  the usual tile" * row["usual"]
        print(f"  {row['queries']:7d}  {row['keys']:4d}  {result}")


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
    return hardware.remedied(kernel, measure, argv, options, sizes, config, device)


def measure(kernel, argv, options, sizes, config, device):
    """Measures, prints and writes what the options ask for. Returns the exit code."""
    weighs = "naive-matmul" in options.only  # the one kernel with a matrix of weights
    hardware.require_host_memory(dataclasses.replace(config, num_layers=1) if weighs else kernel, device)
    torch.manual_seed(0)
    bench = Bench(device)
    if not bench.on_gpu:
        print("There is no GPU: Triton's interpreter runs the kernels, and times mean nothing here.", file=sys.stderr)
    ceilings = measure_ceilings(bench)
    result = {
        "command": shlex.join(["python", "run_triton_profiling.py", *argv]),
        "date": datetime.now().isoformat(timespec="seconds"),
        "environment": hardware.environment(device),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "sizes": sizes | {"num_kv_heads": config.num_kv_heads, "ffn_dim": config.ffn_dim},
        "ceilings": ceilings,
        "kernels": [],
    }

    print("=== Triton Kernel Performance Analysis ===")
    for number, key in enumerate(options.only, 1):
        title, cases = CASES[key]
        print(f"\n{number}. {title} Kernel Profiling")
        for index, case in enumerate(cases(bench, config)):
            if index:
                print()
            result["kernels"].append(profile(bench, case, ceilings))
            print_case(result["kernels"][-1], ceilings)
    for key, title, sweep, show in (
        ("rmsnorm", "Block Sizes of RMSNorm", sweep_block_sizes, print_block_sizes),
        ("attention", "Tiles of Attention", sweep_tiles, print_tiles),
    ):
        if key in options.only and not options.no_sweeps:
            number += 1
            print(f"\n{number}. {title}")
            result[sweep.__name__.removeprefix("sweep_")] = rows = sweep(bench, config)
            show(rows)

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
