"""Compare the figures that were published of the stages with ours. The texts are in the templates beside this file."""

from pathlib import Path

import jinja2
import pandas as pd

from benchmarks.pages.long_table import first_device, long_table, of_each_device, paragraphs, provenance, sources
from benchmarks.pages.training_steps import STEPS
from measure.tables import NOT_MEASURED, number

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


def measured_stages(replay):
    """Return {number: stage} of the stages of a replay that have figures."""
    return {stage["stage"]: stage for stage in replay["stages"] if "batch_ms" in stage}


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


@of_each_device("stages", "")
def published_section(rows):
    """Show the published speed-up beside ours, with the gradients and without."""
    replay = newest_replay(rows, 128, "fp32", 5, 6)
    if replay.empty:
        return ""
    stages = measured_stages(replay.iloc[0])
    text = TEMPLATES.get_template("published.md.jinja").render(
        baseline=replay["baseline"].iloc[0],
        severed=stages[6],
        correct=stages[5],
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
    return paragraphs(text, sources(pd.concat([story, layouts, steps[steps["file"] == ms.index[0]]])))
