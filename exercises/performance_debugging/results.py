"""Read the files of a replay's runs into the dict of summary.json, the one source of cards, pictures and tables.

It has header, environment, config, ceilings and

    baseline        figures of a run, or null
    laptop          whether it is a replay with --laptop
    stages          [{stage, title, planned, obstacle, error, and of a measured one: figures, kernels, attention_us,
                    swiglu_us, over_previous, over_baseline}]; planned is false if --laptop does not run it, and it has
                    a config if its sizes differ
    isolated        with --isolate: [{stage, mistake, run, and what a stage has, over_optimized}], each mistake alone
                    beside stage 5; run names its files (stage4 for a stage that is one mistake by itself)
    counted         with --laptop: {wave, cases: [{stage, kernel, programs, waves, bytes, distinct_bytes, lines,
                    fewest_lines, same_result}]} of memory_counts.py, the lines by their bytes; else null
    attention_layouts, timelines    on a GPU: of measured.py; else null
    recorded        with --laptop: [{file, and a summary like this one}], measured on another machine; else []
    observations    [{stage, source, shown, text}], source "measured", "counted" or "recorded on <device>"

figures: first_loss, final_loss, losses, step_ms (of every step), phase_steps_ms {phase: of every step}, phase_ms
{phase: of the median step}, batch_ms {mean, p20, p50, p80}, gradient_share and so on, see run_figures. over_*: {value,
low, high, verdict} of the speed of the median step over another run's; verdict is "differs" beyond the measured spread,
else "same", "same work" (the same operations ran) or "too few steps": only "differs" may be shown as a ratio.
"""

import json
import statistics

import tiny_llama_v3 as llama
from benchmarks.pages import replays
from profilers.readers import read_kernel_stats

SHARED = ("implementation", "first_loss", "final_loss", "samples_per_second", "tokens_per_second", "batch_ms",
          "host_ms", "peak_memory_mib", "mfu")  # fmt: skip
OWN_SETTINGS = {"impl", "stage", "graph", "warmup_steps", "output_dir", "profile", *llama.BUGS}  # of a stage


def kernel_figures(path):
    """Return the kernel table as a list of dicts, the longest first, or None if there is no profile.

    average_us is of one call, share of the time of all kernels.
    """
    if not path.exists():
        return None
    return [
        {"name": row.Name, "calls": int(row.Calls), "average_us": row.AverageNs / 1e3, "share": row.Percentage / 100}
        for row in read_kernel_stats(path).itertuples()
    ]


def kernel_us(kernels, *names):
    """Return the us of one call of the first of these kernels in the profile, or None."""
    times = {kernel["name"]: kernel["average_us"] for kernel in kernels or []}
    return next((times[name] for name in names if name in times), None)


def run_figures(result):
    """Return the figures of a run, from the JSON of tiny_llama_v3.py.

    Times are medians; the speed is that of all steps. phase_ms is of the step with the median time, or the mean of the
    two around it, as the medians of single phases do not add up to a step.
    """
    steps = result["steps"]
    summary = result["summary"] | {"implementation": result["implementation"]}
    # An even number of steps has two in the middle.
    ordered = sorted(steps, key=lambda step: step["batch_ms"])
    middle = ordered[(len(steps) - 1) // 2 : len(steps) // 2 + 1]
    phases = summary["phase_ms"]
    return {name: summary[name] for name in SHARED} | {
        "losses": [step["loss"] for step in steps],
        "step_ms": [step["batch_ms"] for step in steps],
        "mean_over_median": summary["batch_ms"]["mean"] / summary["batch_ms"]["p50"],
        "phase_ms": {name: statistics.fmean(step["phase_ms"][name] for step in middle) for name in phases},
        "phase_steps_ms": {name: [step["phase_ms"][name] for step in steps] for name in phases},
        "phases_share": statistics.median(sum(step["phase_ms"].values()) / step["batch_ms"] for step in steps) or None,
        "gradient_share": summary["parameters_with_gradient"] / summary["parameters"],
        "without_gradient": summary.get("parameters_without_gradient"),
    }


def shared_config(config):
    """Return the settings that all stages have in common."""
    return {name: value for name, value in config.items() if name not in OWN_SETTINGS}


def read_json(path):
    return json.loads(path.read_text()) if path.exists() else None


def staged_figures(output, name, config):
    """Return the figures of a run of this name for the entry of a stage; {} without files."""
    result = read_json(output / f"{name}.json")
    if not result:
        return {}
    own, kernels = shared_config(result["config"]), kernel_figures(output / f"{name}_profile.csv")
    return run_figures(result) | ({"config": own} if own != config else {}) | {
        "kernels": kernels,
        "attention_us": kernel_us(kernels, replays.ATTENTION_KERNEL),
        "swiglu_us": kernel_us(kernels, replays.NAIVE_SWIGLU, replays.HYBRID_SWIGLU),
    }  # fmt: skip


def summarize(output, runs):
    """Return a dict for summary.json of the runs, of replay.Run, whose files lie in the folder output."""
    # Runs that failed or were not reached have no file; any of the others tells what all have in common.
    results = [read_json(output / f"{run.name}.json") for run in runs if run.stage or run.name == "baseline"]
    sample = next(filter(None, reversed(results)), None)
    config = sample and shared_config(sample["config"])
    # A mistake alone may be the run of a stage, whose obstacle and error are its own then.
    executed = {run.name: run for run in runs if run.commands}
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
        "stages": [],
        "isolated": [],
        "counted": read_json(output / "counted.json"),
    }
    for run in filter(lambda run: run.stage, runs):
        ran = executed.get(run.name, run)
        entry = {"stage": run.stage, "obstacle": ran.obstacle, "error": ran.error}
        entry |= staged_figures(output, run.name, config)
        if run.mistake:
            summary["isolated"].append(entry | {"mistake": run.mistake, "run": run.name})
        else:
            title = replays.short_title(run.stage)
            summary["stages"].append(entry | {"title": title, "planned": bool(run.commands)})
    # Comparisons need the spread of all runs, so they come last.
    for stage in summary["stages"]:
        stage["over_previous"] = replays.over_previous(summary, stage)
        stage["over_baseline"] = replays.over_baseline(summary, stage)
    for run in summary["isolated"]:
        run["over_optimized"] = replays.over_optimized(summary, run)
    return summary
