"""Reads the figures of a replay from the files of its runs, and writes the texts that show them.

summary.json has header, environment, config, ceilings and

    baseline        figures of a run, or null
    laptop          whether it is a replay with --laptop
    stages          [{stage, title, planned, obstacle, error, and of a measured one: figures, kernels, attention_us,
                    swiglu_us, over_previous, over_baseline}]; planned is false if --laptop does not run it, and it has
                    a config if its sizes differ
    isolated        with --isolate: [{stage, mistake, run, and what a stage has, over_optimized}], each mistake alone
                    beside stage 5; run names its files (stage4 for a stage that is one mistake by itself)
    counted         with --laptop: {wave, cases: [{stage, kernel, programs, waves, bytes, distinct_bytes, lines,
                    fewest_lines, same_result}]} of memory_counts.py, the lines by their bytes; else null
    attention_layouts, timelines    on a GPU: of attention_layouts.py and kernel_timeline.py; else null
    recorded        with --laptop: [{file, and a summary like this one}], measured on another machine; else []
    observations    [{stage, source, shown, text}], source "measured", "counted" or "recorded on <device>"

figures: first_loss, final_loss, losses, step_ms (of every step), phase_steps_ms {phase: of every step}, phase_ms
{phase: of the median step}, batch_ms {mean, p20, p50, p80}, gradient_share and so on, see run_figures. over_*: {value,
low, high, verdict} of the speed of the median step over another run's; verdict is "differs" beyond the measured spread,
else "same", "same work" (the same operations ran) or "too few steps": only "differs" may be shown as a ratio.
"""

import json
import statistics
import textwrap

import tiny_llama_v3 as llama
from benchmarks.pages import replays as shown
from benchmarks.pages.replays import ATTENTION_KERNEL, HYBRID_SWIGLU, NAIVE_SWIGLU, short_title
from measure.heartbeat import WIDTH
from measure.tables import markdown_table, text_table
from profilers.readers import read_kernel_stats

# ----------------------------------------------------------------------------------------------------------------------
# Figures


def kernel_figures(path):
    """The kernel table as a list of dicts, the longest first, or None if there is no profile.

    average_us is of one call, share of the time of all kernels.
    """
    if not path.exists():
        return None
    rows = read_kernel_stats(path).itertuples()
    return [dict(name=row.Name, calls=int(row.Calls), average_us=row.AverageNs / 1e3, share=row.Percentage / 100)
            for row in rows]  # fmt: skip


def kernel_us(stage, *names):
    """The us of one call of the first of these kernels in the profile, or None."""
    times = {kernel["name"]: kernel["average_us"] for kernel in stage.get("kernels") or []}
    return next((times[name] for name in names if name in times), None)


def middle(steps):
    """The step with the median time, or the two steps whose mean is the median."""
    ordered = sorted(steps, key=lambda step: step["batch_ms"])
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def run_figures(result):
    """The figures of a run, from the JSON of tiny_llama_v3.py. Times are medians; the speed is that of all steps.

    phase_ms is of the step with the median time, as the medians of single phases do not add up to a step.
    """
    summary, steps = result["summary"], result["steps"]
    batch, phases = summary["batch_ms"], summary["phase_ms"]
    return {
        "implementation": result["implementation"],
        "first_loss": summary["first_loss"],
        "final_loss": summary["final_loss"],
        "losses": [step["loss"] for step in steps],
        "step_ms": [step["batch_ms"] for step in steps],
        "samples_per_second": summary["samples_per_second"],
        "tokens_per_second": summary["tokens_per_second"],
        "batch_ms": batch,
        "mean_over_median": batch["mean"] / batch["p50"],
        "phase_ms": {name: statistics.fmean(step["phase_ms"][name] for step in middle(steps)) for name in phases},
        "phase_steps_ms": {name: [step["phase_ms"][name] for step in steps] for name in phases},
        "phases_share": statistics.median(sum(step["phase_ms"].values()) / step["batch_ms"] for step in steps) or None,
        "host_ms": summary["host_ms"],
        "gradient_share": summary["parameters_with_gradient"] / summary["parameters"],
        "without_gradient": summary.get("parameters_without_gradient"),
        "peak_memory_mib": summary["peak_memory_mib"],
        "mfu": summary["mfu"],
    }


def read_json(path):
    return json.loads(path.read_text()) if path.exists() else None


def staged_figures(output, name, config):
    """The figures of a run with this name for the entry of a stage; {} without files."""
    result = read_json(output / f"{name}.json")
    if not result:
        return {}
    figures = run_figures(result) | {"kernels": kernel_figures(output / f"{name}_profile.csv")}
    if shared_config(result["config"]) != config:
        figures["config"] = shared_config(result["config"])
    return figures | {
        "attention_us": kernel_us(figures, ATTENTION_KERNEL),
        "swiglu_us": kernel_us(figures, NAIVE_SWIGLU, HYBRID_SWIGLU),
    }


def compare(output, runs):
    """Compares the runs in the folder output. Returns a dict for summary.json.

    runs: of replay.Run; a mistake alone has a mistake, a stage has only a stage. Runs without files have no figures.
    """
    ended = [read_json(output / f"{run.name}.json") for run in runs if run.stage is not None or run.name == "baseline"]
    sample = next(filter(None, reversed(ended)), None)
    config = sample and shared_config(sample["config"])
    executed = {run.name: run for run in runs if run.parts}  # a mistake alone may be the run of a stage
    baseline = read_json(output / "baseline.json")
    summary = {
        "environment": sample and sample["environment"],
        "config": config,
        "precision": sample and sample["precision"],
        "entropy": sample and sample["summary"]["entropy"],
        "ceilings": read_json(output / "ceilings.json"),
        "timelines": read_json(output / "kernel_timeline.json"),
        "attention_layouts": read_json(output / "attention_layouts.json"),
        "baseline": baseline and run_figures(baseline),
        "stages": [
            {"stage": run.stage, "title": short_title(run.stage), "planned": bool(run.parts), "obstacle": run.obstacle,
             "error": run.error} | staged_figures(output, run.name, config)
            for run in runs if run.stage is not None and run.mistake is None
        ],
        "isolated": [
            {"stage": run.stage, "mistake": run.mistake, "run": run.name,
             "obstacle": executed[run.name].obstacle, "error": executed[run.name].error}
            | staged_figures(output, run.name, config)
            for run in runs if run.mistake is not None
        ],
        "counted": read_json(output / "counted.json"),
    }  # fmt: skip
    for stage in summary["stages"]:
        stage["over_previous"] = shown.over_previous(summary, stage)
        stage["over_baseline"] = shown.over_baseline(summary, stage)
    for run in summary["isolated"]:
        run["over_optimized"] = shown.over_optimized(summary, run)
    return summary


def shared_config(config):
    """The settings that all stages have in common."""
    own = {"impl", "stage", "graph", "warmup_steps", "output_dir", "profile", *llama.BUGS}
    return {name: value for name, value in config.items() if name not in own}


def without_option(argv, option):
    """argv without an option and its value."""
    kept, skip = [], False
    for argument in argv:
        if not skip and argument != option and not argument.startswith(f"{option}="):
            kept.append(argument)
        skip = argument == option
    return kept


# ----------------------------------------------------------------------------------------------------------------------
# Texts


RECORDED = "Recorded on {}, in {}: not measured here."


def rows_markdown(labels, rows):
    return markdown_table(["", *labels], [[head, *cells] for head, cells in rows])


def markdown(summary):
    """The text of summary.md."""
    parts = ["# The stages, replayed", shown.setting(summary)]
    parts += [shown.comparison_markdown(summary), *([laptop_line(summary)] if summary["laptop"] else [])]
    parts += ["\n".join(f"- {note}" for note in shown.notes(summary))]
    if summary["isolated"]:
        parts += ["## Each mistake alone", ALONE, rows_markdown(*shown.isolated_table(summary))]
    if summary["counted"]:
        parts += ["## Counted", COUNTED, rows_markdown(*shown.counted_table(summary))]
    for replay in summary["recorded"]:
        parts += [f"## Recorded: {shown.sizes(replay)}", recorded_line(replay), shown.comparison_markdown(replay)]
    parts += ["## Key observations"]
    parts += ["\n".join(f"- **{title}** ({mark}): {text}" for title, mark, text in shown.observation_lines(summary))]
    parts += [f"Again: `{summary['command']}`"]
    return "\n\n".join(parts) + "\n"


ALONE = "Each mistake by itself beside stage 5, which has none: what it costs where the others do not hide it."
COUNTED = (
    "What two kernels ask memory for, counted in Triton's interpreter, with the mistake and without. A load is of 64 "
    "neighbours, as many as a wave of AMD's; a line has 128 bytes. None of it is a time, or depends on this machine."
)


def laptop_line(summary):
    """A text about the measurements of --laptop."""
    how = "in Triton's interpreter, whose times are not the kernels'" if shown.is_interpreted(summary) else "as well"
    others = f"the others with a tiny model {how}."
    return f"Measured on this CPU, whatever GPU there is: stage 1 in plain PyTorch at the model's full width, {others}"


def recorded_line(replay):
    return RECORDED.format(shown.source_of(replay), replay["file"])


MAIN = {  # {name of a figure in the report: in a terminal}
    "first loss": "first loss",
    "speed, samples/s": "samples/s",
    "speed / previous": "x previous",
    "speed / baseline": "x baseline",
    "step, median, ms": "step, ms",
    "phases / step, %": "phases, %",
    "weights with a gradient, %": "gradient, %",
}
INTERPRETED = {"first loss": "first loss", "backward, ms": "backward, ms", "weights with a gradient, %": "gradient, %"}
ALONE_MAIN = {
    "first loss": "first loss",
    "step, median, ms": "step, ms",
    "added by the mistake, ms": "added, ms",
    "speed / stage 5": "x stage 5",
    "phases / step, %": "phases, %",
    "attention kernel, us": "attention, us",
    "weights with a gradient, %": "gradient, %",
}


def wrapped(text, indent=""):
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def figures_lines(table, names):
    """A table of benchmarks.pages.replays for a terminal, with a line for each run and the figures in names."""
    labels, rows = table
    rows = {names[name]: cells for name, cells in rows if name in names}
    return text_table(["", *rows], list(zip(labels, *rows.values(), strict=True)))


def console(summary):
    """The main figures and the observations for a terminal."""
    names = INTERPRETED if shown.is_interpreted(summary) else MAIN
    lines = [wrapped(shown.setting(summary)), "", *figures_lines(shown.comparison_table(summary), names)]
    lines += ["", wrapped(laptop_line(summary))] if summary["laptop"] else []
    if summary["isolated"]:
        lines += ["", wrapped(ALONE), "", *figures_lines(shown.isolated_table(summary), ALONE_MAIN)]
    if summary["counted"]:
        header, rows = shown.counted_table(summary)
        lines += ["", wrapped(COUNTED), "", *text_table(["", *header], [[label, *cells] for label, cells in rows])]
    for replay in summary["recorded"]:
        lines += ["", wrapped(f"{shown.sizes(replay)}. {recorded_line(replay)}")]
        if replay is summary["recorded"][0]:  # the others are in the report
            lines += ["", *figures_lines(shown.comparison_table(replay), MAIN)]
    lines.append("")
    for title, mark, text in shown.observation_lines(summary):
        lines += [f"{title} ({mark})", wrapped(text, "    ")]
    return "\n".join(lines)
