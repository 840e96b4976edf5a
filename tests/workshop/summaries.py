"""Summaries of replays, as a GPU, a CPU and a laptop give them, from the fixed figures of replays.json."""

import copy
import json
from pathlib import Path

import numpy as np

from benchmarks.pages import replays

# gpu: a whole summary whose stages show no sign. signs: {stage: figures that show its sign}. isolated: mistakes alone,
# the layout's with the steps of stage 5, the naive kernel's 15 ms longer. counted: as memory_counts.py counts.
# run: the JSON of the script, with three steps.
RECORDED = json.loads(Path(__file__).with_name("replays.json").read_text())
SIGNS = {int(stage): figures for stage, figures in RECORDED["signs"].items()}
NAIVE = SIGNS[4]["kernels"]
WIDE = {"first_loss": 470.0, "config": {"hidden_dim": 512, "vocab_size": 1000}}


def taking(*ms):
    """Return the figures of steps that took so long, of twenty that all took as long if it is one time."""
    ms = [*ms] * 20 if len(ms) == 1 else [*ms]
    batch_ms = dict(zip(("p20", "p50", "p80"), np.percentile(ms, [20, 50, 80]).tolist(), strict=True))
    return {"batch_ms": batch_ms | {"mean": sum(ms) / len(ms)}, "step_ms": ms}


def observed(summary, **fields):
    """Return the summary with other fields, and with its observations."""
    summary = summary | fields
    return summary | {"observations": replays.observations(summary)}


def gpu_summary(changes=None, **fields):
    """Return a summary of all stages on a GPU; changes: {stage: {figure: value}}."""
    summary = copy.deepcopy(RECORDED["gpu"])
    for stage in summary["stages"]:
        stage |= (changes or {}).get(stage["stage"], {})
    return observed(summary, **fields)


def cpu_summary(implementation, changes=None):
    """Return a summary as a CPU gives it: no kernel of ours is in a profile, and there is no graph to capture."""
    summary = gpu_summary(changes, timelines=None, attention_layouts=None)
    summary["environment"]["arch"] = "cpu"
    operators = [{"name": "aten::mm", "calls": 24, "average_us": 9.0, "share": 1.0}]
    for stage in summary["stages"]:
        stage |= {"implementation": implementation, "attention_us": None, "swiglu_us": None, "kernels": operators}
    summary["stages"][-1] = {"stage": 8, "title": "", "obstacle": "--graph needs a GPU", "error": None}
    return observed(summary)


def laptop_summary(*recorded, changes=None):
    """Return a summary of --laptop: stages 1, 5 and 6 measured in the interpreter, kernels counted, and recordings."""
    summary = cpu_summary("triton", {1: WIDE} | (changes or {}))
    for index, stage in enumerate(summary["stages"]):
        if stage["stage"] not in (1, 5, 6):
            not_run = {"planned": False, "obstacle": None, "error": None}
            summary["stages"][index] = {"stage": stage["stage"], "title": stage["title"]} | not_run
    fields = {"laptop": True, "baseline": None, "ceilings": None, "counted": RECORDED["counted"]}
    return observed(summary, recorded=list(recorded) or [gpu_summary(SIGNS, file="results/some.json")], **fields)
