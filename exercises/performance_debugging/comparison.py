"""The figures of a replay, taken from what its runs wrote, and the texts that show them.

summary.json, beside header, environment, config and ceilings:

    baseline        figures of a run, or null
    stages          [{stage, title, obstacle, error, and of a measured one: figures, kernels, attention_us, swiglu_us,
                    over_previous, over_baseline}]
    isolated        with --isolate: [{stage, flag, run, and what a stage has, over_optimized}], each mistake alone beside
                    stage 5; run names its files (stage4 for a stage that is one mistake by itself)
    counted         with --laptop: {attention, swiglu}, of counted.py; else null
    recorded        with --laptop: [{file, and a summary as this one}], measured on another machine; else []
    observations    [{stage, source, shown, text}], source "measured", "counted" or "recorded"

figures: first_loss, final_loss, losses, step_ms (of every step), phase_steps_ms {phase: of every step}, phase_ms
{phase: of the median step}, batch_ms {mean, p20, p50, p80}, gradient_share and so on, see run_figures. over_*: {value,
low, high, verdict} of the speed of the median step over another run's; verdict is "differs" beyond the measured spread,
else "same", "same work" (the same operations ran) or "too few steps": only "differs" may be shown as a ratio.
"""

import json
import statistics

import tiny_llama_v3 as llama
from benchmarks.stages import (
    ATTENTION_KERNEL,
    HYBRID_SWIGLU,
    NAIVE_SWIGLU,
    OPTIMIZED,
    comparison_markdown,
    comparison_table,
    notes,
    observation_lines,
    observations,
    setting,
    short_title,
)
from profiling.readers import read_kernel_stats

# ----------------------------------------------------------------------------------------------------------------------
# Figures

TIMELINES = (OPTIMIZED, 8)  # stages whose kernels a summary keeps one by one: what a graph changes


def kernel_figures(path):
    """The kernel table as a list of dicts, the longest first, or None if there is no profile.

    average_us is of one call, share of the time of all kernels.
    """
    if not path.exists():
        return None
    return [
        {
            "name": row.Name,
            "calls": int(row.Calls),
            "average_us": row.AverageNs / 1e3,
            "share": row.Percentage / 100,
        }
        for row in read_kernel_stats(path).itertuples()
    ]


def kernel_us(stage, *names):
    """us of one call of the first of these kernels that the profile has, or None."""
    times = {kernel["name"]: kernel["average_us"] for kernel in stage.get("kernels") or []}
    return next((times[name] for name in names if name in times), None)


def run_figures(result):
    """The figures of a run, from the JSON of tiny_llama_v3.py. Times are medians; the speed is that of all steps."""
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
        "phase_ms": {name: statistics.median(step["phase_ms"][name] for step in steps) for name in phases},
        "phases_share": statistics.median(sum(step["phase_ms"].values()) / step["batch_ms"] for step in steps) or None,
        "host_ms": summary["host_ms"],
        "gradient_share": summary["parameters_with_gradient"] / summary["parameters"],
        "without_gradient": summary.get("parameters_without_gradient"),
        "peak_memory_mib": summary["peak_memory_mib"],
        "mfu": summary["mfu"],
    }


def ratio(a, b):
    return a / b if a and b else None


def predecessor(stage):
    """The stage that a stage is compared with: history's stages with the one before, the others with the optimized."""
    return stage - 1 if stage <= OPTIMIZED else OPTIMIZED


def read_json(path):
    return json.loads(path.read_text()) if path.exists() else None


def compare(output, runs):
    """The comparison of the stages in the folder output as a dict for summary.json.

    runs: for each stage an object with stage, title, obstacle and error; a stage that did not come to be run has none
    of the figures.
    """
    baseline_result = read_json(output / "baseline.json")
    results = {run.stage: read_json(output / f"stage{run.stage}.json") for run in runs}
    baseline = run_figures(baseline_result) if baseline_result else None
    stages = []
    for run in runs:
        stage = {"stage": run.stage, "title": short_title(run.stage), "obstacle": run.obstacle, "error": run.error}
        if results[run.stage]:
            stage |= run_figures(results[run.stage])
            stage["kernels"] = kernel_figures(output / f"stage{run.stage}_profile.csv")
            if run.stage in TIMELINES:
                stage["timeline"] = read_json(output / f"stage{run.stage}_timeline.json")
            stage["attention_us"] = kernel_us(stage, ATTENTION_KERNEL)
            stage["swiglu_us"] = kernel_us(stage, NAIVE_SWIGLU, HYBRID_SWIGLU)
        stages.append(stage)
    speeds = {stage["stage"]: stage.get("samples_per_second") for stage in stages}
    for stage in stages:
        speed = stage.get("samples_per_second")
        stage["speed_over_previous"] = ratio(speed, speeds.get(predecessor(stage["stage"])))
        stage["speed_over_baseline"] = ratio(speed, baseline and baseline["samples_per_second"])
    sample = next((result for result in [*results.values(), baseline_result] if result), None)
    summary = {
        "environment": sample and sample["environment"],
        "config": sample and shared_config(sample["config"]),
        "precision": sample and sample["precision"],
        "entropy": sample and sample["summary"]["entropy"],
        "ceilings": read_json(output / "ceilings.json"),
        "attention_layouts": read_json(output / "attention_layouts.json"),
        "baseline": baseline,
        "stages": stages,
    }
    return summary | {"observations": observations(summary) if sample else []}


def shared_config(config):
    """What all stages have in common."""
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


def markdown(summary):
    """The text of summary.md."""
    parts = [
        "# The stages, replayed",
        setting(summary),
        comparison_markdown(summary),
        "\n".join(f"- {note}" for note in notes(summary)),
    ]
    parts += ["## Key observations"]
    parts += ["\n".join(f"- **{title}** ({mark}): {text}" for title, mark, text in observation_lines(summary))]
    parts += [f"Again: `{summary['command']}`"]
    return "\n\n".join(parts) + "\n"


def console(summary):
    """The main figures and the observations for a terminal."""
    heads = {
        "first loss": "first loss",
        "speed, samples/s": "samples/s",
        "speed / previous": "x previous",
        "speed / baseline": "x baseline",
        "step, median, ms": "step, ms",
        "phases / step, %": "phases, %",
        "weights with a gradient, %": "gradient, %",
    }
    labels, rows = comparison_table(summary)
    rows = dict(rows)
    lines = [setting(summary), "", f"{'':32}" + "".join(f"{head:>12}" for head in heads.values())]
    for index, label in enumerate(labels):
        lines.append(f"{label[:31]:32}" + "".join(f"{rows[name][index] if name in rows else '':>12}" for name in heads))
    return "\n".join(
        [*lines, "", *(f"{title} ({mark})\n    {text}" for title, mark, text in observation_lines(summary))]
    )
