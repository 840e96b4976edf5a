"""What a participant's kernel costs, beside other implementations and a bound: times on a GPU, counts elsewhere.

`exercises/check.py --time` calls report() for a kernel that has passed its check. It is launched as its check does it,
but at the sizes of CASES. On a GPU, results are compared with
higher precision at this size, and then timed in turns by the device's clock, with a flushed cache. The bound is the
larger of the bytes that must move over what a copy reaches, and the operations over what the library's product reaches,
both measured on this card. Without a GPU the interpreter counts what kernels load, store and multiply; of PyTorch's
operators, the tensors that they read and write are counted.
"""

import contextlib
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

import tiny_llama_v3 as llama
from exercises.checks import ON_GPU, exercise1, exercise2, exercise3, puzzles
from exercises.checks.common import CountBytes, Task, randn
from exercises.performance_debugging import measured
from exercises.probe import observed_by
from measure import work
from measure.accuracy import KERNEL_TOLERANCE, promoted, require
from measure.drawing import SHEET_WIDTH, TINTS, Sheet
from measure.results import describe
from measure.tables import number, text_table
from measure.timing import Bench, in_turns
from measure.work import Work

UNIT, LINE = "us" if ON_GPU else "bytes", 128  # of a Row's value; bytes of a cache line
TURNS = 3


class Case(NamedTuple):
    """A kernel at one size: large on a GPU, small in the interpreter."""

    task: Task
    sizes: Callable  # of no argument: what the check is given for each tile, without its module
    eager: Callable  # of the inputs: computes the same in PyTorch's operators
    flop: Callable = lambda *inputs: 0
    others: Callable = lambda *inputs: {}  # {name: function of no argument}; without "ours", the solution is ours


def on_gpu(large, small):
    return large if ON_GPU else small


BLOCKS = on_gpu((1024, 128, 256, 512, 2048, 4096), (64, 32, 128))
ROWS, COLUMNS = on_gpu((8192, 4096), (8, 200))
WHOLE = 1 << (COLUMNS - 1).bit_length()  # a block that holds a row
SIDE, TILES = on_gpu((2048, (64, 32, 128)), (64, (16, 32)))
DTYPE = on_gpu(torch.bfloat16, torch.float32)  # of the exercises; puzzles are in fp32


def gate_up(gate, up):
    """Return gate and up side by side in rows, as ours take them."""
    return torch.cat([t.reshape(-1, COLUMNS) for t in (gate, up)], dim=1)


def rmsnorm_others(x, weight):
    ours = partial(llama.rmsnorm_forward, x, None, weight, 1e-5)
    return {"F.rms_norm": partial(F.rms_norm, x, (COLUMNS,), weight, 1e-5), "ours": ours}


def attention_others(q, k, v):
    batch = [t[None] for t in (q, k, v)]
    heads_first = [t.transpose(1, 2) for t in batch]
    sdpa = partial(F.scaled_dot_product_attention, *heads_first, is_causal=True, enable_gqa=True)
    return {"PyTorch SDPA": sdpa, "ours": partial(llama.flash_attention_forward, *batch)}


CASES = {
    "grid_copy_kernel": Case(
        puzzles.grid_copy_kernel,
        lambda: [(on_gpu(2**26, 1000), block) for block in BLOCKS],
        torch.clone,
    ),
    "transpose_kernel": Case(
        puzzles.transpose_kernel,
        lambda: [(*(on_gpu(8192, 100),) * 3, 1, side, side) for side in on_gpu((64, 16, 32, 128), (16, 8, 32))],
        lambda x: x.T.contiguous(),
    ),
    "row_sum_kernel": Case(
        puzzles.row_sum_kernel,
        lambda: [(ROWS, COLUMNS, COLUMNS, block) for block in BLOCKS],
        lambda x: x.sum(1, dtype=torch.float32),
        torch.numel,
    ),
    "softmax_kernel": Case(
        puzzles.softmax_kernel,
        lambda: [(randn(ROWS, COLUMNS), WHOLE)],
        lambda x: F.softmax(x, dim=1),
        lambda x: 4 * x.numel(),
    ),
    "row_max_kernel": Case(
        puzzles.row_max_kernel,
        lambda: [(rows, COLUMNS, COLUMNS, block) for rows in [randn(ROWS, COLUMNS)] for block in BLOCKS],
        lambda x: x.amax(1),
        torch.numel,
    ),
    "multiply_tile": Case(
        puzzles.multiply_tile,
        lambda: [(SIDE, SIDE, SIDE, side) for side in TILES],
        torch.matmul,
        lambda x, y: 2 * x.numel() * y.shape[1],
    ),
    "grouped_matmul_kernel": Case(
        puzzles.grouped_matmul_kernel,
        lambda: [(SIDE // side, SIDE // side, 8, side, SIDE) for side in TILES],
        torch.matmul,
        lambda x, y: 2 * x.numel() * y.shape[1],
    ),
    "rmsnorm_kernel": Case(
        exercise1.rmsnorm_kernel,
        lambda: [(ROWS, COLUMNS, 0, block, 1e-5, DTYPE, 0) for block in BLOCKS],
        lambda x, weight: llama.torch_rmsnorm(x, None, weight, 1e-5)[0],
        lambda x, weight: work.rmsnorm(x, weight, x, None).flop,
        rmsnorm_others,
    ),
    "silu_mul_kernel": Case(
        exercise2.silu_mul_kernel,
        lambda: [(ROWS * COLUMNS, block, DTYPE, 0) for block in BLOCKS],
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: work.swiglu_activation(gate, up).flop,
        lambda gate, up: {"ours": partial(llama.swiglu_activation, gate_up(gate, up))},
    ),
    "silu_mul_backward_kernel": Case(
        exercise2.silu_mul_backward_kernel,
        lambda: [((ROWS, COLUMNS), block, DTYPE) for block in BLOCKS],
        lambda grad, gate, up: (torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)),
        lambda grad, gate, up: work.swiglu_activation_backward(grad, gate).flop,
        lambda grad, gate, up: {
            "ours": partial(llama.swiglu_activation_backward_, grad, gate_up(gate, up))
        },  # in place
    ),
    "attention_kernel": Case(
        exercise3.attention_kernel,
        lambda: [(*on_gpu((2048, 16, 8), (48, 2, 1)), side, side, 1, 1, "", DTYPE) for side in TILES],
        exercise3.attention,
        # two products of half of the pairs of a query and a key
        lambda q, k, v: 2 * q.numel() * len(q),
        attention_others,
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Measuring and counting


class Launched(Exception):
    """Ends a check where it launches the kernel."""


class Launch:
    """The call of a module's kernel as its check makes it, its inputs and its results."""

    def __init__(self, task, module, size):
        checks = sys.modules[task.check.__module__]
        stop = mock.patch.object(checks, "launch", side_effect=Launched)
        torch.manual_seed(0)  # so that all tiles have the same inputs
        with stop as launch, contextlib.suppress(Launched):
            task.check(module, *size)
        (kernel, grid, *args), constants = launch.call_args
        constants = {name: value for name, value in constants.items() if name != "share"}
        self.call = partial(kernel[grid], *args, **constants)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.results = [tensor for tensor in tensors if hasattr(tensor, "behind")]
        self.inputs = [tensor for tensor in tensors if not hasattr(tensor, "behind")]
        sides = [str(constants[name]) for name in ("BLOCK_SIZE", "BLOCK_M", "BLOCK_N") if name in constants]
        self.tile = " x ".join(sides)


class Row(NamedTuple):
    """A line of the table."""

    name: str
    value: float  # us, or bytes
    others: tuple  # the other figures, as text


def timed(case, launches, calls, cost):
    """Yield the Rows of a GPU, the bound last; ArithmeticError if a result of one of the launches is wrong."""
    bench, inputs = Bench(llama.select_device("auto")), next(iter(launches.values())).inputs
    dtype = inputs[0].dtype

    def named(results):
        return dict(enumerate(results if isinstance(results, tuple | list) else [results]))

    plain, exact = named(case.eager(*inputs)), named(case.eager(*promoted(inputs)))
    for name, call in list(calls.items()):
        try:
            bench.flushed_ms(call)  # compiles
        except Exception as error:  # too little shared memory, no compiler
            print(f"      {name} is left out: {describe(error)}")
            del calls[name]
            continue
        if name in launches:
            require(named(launches[name].results), plain, exact, KERNEL_TOLERANCE[dtype])
    times = in_turns([partial(bench.flushed_ms, call) for call in calls.values()], TURNS)
    reached = measured.ceilings(llama.Config(use_amp=dtype == torch.bfloat16), bench.device)
    for name, own in zip(calls, times, strict=True):
        us = statistics.median(own) * 1e3
        yield Row(name, us, (number(cost.bytes / us / 1e3), number(cost.flop / us / 1e6)))
    bounds = cost.bytes / reached["bytes_per_second"], cost.flop / reached["flop_per_second"]
    yield Row("bound: memory" if bounds[0] > bounds[1] else "bound: arithmetic", max(bounds) * 1e6, ("", ""))


def counted(case, launches, calls, cost):
    """Yield the Rows of the interpreter, the bound last."""
    from exercises.performance_debugging import memory_counts

    for name, call in calls.items():
        counts = memory_counts.Counts()
        with observed_by(counts), CountBytes() as operators:
            call()
        kernels = counts.kernels.values()
        seen = [memory_counts.figures(accesses) for kernel in kernels for accesses in (kernel.loads, kernel.stores)]
        moved, lines, products = operators.bytes, "", operators.products
        if seen:
            moved, lines = sum(kind["bytes"] for kind in seen), f"{sum(kind['lines'][LINE] for kind in seen):,}"
            products = sum(kernel.products for kernel in kernels)
        yield Row(name, moved, (lines, f"{products:,}"))
    yield Row("bound", cost.bytes, (f"{-(-cost.bytes // LINE):,}", f"{cost.flop // 2:,}"))


def shown(value):
    return number(value) if ON_GPU else f"{value:,}"


def table(rows):
    """Return lines of text."""
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
    """Return the lines of a table, the SVG of its picture, and the best time in us or None, of a task in CASES."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "TensorFloat32")  # products in fp32 are compared with those in fp32
    case = CASES[task]
    sizes = case.sizes()
    launches = [Launch(case.task, module, size) for size in sizes]
    ours, inputs = Launch(case.task, solution, sizes[0]), launches[0].inputs
    launches = {f"yours, {launch.tile}": launch for launch in launches}
    calls = {name: launch.call for name, launch in launches.items()}
    calls["PyTorch eager"] = partial(case.eager, *inputs)
    if ON_GPU:
        calls["torch.compile"] = partial(torch.compile(case.eager), *inputs)
    calls |= {"ours": ours.call} | case.others(*inputs)
    cost = Work(sum(t.nbytes for t in (*inputs, *ours.results)), case.flop(*inputs))
    rows = list((timed if ON_GPU else counted)(case, launches, calls, cost))
    best = min((row.value for row in rows if row.name in launches), default=None) if ON_GPU else None
    size = f"{' x '.join(map(str, inputs[0].shape))} elements"
    how = "timed" if ON_GPU else "counted in Triton's interpreter, as there is no GPU"
    return [f"{size}, {how}:", *table(rows)], picture(f"{task}: {size}", rows), best
