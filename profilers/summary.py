"""Write triton_analysis_summary.md: launch overhead, bandwidth and utilisation of a recorded session.

    python -m profilers.summary rocprof_results/session_20261121_120000 --tool rocprofv3

Called by run_rocprof_triton.sh. Exit codes: 0 done, 2 a recording is missing or cannot be read.
"""

import sys
from pathlib import Path

import pandas as pd

if not __package__:
    print("run it from the root as python -m profilers.summary", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, program, replacing
from measure.kernels_alone import rates, rates_alone, read_kernels_alone
from measure.tables import cell, markdown_table, number, percent
from profilers.counters import derive
from profilers.hotspots import PEAK_MEMORY, hotspots, marks_no_steps, scope_of
from profilers.kernel_names import short_name
from profilers.readers import read_kernels, read_peak_memory, read_step_counters
from profilers.readers.files import reported
from profilers.timeline import step_figures

TOP = 10
TOOLS = {"rocprofv3": "rocprofv3", "torch": "torch.profiler"}
BANDWIDTH = ["kernel", "MB", "ms", "GB/s", "% of the bandwidth"]  # columns of rates()
ROOFLINE = ["kernel", "FLOP a byte", "TFLOP/s", "ceiling", "% of the ceiling"]
UTILISATION = {  # columns of counters.derive(), as they are shown
    "kernel": "kernel", "compute": "compute, % of peak", "matrix": "matrix units, %", "memory": "memory, % of peak",
    "occupancy": "occupancy, %", "waves a CU": "waves a CU", "L2 hits": "L2 hits, %",
}  # fmt: skip


def markdown(table):
    """Return the first rows of a table in Markdown, with a dash for NaN."""
    right = [pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]
    rows = [
        [(number(value) or "-") if is_number else cell(value) for value, is_number in zip(row, right, strict=True)]
        for row in table.head(TOP).itertuples(index=False)
    ]
    return markdown_table(list(table), rows, right)


def counted(title, table, run):
    """Return a table that is computed from counters, below its title. run: what they were counted in."""
    if table.empty:
        return f"Not counted in {run} (that needs rocprofv3)."
    return f"{title}:\n\n{markdown(table)}"


def unknown_flop(kernels):
    """Name the kernels that used matrix units in a precision whose FLOP were not counted."""
    names = ", ".join(f"`{name}`" for name in kernels)
    return f"\nNot in the table, as MfmaFlops has no FP8, XF32, FP6 or FP4: {names}.\n" if names else ""


def launch_section(figures, remedy="`--graph`"):
    """figures: of step_figures; remedy: what replays a step."""
    if figures is None:
        return "The trace does not name its steps, so launches cannot be assigned to one."
    if not figures["launches"]:
        return "The trace holds no launch calls of the host."
    return (
        f"- {figures['kernels']:.6g} kernels a step, in {figures['launches']:.6g} launches\n"
        f"- a launch call takes the host {figures['launch_us'] / figures['launches']:.2f} us, "
        f"{figures['launch_us']:.0f} us a step: {percent(figures['launch_us'] / figures['step_us'])} "
        "of the step, profiling included\n"
        f"- no kernel runs for {figures['step_us'] - figures['busy_us']:.0f} us a step\n\n"
        f"If that is more than the kernels take, the step is launch-bound: {remedy} replays it in one launch."
    )


def busy_line(figures):
    return figures and (
        f"- a kernel runs during {percent(figures['busy_us'] / figures['step_us'])} of a step "
        f"({figures['busy_us']:.0f} us of {figures['step_us']:.0f} us, "
        f"means of {figures['steps']} steps, profiling included)"
    )


def summary(path, tool, program=None):
    """Return the text of the summary of a session's folder. Raises Unreadable.

    tool is one of TOOLS, program the name of what was recorded, None for the training script.
    """
    result = read_kernels_alone(path / "kernels_alone.json")
    environment, ceilings = result["environment"], result["ceilings"]
    table, steps, processes = read_kernels(path)
    counters, is_of_steps = read_step_counters(path)
    spots, figures = hotspots(table, steps), step_figures(path)
    # Counting slows kernels down: bytes come from the passes that counted, times from the run that did not.
    derived = derive(counters, table).sort_values("ns", ascending=False)
    derived["kernel"] = [short_name(name, 50) for name in derived.index]
    in_training = rates(derived, ceilings)
    unknown = derived["kernel"][derived["flop"].isna() & derived["matrix"].gt(0)] if "MfmaFlops" in counters else []
    used = derived[list(UTILISATION)].dropna(axis="columns", how="all").rename(columns=UTILISATION)
    run, launches, whose, note = "the training run", launch_section(figures), "", ""
    if program:
        run, launches = f"the run of `{program}`", launch_section(figures, "a captured graph")
        whose, note = " of `tiny_llama_v3.py`", f"{marks_no_steps(program)}.\n\n" * (not steps)
    if len(counters) and not is_of_steps:
        note += "**The counters are means of the whole run, warm-up included.**\n\n"
    # Interpreted kernels take a thousand times as long, so that only the columns without times mean something.
    alone = rates_alone(result)
    if environment["arch"] == "cpu":
        note += "**No GPU: the kernels ran in Triton's interpreter, and times mean nothing.**\n\n"
        alone = alone[["kernel", "MB", "FLOP a byte"]]
    if peak := read_peak_memory(path):
        note += f"{PEAK_MEMORY.format(peak / 2**30)}.\n\n"
    per_step = {"ms": "ms a step", "calls": "calls a step"} if steps else {}
    top = spots.rename(columns={"share": "% of the time"} | per_step)
    return f"""# Triton kernels, profiled

{environment["device"]} ({environment["arch"]}), PyTorch {environment["torch"]}, Triton {environment["triton"]}, \
{result["date"]}.
Recorded by {TOOLS[tool]}; the command lines are in `log.txt`.

{note}## Hot spots

{scope_of(steps, processes)}: {spots["ms"].sum():,.4g} ms. Picture: `kernels.png`.

{markdown(top)}

## Kernel launch overhead

{launches}

## Memory bandwidth

Measured ceiling of this device, by a kernel that reads and writes: {ceilings["GB/s"]:,.4g} GB/s.

{counted(f"In {run}, from the bytes counted at the memory", in_training[BANDWIDTH].dropna(), run)}

Each Triton kernel{whose} alone, from the bytes that it must move at least:

{markdown(alone.filter(BANDWIDTH))}

## GPU utilisation

{busy_line(figures) or ""}

{counted(f"In {run}", used.dropna(subset=list(used)[1:], how="all"), run)}

## Roofline inputs

Ceilings: {ceilings["GB/s"]:,.4g} GB/s and {ceilings["TFLOP/s"]:,.4g} TFLOP/s, which meet at \
{1e3 * ceilings["TFLOP/s"] / ceilings["GB/s"]:,.4g} FLOP a byte. With less arithmetic a kernel can at best reach the \
first, with more the second. One far below its ceiling is limited by neither, and above 100 % caches served what the \
ceiling's kernel gets from memory. Picture: `roofline.png`.

Each Triton kernel{whose} alone:

{markdown(alone.filter(ROOFLINE))}

{counted(f"Counted in {run}, matrix units alone", in_training[ROOFLINE].dropna(), run)}
{unknown_flop(unknown)}"""


@program("summary")
def main(argv):
    parser = Parser("summary", __doc__)
    parser.add_argument("session", type=Path, help="folder of the session")
    parser.add_argument("--tool", choices=list(TOOLS), required=True, help="what recorded it")
    parser.add_argument("--program", metavar="NAME", help="of what was recorded, if it is not the training script")
    options = parser.parse_args(argv)
    with reported(options.session / "kernels_alone.json"):  # the readers report the other files
        text = summary(options.session, options.tool, options.program)
    with replacing(options.session / "triton_analysis_summary.md") as path:
        path.write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
