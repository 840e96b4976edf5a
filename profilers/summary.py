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
from measure.tables import cell, markdown_table, number
from profilers.counters import derive
from profilers.hotspots import PEAK_MEMORY, hotspots, scope_of
from profilers.kernel_names import operation_of, short_name
from profilers.readers import read_peak_memory, read_step_counters, read_step_stats
from profilers.readers.files import reported
from profilers.readers.kernel_benchmark import read_kernel_benchmark
from profilers.timeline import step_figures

TOP = 10
TOOLS = {"rocprofv3": "rocprofv3", "ncu": "torch.profiler (times) and ncu (counters)", "torch": "torch.profiler"}


def markdown(table):
    """A table in Markdown, with a dash for NaN."""

    def text(value):
        if isinstance(value, float):
            return "-" if pd.isna(value) else number(value)
        return cell(str(value))

    rows = [list(map(text, row)) for row in table.itertuples(index=False, name=None)]
    right = [pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]
    return markdown_table(list(table.columns), rows, right)


# Arguments of the sections: figures of step_figures (None without steps), derived of counters.derive (empty if nothing
# was counted), and alone of read_kernel_benchmark.


def launch_section(figures, on_gpu):
    if not on_gpu:
        return "There is no GPU: nothing is launched. The operators above ran one after the other on the host."
    if figures is None:
        return "The trace does not name its steps, so launches cannot be assigned to one."
    if not figures["launches"]:
        return "The trace holds no launch calls of the host."
    share = figures["launch_us"] / figures["step_us"]
    return (
        f"- {figures['kernels']:.6g} kernels a step, in {figures['launches']:.6g} launches\n"
        f"- a launch call takes the host {figures['mean_launch_us']:.2f} us, {figures['launch_us']:.0f} us a step: "
        f"{100 * share:.1f} % of the step, profiling included\n"
        f"- between two kernels the device pauses for {figures['gap_us']:.2f} us on average, "
        f"{figures['gap_us'] * max(figures['kernels'] - 1, 0):.0f} us a step\n\n"
        "If the pauses add up to more than the kernels, the step is launch-bound: `--graph` replays it in one launch."
    )


def utilisation_section(figures, derived):
    lines = []
    if figures:
        lines.append(
            f"- a kernel runs during {100 * figures['busy']:.1f} % of a step ({figures['kernel_us']:.0f} us of "
            f"{figures['step_us']:.0f} us, means of {figures['steps']} steps, profiling included)"
        )
    columns = {
        "compute": "compute, % of peak", "matrix": "matrix units, %", "memory": "memory, % of peak",
        "occupancy": "occupancy, %", "waves a CU": "waves a CU", "L2 hits": "L2 hits, %",
    }  # fmt: skip
    known = derived[[name for name in columns if name in derived]].dropna(axis="columns", how="all")
    if known.empty:
        lines.append("- occupancy and the use of compute units: not counted (they need rocprofv3 or ncu)")
        return "\n".join(lines)
    top = known.loc[derived["ns"].sort_values(ascending=False).index[:TOP]].rename(columns=columns)
    top.insert(0, "kernel", names_of(top))
    return "\n".join([*lines, "", markdown(top)])


def runs_on_gpu(alone):
    return alone["environment"]["arch"] != "cpu"


def kernels_of(alone):
    """Return a table of name, bytes, flop and ns of the kernels alone."""
    kernels = pd.DataFrame(alone["kernels"])
    return kernels.assign(ns=[1e6 * case["ms"] for case in kernels["triton"]])


def shown_alone(alone, table):
    """Return a table in Markdown; of interpreted kernels only the first two columns, which contain no times."""
    if runs_on_gpu(alone):
        return markdown(table)
    return f"(Triton's interpreter ran them, in Python: no ceiling limits that.)\n\n{markdown(table.iloc[:, :2])}"


def names_of(table):
    return [short_name(name, 50) for name in table.index]


def bandwidth_section(derived, alone):
    ceiling, kernels = alone["ceilings"]["GB/s"], kernels_of(alone)
    parts = [f"Measured ceiling of this device, by a kernel that reads and writes: {ceiling:,.4g} GB/s."]
    counted = derived.dropna(subset="GB/s") if len(derived) else derived
    if len(counted):
        top = counted.sort_values("bytes", ascending=False).head(TOP)
        table = {
            "kernel": names_of(top),
            "operation": top.index.map(operation_of),
            "MB a run": top["bytes"] / 1e6,
            "GB/s": top["GB/s"],
            "% of the ceiling": 100 * top["GB/s"] / ceiling,
        }
        parts.append("In the training run, from the bytes counted at the memory:\n\n" + markdown(pd.DataFrame(table)))
    else:
        parts.append("Bytes in the training run were not counted (that needs rocprofv3 or ncu).")
    speed = kernels["bytes"] / kernels["ns"]
    table = {
        "kernel alone": kernels["name"],
        "MB": kernels["bytes"] / 1e6,
        "ms": kernels["ns"] / 1e6,
        "GB/s": speed,
        "% of the ceiling": 100 * speed / ceiling,
    }
    parts.append("Each Triton kernel alone, from the bytes that it must move at least:")
    return "\n\n".join([*parts, shown_alone(alone, pd.DataFrame(table))])


def roofline_section(derived, alone):
    bandwidth, arithmetic = alone["ceilings"]["GB/s"], alone["ceilings"]["TFLOP/s"]
    ridge, kernels = arithmetic * 1e3 / bandwidth, kernels_of(alone)
    text = (
        f"Ceilings: {bandwidth:,.4g} GB/s and {arithmetic:,.4g} TFLOP/s, which meet at {ridge:,.4g} FLOP a byte. With "
        "less arithmetic a kernel can at best reach the first, with more the second. One far below its ceiling is "
        "limited by neither, and above 100 % caches served what the ceiling's kernel gets from memory. Picture: "
        "`roofline.png`.\n\n"
    )
    intensity, speed = kernels["flop"] / kernels["bytes"], kernels["flop"] / kernels["ns"] / 1e3
    table = {
        "kernel alone": kernels["name"],
        "FLOP a byte": intensity,
        "TFLOP/s": speed,
        "ceiling": intensity.lt(ridge).map({True: "memory", False: "arithmetic"}),
        "% of the ceiling": 100 * speed / (intensity * bandwidth / 1e3).clip(upper=arithmetic),
    }
    text += shown_alone(alone, pd.DataFrame(table))
    counted = derived[derived["flop"].gt(0) & derived["bytes"].gt(0)] if len(derived) else derived
    if len(counted):
        table = {
            "kernel": names_of(counted),
            "FLOP a byte": counted["flop"] / counted["bytes"],
            "TFLOP/s": counted["flop"] / counted["ns"] / 1e3,
        }
        text += "\n\nCounted in the training run, matrix units alone:\n\n" + markdown(pd.DataFrame(table).head(TOP))
    return text


def summary(path, tool):
    """Returns the text of the summary of a session's folder; tool is one of TOOLS. Raises Unreadable."""
    table, steps = read_step_stats(path)
    alone = read_kernel_benchmark(path / "kernels_alone.json")
    counters, is_of_steps = read_step_counters(path)
    derived = derive(counters, table) if len(counters) else pd.DataFrame()
    figures = step_figures(path)
    spots = hotspots(table, steps)
    peak = read_peak_memory(path)
    memory = f"\n{PEAK_MEMORY.format(peak / 2**30)}.\n" if peak else ""
    on_gpu = runs_on_gpu(alone)
    environment = alone["environment"]
    top = spots.head(TOP).rename(columns={"share": "% of the time", "ms": "ms a step", "calls": "calls a step"})
    software = f"PyTorch {environment['torch']}, Triton {environment['triton']}"
    note = "" if on_gpu else "\n**No GPU: the kernels ran in Triton's interpreter, and times mean nothing.**\n"
    if len(counters) and not is_of_steps:
        note += (
            "\n**The counters are means of the whole run, warm-up included: the steps were not found in every pass.**\n"
        )
    return f"""# Triton kernels, profiled

{environment["device"]} ({environment["arch"]}), {software}, {alone["date"]}.
Recorded by {TOOLS[tool]}; the command lines are in `log.txt`.
{note}
## Hot spots

{scope_of(steps, 1)}: {spots["ms"].sum():,.4g} ms. Picture: `kernels.png`.

{markdown(top)}

## Kernel launch overhead

{launch_section(figures, on_gpu)}

## Memory bandwidth

{bandwidth_section(derived, alone)}

## GPU utilisation

{utilisation_section(figures, derived)}
{memory}
## Roofline inputs

{roofline_section(derived, alone)}
"""


def parse(argv):
    parser = Parser("summary", __doc__)
    parser.add_argument("session", type=Path, help="folder of the session")
    parser.add_argument("--tool", choices=list(TOOLS), required=True, help="what recorded it")
    return parser.parse_args(argv)


@program("summary")
def main(argv):
    options = parse(argv)
    with reported(options.session / "kernels_alone.json"):  # the readers report the other files
        text = summary(options.session, options.tool)
    with replacing(options.session / "triton_analysis_summary.md") as path:
        path.write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
