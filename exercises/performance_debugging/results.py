"""Read the files of a replay's runs into the dict of summary.json, the one source of cards, pictures and tables.

It has header, environment, config and

    baseline        figures of a run, or null
    laptop          whether it is a replay with --laptop
    stages          [{stage, title, obstacle, error, and of a measured one: figures, kernels, attention_us, swiglu_us,
                    over_previous, over_baseline}]
    recorded        with --laptop: summaries like this one, measured on another machine; else []
    observations    [{stage, source, shown, text}], source "measured" or "recorded on ..."

figures: the script's summary, but phase_ms is {phase: of the median step}, and with step_ms (of every step),
gradient_share and so on, see run_figures. over_*: {value, verdict} of the speed of the median step over
another run's; verdict is "differs" beyond the measured spread, else "same", "same work" (the same operations ran) or
"too few steps": only "differs" may be shown as a ratio.
"""

import json
import statistics

import tiny_llama_v3 as llama
from benchmarks.pages.replays import measured_stages
from measure.timing import LEAST_TIMES, ratio_of_medians, spread_of_medians
from profilers.readers import read_kernel_stats

OPTIMIZED = 5
ATTENTION_KERNEL = "flash_attention_kernel"
NAIVE_SWIGLU, HYBRID_SWIGLU = "swiglu_kernel", "swiglu_activation_kernel"
OWN_SETTINGS = {"impl", "stage", "graph", "warmup_steps", "output_dir", "profile", *llama.BUGS}  # of a stage


def short_title(stage):
    return llama.STAGES[stage].split(" instead of ")[0]


# ----------------------------------------------------------------------------------------------------------------------
# The figures of one run


def kernel_figures(path):
    """Return the kernel table as a list of dicts, the longest first, or None if there is no profile.

    average_us is of one call, share of the time of all kernels.
    """
    if not path.exists():
        return None
    return [
        {"name": row.Name, "average_us": row.AverageNs / 1e3, "share": row.Percentage / 100}
        for row in read_kernel_stats(path).itertuples()
    ]


def run_figures(result):
    """Return the figures of a run, from the JSON of tiny_llama_v3.py.

    The speed is that of all steps. phase_ms is of the step with the median time, the faster of two, as the medians of
    single phases do not add up to a step.
    """
    steps, summary = result["steps"], result["summary"]
    ordered = sorted(steps, key=lambda step: step["batch_ms"])
    return summary | {
        "implementation": result["implementation"],
        "step_ms": [step["batch_ms"] for step in steps],
        "mean_over_median": summary["batch_ms"]["mean"] / summary["batch_ms"]["p50"],
        "phase_ms": ordered[(len(steps) - 1) // 2]["phase_ms"],
        "phases_share": statistics.median(sum(step["phase_ms"].values()) / step["batch_ms"] for step in steps) or None,
        "gradient_share": summary["parameters_with_gradient"] / summary["parameters"],
    }


# ----------------------------------------------------------------------------------------------------------------------
# Whether one run is faster than another

CHANGES_WORK = frozenset("graph noncontiguous_kv triton_matmul_swiglu severed_autograd".split())


def work_of(run):
    """Return the work of a run's steps: equal for runs of the same operations."""
    # Other mistakes change numbers or clocks, and not which operations run.
    flags = CHANGES_WORK.intersection(llama.stage_flags(run.get("stage")))
    return run["implementation"], flags


def spread_of_processes(runs):
    """Return the largest ratio of the times of a step in two processes with the same work; 1 if there are none.

    Clocks, temperatures and other jobs differ more between processes than between steps.
    """
    # Runs of the same work differ by nothing but noise, so their ratio measures it.
    same_work = {}
    for run in runs:
        if len(run["step_ms"]) >= LEAST_TIMES:
            same_work.setdefault(work_of(run), []).append(run["step_ms"])
    return max(map(spread_of_medians, same_work.values()), default=1.0)


def compare_speed(run, other, spread):
    """Return {"value", "verdict"}: the speed of a run relative to another one, by their median steps."""
    ratio = ratio_of_medians(other["step_ms"], run["step_ms"], spread)
    if work_of(run) == work_of(other):
        verdict = "same work"
    elif min(len(run["step_ms"]), len(other["step_ms"])) < LEAST_TIMES:
        verdict = "too few steps"
    else:
        verdict = "differs" if ratio.differs else "same"
    return {"value": ratio.value, "verdict": verdict}


def compare_stages(summary):
    """Add over_previous and over_baseline to the stages of a summary.

    They are None if a run is missing, and on a CPU, whose times do not tell the stages apart.
    """
    baseline = summary["baseline"]
    runs = measured_stages(summary) | ({"baseline": baseline} if baseline else {})
    on_gpu = runs and summary["environment"]["arch"] != "cpu"
    spread = spread_of_processes(runs.values())
    for stage in summary["stages"]:
        number = stage["stage"]
        # From stage 6 on, a stage differs from the optimized one, not from the one before.
        for name, other in ("over_previous", min(number - 1, OPTIMIZED)), ("over_baseline", "baseline"):
            both = [runs.get(number), runs.get(other)]
            stage[name] = compare_speed(*both, spread) if on_gpu and all(both) else None


# ----------------------------------------------------------------------------------------------------------------------
# The whole replay


def stage_figures(output, name, result):
    """Return the figures of a stage's result."""
    kernels = kernel_figures(output / f"{name}_profile.csv")
    us = {kernel["name"]: kernel["average_us"] for kernel in kernels or []}
    return run_figures(result) | {
        "kernels": kernels,
        "attention_us": us.get(ATTENTION_KERNEL),
        "swiglu_us": us.get(NAIVE_SWIGLU) or us.get(HYBRID_SWIGLU),
    }


def summarize(output, runs):
    """Return a dict for summary.json of the runs, of replay.Run, whose files lie in output; None if there are none."""
    # Runs that failed or were not reached have no file; any of the others tells what all have in common.
    paths = {run.name: output / f"{run.name}.json" for run in runs}
    results = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    if not results:
        return None
    *_, sample = results.values()
    summary = {
        "environment": sample["environment"],
        "config": {name: value for name, value in sample["config"].items() if name not in OWN_SETTINGS},
        "precision": sample["precision"],
        "baseline": run_figures(results["baseline"]) if "baseline" in results else None,
        "stages": [
            {"stage": run.stage, "title": short_title(run.stage), "obstacle": run.obstacle, "error": run.error}
            | (stage_figures(output, run.name, results[run.name]) if run.name in results else {})
            for run in runs
            if run.stage
        ],
    }
    compare_stages(summary)
    return summary
