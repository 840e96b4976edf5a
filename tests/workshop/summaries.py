"""Summaries of replays, as a GPU, a CPU and a laptop give them, from the fixed figures of replays.json."""

import copy
import json
from pathlib import Path

import numpy as np

from exercises.performance_debugging.evidence import observations
from exercises.performance_debugging.results import compare_stages

# gpu: a whole summary whose stages show no sign. signs: {stage: figures that show its sign}. run: the JSON of the
# script, with three steps.
RECORDED = json.loads(Path(__file__).with_name("replays.json").read_text())
SIGNS = {int(stage): figures for stage, figures in RECORDED["signs"].items()}


def taking(*ms):
    """Return the figures of steps that took so long, of twenty that all took as long if it is one time."""
    ms = [*ms] * 20 if len(ms) == 1 else [*ms]
    batch_ms = dict(zip(("p20", "p50", "p80"), np.percentile(ms, [20, 50, 80]).tolist(), strict=True))
    return {"batch_ms": batch_ms | {"mean": sum(ms) / len(ms)}, "step_ms": ms}


def observed(summary, **fields):
    """Return the summary with other fields, and with its comparisons and observations."""
    summary = summary | fields
    compare_stages(summary)
    return summary | {"observations": observations(summary)}


def gpu_summary(changes=None, **fields):
    """Return a summary of all stages on a GPU; changes: {stage: {figure: value}}."""
    summary = copy.deepcopy(RECORDED["gpu"])
    for stage in summary["stages"]:
        stage |= (changes or {}).get(stage["stage"], {})
    return observed(summary, **fields)


def cpu_summary(implementation, changes=None, **fields):
    """Return a summary as a CPU gives it: no kernel of ours is in a profile, and there is no graph to capture."""
    summary = gpu_summary(changes)
    summary["environment"]["arch"] = "cpu"
    for stage in summary["stages"]:
        stage |= {"implementation": implementation, "attention_us": None, "swiglu_us": None, "kernels": None}
    summary["stages"][-1] = {"stage": 8, "title": "", "obstacle": "--graph needs a GPU", "error": None}
    return observed(summary, **fields)


def laptop_summary(*recorded):
    """Return a summary of --laptop: stages 1, 5 and 6 measured in the interpreter, and recordings."""
    summary = cpu_summary("triton", {1: SIGNS[1], 6: SIGNS[6]})
    for index, stage in enumerate(summary["stages"]):
        if stage["stage"] not in (1, 5, 6):
            left_out = {"obstacle": "its sign needs a GPU", "error": None}
            summary["stages"][index] = {"stage": stage["stage"], "title": stage["title"]} | left_out
    return observed(summary, laptop=True, baseline=None, recorded=list(recorded))
