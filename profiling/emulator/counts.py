"""Count what the kernels of a training step do on an emulated AMD GPU: instructions, bytes, cache lines, LDS conflicts.

    python -m profiling.emulator --count                            write docs/emulated_counts.md and its JSON
    python -m profiling.emulator --count --architectures gfx942 -- --stage 2 --batch-size 2 --seq-len 64
                                                                    print the kernels of one step with these flags

An instruction counts once for each wave that executes it. Of each access to global memory the lanes' addresses are
looked at: how many bytes they ask for, and in how many cache lines these lie. Of each access to LDS: how many cycles
its banks make it wait. The library's products are not seen. Nothing here is a time.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import collections
import dataclasses
import functools
import re
import shlex
import sys
from typing import NamedTuple

import numpy as np

import tiny_llama_v3 as llama
from measure.results import RESULTS, ROOT, read_result, write_json
from measure.tables import markdown_table, number
from profiling.emulator import source
from profiling.kernel_report import memory_access, wave_size

PAGE, RESULT = ROOT / "docs" / "emulated_counts.md", RESULTS / "emulated_counts.json"
LANES = wave_size("gfx942")  # and of the other two

# ----------------------------------------------------------------------------------------------------------------------
# The memories. Lines of the vector L1 cache: ROCm Compute Profiler's documentation, "Vector L1 cache". Banks of LDS,
# and the lanes that it serves at a time: Composable Kernel's, "Understanding AMD GPU LDS and Bank Conflicts".

LINE_BYTES = {"gfx90a": 64, "gfx942": 128, "gfx950": 128}
LDS_BANKS = {"gfx90a": 32, "gfx942": 32, "gfx950": 64}
BANK_BYTES = 4
WORD_BITS = 32  # of a word's number
# A read of 16 bytes is served for these lanes together, and 32 further on; other accesses in the order of lanes.
WIDE_READ = ((0, 1, 2, 3, 20, 21, 22, 23), (4, 5, 6, 7, 16, 17, 18, 19), (8, 9, 10, 11, 28, 29, 30, 31),
             (12, 13, 14, 15, 24, 25, 26, 27))  # fmt: skip


def lines_touched(addresses, width, line_bytes):
    """(cache lines that hold width bytes at each of the addresses, the fewest that could hold as many bytes)"""
    distinct = np.unique(addresses)
    lines = np.union1d(distinct // line_bytes, (distinct + width - 1) // line_bytes)
    return len(lines), -(-len(distinct) * width // line_bytes)


@functools.cache
def groups_of_lanes(width, kind, banks):
    """(lanes, the number of the group that each is in): LDS serves the lanes of a group together."""
    if width == 16 and kind == "read" and banks == 32:
        half = np.array(WIDE_READ)
        groups = np.concatenate([half, half + LANES // 2])
    else:
        most = min(LANES, banks * BANK_BYTES // max(width, BANK_BYTES))
        groups = np.arange(LANES).reshape(-1, 1 << most.bit_length() - 1)  # 12 bytes are served as 16 are
    return groups.ravel(), np.repeat(np.arange(len(groups)), groups.shape[1])


def bank_conflicts(addresses, active, width, kind, banks):
    """Cycles beyond one for each group of lanes: of a bank's different words, one is served in a cycle.

    addresses (LANES,) in bytes, active (LANES,) of bools: the lanes that take part; kind: "read" or "write".
    """
    lanes, group = groups_of_lanes(width, kind, banks)
    taking_part = active[lanes]
    words = addresses[lanes[taking_part], None] // BANK_BYTES + np.arange(-(-width // BANK_BYTES))
    # A word that several ask for is read once. Words of different groups do not meet.
    asked = np.unique((words + (group[taking_part, None] << WORD_BITS)).ravel())
    cycles = np.bincount((asked >> WORD_BITS) * banks + asked % banks, minlength=(group[-1] + 1) * banks)
    return int(np.maximum(cycles.reshape(-1, banks).max(1) - 1, 0).sum())


# ----------------------------------------------------------------------------------------------------------------------
# Instructions


def class_of(name):
    """The class of an instruction that the tables count it in."""
    if name.startswith("V_MFMA"):
        return "matrix"
    if memory_access(name.lower()):
        return "global memory"
    if name.startswith("DS_"):
        return "LDS"
    return "vector" if name.startswith("V_") else "scalar"


class LocalAccess(NamedTuple):
    """An access to LDS."""

    kind: str  # "read" or "write"
    width: int  # bytes a lane
    offsets: tuple  # in bytes, one for each of its addresses


def local_access(name, offset0, offset1):
    """The LocalAccess of an instruction with these fields of 8 bits; None if it is none, such as a permutation."""
    parts = re.fullmatch(r"DS_(READ|WRITE)(2?)(ST64)?_[BUI](\d+)(?:_D16.*|_TR_B\d+)?", name)
    if not parts:
        return None
    kind, two, far, bits = parts.groups()
    width = int(bits) // 8
    scale = width * (64 if far else 1)
    offsets = (offset0 * scale, offset1 * scale) if two else (offset0 | offset1 << 8,)
    return LocalAccess(kind.lower(), width, offsets)


@dataclasses.dataclass
class Counts:
    """Of all launches of one kernel."""

    launches: int = 0
    instructions: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by class
    # Of "load" and "store": accesses in which any lane takes part, the bytes that all lanes ask for, the cache lines
    # that each access touches, and the fewest that could hold what it asks for.
    accesses: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lines: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    fewest_lines: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    local_accesses: int = 0  # to LDS
    local_conflicts: int = 0  # cycles


# ----------------------------------------------------------------------------------------------------------------------
# Report

# Each instruction is executed one after the other, hence the small sizes. The layout's stride is batch * kv_heads
# elements: in the stages that differ in it, these two are as large as in the workshop.
LAYOUT_SIZES = ("--batch-size", "8", "--seq-len", "64", "--num-layers", "1", "--ffn-dim", "4", "--vocab-size", "16")
SWIGLU_SIZES = ("--batch-size", "1", "--seq-len", "16", "--num-layers", "1", "--ffn-dim", "128", "--vocab-size", "16")
STEP_SIZES = ("--batch-size", "2", "--seq-len", "64", "--num-layers", "1", "--ffn-dim", "512", "--vocab-size", "256")
ATTENTION = ("flash_attention_kernel", "flash_attention_backward_kernel")
CASES = {  # {name: (flags of the script, the kernels that are looked at; None: all)}
    "stage 2": (("--stage", "2", *LAYOUT_SIZES), ATTENTION),
    "stage 3": (("--stage", "3", *LAYOUT_SIZES), ATTENTION),
    "stage 4": (("--stage", "4", *SWIGLU_SIZES), ("swiglu_kernel",)),
    "stage 5": (("--stage", "5", *SWIGLU_SIZES), ("swiglu_activation_kernel",)),
    "step": (("--use-amp", *STEP_SIZES), None),
}


def config_of(flags):
    return llama.parse_config(list(flags), "tiny_llama_v3.py")


def lines_cell(counts, kind):
    """Cache lines of an average access and the fewest possible, such as 57.8 (2.7)."""
    accesses = counts.accesses[kind]
    return f"{counts.lines[kind] / accesses:.1f} ({counts.fewest_lines[kind] / accesses:.1f})" if accesses else ""


COLUMNS = [
    "kernel", "launches", "matrix", "vector", "scalar", "LDS", "global memory", "KB loaded", "KB stored",
    "lines a load", "lines a store", "LDS conflicts",
]  # fmt: skip


def counts_line(kernel, counts):
    instructions = [f"{counts.instructions[name]:,}" for name in COLUMNS[2:7]]
    conflicts = f"{counts.local_conflicts / counts.local_accesses:.1f}" if counts.local_accesses else ""
    return [
        f"`{kernel}`", f"{counts.launches}", *instructions, number(counts.bytes["load"] / 1e3),
        number(counts.bytes["store"] / 1e3), lines_cell(counts, "load"), lines_cell(counts, "store"), conflicts,
    ]  # fmt: skip


def counts_table(kernels):
    """The table of {kernel: Counts}."""
    return markdown_table(COLUMNS, [counts_line(name, counts) for name, counts in kernels.items()])


def counts_of(result, arch, case):
    """{kernel: Counts} of a case in the result."""
    return {
        kernel: Counts(**{name: collections.Counter(v) if isinstance(v, dict) else v for name, v in counts.items()})
        for kernel, counts in result["counts"][arch][case].items()
    }


def layout_table(result):
    """Stage 2 beside stage 3."""
    rows = []
    for arch in result["counts"]:
        bad, good = (counts_of(result, arch, stage) for stage in ("stage 2", "stage 3"))
        for kernel in ATTENTION:
            pair = bad[kernel], good[kernel]
            rows.append(
                [arch, f"`{kernel}`", *(number(counts.bytes["load"] / 1e3) for counts in pair),
                 *(f"{counts.accesses['load']:,}" for counts in pair), *(lines_cell(counts, "load") for counts in pair),
                 *(f"{counts.lines['load']:,}" for counts in pair)]
            )  # fmt: skip
    names = ["KB loaded", "loads", "lines a load", "lines in all"]
    header = ["GPU", "kernel", *(f"{name}, {stage}" for name in names for stage in (2, 3))]
    return markdown_table(header, rows, [False, False] + [True] * 8)


def swiglu_table(result):
    """Stage 4 beside stage 5."""
    rows = []
    for arch in result["counts"]:
        for stage in ("stage 4", "stage 5"):
            for kernel, counts in counts_of(result, arch, stage).items():
                executed = f"{sum(counts.instructions.values()):,}"
                kilobytes, matrix = number(counts.bytes["load"] / 1e3), f"{counts.instructions['matrix']}"
                rows.append([arch, stage, f"`{kernel}`", executed, matrix, kilobytes, f"{counts.lines['load']:,}"])
    header = ["GPU", "stage", "kernel", "instructions", "matrix instructions", "KB loaded", "lines in all"]
    return markdown_table(header, rows, [False] * 3 + [True] * 4)


def operand_kilobytes(config):
    """KB of what SwiGLU's first product must read, the rows and the weights, in fp32."""
    return 4 * config.hidden_dim * (config.tokens_per_step + 2 * config.ffn_dim) / 1e3


HEADER = """# What the kernels do on an emulated AMD GPU

<!-- Generated by `make emulate COUNT=1`; do not edit. -->

Counted while the compiled kernels were executed, instruction by instruction, on a CPU
([what that shows, and what not](rocm.md#what-has-been-verified)). **No time is on this page**: it has the reasons for
times that are measured elsewhere. An instruction counts once for each wave (64 threads) that executes it.

- *KB loaded*: what all threads ask for, the same byte again each time.
- *lines a load*: the cache lines that an average load of global memory touches, and in parentheses the fewest that
  could hold what it asks for. A line has 64 bytes on gfx90a and 128 on gfx942 and gfx950. The cache serves a load line
  by line.
- *LDS conflicts*: the cycles that an average access to LDS waits because threads that are served together ask one bank
  for different words. Which are served together AMD documents for 16 bytes a thread and 32 banks; other accesses are
  taken in the order of threads, and gfx950 to have 64 banks.

The library's matrix products are not seen. [compiled_kernels.md](compiled_kernels.md) has the compiler's side of the
same kernels."""

LAYOUT = """## Stage 2 beside stage 3: the layout of K and V

Both stages ask for the same bytes. In stage 2 the elements of a head lie batch x heads elements apart, so that no load
can fetch two of them at once, and each thread of a load touches a line of its own. Flags:
`{flags}`."""

SWIGLU = """## Stage 4 beside stage 5: SwiGLU

Stage 4 makes each element of the product by itself, with vector instructions, from a row and two columns that it loads
anew. All rows and columns together have {operands} KB. The loads touch as few lines as they can: what is wrong is how
often. In stage 5 the library multiplies, with matrix instructions, and a kernel makes the activation. Flags:
`{flags}`."""

STEP = """## Every kernel of a step, {arch}

Flags: `{flags}`."""


def page(result):
    """The Markdown of a result."""
    layout, swiglu, step = (CASES[case][0] for case in ("stage 3", "stage 5", "step"))
    operands = number(operand_kilobytes(config_of(swiglu)))
    parts = [
        HEADER, f"Compiled by Triton {result['triton']}; counted by `{result['command']}`.",
        LAYOUT.format(flags=" ".join(layout[2:])), layout_table(result),
        SWIGLU.format(flags=" ".join(swiglu[2:]), operands=operands), swiglu_table(result),
    ]  # fmt: skip
    for arch in result["counts"]:
        parts += [STEP.format(arch=arch, flags=" ".join(step)), counts_table(counts_of(result, arch, "step"))]
    return "\n\n".join(parts) + "\n"


def run(argv):
    parser = llama.Parser("profiling.emulator.counts", __doc__)
    parser.add_argument("--architectures", nargs="+", choices=list(LINE_BYTES), default=list(LINE_BYTES))
    parser.add_argument("flags", nargs="*", help="of tiny_llama_v3.py, after --")
    options = parser.parse_args(argv)
    config = config_of(options.flags) if options.flags else None
    try:
        from profiling.emulator import counting
    except ModuleNotFoundError as error:  # __main__.py starts a process that has it
        raise llama.UsageError(f"{error.name} is not here: count with python -m profiling.emulator --count") from error
    if config:
        for arch in options.architectures:
            print(f"{arch}, one step of tiny_llama_v3.py {shlex.join(options.flags)}:\n")
            print(counts_table(counting.count_step(arch, config)), flush=True)
        return 0
    counts = {arch: {} for arch in options.architectures}
    for arch in options.architectures:
        for case, (flags, kernels) in CASES.items():
            print(f"{arch}: {case}", flush=True)
            counted = counting.count_step(arch, config_of(flags), kernels)
            counts[arch][case] = {kernel: vars(counted[kernel]) for kernel in kernels or counted}
    result = {
        "command": "make emulate COUNT=1", "triton": llama.triton.__version__, "tinygrad": source.COMMIT,
        "counts": counts,
    }  # fmt: skip
    write_json(RESULT, result)
    PAGE.write_text(page(read_result(RESULT)))
    print(f"Written: {PAGE.relative_to(ROOT)}, {RESULT.relative_to(ROOT)}")
    return 0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return llama.exit_code_of(lambda: run(argv), "profiling.emulator.counts")


if __name__ == "__main__":
    sys.exit(main())
