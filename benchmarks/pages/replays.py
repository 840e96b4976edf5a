"""Write the tables of the workshop's stages, and what was published of them beside what is measured.

A result is the summary.json of run_all_stages.sh, kept as stages_<device>_<name>.json.
"""

import dataclasses
from pathlib import Path

import jinja2
import pandas as pd
import torch

from benchmarks.pages.long_table import (
    first_device,
    long_table,
    markdown,
    newest,
    of_each_device,
    paragraphs,
    provenance,
)
from benchmarks.pages.training_steps import STEPS
from measure.results import recorded_config
from measure.tables import NOT_MEASURED, number, percent
from measure.timing import LEAST_TIMES
from tiny_llama import hardware

# ----------------------------------------------------------------------------------------------------------------------
# One replay


def measured_stages(summary):
    """Return {number: stage} of the stages of a replay that have figures."""
    return {stage["stage"]: stage for stage in summary["stages"] if "batch_ms" in stage}


def figure(name):
    return lambda run: number(run.get(name))


def phase(name):
    return lambda run: number(run["phase_ms"].get(name))


def share(name):
    return lambda run: percent(run[name]) if run[name] is not None else ""


def speed(name):
    """Return a function of a run: the ratio of speeds where they differ, and else one of the words of NOTES."""

    def text(run):
        if not (comparison := run.get(name)):
            return ""
        verdict, value = comparison["verdict"], comparison["value"]
        if verdict == "same work" and value < 0.9 and run["host_ms"] > 0.8 * run["batch_ms"]["p50"]:
            return "host"
        return {"differs": number(value), "too few steps": "too few"}.get(verdict, "same")

    return text


FIGURES = {  # {row: its text from the figures of a run}
    "first loss": figure("first_loss"),
    "final loss": figure("final_loss"),
    "speed, samples/s": figure("samples_per_second"),
    "speed / previous": speed("over_previous"),
    "speed / baseline": speed("over_baseline"),
    "step, median, ms": lambda run: number(run["batch_ms"]["p50"]),
    "forward, ms": phase("forward"),
    "backward, ms": phase("backward"),
    "optimizer, ms": phase("optimizer"),
    "phases / step": share("phases_share"),
    "attention kernel, us": figure("attention_us"),
    "SwiGLU kernel, us": figure("swiglu_us"),
    "weights with a gradient": share("gradient_share"),
    "mean / median": figure("mean_over_median"),
    "peak memory, MiB": figure("peak_memory_mib"),
}
RATIOS = ["speed / previous", "speed / baseline"]
NOTES = {  # {row, or word in the place of a ratio: what it means}
    "speed, samples/s": "speed: that of all steps together.",
    "speed / previous": "speed / previous: the ratio of median steps; what follows stage 5 is compared with stage 5.",
    "speed / baseline": "speed / baseline: the ratio of median steps.",
    "same": "same: the same operations ran, or the medians differ by no more than the spread of the steps and of two "
    "columns with the same operations, such as 5 and 7.",
    "host": "host: the same operations ran, but the host took longer to launch them.",
    "too few": f"too few: fewer than {LEAST_TIMES} steps.",
    "SwiGLU kernel, us": "SwiGLU kernel: one call of swiglu_kernel, which also multiplies (stages 1 to 4), or of "
    "swiglu_activation_kernel.",
    "phases / step": "phases / step: the median share of forward, backward and optimizer in their step.",
}


def notes_of(*tables):
    """Return the NOTES about the rows and words that these tables of table_of() have."""
    shown = {name for table in tables for name in (*table.index, *table.reindex(RATIOS).to_numpy().flat)}
    return [note for name, note in NOTES.items() if name in shown]


def table_of(summary):
    """Return a DataFrame of texts with a column for each run of a replay, without figures that no run has."""
    runs = {"baseline": summary["baseline"]} if summary["baseline"] else {}
    runs |= {f"{number} {stage['title']}": stage for number, stage in measured_stages(summary).items()}
    table = pd.DataFrame({label: {name: text(run) for name, text in FIGURES.items()} for label, run in runs.items()})
    return table[(table != "").any(axis="columns")]


def sizes(summary):
    return f"{summary['config']['batch_size']} x {summary['config']['seq_len']} tokens, {summary['precision']}"


# ----------------------------------------------------------------------------------------------------------------------
# All replays of a folder


def newest_of_settings(rows):
    """Return the newest replay of each length of sequence and precision, fp32 first, from one device's long table."""
    settings = {
        "seq_len": rows["config"].map(lambda config: config["seq_len"]),
        "low": rows["precision"] != "fp32",
    }
    return newest(rows.assign(**settings), "seq_len", "low").sort_values(["seq_len", "low"])


def newest_replays(folder):
    """Return the summaries of the first device's newest replays in a folder."""
    rows = first_device(long_table(folder, "stages"))
    return list(newest_of_settings(rows)["result"]) if len(rows) else []


@of_each_device("stages", "")
def stages_section(rows):
    """Show the table of the newest replay of each setting."""
    texts, tables = [], []
    for _, replay in newest_of_settings(rows).groupby("file", sort=False):
        summary = replay["result"].iloc[0]
        table = table_of(summary)
        if len(table.columns) > 1:
            table = table[table.nunique(axis="columns") > 1]  # what all runs share teaches nothing about one
        tables.append(table)
        texts += [
            f"**{sizes(summary)}**, {summary['config']['num_steps']} steps: `{summary['command']}`",
            markdown(table.reset_index(names="")),
            provenance(replay),
        ]
    return paragraphs(*texts, "\n".join(f"- {note}" for note in notes_of(*tables)))


# ----------------------------------------------------------------------------------------------------------------------
# What was published. The texts are in the templates beside this file.

# A figure that a result lacks is an error, and not an empty cell.
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def factor(value, other):
    """Format how many times as large a value is as another."""
    return f"{number(value / other, 2)} x"


def change(before, after, unit):
    """Format two numbers as `10.8 → 3.2 ms, 3.4 x`; empty if one is missing."""
    if not (before and after):
        return ""
    times = f", {factor(before, after)}" if unit != "%" else ""
    return f"{number(before)} → {number(after)} {unit}{times}"


TEMPLATES.filters["number"] = number
TEMPLATES.globals |= {"change": change, "factor": factor}


def newest_replay(rows, seq_len, precision, *stages):
    """Return the newest replay with a baseline and these stages, in a table of one line; none if there is none."""
    # The published figures are for one setting; ours must be for the same.
    is_wanted = [
        replay["config"]["seq_len"] == seq_len
        and replay["precision"] == precision
        and replay["baseline"] is not None
        and measured_stages(replay).keys() >= {*stages}
        for replay in rows["result"]
    ]
    return rows[is_wanted].head(1)


def kept_mib(config):
    """Return {name: MiB} that a step keeps by count: for the backward pass, and in its gradients."""
    device = torch.device("cuda")
    ours = recorded_config(config)
    kept = {
        name: ours.batch_size * hardware.memory_needed(dataclasses.replace(ours, **changes), device).sequence
        for name, changes in {"ours": {}, "plain": {"impl": "torch"}, "severed": {"severed_autograd": True}}.items()
    }
    gradients = 4 * hardware.count_matrix_weights(ours)
    of = kept | {"severed": kept["ours"] - kept["severed"], "gradients": gradients}
    return {name: count / 2**20 for name, count in of.items()}


@of_each_device("stages", "")
def published_section(rows):
    """Show the published speed-up beside ours, with the gradients and without."""
    replay = newest_replay(rows, 128, "fp32", 5, 6)
    if replay.empty:
        return ""
    text = TEMPLATES.get_template("published.md.jinja").render(
        baseline=replay["baseline"].iloc[0],
        stages=measured_stages(replay.iloc[0]),
        kept=kept_mib(replay["config"].iloc[0]),
    )
    return paragraphs(text, provenance(replay))


def claims_section(folder):
    """Show each published claim about a stage beside what is measured."""
    replays = first_device(long_table(folder, "stages"))
    story = newest_replay(replays, 128, "fp32", *range(1, 8))
    layouts = newest_replay(replays, 2048, "bf16", 2, 3)
    steps = first_device(long_table(folder, *STEPS))
    steps = steps[steps["size"] == "small"]
    # Plain and fused PyTorch of one result, both eager.
    ms = steps.pivot_table("ms median", "file", "row", sort=False).reindex(columns=["torch", "sdpa"]).dropna()
    if story.empty or layouts.empty or ms.empty:
        return NOT_MEASURED
    text = TEMPLATES.get_template("claims.md.jinja").render(
        baseline=story["baseline"].iloc[0],
        stages=measured_stages(story.iloc[0]),
        layouts=measured_stages(layouts.iloc[0]),
        ms=ms.iloc[0],
    )
    return paragraphs(text, provenance(pd.concat([story, layouts, steps[steps["file"] == ms.index[0]]])))
