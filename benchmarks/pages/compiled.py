"""Write the tables of what several releases of Triton make of the kernels."""

from benchmarks.pages.long_table import paragraphs, source_of
from measure.results import read_result
from measure.tables import NOT_MEASURED, markdown_table, number
from offline.compilers import RESULT, share_of

HEAVY_LOSS = 0.5  # of the occupancy with the newest release


def launch_cells(row):
    return [f"`{row['kernel'].removesuffix('_kernel')}`", row["precision"], row["tile"]]


def figure_cell(row, version):
    """Return the registers and the occupancy of a launch, and what it spills."""
    compiled = row["compiled"][version]
    if not compiled:
        return "does not compile"
    spilled = f", spills {compiled['spilled']}" if compiled["spilled"] else ""
    return f"{compiled['registers']}{spilled}: {number(100 * compiled['occupancy'])} %"


def worst_cell(part):
    """Return the launch of a part of the summary that loses the most, in words."""
    if not (row := part["worst"]):
        return ""
    kernel, *rest = launch_cells(row)
    figures = (figure_cell(row, part[name]) for name in ("version", "newest"))
    return f"{kernel} ({', '.join(rest)}), {' instead of '.join(figures)}"


def compilers_section(folder):
    """Show how the occupancy differs between releases, and below it each launch that loses half or more."""
    if not (folder / RESULT.name).exists():
        return NOT_MEASURED
    result = read_result(folder / RESULT.name)
    *older, newest = result["versions"]
    counts = "launches", "lower", "higher", "spilling"
    lines = [
        [part["version"], part["arch"], *(number(part[name], 1) for name in counts), worst_cell(part)]
        for part in result["summary"]
    ]
    losers = [
        [version, row["arch"], *launch_cells(row), figure_cell(row, version), figure_cell(row, newest)]
        for version in older
        for row in result["rows"]
        if share_of(row, version, newest) <= HEAVY_LOSS
    ]
    source, commit = source_of(result)
    counted = ["launches", "lower occupancy", "higher", "that spill"]
    header = ["Triton", "GPU", *counted, "the most lost, registers: occupancy"]
    return paragraphs(
        markdown_table(header, lines, [column in counted for column in header]),
        losers and f"Launches with half the occupancy of Triton {newest}, or less, in registers: occupancy",
        losers and markdown_table([*header[:2], "kernel", "precision", "tile", "with it", newest], losers, [False] * 7),
        f"{source}: [{RESULT.name}](benchmarks/results/{RESULT.name}){commit}",
    )
