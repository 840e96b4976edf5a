#!/usr/bin/env python3
"""Profile each Triton kernel of tiny_llama_v3.py against PyTorch: time, error, memory, bandwidth or arithmetic.

    python run_triton_profiling.py                                   sizes of a small model
    python run_triton_profiling.py --only rmsnorm --hidden-dim 4096  one kernel, another width
    python run_triton_profiling.py --json profile.json               all of it as a file

"ms" is the device's time of one call, by events, the cache flushed before it and launches left out (the call is
captured in a graph); wall time is that of calls issued one after the other, launches included. An error may be twice
that of PyTorch in the same precision, plus a rounding. Bandwidth counts the bytes that must be moved at least, and its
ceiling is measured here, by a kernel that reads and writes; that of arithmetic by a large matrix product. Without a GPU
Triton's interpreter runs the kernels at small sizes: the errors count, the times mean nothing.

Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met or the file not be written, 130 interrupted,
141 the reader of the output has left.
"""

import argparse
import functools
import os
import shlex
import statistics
import sys
import time
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
from tiny_llama_v3 import exit_code_of  # noqa: E402

BLOCK_SIZES = (64, 128, 256, 512, 1024)
FLUSHED_BYTES = 512 * 2**20  # more than any cache holds, MI300's 256 MiB included
MEASURED_SECONDS = 0.1
SIZES = {  # model sizes that suit the device; each is an option
    "cuda": dict(batch_size=16, seq_len=512, hidden_dim=1024, num_heads=16, vocab_size=32000),
    "cpu": dict(batch_size=1, seq_len=32, hidden_dim=64, num_heads=4, vocab_size=96),
}


class Case(NamedTuple):
    """One direction of one operation; the calls return tuples of corresponding tensors."""

    name: str
    ours: object
    theirs: object
    exact: object  # the same in float64
    bytes: int  # that must be moved at least
    flop: int
    by_bytes: bool  # what its speed is limited by, and rated by


# ----------------------------------------------------------------------------------------------------------------------
# Cases: each generator yields the Cases of one operation, forward and backward


def doubled(tensors):
    return [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]


def directions(bench, name, function, inputs, upstream, forward, backward, costs, by_bytes=True):
    """Cases of function(*inputs), a tensor, and its gradients; costs is (bytes, flop) of each direction."""

    def exact_forward():
        return (function(*doubled(inputs)).detach(),)

    def exact_backward():
        exact = doubled(inputs)
        return torch.autograd.grad(function(*exact), [x for x in exact if x.requires_grad], upstream.double())

    yield Case(name, forward, lambda: (function(*inputs),), exact_forward, *costs[0], by_bytes)
    with bench.on_stream():
        theirs = kernels.gradient_call(function, inputs, upstream)
    yield Case(f"{name} backward", backward, theirs, exact_backward, *costs[1], by_bytes)


def rmsnorm_cases(bench, config):
    x = bench.randn(config.tokens_per_step, config.hidden_dim).requires_grad_()
    weight = bench.randn(config.hidden_dim).requires_grad_()
    upstream = bench.randn(*x.shape)
    plain = x.detach(), None, weight.detach()
    *_, rstd = llama.rmsnorm_forward(*plain, kernels.EPS)
    costs = (2 * x.nbytes, 4 * x.numel()), (3 * x.nbytes, 8 * x.numel())
    yield from directions(
        bench, "RMSNorm", kernels.torch_norm, (x, weight), upstream,
        lambda: llama.rmsnorm_forward(*plain, kernels.EPS)[1:2],
        lambda: llama.rmsnorm_backward(upstream, None, plain[0], plain[2], rstd), costs,
    )  # fmt: skip


def swiglu_cases(bench, config):
    gate_up = bench.randn(config.tokens_per_step, 2 * config.ffn_dim).requires_grad_()
    upstream = bench.randn(config.tokens_per_step, config.ffn_dim)
    overwritten = gate_up.detach().clone()

    def backward():  # in place: a second call reads a gradient, which takes as long
        llama.swiglu_activation_backward_(upstream, overwritten)
        return (overwritten,)

    size, count = upstream.nbytes, upstream.numel()
    yield from directions(
        bench, "SwiGLU activation", kernels.torch_activation, (gate_up,), upstream,
        lambda: (llama.swiglu_activation(gate_up.detach()),), backward, ((3 * size, 6 * count), (5 * size, 12 * count)),
    )  # fmt: skip


def naive_matmul_cases(bench, config):
    rows = min(config.tokens_per_step, 1024 if bench.on_gpu else 2)
    x = bench.randn(rows, config.hidden_dim)
    weight = bench.randn(2 * config.ffn_dim, config.hidden_dim) / config.hidden_dim**0.5

    def function(x, weight):
        return (kernels.torch_activation(F.linear(x, weight)),)

    moved = x.nbytes + weight.nbytes + rows * config.ffn_dim * x.itemsize
    yield Case(
        "SwiGLU matrix product, naive", lambda: llama.swiglu_naive_matmul(x, weight)[1:], lambda: function(x, weight),
        lambda: function(*doubled((x, weight))), moved, 2 * rows * weight.numel(), by_bytes=False,
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
        llama.flash_attention_backward(upstream, q, k, v, o, lse, *gradients)
        return gradients

    flop = 2 * config.seq_len * q.numel()  # two products, half of each masked
    moved = 2 * q.nbytes + 2 * k.nbytes
    yield from directions(
        bench, "attention", function, [x.clone().requires_grad_() for x in (q, k, v)], upstream,
        lambda: llama.flash_attention_forward(q, k, v)[:1], backward,
        ((moved, flop), (2 * moved, 5 * flop // 2)), by_bytes=False,
    )  # fmt: skip


def cross_entropy_cases(bench, config):
    logits = bench.randn(config.tokens_per_step, config.vocab_size).requires_grad_()
    targets = torch.randint(config.vocab_size, (config.tokens_per_step,), device=logits.device)
    overwritten = logits.detach().clone()

    def ours():
        losses = llama.cross_entropy_(overwritten, targets, 1.0 / len(targets))
        return losses.mean(), overwritten

    def function(logits):
        loss = F.cross_entropy(logits, targets)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    def theirs():
        # A fresh leaf: autograd ties a leaf to the stream that it was first used on, and capturing has its own.
        return function(logits.detach().requires_grad_())

    yield Case(
        "cross-entropy, loss and gradient", ours, theirs, lambda: function(*doubled((logits,))),
        2 * logits.nbytes, 5 * logits.numel(), by_bytes=True,
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


def error_of(case, dtype):
    """(the largest error of any element, what is allowed), of the tensor that comes closest to failing."""
    worst = (0.0, 1.0)
    # Copies: what is computed in place, or in a buffer that is used again, is gone at the next call.
    ours = [x.detach().double() for x in case.ours()]
    theirs = [x.detach().double() for x in case.theirs()]
    for a, b, exact in zip(ours, theirs, case.exact(), strict=True):
        allowed = 2 * float((b - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max())
        error = float((a - exact).abs().max())
        if not error / allowed <= worst[0] / worst[1]:  # a NaN too
            worst = (error, allowed)
    return worst


@functools.cache
def flush_buffer():
    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")


def device_ms(bench, call):
    """The median device time of a captured call, the cache flushed before each."""
    if not bench.on_gpu:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    with bench.on_stream():
        call()  # compiles, and initialises the libraries
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=bench.stream):
        call()

    def replay():
        flush_buffer().zero_()  # also gives the host the time to be ahead
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    first = min(replay() for _ in range(3))
    count = max(10, min(100, int(MEASURED_SECONDS * 1e3 / first)))
    return statistics.median(replay() for _ in range(count))


def wall_ms(bench, call):
    """The time of a call when many follow each other, launches included."""
    if not bench.on_gpu:
        return device_ms(bench, call)
    with bench.on_stream():
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        count = max(5, min(200, int(MEASURED_SECONDS / (time.perf_counter() - start))))
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / count


def memory_mib(bench, call):
    """What a call allocates at its peak beyond what is there; None on a CPU."""
    if not bench.on_gpu:
        return None
    with bench.on_stream():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_ceilings(bench):
    """{"GB/s", "TFLOP/s"} that this device reaches when it does nothing else."""
    ((_, moved, _, calls),) = kernels.copy_cases(bench)
    copy_us = bench.microseconds(calls["torch"])
    size = 8192 if bench.on_gpu else 128
    a, b = bench.randn(size, size), bench.randn(size, size)
    product_us = bench.microseconds([functools.partial(torch.mm, a, b)])
    return {"GB/s": moved / copy_us / 1e3, "TFLOP/s": 2 * size**3 / product_us / 1e6}


def profile(bench, case, ceilings):
    """All figures of a Case as a dict."""
    with bench.on_stream():
        error, allowed = error_of(case, bench.dtype)
    result = {"name": case.name, "error": error, "allowed": allowed, "bytes": case.bytes, "flop": case.flop}
    for contender, call in (("triton", case.ours), ("torch", case.theirs)):
        result[contender] = {
            "ms": device_ms(bench, call),
            "wall_ms": wall_ms(bench, call),
            "memory_mib": memory_mib(bench, call),
        }
    unit = "GB/s" if case.by_bytes else "TFLOP/s"
    ms = result["triton"]["ms"]
    rate = case.bytes / ms / 1e6 if case.by_bytes else case.flop / ms / 1e9
    result |= {"speedup": result["torch"]["ms"] / ms, "unit": unit, "rate": rate, "share": rate / ceilings[unit]}
    return result


def sweep_block_sizes(bench, config):
    """RMSNorm forward with blocks of columns smaller than a row, equal to it, and larger."""
    x, weight = bench.randn(config.tokens_per_step, config.hidden_dim), bench.randn(config.hidden_dim)
    results = []
    for block_size in BLOCK_SIZES:
        llama.COMPILED.clear()  # what is compiled below is what is asked for
        ms = device_ms(bench, lambda size=block_size: llama.rmsnorm_forward(x, None, weight, kernels.EPS, size))
        tile = llama.norm_tile(*x.shape, False, bench.device.type, block_size)
        row = {
            "block_size": block_size,
            "rows": tile.rows,
            "warps": tile.warps,
            "ms": ms,
            "GB/s": 2 * x.nbytes / ms / 1e6,
        }
        (compiled,) = llama.COMPILED.values()
        results.append(row | {"registers": getattr(compiled, "n_regs", None)})
    return results


def sweep_tiles(bench, config):
    """Attention forward with tiles of queries x keys; what does not fit into shared memory says so."""
    q = bench.randn(config.batch_size, config.seq_len, config.num_heads, config.head_dim)
    k, v = (bench.randn(config.batch_size, config.seq_len, config.num_kv_heads, config.head_dim) for _ in range(2))
    flop = 2 * config.seq_len * q.numel()
    block_d, precision = llama.next_power_of_2(config.head_dim), llama.dot_precision(bench.device)
    usual = llama.attention_tile("forward", q.element_size(), block_d, precision, bench.device.type)
    results = []
    for m in (32, 64, 128) if bench.on_gpu else (16, 32):
        for n in (32, 64, 128) if bench.on_gpu else (16, 32):
            row = {
                "queries": m,
                "keys": n,
                "usual": (m, n) == (usual.m, usual.n),
                "ms": None,
                "TFLOP/s": None,
                "error": None,
            }
            tile = usual._replace(m=m, n=n)
            with mock.patch.object(llama, "attention_tile", lambda *_, tile=tile: tile):
                try:
                    row["ms"] = device_ms(bench, lambda: llama.flash_attention_forward(q, k, v))
                    row["TFLOP/s"] = flop / row["ms"] / 1e9
                except Exception as error:  # of this tile alone
                    row["error"] = kernels.describe(error)
            results.append(row)
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
    print("  block  rows a program  warps  registers        ms      GB/s")
    for row in rows:
        registers = "-" if row["registers"] is None else row["registers"]
        print(
            f"  {row['block_size']:5d}  {row['rows']:14d}  {row['warps']:5d}  {registers:>9}  {row['ms']:8.3f}  "
            f"{row['GB/s']:8.4g}"
        )


def print_tiles(rows):
    print("  queries  keys        ms   TFLOP/s")
    for row in rows:
        result = row["error"] or f"{row['ms']:8.3f}  {row['TFLOP/s']:8.3g}" + "  the usual tile" * row["usual"]
        print(f"  {row['queries']:7d}  {row['keys']:4d}  {result}")


def parse(argv):
    parser = llama.Parser(
        prog="run_triton_profiling.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="kernels (default: all)")
    parser.add_argument("--no-sweeps", action="store_true", help="leave out block sizes and tiles")
    for name, value in SIZES["cuda"].items():
        default = f"default: {value}, on a CPU {SIZES['cpu'][name]}"
        parser.add_argument(llama.flag_of(name), type=int, metavar="N", help=default)
    parser.add_argument("--json", metavar="FILE", help="also write all figures here")
    return parser.parse_args(argv)


def run(argv):
    options = parse(argv)
    device = llama.select_device("auto")
    obstacle = llama.triton_obstacle(device)
    if obstacle:
        raise llama.UsageError(f"the kernels cannot run here: {obstacle}; on Linux: pip install triton")
    given = {name: getattr(options, name) for name in SIZES["cuda"] if getattr(options, name) is not None}
    sizes = SIZES[device.type] | given
    config = llama.Config(**sizes)
    if options.json is not None:
        if os.path.isdir(options.json):
            raise llama.UsageError(f"--json {options.json} is a folder: name a file")
        replaced = os.path.lexists(options.json)
        llama.writable_folder("--json", os.path.dirname(os.path.abspath(options.json)) if replaced else options.json)
    torch.manual_seed(0)
    bench = kernels.Bench(device, compile_baselines=False)
    if not bench.on_gpu:
        print("There is no GPU: Triton's interpreter runs the kernels, and times mean nothing here.", file=sys.stderr)
    ceilings = measure_ceilings(bench)
    result = {
        "command": shlex.join(["python", "run_triton_profiling.py", *argv]),
        "date": datetime.now().isoformat(timespec="seconds"),
        "environment": llama.environment(device),
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
        llama.write_json(Path(options.json), result)
        print(f"Results: {options.json}")
    wrong = [case["name"] for case in result["kernels"] if not case["error"] <= case["allowed"]]
    for name in wrong:
        print(
            f"run_triton_profiling.py: {name} differs from PyTorch in float64 by more than is allowed", file=sys.stderr
        )
    return 1 if wrong else 0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), "run_triton_profiling.py")


if __name__ == "__main__":
    sys.exit(main())
