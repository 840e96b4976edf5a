#!/usr/bin/env python3
"""Time the kernels of tiny_llama_v3.py over their block sizes.

    python exercises/sweep.py swiglu                              the naive kernel, the activation, and the library
    python exercises/sweep.py attention --seq-len 128 512 2048    tiles of flash_attention_kernel

Every result is compared with PyTorch's before it is timed. Times are medians of the device's clock, the cache flushed
before each call. Without a GPU a small size is interpreted: results are checked, times are left out.
Exit codes: 0 done, 1 a result is wrong, 2 the request cannot be met.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_llama_v3 as llama  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter multiplies bf16 wrongly
NAIVE_BLOCKS = (32, 64, 128, 256, 512)
ACTIVATION_BLOCKS = (128, 256, 512, 1024, 2048, 4096)
TILES = [(m, n, warps) for m in (32, 64, 128) for n in (32, 64, 128) for warps in (4, 8)]


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def report(label, call, result, expected, work, unit):
    """Prints a line of the sweep; False if the result, which call must have filled, is wrong. work: bytes or FLOP."""
    try:
        call()
    except llama.triton.runtime.errors.OutOfResources as error:
        print(f"{label:34} does not fit: {error}")
        return True
    error = float(torch.linalg.vector_norm(result.float() - expected) / torch.linalg.vector_norm(expected))
    if not error < 2e-2:
        print(f"{label:34} WRONG: relative error {error:.1e}")
        return False
    if ON_GPU:
        ms = llama.triton.testing.do_bench(call, return_mode="median")
        print(f"{label:34} {ms * 1e3:10.1f} us {work / ms / 1e9:10.3g} {unit}", flush=True)
    else:
        print(f"{label:34} right (interpreted: not timed)", flush=True)
    return True


def sweep_swiglu(options):
    """Yields whether each result is right."""
    rows, inner, cols = (1024, 512, 2048) if ON_GPU else (2, 32, 48)
    x, weight = randn(rows, inner), randn(2 * cols, inner) * inner**-0.5
    gate_up, hidden = randn(rows, 2 * cols), randn(rows, cols)
    both = F.linear(x.float(), weight.float())
    expected = F.silu(both[:, :cols]) * both[:, cols:]
    flop, moved = 4 * rows * inner * cols, 3 * hidden.nbytes
    print(f"x ({rows}, {inner}), weight ({2 * cols}, {inner}), {DTYPE}")
    for block in NAIVE_BLOCKS:
        kernel = llama.swiglu_kernel[(rows * cols,)]
        call = partial(kernel, x, weight, gate_up, hidden, inner, cols, BLOCK_SIZE=block)
        yield report(f"swiglu_kernel, BLOCK_SIZE {block}", call, hidden, expected, flop, "TFLOP/s")
    library = partial(torch.mm, x, weight.t(), out=gate_up)
    yield report("the library's product", library, gate_up, both, flop, "TFLOP/s")
    for block in ACTIVATION_BLOCKS:
        kernel = llama.swiglu_activation_kernel[(rows * llama.cdiv(cols, block),)]
        call = partial(kernel, gate_up, hidden, cols, BLOCK_SIZE=block)
        yield report(f"activation, BLOCK_SIZE {block}", call, hidden, expected, moved, "TB/s")


def sweep_attention(options):
    """Yields whether each result is right."""
    batch, heads, kv_heads, head_dim = (8, 8, 4, 64) if ON_GPU else (1, 2, 1, 16)
    for seq_len in options.seq_len:
        q, k, v = randn(batch, seq_len, heads, head_dim), *randn(2, batch, seq_len, kv_heads, head_dim)
        o, lse = torch.empty_like(q), torch.empty(batch, heads, seq_len, device=DEVICE)
        turned = (t.float().transpose(1, 2) for t in (q, k, v))
        expected = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True).transpose(1, 2)
        chosen = llama.attention_tile("forward", q.element_size(), head_dim, DEVICE)
        print(f"\nq {tuple(q.shape)}, k and v {tuple(k.shape)}, {DTYPE}; the script takes {chosen.m} x {chosen.n}")
        for m, n, warps in TILES if ON_GPU else TILES[:1]:
            kernel = llama.flash_attention_kernel[(batch * heads, llama.cdiv(seq_len, m))]
            call = partial(
                kernel, q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(), heads, seq_len,
                head_dim**-0.5 * llama.LOG2_E, GROUP_SIZE=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=head_dim,
                BLOCK_M=m, BLOCK_N=n, PRECISION="ieee", num_warps=warps, num_stages=chosen.stages,
            )  # fmt: skip
            flop = 2 * batch * heads * seq_len**2 * head_dim  # two products, half of each masked
            yield report(f"queries {m}, keys {n}, warps {warps}", call, o, expected, flop, "TFLOP/s")


SWEEPS = {"swiglu": sweep_swiglu, "attention": sweep_attention}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=SWEEPS)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[128, 512, 2048], help="of attention")
    options = parser.parse_args(argv)
    if min(options.seq_len) < 1:
        parser.error(f"--seq-len {min(options.seq_len)} is not positive: give 1 or more")
    if llama.triton is None:
        print("sweep.py: error: Triton is not installed: pip install triton (on Linux)", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    return int(not all(list(SWEEPS[options.kernel](options))))


if __name__ == "__main__":
    sys.exit(main())
