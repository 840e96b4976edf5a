"""Count the bytes and cache lines that two kernels load, with and without a mistake, in Triton's interpreter.

    python -m exercises.performance_debugging.memory_counts --output-dir DIR      writes DIR/counted.json

The program observes each load of the running kernel: its addresses, and how many cache lines they lie in, for each 64
neighbours of a tile, as a wave of an AMD GPU loads them together. No time is measured, and the machine does not matter.
"""

import collections
import contextlib
import math
import os
import sys
from pathlib import Path
from unittest import mock

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.memory_counts", file=sys.stderr)
    sys.exit(2)
import numpy as np
import torch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import tiny_llama_v3 as llama  # noqa: E402
from emulated.memory_system import LANES  # noqa: E402
from measure.command_line import Parser, program  # noqa: E402
from measure.device import require_triton  # noqa: E402
from measure.results import write_json  # noqa: E402

LINE_BYTES = (64, 128)  # of the vector cache of MI200; of MI300 and NVIDIA
NOTHING = -1  # the address of a masked lane


def distinct_in_rows(values):
    """The number of different values in each row, except NOTHING."""
    ordered = np.sort(values, axis=1)
    is_new = np.diff(ordered, axis=1, prepend=NOTHING) != 0
    return (is_new & (ordered != NOTHING)).sum(axis=1)


class Accesses:
    """The addresses of loads, or of stores, of all launches of one kernel."""

    def __init__(self):
        self.waves = {}  # {bytes of an element: [addresses, a row for each wave]}

    def add(self, addresses, itemsize):
        """Adds the addresses of a tile of any shape; a wave has neighbours in the last dimension."""
        lanes = np.full(-(-addresses.size // LANES) * LANES, NOTHING)
        lanes[: addresses.size] = addresses.ravel()
        self.waves.setdefault(itemsize, []).append(lanes.reshape(-1, LANES))

    def figures(self):
        """The figures for summary.json; distinct_bytes counts each byte once."""
        total = {"waves": 0, "bytes": 0, "distinct_bytes": 0}
        total |= {name: dict.fromkeys(LINE_BYTES, 0) for name in ("lines", "fewest_lines")}
        for itemsize, parts in self.waves.items():
            waves = np.concatenate(parts)
            waves = waves[(waves != NOTHING).any(axis=1)]
            asked, distinct = waves[waves != NOTHING], distinct_in_rows(waves) * itemsize
            total["waves"] += len(waves)
            total["bytes"] += asked.size * itemsize
            total["distinct_bytes"] += np.unique(asked).size * itemsize
            for size in LINE_BYTES:
                lines = np.where(waves == NOTHING, NOTHING, waves // size)
                total["lines"][size] += int(distinct_in_rows(lines).sum())
                total["fewest_lines"][size] += int((-(-distinct // size)).sum())
        return total


class Launches:
    """What all launches of one kernel do."""

    def __init__(self):
        self.programs, self.loads, self.stores = 0, Accesses(), Accesses()
        self.products = 0  # pairs of numbers that tl.dot multiplies


class AddressSpace:
    """Places the tensors of a launch as a GPU's allocator does: each begins at a cache line."""

    APART = 2**40  # bytes, more than the size of any tensor

    def __init__(self, tensors):
        self.storages = [t.untyped_storage() for t in tensors if t is not None]

    def place(self, addresses):
        """Moves addresses in one of the tensors to its place here."""
        for index, storage in enumerate(self.storages):
            begin = storage.data_ptr()
            if begin <= addresses[0] < begin + storage.nbytes():
                return addresses - begin + index * self.APART
        raise AssertionError("a load of none of the launch's tensors")


@contextlib.contextmanager
def observed_launches():
    """Yields {kernel: Launches} of what the interpreter runs in this context."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

    launches, running = collections.defaultdict(Launches), []
    execute, load = GridExecutor.__call__, InterpreterBuilder.create_masked_load
    store, dot = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_dot

    def observed_execute(executor, *args, **kwargs):
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        running.append((launches[executor.fn.__name__], AddressSpace(tensors)))
        execute(executor, *args, **kwargs)
        running.pop()[0].programs += math.prod(interpreter_builder.grid_dim)

    def add(kind, pointers, mask):
        addresses, taking_part = pointers.data.astype(np.int64), np.broadcast_to(mask.data, pointers.data.shape)
        if taking_part.any():
            kernel, space = running[-1]
            placed = np.full(addresses.shape, NOTHING)
            placed[taking_part] = space.place(addresses[taking_part])
            getattr(kernel, kind).add(placed, pointers.get_element_ty().primitive_bitwidth // 8)

    def observed_load(builder, pointers, mask, *args, **kwargs):
        add("loads", pointers, mask)
        return load(builder, pointers, mask, *args, **kwargs)

    def observed_store(builder, pointers, value, mask, *args, **kwargs):
        add("stores", pointers, mask)
        return store(builder, pointers, value, mask, *args, **kwargs)

    def observed_dot(builder, a, b, *args, **kwargs):
        running[-1][0].products += a.data.size * b.data.shape[-1]
        return dot(builder, a, b, *args, **kwargs)

    with (
        mock.patch.object(GridExecutor, "__call__", observed_execute),
        mock.patch.multiple(InterpreterBuilder, create_masked_load=observed_load, create_masked_store=observed_store,
                            create_dot=observed_dot),
    ):  # fmt: skip
        yield launches


# ----------------------------------------------------------------------------------------------------------------------
# Cases. The attention kernel has the sizes of docs/emulated_counts.md: the stride of the bad layout is batch * kv_heads
# elements, and these two are those of the workshop. The naive SwiGLU has an eighth of the programs of that page.

BATCH, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 8, 64, 8, 4, 64
ROWS, HIDDEN, FFN = 8, 512, 32


def attention(layout):
    """A forward pass with K and V, (batch, seq, heads, head_dim), in the layout of a function."""
    qkv = torch.randn(BATCH, SEQ_LEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    q, k, v = llama.split_heads(qkv, HEADS, KV_HEADS)
    return llama.flash_attention_forward(q, layout(k), layout(v))[0]


def naive_swiglu():
    """The product and the activation by our kernel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    return llama.swiglu_naive_matmul(x, torch.randn(2 * FFN, HIDDEN, generator=generator) / HIDDEN**0.5)[1]


def hybrid_swiglu():
    """The activation by our kernel; the product of the library is not observed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    return llama.swiglu_activation(x @ (torch.randn(2 * FFN, HIDDEN, generator=generator) / HIDDEN**0.5).T)


# {stage with a mistake: (the function for this stage, that for the next stage)}
PAIRS = {
    2: (lambda: attention(llama.badly_strided), lambda: attention(lambda x: x)),
    4: (naive_swiglu, hybrid_swiglu),
}


def count(stages):
    """The cases of counted.json for the PAIRS of these stages."""
    cases = []
    for first in sorted(stages & set(PAIRS)):
        outputs = []
        for stage, execute in enumerate(PAIRS[first], first):
            with observed_launches() as launches:
                outputs.append(execute())
            ((kernel, seen),) = launches.items()
            cases.append({"stage": stage, "kernel": kernel, "programs": seen.programs, **seen.loads.figures()})
            print(f"stage {stage}, {kernel}: {cases[-1]['bytes']:,} bytes in {cases[-1]['waves']:,} loads", flush=True)
        for case in cases[-2:]:
            case["same_result"] = torch.allclose(*outputs, atol=1e-5)
    return cases


@program("memory_counts.py")
def main(argv):
    parser = Parser("memory_counts.py", __doc__)
    parser.add_argument("--stages", default="2,4", metavar="2,4", help="the stages whose kernels are counted")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(argv)
    require_triton()
    cases = count({int(number) for number in options.stages.split(",")})
    write_json(options.output_dir / "counted.json", {"wave": LANES, "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
