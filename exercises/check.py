#!/usr/bin/env python3
"""Check an exercise: each task prints PASS, or FAIL and why.

    python exercises/check.py exercise1                 what you wrote in exercises/exercise1_triton_basics.py
    python exercises/check.py exercise1 --solution      the solution

Without a GPU the kernels run in Triton's interpreter, in seconds.
Exit codes: 0 all tasks pass, 1 some do not yet, 2 the request cannot be met.
"""

import importlib.util
import math
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch.nn.functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import tiny_llama_v3 as llama  # noqa: E402
from tiny_llama_v3 import exit_code_of  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"


class Wrong(Exception):
    """What is wrong with a task, and where to look."""


def expect(condition, message):
    if not condition:
        raise Wrong(message)


def expect_number(name, got, wanted, hint):
    expect(got == wanted, f"{name} is {got!r}, expected {wanted!r}: {hint}")


def expect_close(name, got, wanted, tolerance, hint):
    """Compares tensors in fp64; the message names the first element that differs."""
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    expect(got.shape == wanted.shape, f"{name} has the shape {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    bad = ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        value, good = got[where].item(), wanted[where].item()
        unstored = " (as it was before: is anything stored?)" if math.isnan(value) else ""
        raise Wrong(
            f"{int(bad.sum())} of {bad.numel()} elements of {name} are wrong: at {where} it is {value:.5g}{unstored}, "
            f"expected {good:.5g}; {hint}"
        )


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


GUARD = 4096  # elements behind an output that a store without a mask may hit


def unwritten(*shape, dtype=torch.float32):
    """(a tensor full of NaN, the memory behind it)"""
    buffer = torch.full((math.prod(shape) + GUARD,), float("nan"), device=DEVICE, dtype=dtype)
    return buffer[:-GUARD].view(shape), buffer[-GUARD:]


def expect_untouched(name, behind):
    expect(bool(behind.isnan().all()), f"something was stored beyond the end of {name}: is there a mask?")


# ----------------------------------------------------------------------------------------------------------------------
# Exercise 1


def check_rmsnorm_kernel(exercise):
    for n_rows, n_cols, block_size in ((3, 128, 128), (2, 512, 64), (2, 200, 64), (1, 1, 64), (2, 96, 1024)):
        padded, _ = unwritten(n_rows, n_cols + 7)  # what lies between and behind the rows is not theirs to read
        padded[:, :n_cols] = randn(n_rows, n_cols)
        x, weight = padded[:, :n_cols], randn(n_cols)
        y, behind = unwritten(n_rows, n_cols)
        exercise.rmsnorm_kernel[(n_rows,)](x, weight, y, x.stride(0), n_cols, 1e-5, BLOCK_SIZE=block_size)
        wanted, _ = llama.torch_rmsnorm(x.double(), None, weight.double(), 1e-5)
        case = f"y for rows of {n_cols}, BLOCK_SIZE {block_size}"
        expect_untouched(case, behind)
        expect_close(case, y, wanted, 1e-5, "are the mask, the row's stride and both loops right?")
    x, (y, _) = torch.zeros(1, 64, device=DEVICE), unwritten(1, 64)
    exercise.rmsnorm_kernel[(1,)](x, torch.ones(64, device=DEVICE), y, 64, 64, 1e-5, BLOCK_SIZE=64)
    expect_close("y for a row of zeros", y, x, 0, "eps keeps it from dividing by zero")


def check_memory_lines(exercise):
    for block_size, itemsize, stride, lines, hint in (
        (32, 4, 1, 1, "32 neighbours of 4 bytes lie in one line of 128"),
        (1024, 2, 1, 16, "2048 bytes, one after the other"),
        (64, 4, 32, 64, "each element lies in a line of its own"),
        (64, 4, 2, 4, "every second element: half of what is fetched is thrown away"),
        (64, 4, 1000, 64, "more than a line apart: no line is touched twice, and those between not at all"),
    ):
        name = f"memory_lines({block_size}, {itemsize}, {stride})"
        expect_number(name, exercise.memory_lines(block_size, itemsize, stride), lines, hint)
    name = "memory_lines(64, 4, 1, line=64)"
    expect_number(name, exercise.memory_lines(64, 4, 1, line=64), 4, "AMD's caches have lines of 64 or 128 bytes")


class CountBytes(TorchDispatchMode):
    """Bytes of the matrices that PyTorch's operators read and write; rows and columns count as nothing."""

    def __init__(self, smallest):
        super().__init__()
        self.smallest, self.bytes = smallest, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        self.bytes += sum(t.nbytes for t in tensors if t.numel() >= self.smallest)
        return result


def check_bytes_moved(exercise):
    for n_rows, n_cols, dtype in ((64, 96, torch.float32), (32, 256, torch.float16)):
        x, weight = randn(n_rows, n_cols, dtype=dtype), randn(n_cols, dtype=dtype)
        with CountBytes(smallest=n_rows * n_cols) as counted:
            llama.torch_rmsnorm(x, None, weight, 1e-5)
        fused, separate = exercise.bytes_moved(n_rows, n_cols, x.element_size())
        case = f"for {n_rows} rows of {n_cols} elements of {x.element_size()} bytes"
        expect_number(f"fused {case}", fused, 2 * x.nbytes, "x comes in once, y goes out once")
        expect_number(f"separate {case}", separate, counted.bytes, "this is what PyTorch's operators were seen to move")


# ----------------------------------------------------------------------------------------------------------------------
# Exercise 2


def check_counts(exercise):
    rows, inner, cols, itemsize = 1024, 512, 2048, 4
    naive = rows * cols * 3 * (inner + 1) * itemsize
    least = sum(n * itemsize for n in (rows * inner, 2 * cols * inner, 2 * rows * cols, rows * cols))
    flop = 2 * 2 * rows * cols * inner
    sizes = f"({rows}, {inner}, {cols}, {itemsize})"
    expect_number(f"naive_bytes{sizes}", exercise.naive_bytes(rows, inner, cols, itemsize), naive,
                  "each program loads 3 * inner elements and stores 3")  # fmt: skip
    expect_number(f"least_bytes{sizes}", exercise.least_bytes(rows, inner, cols, itemsize), least,
                  "x, the two weights, gate, up and hidden, once each")  # fmt: skip
    expect_number("matmul_flop(1024, 512, 2048)", exercise.matmul_flop(rows, inner, cols), flop,
                  "two products; each element of each takes inner multiplications and additions")  # fmt: skip


def check_silu_mul_kernel(exercise):
    for n_elements, block_size, dtype in (
        (256, 64, torch.float32),
        (1000, 128, torch.float32),
        (77, 64, torch.float16),
    ):
        gate, up = randn(n_elements, dtype=dtype), randn(n_elements, dtype=dtype)
        out, behind = unwritten(n_elements, dtype=dtype)
        grid = (llama.cdiv(n_elements, block_size),)
        exercise.silu_mul_kernel[grid](gate, up, out, n_elements, BLOCK_SIZE=block_size)
        wanted = F.silu(gate.double()) * up.double()
        case = f"out for {n_elements} elements, BLOCK_SIZE {block_size}"
        expect_untouched(case, behind)
        expect_close(case, out, wanted, 1e-5 if dtype == torch.float32 else 2e-3, "silu(gate) * up")


def check_silu_mul_backward_kernel(exercise):
    gate, up, out_grad = (randn(5, 60) * 3 for _ in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    wanted = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, out_grad.double())
    outputs = [unwritten(5, 60) for _ in leaves]
    got = [grad for grad, _ in outputs]
    exercise.silu_mul_backward_kernel[(llama.cdiv(300, 128),)](out_grad, gate, up, *got, 300, BLOCK_SIZE=128)
    for name, (ours, behind), theirs in zip(("gate_grad", "up_grad"), outputs, wanted, strict=True):
        expect_untouched(name, behind)
        expect_close(name, ours, theirs, 1e-4, "compare with the derivative in the docstring")


def check_hybrid_swiglu(exercise):
    for kernel in (check_silu_mul_kernel, check_silu_mul_backward_kernel):
        reason = verdict(kernel, exercise)
        expect(reason is None, "not checked before both kernels pass")
    x, gate, up, down = randn(2, 3, 32), randn(48, 32), randn(48, 32), randn(32, 48)
    leaves = [t.clone().requires_grad_() for t in (x, gate, up, down)]
    out = exercise.hybrid_swiglu(*leaves)
    wanted = llama.torch_swiglu(x.double(), torch.cat((gate, up)).double(), down.double())
    expect_close("the output", out, wanted, 1e-3, "down(silu(x gate) * (x up))")
    out.sum().backward()
    for name, leaf in zip(("x", "gate_weight", "up_weight", "down_weight"), leaves, strict=True):
        expect(leaf.grad is not None and bool(leaf.grad.any()),
               f"{name} receives no gradient: go through SiluMul.apply, not through the kernel itself")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Exercise 3


def check_fold(exercise):
    scores, values = randn(5, 48).double() * 30, randn(48, 8).double()
    m, l, acc = torch.full((5,), -math.inf).to(scores), torch.zeros(5).to(scores), torch.zeros(5, 8).to(scores)
    for begin, end in ((0, 16), (16, 17), (17, 48)):
        m, l, acc = exercise.fold(m, l, acc, scores[:, begin:end], values[begin:end])
        expect_close(f"m after {end} keys", m, scores[:, :end].max(dim=1).values, 1e-12, "the largest score so far")
        hint = "what was summed under the old maximum must be rescaled to the new one"
        wanted = torch.exp(scores[:, :end] - m[:, None])
        expect_close(f"l after {end} keys", l, wanted.sum(dim=1), 1e-9, hint)
        expect_close(f"acc after {end} keys", acc, wanted @ values[:end], 1e-9, hint)


def check_key_blocks(exercise):
    for block_m, block_n, seq_len in ((64, 64, 256), (64, 32, 200), (32, 64, 200), (16, 16, 5)):
        seen = torch.ones(seq_len, seq_len).tril().bool()
        for block in range(llama.cdiv(seq_len, block_m)):
            rows = seen[block * block_m : (block + 1) * block_m]
            tiles = [rows[:, start : start + block_n] for start in range(0, seq_len, block_n)]
            full = sum(bool(tile.all()) and tile.shape[1] == block_n for tile in tiles)
            masked = sum(bool(tile.any()) for tile in tiles) - full
            name = f"key_blocks({block}, {block_m}, {block_n}, {seq_len})"
            expect_number(name, tuple(exercise.key_blocks(block, block_m, block_n, seq_len)), (full, masked),
                          "the first query of the block sees the fewest keys, the last one the most")  # fmt: skip


def reference_attention(q, k, v):
    """Of (seq, heads, head_dim) in fp64."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)


def check_attention_kernel(exercise):
    for seq_len, heads, kv_heads, block_m, block_n in ((32, 1, 1, 16, 16), (50, 2, 2, 32, 16), (37, 4, 2, 16, 32)):
        q, k, v = randn(seq_len, heads, 16) * 3, randn(seq_len, kv_heads, 16), randn(seq_len, kv_heads, 16)
        o, behind = unwritten(seq_len, heads, 16)
        exercise.attention_kernel[(heads, llama.cdiv(seq_len, block_m))](
            q, k, v, o, *q.stride()[:2], *k.stride()[:2], seq_len, 16**-0.5,
            GROUP_SIZE=heads // kv_heads, HEAD_DIM=16, BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
        case = f"o for {seq_len} tokens, {heads} heads on {kv_heads}, tiles {block_m} x {block_n}"
        expect_untouched(case, behind)
        hint = "try without the mask, then with it; with several heads, which k and v does a head read?"
        expect_close(case, o, reference_attention(q, k, v), 1e-4, hint)


def check_attention_gradients(exercise):
    q, k, v, o_grad = (randn(20, 8).double() for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].T * 8**-0.5
    scores = scores.masked_fill(torch.ones(20, 20, device=DEVICE).triu(1).bool(), -math.inf)
    o = F.softmax(scores, dim=-1) @ leaves[2]
    wanted = torch.autograd.grad(o, leaves, o_grad)
    lse = torch.logsumexp(scores, dim=1)
    got = exercise.attention_gradients(q, k, v, o.detach(), lse.detach(), o_grad, 8**-0.5)
    for name, ours, theirs in zip(
        ("v_grad", "q_grad", "k_grad"), (got[2], *got[:2]), (wanted[2], *wanted[:2]), strict=True
    ):
        expect_close(name, ours, theirs, 1e-9, "v_grad needs p only; the others need delta and the scale as well")


# ----------------------------------------------------------------------------------------------------------------------
# Command line

EXERCISES = {
    "exercise1": {
        "rmsnorm_kernel": check_rmsnorm_kernel,
        "memory_lines": check_memory_lines,
        "bytes_moved": check_bytes_moved,
    },
    "exercise2": {
        "naive_bytes, least_bytes, matmul_flop": check_counts,
        "silu_mul_kernel": check_silu_mul_kernel,
        "silu_mul_backward_kernel": check_silu_mul_backward_kernel,
        "hybrid_swiglu": check_hybrid_swiglu,
    },
    "exercise3": {
        "fold": check_fold,
        "key_blocks": check_key_blocks,
        "attention_kernel": check_attention_kernel,
        "attention_gradients": check_attention_gradients,
    },
}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(check, exercise):
    """Why a task fails, or None."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of kernels with holes in the interpreter
            check(exercise)
    except Wrong as wrong:
        return str(wrong)
    except NotImplementedError as blank:
        return f"not written yet, {blank}"
    except Exception as error:  # whatever the code under test does
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == exercise.__file__
        ]
        place = f" in line {lines[-1]} of {Path(exercise.__file__).name}" if lines else ""
        return f"{type(error).__name__}{place}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def run(argv):
    parser = llama.Parser("check.py", __doc__)
    parser.add_argument("exercise", choices=EXERCISES)
    parser.add_argument("--solution", action="store_true", help="check the solution instead")
    options = parser.parse_args(argv)
    if llama.triton is None:
        raise llama.UsageError("Triton is not installed: pip install triton (on Linux)")
    folder = HERE / "solutions" if options.solution else HERE
    (path,) = folder.glob(f"{options.exercise}_*.py")
    try:
        exercise = load(path)
    except Exception as error:  # a syntax error, say
        line = getattr(error, "lineno", None)
        print(f"FAIL  {path.name} cannot be imported{f', line {line}' if line else ''}: {error}")
        return 1
    tasks = EXERCISES[options.exercise]
    failed = 0
    for name, check in tasks.items():
        reason = verdict(check, exercise)
        failed += reason is not None
        print(f"FAIL  {name}: {reason}" if reason else f"PASS  {name}", flush=True)
    print(f"{options.exercise}: {len(tasks) - failed} of {len(tasks)} tasks pass")
    return int(failed > 0)


def main(argv=None):
    return exit_code_of(lambda: run(argv), "check.py")


if __name__ == "__main__":
    sys.exit(main())
