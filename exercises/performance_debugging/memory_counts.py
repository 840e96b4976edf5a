"""Count the bytes and cache lines that two kernels load, with and without a mistake, in Triton's interpreter.

    python -m exercises.performance_debugging.memory_counts --output-dir DIR      writes DIR/counted.json

The program observes each load of the running kernel: its addresses, and how many cache lines they lie in, for each 64
neighbours of a tile, as a wave of an AMD GPU loads them together. No time is measured, and the machine does not matter.
"""

import collections
import os
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.memory_counts", file=sys.stderr)
    sys.exit(2)
import numpy as np
import torch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import tiny_llama_v3 as llama  # noqa: E402
from exercises.probe import Observer, observed_by  # noqa: E402
from measure.command_line import Parser, program  # noqa: E402
from measure.device import require_triton  # noqa: E402
from measure.results import write_json  # noqa: E402

LANES = 64  # of a wave of an AMD GPU
LINE_BYTES = (64, 128)  # of the vector cache of MI200; of MI300 and NVIDIA
NOTHING = -1  # the address of a masked lane, and the line that it lies in
APART = 2**40  # bytes between tensors, more than the size of any


def distinct_in_rows(values):
    """Return the number of different values in each row, except NOTHING."""
    ordered = np.sort(values, axis=1)
    is_new = np.diff(ordered, axis=1, prepend=NOTHING) != 0
    return (is_new & (ordered != NOTHING)).sum(axis=1)


def figures(accesses):
    """Return the figures for summary.json; distinct_bytes counts each byte once.

    accesses: {bytes of an element: [addresses, a row for each wave]}
    """
    total = collections.Counter(waves=0, bytes=0, distinct_bytes=0)
    lines, fewest = ({size: 0 for size in LINE_BYTES} for _ in range(2))
    for itemsize, parts in accesses.items():
        waves = np.concatenate(parts)
        waves = waves[(waves != NOTHING).any(axis=1)]
        asked, distinct = waves[waves != NOTHING], distinct_in_rows(waves) * itemsize
        total["waves"] += len(waves)
        total["bytes"] += asked.size * itemsize
        total["distinct_bytes"] += np.unique(asked).size * itemsize
        for size in LINE_BYTES:
            lines[size] += int(distinct_in_rows(waves // size).sum())
            fewest[size] += int((-(-distinct // size)).sum())
    return {**total, "lines": lines, "fewest_lines": fewest}


class Launches:
    """What all launches of one kernel do."""

    def __init__(self):
        self.programs = set()  # (number of the launch, program ids)
        self.loads, self.stores = collections.defaultdict(list), collections.defaultdict(list)
        self.products = 0  # pairs of numbers that tl.dot multiplies


class Counts(Observer):
    """Counts what kernels do."""

    def __init__(self):
        self.kernels = collections.defaultdict(Launches)
        self.launches = 0

    def launch(self, kernel, tensors):
        self.kernel, self.storages = self.kernels[kernel], [tensor.untyped_storage() for tensor in tensors]
        self.launches += 1

    def load(self, access):
        self.add(self.kernel.loads, access)

    def store(self, access):
        self.add(self.kernel.stores, access)

    def dot(self, product):
        a, b = product.sides
        self.kernel.products += a.data.size * b.data.shape[-1]

    def add(self, accesses, access):
        """Add the addresses of a tile of any shape; a wave has neighbours in the last dimension."""
        self.kernel.programs.add((self.launches, access.program))
        lanes = np.full(-(-access.mask.size // LANES) * LANES, NOTHING)
        for index, storage in enumerate(self.storages):
            # As a GPU's allocator places tensors: each begins at a cache line.
            offsets = (access.addresses - storage.data_ptr()).ravel()
            own = access.mask.ravel() & (0 <= offsets) & (offsets < storage.nbytes())
            lanes[: own.size][own] = offsets[own] + index * APART
        accesses[access.element_type.primitive_bitwidth // 8].append(lanes.reshape(-1, LANES))


# ----------------------------------------------------------------------------------------------------------------------
# Cases. The stride of the bad layout is batch * kv_heads elements, and these two are those of the workshop.

BATCH, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 8, 64, 8, 4, 64
ROWS, HIDDEN, FFN = 8, 512, 32


def attention(layout):
    """A forward pass with K and V, (batch, seq, heads, head_dim), in the layout of a function."""
    qkv = torch.randn(BATCH, SEQ_LEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    q, k, v = llama.split_heads(qkv, HEADS, KV_HEADS)
    return llama.flash_attention_forward(q, layout(k), layout(v))[0]


def swiglu_inputs():
    """Return x and the weight of gate and up."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    return x, torch.randn(2 * FFN, HIDDEN, generator=generator) / HIDDEN**0.5


def naive_swiglu():
    """The product and the activation by our kernel."""
    return llama.swiglu_naive_matmul(*swiglu_inputs())[1]


def hybrid_swiglu():
    """The activation by our kernel; the product of the library is not observed."""
    x, weight = swiglu_inputs()
    return llama.swiglu_activation(x @ weight.T)


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
            counts = Counts()
            with observed_by(counts):
                outputs.append(execute())
            ((kernel, seen),) = counts.kernels.items()
            cases.append({"stage": stage, "kernel": kernel, "programs": len(seen.programs), **figures(seen.loads)})
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
