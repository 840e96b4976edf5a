"""Compare tiles of the attention kernels on AMD GPUs that need not be in this machine, by their compiled loops.

    python -m compiled.tiles                              write docs/attention_tiles.md and its JSON
    python -m compiled.tiles --architectures gfx942 --heads 64 --passes forward       print, write nothing

A kernel spends its time in a loop over tiles of scores. The program adds up the cycles that the ISA gives for the
instructions of this loop, for each part of a compute unit, and derives from the registers how many waves share a unit.
This model ignores latencies, bank conflicts and caches. It shows which part limits the loop, and what a tile, an option
or a rewritten line changes. No kernel is run.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import collections
import re
import sys
from typing import NamedTuple
from unittest import mock

import torch

if not __package__:
    print("run it from the root as python -m compiled.tiles", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from compiled import compiler
from compiled.architectures import CHIPS, is_amd, occupancy
from compiled.recorded import Job, recording
from measure.command_line import program
from measure.device import require_triton
from measure.results import RESULTS, ROOT
from measure.tables import markdown_table, number

PAGE, RESULT = ROOT / "docs" / "attention_tiles.md", RESULTS / "attention_tiles.json"
ARCHITECTURES = [arch for arch in CHIPS if is_amd(arch)]
SEQ_LEN = 2048  # of the recorded launches; at this length the loops without a mask do nearly all of the work

# ----------------------------------------------------------------------------------------------------------------------
# Cycles of instructions

SIMDS = 4  # of a compute unit; each has a matrix unit and 16 lanes for a wave's 64
# Operations a cycle of one matrix unit: the peaks of the datasheets.
MATRIX_RATES = {
    "gfx90a": {"bf16": 256, "f32": 64},
    "gfx942": {"bf16": 512, "xf32": 256, "f32": 64},
    "gfx950": {"bf16": 1024, "f32": 64},
}
VECTOR_CYCLES = 4  # 64 lanes on 16
TRANSCENDENTAL_CYCLES = 16  # a quarter of that rate
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_f32")
LDS_BYTES = {"gfx90a": 128, "gfx942": 128, "gfx950": 256}  # a cycle, for the whole compute unit: 4 a bank
MATRIX = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_?(bf16|xf32|f32)")
LDS = re.compile(r"ds_(?:read|write)(2)?(?:st64)?_[biu](\d+)")


class Loop(NamedTuple):
    """The cycles that one iteration of a wave occupies each part of a unit, and the loads of that iteration."""

    matrix: int
    vector: int
    lds: int
    buffer_loads: int = 0  # 32-bit offsets from a base in scalar registers, bounds checked by the hardware
    other_loads: int = 0  # 64-bit addresses, a branch or a select for each mask


def target_of(assembly):
    return re.search(r'\.amdgcn_target "[^"]*-(gfx\w+)', assembly)[1]


def matrix_cycles(name, arch):
    shape = MATRIX.match(name)
    if not shape:
        raise ValueError(f"{name}: its cycles are not known; add its type to MATRIX_RATES")
    m, n, k = map(int, shape.groups()[:3])
    rate = MATRIX_RATES[arch][shape[4]]
    if arch == "gfx950" and shape[4] == "bf16" and m * k < 512:
        rate //= 2  # the short instructions take as long as on gfx942
    return 2 * m * n * k // rate


def lds_bytes(name):
    """The bytes that an instruction moves through LDS for the 64 lanes of a wave."""
    if name.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")):
        return 64 * 4
    moved = LDS.match(name)
    if not moved:
        raise ValueError(f"{name}: its bytes are not known; add it to LDS")
    return 64 * int(moved[2]) // 8 * (2 if moved[1] else 1)


def count_cycles(instructions, arch):
    """The Loop of {name of an instruction: count}; ValueError for an instruction whose cycles are unknown."""
    matrix = vector = lds = buffer_loads = other_loads = 0
    for name, times in instructions.items():
        if name.startswith("v_mfma"):
            matrix += times * matrix_cycles(name, arch)
        elif name.startswith("v_"):
            vector += times * (TRANSCENDENTAL_CYCLES if TRANSCENDENTAL.match(name) else VECTOR_CYCLES)
        elif name.startswith("ds_"):
            lds += times * lds_bytes(name)
        elif name.startswith("buffer_load"):
            buffer_loads += times
        elif name.startswith(("global_load", "flat_load")):
            other_loads += times
    return Loop(matrix, vector, lds // LDS_BYTES[arch], buffer_loads, other_loads)


def inner_loops(assembly):
    """Counts the instructions of each innermost loop, in order: [{name: count}]."""
    labels, names, loops, last_begin = {}, [], [], -1
    for line in assembly.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\s+([a-z]\w+)", line):
            names.append(instruction[1])
            target = re.match(r"\s+s_c?branch\w*\s+(\.LBB\w+)", line)
            if target and target[1] in labels:
                begin = labels[target[1]]
                if last_begin < begin:  # otherwise this loop contains the one before
                    loops.append(collections.Counter(names[begin:]))
                last_begin = begin
    return loops


def main_loop(assembly):
    """The Loop without a mask: of the loops with the products of a tile, the one with the least other work."""
    loops = [count_cycles(loop, target_of(assembly)) for loop in inner_loops(assembly)]
    return min(loops, key=lambda loop: (-loop.matrix, loop.vector))


def cycles_per_score(loop, scores, warps, resident):
    """The cycles of a compute unit for each score, with so many resident waves and so many scores in one iteration.

    Two or more waves on a SIMD overlap: the products of one run beside the exponentials of another. A single wave does
    not overlap.
    """
    waves = resident / SIMDS
    simd = waves * max(loop.matrix, loop.vector) if waves >= 2 else waves * (loop.matrix + loop.vector)
    return max(simd, resident * loop.lds) * warps / resident / scores


# ----------------------------------------------------------------------------------------------------------------------
# Alternatives to a tile


class Pass(NamedTuple):
    kernel: str
    products: int  # of a tile, each of 2 * head_dim operations for a score


PASSES = {
    "forward": Pass("flash_attention_kernel", 2),
    "dq": Pass("flash_attention_backward_dq_kernel", 3),
    "dkdv": Pass("flash_attention_backward_dkdv_kernel", 4),
}
ROUNDING = "rounding as the compiler does"


def alternatives(tile):
    """{what differs from the tile: an AttentionTile that differs in this one thing}."""
    found = {}
    for name, size in (("BLOCK_M", tile.BLOCK_M), ("BLOCK_N", tile.BLOCK_N)):
        for other in (size // 2, 2 * size):
            if 16 <= other <= 256:
                found[f"{other} {'queries' if name == 'BLOCK_M' else 'keys'}"] = tile._replace(**{name: other})
    found["8 waves"] = tile._replace(num_warps=8)
    found["2 stages"] = tile._replace(num_stages=2)
    found["products of 32 x 32"] = tile._replace(options=tile.options | {"matrix_instr_nonkdim": 32})
    for waves in (2, 3, 4):
        found[f"waves_per_eu={waves}"] = tile._replace(options=tile.options | {"waves_per_eu": waves})
    return found


def record_launch(arch, head_dim, pass_name, tile=None):
    """The launch of a pass in bf16, with the given tile or the one that the launchers choose."""
    chosen = llama.attention_tile

    def choose(name, *rest):
        return tile if tile and name == pass_name else chosen(name, *rest)

    replaced = mock.patch.object(llama, "attention_tile", choose)
    with recording(arch) as launches, replaced, torch.device("meta"):
        q, k = (torch.empty(1, SEQ_LEN, heads, head_dim, dtype=torch.bfloat16) for heads in (16, 8))
        o, lse = llama.flash_attention_forward(q, k, k)
        llama.flash_attention_backward(o, q, k, k, o, lse, q, k, k)
    return next(launch for launch in launches if launch.kernel == PASSES[pass_name].kernel)


def tile_of(launch):
    constants, options = launch.named_constants, dict(launch.options)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    return llama.AttentionTile(constants["BLOCK_M"], constants["BLOCK_N"], warps, stages, options)


def launches_of(arch, head_dim, pass_name):
    """{what differs: Launch}; first the tile that the launchers choose."""
    chosen = record_launch(arch, head_dim, pass_name)
    launches = {"chosen": chosen}
    if chosen.named_constants["ROUND_BY_HAND"]:
        with mock.patch.object(llama, "LACK_BF16_ROUNDING", ()):
            launches[ROUNDING] = record_launch(arch, head_dim, pass_name)
    for name, tile in alternatives(tile_of(chosen)).items():
        launches[name] = record_launch(arch, head_dim, pass_name, tile)
    return launches


def read(asm):
    return compiler.read_amdgcn(asm) | {"loop": main_loop(asm["amdgcn"])}


def analyse(architectures, heads, passes, processes):
    """Returns a row, a dict, for each tile."""
    places = [(arch, head_dim, name) for arch in architectures for head_dim in heads for name in passes]
    launches = {(*place, what): x for place in places for what, x in launches_of(*place).items()}
    jobs = {place: Job(place[0], "large", "bf16", launch, 1) for place, launch in launches.items()}
    compiled = compiler.compile_jobs(jobs.values(), processes, read)
    return [make_row(*place, job.launch, compiled[job.arch, job.launch.compiled_as]) for place, job in jobs.items()]


def make_row(arch, head_dim, pass_name, what, launch, compiled):
    tile = tile_of(launch)
    row = {
        "arch": arch, "head_dim": head_dim, "pass": pass_name, "what": what,
        "tile": [tile.BLOCK_M, tile.BLOCK_N], "error": compiled.get("error"),
    }  # fmt: skip
    if row["error"]:
        return row
    scores = tile.BLOCK_M * tile.BLOCK_N
    loop, registers, shared = compiled["loop"], compiled["registers"], compiled["shared_bytes"]
    waves = occupancy(arch, registers, shared, tile.num_warps)["warps"]
    fits = shared <= CHIPS[arch].shared_limit
    return row | {
        "registers": registers,
        "spills": compiled["vector_spills"],
        "shared_bytes": shared,
        "waves": waves,
        "loop": loop._asdict(),
        "cycles": 1000 * cycles_per_score(loop, scores, tile.num_warps, waves) if fits else None,
        "bound": 1000 * PASSES[pass_name].products * 2 * head_dim / (SIMDS * MATRIX_RATES[arch]["bf16"]),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Report


HEADER = """# Tiles of the attention kernels on AMD GPUs

<!-- Generated by `make kernel-report`; do not edit. -->

The attention kernels spend their time in a loop over tiles of scores. Here is what the compiler makes of that loop, in
bf16: with the tile that [tiny_llama_v3.py](../tiny_llama_v3.py) chooses, and with what differs from it in one thing.
**Nothing on this page was run**: cycles are instructions times what the ISA gives each of them, and leave out
latencies, bank conflicts and caches. [kernels.md](kernels.md#the-attention-loops-on-amd) says what was decided by them;
only the hardware can confirm it. The kernel of short sequences, which makes all gradients, is not here: launches and
latencies are its bound.

- *registers* of a thread, of 512, and the vector registers that are *spilled* to memory.
- *waves* that share a compute unit and its four SIMDs.
- *loads* of global memory in the loop, for each lane: *buffer* loads take offsets of 32 bits, and the hardware checks
  their bounds.
- *matrix*, *vector*, *LDS*: cycles that one wave's way through the loop keeps its SIMD's matrix unit busy, its vector
  lanes (4 an instruction, 16 an exponential), and the LDS (128 bytes a cycle, on gfx950 256) of the whole unit.
- *model*: cycles of a compute unit for 1,000 scores. The longest of the three counts, if two waves or more share a
  SIMD; a wave alone has matrix and vector cycles one after the other.
- *bound*: the cycles of the products alone, at the matrix units' peak.
"""
COLUMNS = ["", "queries x keys", "registers", "LDS KiB", "waves", "loads", "matrix", "vector", "LDS", "model"]


def report_line(row):
    tile = "{} x {}".format(*row["tile"])
    if row["error"]:
        return [row["what"], tile, "does not compile", *[""] * 7]
    spilled = f", {row['spills']} spilled" if row["spills"] else ""
    model = number(row["cycles"]) if row["cycles"] else "does not fit"
    what, model = (f"**{row['what']}**", f"**{model}**") if row["what"] == "chosen" else (row["what"], model)
    loop = Loop(**row["loop"])
    loads = f"{loop.buffer_loads} buffer" + (f", {loop.other_loads} other" if loop.other_loads else "")
    cells = [what, tile, f"{row['registers']}{spilled}", number(row["shared_bytes"] / 1024), f"{row['waves']}", loads]
    return [*cells, *(f"{cycles:,}" for cycles in (loop.matrix, loop.vector, loop.lds)), model]


def tables(rows):
    """Yields the Markdown of a table for each architecture, head and pass."""
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row["arch"], row["head_dim"], row["pass"]].append(row)
    for (arch, head_dim, pass_name), group in grouped.items():
        yield f"**{arch}, heads of {head_dim}, {pass_name}** (bound: {number(group[0]['bound'])})"
        yield markdown_table(COLUMNS, [report_line(row) for row in group])


def page(result):
    return "\n\n".join([HEADER, compiler.source_of(result, RESULT), *tables(result["rows"])]) + "\n"


def parse(argv):
    parser = compiler.parser_of("compiled.tiles", __doc__, ARCHITECTURES)
    parser.add_argument(
        "--heads", nargs="+", type=int, choices=(32, 64, 128), help="head dimensions (default: 64, 128)"
    )
    parser.add_argument("--passes", nargs="+", choices=list(PASSES), help="(default: all)")
    return parser.parse_args(argv)


@program("compiled.tiles")
def main(argv):
    options = parse(argv)
    require_triton()
    asked = options.architectures or options.heads or options.passes
    rows = analyse(
        options.architectures or ARCHITECTURES, options.heads or (64, 128), options.passes or PASSES, options.processes
    )
    if asked:
        print("\n\n".join(tables(rows)))
        return 0
    compiler.write_page(PAGE, page, RESULT, "compiled.tiles", argv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
