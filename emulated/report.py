"""Count what the kernels of a training step do on an emulated AMD GPU: instructions, bytes, cache lines, LDS conflicts.

    python -m emulated --count                                  write docs/emulated_counts.md and its JSON
    python -m emulated --count --architectures gfx942 -- --stage 2 --batch-size 2 --seq-len 64
                                                                    print the kernels of one step with these flags

An instruction counts once for each wave that executes it. For each access to global memory the program counts the
bytes that the lanes request and the cache lines that hold them; for each access to LDS, the cycles that it waits for
banks. The products of the library are not counted. No times are measured.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import collections
import shlex
import sys

if not __package__:
    print("run it from the root as python -m emulated.report", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from emulated import source
from emulated.counts import Counts
from emulated.memory_system import LINE_BYTES
from measure.command_line import Parser, program, replacing
from measure.results import RESULTS, ROOT, read_result, write_json
from measure.tables import markdown_table, number

PAGE, RESULT = ROOT / "docs" / "emulated_counts.md", RESULTS / "emulated_counts.json"

# Sizes are small because emulation is slow. The bad layout has a stride of batch * kv_heads elements: in the stages
# that compare layouts, these two are as large as in the workshop.
LAYOUT_SIZES = ("--batch-size", "8", "--seq-len", "64", "--num-layers", "1", "--ffn-dim", "4", "--vocab-size", "16")
SWIGLU_SIZES = ("--batch-size", "1", "--seq-len", "16", "--num-layers", "1", "--ffn-dim", "128", "--vocab-size", "16")
STEP_SIZES = ("--batch-size", "2", "--seq-len", "64", "--num-layers", "1", "--ffn-dim", "512", "--vocab-size", "256")
ATTENTION = ("flash_attention_kernel", "flash_attention_backward_kernel")
CASES = {  # {name: (flags of the script, the kernels whose accesses are counted; None: all)}
    "stage 2": (("--stage", "2", *LAYOUT_SIZES), ATTENTION),
    "stage 3": (("--stage", "3", *LAYOUT_SIZES), ATTENTION),
    "stage 4": (("--stage", "4", *SWIGLU_SIZES), ("swiglu_kernel",)),
    "stage 5": (("--stage", "5", *SWIGLU_SIZES), ("swiglu_activation_kernel",)),
    "step": (("--use-amp", *STEP_SIZES), None),
}


def config_of(flags):
    return llama.parse_config(list(flags), "tiny_llama_v3.py")


def lines_cell(counts, kind):
    """The cache lines of an average access and the fewest possible, such as 57.8 (2.7)."""
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
    """A table that compares stage 2 with stage 3."""
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
    """A table that compares stage 4 with stage 5."""
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
    """The KB that SwiGLU's first product must read in fp32: the rows and the weights."""
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


@program("emulated.report")
def main(argv):
    parser = Parser("emulated.report", __doc__)
    parser.add_argument("--architectures", nargs="+", choices=list(LINE_BYTES), default=list(LINE_BYTES))
    parser.add_argument("flags", nargs="*", help="after --: flags of tiny_llama_v3.py")
    options = parser.parse_args(argv)
    config = config_of(options.flags) if options.flags else None
    try:
        from emulated import counting
    except ModuleNotFoundError as error:  # __main__.py starts a process that can import it
        raise llama.UsageError(f"{error.name} is not here: count with python -m emulated --count") from error
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
    with replacing(PAGE) as path:
        path.write_text(page(read_result(RESULT)))
    print(f"Written: {PAGE.relative_to(ROOT)}, {RESULT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
