"""What a participant's kernel costs, beside other implementations and a bound: times on a GPU, counts elsewhere.

`exercises/check.py --time` calls report() for a kernel that has passed its check. It is launched as its check does it,
but at the sizes of CASES. On a GPU, results are compared with the solution's at this size, and then timed in turns by
the device's clock, with a flushed cache. The bound is the larger of the bytes that must move over what a copy reaches,
and the operations over what the library's product reaches, both measured on this card. Without a GPU the interpreter
counts what kernels load and store; of PyTorch's operators, the tensors that they read and write are counted.
"""

import contextlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import tiny_llama_v3 as llama
from exercises.checks import ON_GPU, exercise1, exercise2, exercise3, puzzles
from exercises.probe import Observer, observed_by
from measure.results import describe
from measure.tables import number, text_table
from measure.timing import Bench, in_turns, measure_ceilings

LINE = 128  # bytes of a cache line, on MI300 and NVIDIA
LANES = 64  # of a wave of an AMD GPU, which loads them together
NOTHING = -1  # the offset of a masked lane, and the line that it lies in
TURNS = 3


class Case(NamedTuple):
    """A kernel at one size: large on a GPU, small in the interpreter."""

    sizes: list  # for each tile, what the check is given after the module
    eager: Callable  # of the inputs: computes the same in PyTorch's operators
    flop: Callable = lambda *inputs: 0  # of products; other kernels are limited by memory
    others: Callable = lambda *inputs: {}  # {name: function of no argument}


def on_gpu(large, small):
    return large if ON_GPU else small


BLOCKS = on_gpu((1024, 128, 256, 512, 2048, 4096), (64, 32, 128))
ROWS, COLUMNS = on_gpu((8192, 4096), (8, 200))
SIDE, TILES = on_gpu((2048, (64, 32, 128)), (64, (16, 32)))  # of matrices
HEADS = on_gpu((2048, 16, 8), (48, 2, 1))  # tokens, heads of q, heads of k and v
DTYPE = on_gpu(torch.bfloat16, torch.float32)  # of the exercises; puzzles are in fp32


def rmsnorm_others(x, weight):
    ours = partial(llama.rmsnorm_forward, x, None, weight, 1e-5)
    return {"F.rms_norm": partial(F.rms_norm, x, (COLUMNS,), weight, 1e-5), "ours": ours}


def attention_others(q, k, v):
    batch = [t[None] for t in (q, k, v)]
    heads_first = [t.transpose(1, 2) for t in batch]
    sdpa = partial(F.scaled_dot_product_attention, *heads_first, is_causal=True, enable_gqa=True)
    return {"PyTorch SDPA": sdpa, "ours": partial(llama.flash_attention_forward, *batch)}


CASES = {
    "grid_copy_kernel": Case([(on_gpu(2**26, 1000), block) for block in BLOCKS], torch.clone),
    "transpose_kernel": Case(
        [(*(on_gpu(8192, 100),) * 3, 1, side, side) for side in on_gpu((64, 16, 32, 128), (16, 8, 32))],
        lambda x: x.T.contiguous(),
    ),
    "multiply_tile": Case(
        [(SIDE, SIDE, SIDE, side) for side in TILES],
        torch.matmul,
        lambda x, y: 2 * x.numel() * y.shape[1],
    ),
    "rmsnorm_kernel": Case(
        [(ROWS, COLUMNS, 0, block, 1e-5, DTYPE) for block in BLOCKS],
        lambda x, weight: llama.torch_rmsnorm(x, None, weight, 1e-5)[0],
        others=rmsnorm_others,
    ),
    "silu_mul_kernel": Case(
        [(ROWS * COLUMNS, block, DTYPE) for block in BLOCKS],
        lambda gate, up: F.silu(gate) * up,
    ),
    "silu_mul_backward_kernel": Case(
        [((ROWS, COLUMNS), block, DTYPE) for block in BLOCKS],
        lambda grad, gate, up: (torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)),
    ),
    "attention_kernel": Case(
        [(*HEADS, side, side, 1, 1, "", DTYPE) for side in TILES],
        exercise3.attention,
        # Two products of half of the pairs of a query and a key.
        lambda q, k, v: 2 * q.numel() * len(q),
        attention_others,
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Launching, timing and counting


class Launched(Exception):
    """Ends a check where it launches the kernel."""


class Launch:
    """The call of a module's kernel as its check makes it, its inputs and its results."""

    def __init__(self, task, module, size):
        checks = next(checks for checks in (puzzles, exercise1, exercise2, exercise3) if task in checks.TASKS)
        stop = mock.patch.object(checks, "launch", side_effect=Launched)
        torch.manual_seed(0)  # so that all tiles have the same inputs
        with stop as launch, contextlib.suppress(Launched):
            checks.TASKS[task].check(module, *size)
        (kernel, grid, *args), constants = launch.call_args
        constants = {name: value for name, value in constants.items() if name != "share"}
        self.call = partial(kernel[grid], *args, **constants)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.results = [tensor for tensor in tensors if hasattr(tensor, "behind")]
        self.inputs = [tensor for tensor in tensors if not hasattr(tensor, "behind")]
        sides = [constants[name] for name in ("BLOCK_SIZE", "BLOCK_M", "BLOCK_N") if name in constants]
        self.tile = " x ".join(map(str, sides))


def timed(launches, calls, reference):
    """Return {name: median time in us}; AssertionError if a launch gives another result than the reference."""
    reference.call()
    bench, able = Bench(llama.select_device("auto")), {}
    for name, call in calls.items():
        try:
            bench.flushed_ms(call)  # compiles
        except Exception as error:  # too little shared memory, no compiler
            print(f"      {name} is left out: {describe(error)}")
            continue
        able[name] = partial(bench.flushed_ms, call)
        if name in launches:
            # The check has judged the last digits; a mistake at this size is larger than what bf16 rounds.
            torch.testing.assert_close(launches[name].results, reference.results, rtol=0.02, atol=0.02)
    times = in_turns(list(able.values()), TURNS)
    return {name: statistics.median(own) * 1e3 for name, own in zip(able, times, strict=True)}


def bound_us(moved, flop, dtype):
    """Return the name of the bound on this card, and its time."""
    reached = measure_ceilings(Bench(llama.select_device("auto")), dtype)
    memory, arithmetic = moved / reached["GB/s"] / 1e3, flop / reached["TFLOP/s"] / 1e6
    return "memory" if memory > arithmetic else "arithmetic", max(memory, arithmetic)


class Counts(Observer):
    """Count the bytes and cache lines that kernels load and store."""

    def __init__(self):
        self.bytes = self.lines = 0

    def launch(self, kernel, tensors):
        self.begins = np.sort([tensor.untyped_storage().data_ptr() for tensor in tensors])

    def load(self, access):
        """Count an access of a tile of any shape, in its best order, as a compiled kernel has it."""
        order = access.order()
        wanted, lanes = access.mask.ravel(order), np.full(-(-access.mask.size // LANES) * LANES, NOTHING)
        addresses = access.addresses.ravel(order)[wanted]
        # As a GPU's allocator places tensors: each begins at a cache line.
        lanes[: wanted.size][wanted] = addresses - self.begins[np.searchsorted(self.begins, addresses, "right") - 1]
        # The different lines of each wave: sorted, those that differ from the one before.
        lines = np.sort(lanes.reshape(-1, LANES) // LINE, axis=1)
        self.lines += int((np.diff(lines, axis=1, prepend=NOTHING) != 0).sum())
        self.bytes += int(wanted.sum()) * access.element_type.primitive_bitwidth // 8

    store = load

    def atomic(self, access, loads):
        self.load(access)


class CountOperators(TorchFunctionMode):
    """Count calls of PyTorch's operators, and the bytes that they read and write; views move nothing."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        result = function(*args, **(kwargs or {}))
        operands = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)]
        memory = [t.untyped_storage().data_ptr() for t in operands]
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in memory:
            self.bytes += sum(t.nbytes for t in (*operands, result))
        return result


def counted(call):
    """Return what a call moves in the interpreter: bytes, and lines (0 for operators)."""
    with observed_by(counts := Counts()), CountOperators() as operators:
        call()
    return counts.bytes or operators.bytes, counts.lines


def report(task, module, solution):
    """Return the lines of a table of a task in CASES."""
    case = CASES[task]
    launches = {f"yours, {each.tile}": each for each in (Launch(task, module, size) for size in case.sizes)}
    reference = Launch(task, solution, case.sizes[0])
    inputs = reference.inputs
    calls = {name: launch.call for name, launch in launches.items()}
    calls["PyTorch eager"] = partial(case.eager, *inputs)
    if ON_GPU:
        calls["torch.compile"] = partial(torch.compile(case.eager), *inputs)
    calls |= case.others(*inputs) | {"solution": reference.call}
    moved = sum(t.nbytes for t in (*inputs, *reference.results))
    size = f"{' x '.join(map(str, inputs[0].shape))} elements"
    # A bound counts each input and result once.
    if ON_GPU:
        times = timed(launches, calls, reference)
        limit, bound = bound_us(moved, case.flop(*inputs), inputs[0].dtype)
        rows = [(name, number(us), f"{us / bound:.2f}") for name, us in (times | {f"bound: {limit}": bound}).items()]
        return [f"{size}, timed:", *text_table(("", "us", "x bound"), rows)]
    counts = {name: counted(call) for name, call in calls.items()} | {"bound": (moved, -(-moved // LINE))}
    rows = [
        # What an operator does inside cannot be seen.
        (name, f"{own:,}", f"{own / moved:.2f}", f"{lines:,}" if lines else "–")
        for name, (own, lines) in counts.items()
    ]
    return [
        f"{size}, counted in Triton's interpreter, as there is no GPU:",
        *text_table(("", "bytes", "x bound", "lines"), rows),
    ]
