"""Summaries of replays, as a GPU, a CPU and a laptop give them: the same fixed figures for all tests."""

import dataclasses
import math
import random

import numpy as np

import tiny_llama_v3 as llama
from benchmarks.pages import replays
from exercises.performance_debugging.results import shared_config
from tiny_llama import hardware

KERNELS = {"flash_attention_kernel": 5.0, "swiglu_activation_kernel": 4.0, "nvjet_gemm": 30.0}
NAIVE = [
    {"name": "swiglu_kernel", "calls": 24, "average_us": 2000.0, "share": 0.8},
    {"name": "nvjet_sm90_tst_128x96_64x6_2x1_v_bz_splitK_NTT", "calls": 24, "average_us": 400.0, "share": 0.2},
]
SEVERED = [name for name, _ in llama.TinyLlamaTriton(llama.Config(), llama.OPERATIONS["torch"]).named_parameters()][1:]


def taking(*ms):
    """Return the figures of steps that took so long, of twenty that all took as long if it is one time."""
    ms = [*ms] * 20 if len(ms) == 1 else [*ms]
    batch_ms = dict(zip(("p20", "p50", "p80"), np.percentile(ms, [20, 50, 80]).tolist(), strict=True))
    batch_ms["mean"] = sum(ms) / len(ms)
    return {"batch_ms": batch_ms, "step_ms": ms, "samples_per_second": 1e3 * 8 / batch_ms["mean"]}


def around(ms, spread=0.05, seed=0):
    """Return twenty times, not further from ms than this share."""
    draw = random.Random(seed)
    return [ms * (1 + draw.uniform(-spread, spread)) for _ in range(20)]


SIGNS = {  # of each stage, as its picture and its changes show it
    1: {"first_loss": 470.0, **taking(21.0)},
    2: {"attention_us": 25.0, **taking(21.0)},
    3: {"phases_share": 0.3, "phase_ms": {"forward": 3.0, "backward": 2.5, "optimizer": 0.8}, **taking(21.0)},
    4: {**taking(21.0), "kernels": NAIVE, "phase_ms": {"forward": 16.0, "backward": 3.0, "optimizer": 0.5}},
    6: {"gradient_share": 0.016, "without_gradient": SEVERED, "phase_ms": {"backward": 0.2}},
    7: {"mean_over_median": 40.0, **taking(7340.0, *around(5.0))},
    8: taking(1.25),
}


def stage_figures(number, **changes):
    """Return the entry of a stage that shows no sign, but for the changes."""
    figures = {
        "stage": number, "title": replays.short_title(number), "obstacle": None, "error": None,
        "implementation": "triton", "first_loss": 7.0, "final_loss": 6.9, "losses": [7.0, 6.9],
        **taking(5.0), "tokens_per_second": 2e5, "mean_over_median": 1.0,
        "phase_ms": {"forward": 1.5, "backward": 3.0, "optimizer": 0.5}, "phases_share": 1.0, "host_ms": 2.0,
        "gradient_share": 1.0, "peak_memory_mib": 600.0, "mfu": 0.1, "attention_us": 5.0, "swiglu_us": 4.0,
        "kernels": [{"name": k, "calls": 24, "average_us": us, "share": us / 39} for k, us in KERNELS.items()],
    }  # fmt: skip
    return figures | changes


def observed(summary, **changes):
    """Return the summary with changes, and with its observations."""
    summary = summary | changes
    return summary | {"observations": replays.observations(summary)}


def gpu_summary(changes=None, **fields):
    """Return a summary of all stages on a GPU; changes: {stage: {figure: value}}."""
    baseline = stage_figures(5, **taking(10.0), implementation="torch")
    for name in ("stage", "title", "obstacle", "error", "kernels", "attention_us", "swiglu_us"):
        del baseline[name]
    summary = {
        "benchmark": "stages", "command": "./run_all_stages.sh --beyond", "commands": ["python v3_stage5.py"],
        "date": "2026-11-21T10:00:00", "profiler": "torch.profiler", "interrupted": False, "entropy": math.log(1000),
        "environment": hardware.environment(llama.Device("cuda", "NVIDIA H200", "sm_90", 132, 32)),
        "config": shared_config(dataclasses.asdict(llama.Config(seq_len=128))),
        "precision": "fp32",
        "ceilings": {"bytes_per_second": 4e12, "flop_per_second": 5e13, "peak_tflops": 66.9},
        "baseline": baseline,
        "stages": [stage_figures(number, **(changes or {}).get(number, {})) for number in llama.STAGES],
        "laptop": False, "isolated": [], "counted": None, "recorded": [],
    }  # fmt: skip
    return observed(summary, **fields)


def whole_summary(**fields):
    """Return a summary of a GPU whose stages all show, with what was measured for their pictures."""
    lengths = [
        {"seq_len": n, "contiguous": around(23 * n / 128, 0.01), "strided": around(35 * n / 128, 0.01, 1)}
        for n in (128, 256, 4096)
    ]
    timelines = {}
    for stage, step_us, busy in (("5", 6000, 0.25), ("8", 1600, 0.9375)):  # forty kernels at equal distances
        apart = step_us / 40
        starts = [apart * index for index in range(40)]
        timelines[stage] = {"step_us": step_us, "start_us": starts, "length_us": [busy * apart] * 40}
    layouts = {"precision": "fp32", "batch_size": 8, "lengths": lengths}
    return gpu_summary(SIGNS, **{"timelines": timelines, "attention_layouts": layouts} | fields)


def with_isolated(summary):
    """Return a summary of --isolate: the layout alone takes as long as stage 5, the naive kernel 15 ms longer."""
    alone = (
        (1, "no_init", "stage1_alone", taking(5.0)),
        (2, "noncontiguous_kv", "stage2_alone", taking(*[4.9, 5.0, 5.1] * 4)),
        (4, "triton_matmul_swiglu", "stage4", taking(20.0)),
    )
    isolated = [stage_figures(number, **figures, mistake=mistake, run=run) for number, mistake, run, figures in alone]
    return observed(summary, isolated=isolated)


def cpu_summary(implementation, changes=None):
    """Return a summary as a CPU gives it: no kernel of ours is in a profile, and there is no graph to capture."""
    summary = gpu_summary(changes)
    summary["environment"]["arch"] = "cpu"
    operators = [{"name": "aten::mm", "calls": 24, "average_us": 9.0, "share": 1.0}]
    for stage in summary["stages"]:
        stage |= {"implementation": implementation, "attention_us": None, "swiglu_us": None, "kernels": operators}
    summary["stages"][-1] = {"stage": 8, "title": "", "obstacle": "--graph needs a GPU", "error": None}
    return observed(summary)


LOADS = (  # of the counted cases: stage, kernel, bytes asked for, distinct, lines
    (2, "flash_attention_kernel", 4e6, 2e6, 4800),
    (3, "flash_attention_kernel", 4e6, 2e6, 200),
    (4, "swiglu_kernel", 2.2e6, 1e5, 200),
    (5, "swiglu_activation_kernel", 1e4, 1e4, 200),
)


def laptop_summary(recorded=None, changes=None):
    """Return a summary of --laptop: stages 1, 5 and 6 measured in the interpreter, kernels counted, and recordings."""
    wide = {"first_loss": 470.0, "config": {"hidden_dim": 512, "vocab_size": 1000}}
    summary = cpu_summary("triton", {1: wide} | (changes or {}))
    for index, stage in enumerate(summary["stages"]):
        if stage["stage"] not in (1, 5, 6):
            not_run = {"planned": False, "obstacle": None, "error": None}
            summary["stages"][index] = {"stage": stage["stage"], "title": stage["title"]} | not_run
    cases = []
    for stage, kernel, asked, distinct, lines in LOADS:
        touched, fewest = {"64": lines, "128": lines}, {"64": 200, "128": 200}
        cases.append({"stage": stage, "kernel": kernel, "bytes": asked, "distinct_bytes": distinct, "same_result": True,
                      "programs": 64, "waves": 100, "lines": touched, "fewest_lines": fewest})  # fmt: skip
    there = gpu_summary({2: {"attention_us": 25.0}}, file="benchmarks/results/stages_nvidia-h200_x.json")
    fields = {"laptop": True, "baseline": None, "ceilings": None, "counted": {"wave": 64, "cases": cases}}
    return observed(summary, recorded=recorded or [there], **fields)
