"""What a participant's kernel costs, beside other implementations and a bound: times on a GPU, counts elsewhere.

`exercises/check.py --time` calls report() for a kernel that has passed its check. On a GPU, results are compared with
higher precision at this size, and then timed in turns by the device's clock, with a flushed cache. The bound is the
larger of the bytes that must move over what a copy reaches, and the operations over what the library's product reaches,
both measured on this card. Without a GPU the interpreter counts what kernels load, store and multiply; of PyTorch's
operators, the tensors that they read and write are counted.
"""

import statistics
import warnings
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks import ON_GPU
from exercises.checks.common import CountBytes
from exercises.performance_debugging import measured
from measure import work
from measure.accuracy import KERNEL_TOLERANCE, promoted, require
from measure.drawing import SHEET_WIDTH, TINTS, Sheet
from measure.results import describe
from measure.tables import number, text_table
from measure.timing import Bench, in_turns
from measure.work import Work

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # of the exercises; puzzles are in fp32
BLOCKS = (1024, 128, 256, 512, 2048, 4096) if ON_GPU else (64, 32, 128)
UNIT, LINE = "us" if ON_GPU else "bytes", 128  # of a Row's value; bytes of a cache line
TURNS = 3


class Case(NamedTuple):
    """A kernel at one size: large on a GPU, small in the interpreter."""

    size: str
    yours: dict  # {name: function of a module that launches its kernel and returns the results}, one for each tile
    eager: object  # a function of the inputs that computes the same in PyTorch's operators
    inputs: list
    work: Work
    others: dict = {}  # {name: function of no argument}; where "ours" is not among them, it is the solution's kernel


def randn(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def launched(task, inputs, outputs, grid, scalars, *tiles, **constants):
    """Case.yours of a kernel that takes inputs, outputs (like these, but new), scalars, a tile and constants.

    grid: a function of a tile, {name of a constant: value}.
    """

    def launch(tile, module):
        results = [torch.empty_like(output) for output in outputs]
        getattr(module, task)[grid(tile)](*inputs, *results, *scalars, **tile, **constants)
        return results

    return {f"yours, {' x '.join(map(str, tile.values()))}": partial(launch, tile) for tile in tiles}


def blocks(n):
    """A grid of blocks of n elements, and the tiles."""
    return lambda tile: (llama.cdiv(n, tile["BLOCK_SIZE"]),), [dict(BLOCK_SIZE=size) for size in BLOCKS]


def grid_copy():
    x = randn(2**26 if ON_GPU else 1000, dtype=torch.float32)
    grid, tiles = blocks(len(x))
    yours = launched("grid_copy_kernel", [x], [x], grid, [len(x)], *tiles)
    return Case(f"{len(x):,} elements", yours, torch.clone, [x], Work(2 * x.nbytes, 0))


def transpose():
    side, tiles = (8192, (64, 16, 32, 128)) if ON_GPU else (100, (16, 8, 32))
    x = randn(side, side, dtype=torch.float32)
    yours = launched("transpose_kernel", [x], [x], lambda tile: (llama.cdiv(side, tile["BLOCK_M"]),) * 2,
                     (side, side, *x.stride()), *(dict(BLOCK_M=m, BLOCK_N=m) for m in tiles))  # fmt: skip
    return Case(f"{side} x {side}", yours, lambda x: x.T.contiguous(), [x], Work(2 * x.nbytes, 0))


def of_rows(task, eager, flop, dtype=torch.float32, whole_row=False):
    """The case of a puzzle with one program for each row. whole_row: the block holds it, and y is as long."""
    rows, columns = (8192, 4096) if ON_GPU else (8, 250)
    x = randn(rows, columns, dtype=dtype)
    y = torch.empty(rows, *[columns] * whole_row, device=DEVICE)
    scalars = [columns] if whole_row else [columns, x.stride(0)]
    sizes = [llama.triton.next_power_of_2(columns)] if whole_row else BLOCKS
    yours = launched(task, [x], [y], lambda tile: (rows,), scalars, *(dict(BLOCK_SIZE=size) for size in sizes))
    return Case(f"{rows} rows of {columns}", yours, eager, [x], Work(x.nbytes + y.nbytes, flop * x.numel()))


def matmul(task="matmul_kernel", **constants):
    side, tiles = (2048, ((64, 64), (32, 32), (128, 64))) if ON_GPU else (64, ((16, 16), (32, 32)))
    x, y = (randn(side, side, dtype=torch.float32) for _ in range(2))

    def grid(tile):
        down, across = llama.cdiv(side, tile["BLOCK_M"]), llama.cdiv(side, tile["BLOCK_N"])
        return (down * across,) if constants else (down, across)

    yours = launched(task, [x, y], [x], grid, [side] * 3, *(dict(BLOCK_M=m, BLOCK_N=n) for m, n in tiles),
                     BLOCK_K=32 if ON_GPU else 16, **constants)  # fmt: skip
    return Case(f"{side} x {side} x {side}", yours, torch.matmul, [x, y], Work(3 * x.nbytes, 2 * side**3))


def rmsnorm():
    rows, columns = (8192, 4096) if ON_GPU else (8, 200)
    x, weight, eps = randn(rows, columns), randn(columns), 1e-5
    yours = launched("rmsnorm_kernel", [x, weight], [x], lambda tile: (rows,), (x.stride(0), columns, eps),
                     *(dict(BLOCK_SIZE=size) for size in BLOCKS))  # fmt: skip
    others = {"F.rms_norm": partial(F.rms_norm, x, (columns,), weight, eps),
              "ours": lambda: llama.rmsnorm_forward(x, None, weight, eps)[1]}  # fmt: skip
    return Case(f"{rows} rows of {columns}", yours, lambda x, weight: llama.torch_rmsnorm(x, None, weight, eps)[0],
                [x, weight], work.rmsnorm(x, weight, x, None), others)  # fmt: skip


def silu_mul(backward=False):
    inputs = out_grad, gate, up = [randn(*((4096, 8192) if ON_GPU else (8, 125))) for _ in range(3)]
    both, (grid, tiles) = torch.cat([gate, up], dim=1), blocks(gate.numel())
    if not backward:
        yours = launched("silu_mul_kernel", [gate, up], [gate], grid, [gate.numel()], *tiles)
        return Case(f"{gate.numel():,} elements", yours, lambda gate, up: F.silu(gate) * up, [gate, up],
                    work.swiglu_activation(both, gate), {"ours": lambda: llama.swiglu_activation(both)})  # fmt: skip

    def eager(out_grad, gate, up):
        return torch.ops.aten.silu_backward(out_grad * up, gate), out_grad * F.silu(gate)

    yours = launched("silu_mul_backward_kernel", inputs, [gate, up], grid, [gate.numel()], *tiles)
    ours = partial(llama.swiglu_activation_backward_, out_grad, both)  # in place
    return Case(f"{gate.numel():,} elements", yours, eager, inputs, work.swiglu_activation_backward(out_grad, both),
                {"ours": ours})  # fmt: skip


def attention():
    seq_len, heads, d, sides = (2048, 16, 64, (64, 32, 128)) if ON_GPU else (48, 2, 32, (16, 32))
    q, k, v = randn(seq_len, heads, d), *(randn(seq_len, heads // 2, d) for _ in range(2))
    yours = launched("attention_kernel", [q, k, v], [q], lambda tile: (heads, llama.cdiv(seq_len, tile["BLOCK_M"])),
                     (*q.stride()[:2], *k.stride()[:2], seq_len, d**-0.5),
                     *(dict(BLOCK_M=side, BLOCK_N=side) for side in sides), GROUP_SIZE=2, HEAD_DIM=d)  # fmt: skip

    def eager(q, k, v):
        q, k, v = q.transpose(0, 1), *(t.repeat_interleave(2, dim=1).transpose(0, 1) for t in (k, v))
        future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=DEVICE).triu(1)
        scores = (q @ k.transpose(1, 2) * d**-0.5).masked_fill(future, float("-inf"))
        return (F.softmax(scores, dim=-1) @ v).transpose(0, 1)

    batch = [t[None] for t in (q, k, v)]
    heads_first = [t.transpose(1, 2) for t in batch]
    fused = partial(F.scaled_dot_product_attention, *heads_first, is_causal=True, enable_gqa=True)
    others = {"PyTorch SDPA": fused, "ours": partial(llama.flash_attention_forward, *batch)}
    return Case(f"{seq_len} tokens, {heads} heads on {heads // 2}", yours, eager, [q, k, v],
                work.attention(*batch, batch[0], None), others)  # fmt: skip


CASES = {
    "grid_copy_kernel": grid_copy,
    "transpose_kernel": transpose,
    "row_sum_kernel": partial(of_rows, "row_sum_kernel", lambda x: x.sum(1, dtype=torch.float32), 1, torch.float16),
    "softmax_kernel": partial(of_rows, "softmax_kernel", lambda x: F.softmax(x, dim=1), 4, whole_row=True),
    "row_max_kernel": partial(of_rows, "row_max_kernel", lambda x: x.amax(1), 1),
    "multiply_tile": matmul,
    "grouped_matmul_kernel": partial(matmul, "grouped_matmul_kernel", GROUP=8),
    "rmsnorm_kernel": rmsnorm,
    "silu_mul_kernel": silu_mul,
    "silu_mul_backward_kernel": partial(silu_mul, backward=True),
    "attention_kernel": attention,
}


# ----------------------------------------------------------------------------------------------------------------------
# Measuring and counting


class Row(NamedTuple):
    """A line of the table."""

    name: str
    value: float  # us, or bytes
    others: tuple  # the other figures, as text


def timed(case, calls):
    """Yields the Rows of a GPU, the bound last; ArithmeticError if a result of the participant's is wrong."""
    bench, dtype = Bench(llama.select_device("auto")), case.inputs[0].dtype

    def named(results):
        return dict(enumerate(results if isinstance(results, tuple | list) else [results]))

    plain, exact = named(case.eager(*case.inputs)), named(case.eager(*promoted(case.inputs)))
    for name, call in list(calls.items()):
        try:
            if name in case.yours:
                require(named(call()), plain, exact, KERNEL_TOLERANCE[dtype])
            bench.flushed_ms(call)  # compiles
        except ArithmeticError:
            raise
        except Exception as error:  # too little shared memory, no compiler
            print(f"      {name} is left out: {describe(error)}")
            del calls[name]
    times = in_turns([partial(bench.flushed_ms, call) for call in calls.values()], TURNS)
    reached = measured.ceilings(llama.Config(use_amp=dtype == torch.bfloat16), bench.device)
    for name, own in zip(calls, times, strict=True):
        us = statistics.median(own) * 1e3
        yield Row(name, us, (number(case.work.bytes / us / 1e3), number(case.work.flop / us / 1e6)))
    bounds = case.work.bytes / reached["bytes_per_second"], case.work.flop / reached["flop_per_second"]
    yield Row("bound: memory" if bounds[0] > bounds[1] else "bound: arithmetic", max(bounds) * 1e6, ("", ""))


def counted(case, calls):
    """Yields the Rows of the interpreter, the bound last."""
    from exercises.performance_debugging import memory_counts

    for name, call in calls.items():
        with memory_counts.observed_launches() as launches, CountBytes() as operators:
            call()
        seen = [kind.figures() for kernel in launches.values() for kind in (kernel.loads, kernel.stores)]
        if seen:
            products = sum(kernel.products for kernel in launches.values())
            yield Row(name, sum(kind["bytes"] for kind in seen),
                      (f"{sum(kind['lines'][LINE] for kind in seen):,}", f"{products:,}"))  # fmt: skip
        else:
            yield Row(name, operators.bytes, ("", f"{operators.products:,}"))
    yield Row("bound", case.work.bytes, (f"{-(-case.work.bytes // LINE):,}", f"{case.work.flop // 2:,}"))


def shown(value):
    return number(value) if ON_GPU else f"{value:,}"


def table(rows):
    """Lines of text."""
    headings = ("us", "x bound", "GB/s", "TFLOP/s") if ON_GPU else ("bytes", "x bound", "lines", "products")
    multiplies = any(row.others[1] not in ("", "0") for row in rows[:-1])
    cells = [(row.name, shown(row.value), f"{row.value / rows[-1].value:.2f}", *row.others) for row in rows]
    keep = 5 if multiplies or ON_GPU else 4
    return text_table(("", *headings)[:keep], [line[:keep] for line in cells])


def picture(title, rows):
    """Return the SVG: a bar for each implementation, and the bound as a line."""
    *bars, bound = rows
    sheet, left, top, each = Sheet(title), 152, 56, 34
    scale, bottom = (SHEET_WIDTH - 290) / max(row.value for row in rows), top + each * len(bars)
    for y, row in zip(range(top, bottom, each), bars, strict=True):
        sheet.text(left - 10, y + 19, row.name, "right")
        sheet.box(left, y, scale * row.value, each - 8, TINTS[row.name.startswith("yours")])
        sheet.text(SHEET_WIDTH - 12, y + 19, f"{shown(row.value)} {UNIT}", "right")
    x = left + scale * bound.value
    sheet.line((x, x), (top - 8, bottom + 2))
    sheet.text(x, bottom + 20, f"{bound.name}: {shown(bound.value)}", "center")
    return sheet.svg(bottom + 32)


def report(task, module, solution):
    """(the lines of a table, the SVG of its picture, the best time in us or None) of a task in CASES."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "TensorFloat32")  # products in fp32 are compared with those in fp32
    case = CASES[task]()
    calls = {name: partial(yours, module) for name, yours in case.yours.items()}
    calls |= {"PyTorch eager": partial(case.eager, *case.inputs)}
    calls |= {"torch.compile": partial(torch.compile(case.eager), *case.inputs)} if ON_GPU else {}
    calls |= {"ours": partial(next(iter(case.yours.values())), solution)} | case.others
    rows = list((timed if ON_GPU else counted)(case, calls))
    best = min((row.value for row in rows if row.name in case.yours), default=None) if ON_GPU else None
    how = "timed" if ON_GPU else "counted in Triton's interpreter, as there is no GPU"
    return [f"{case.size}, {how}:", *table(rows)], picture(f"{task}: {case.size}", rows), best
