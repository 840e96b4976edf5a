"""Write the section of a training run: what it cost, what it learnt, and how the saved model goes on with a text."""

import math

import pandas as pd

from benchmarks.pages.long_table import first_device, long_table, markdown, paragraphs, provenance, whole
from benchmarks.training import TEMPERATURE, TINY
from measure.tables import NOT_MEASURED, number
from tiny_llama.files import printable

OURS = "triton graph"
MOST_LINES, MOST_CHARACTERS = 15, 100  # of the shown text


def has_ended(result):
    """Return whether a result is of a run that was not interrupted, and no trial."""
    return result["model"] != TINY and "transformers" in result


def newest_run(folder):
    """Return the long table of the newest run of the first device that has one: one row, or none."""
    results = long_table(folder, "training")
    return first_device(results[results["result"].map(has_ended).astype(bool)]).head(1)


def loss_text(loss):
    """Return a loss in nats, and in brackets in bits a byte; empty if there is none."""
    return "" if loss is None else f"{loss:.3f} ({loss / math.log(2):.3f})"


def run_table(result):
    """Return the table with a line for each row of a result."""
    rows, tokens = result["rows"], result["config"]["batch_size"] * result["config"]["seq_len"]
    # A point of a curve is the mean of the same steps in both, so that the last one of the shorter compares them.
    common = min((row["curve"]["step"] for row in rows.values() if not row["error"]), key=len)
    lines = []
    for name, row in rows.items():
        line = {"": f"**{name}**" if name == OURS else name, "steps": row["error"] or ""}
        if not row["error"]:
            line |= {
                "steps": whole(row["steps"]),
                "million tokens": number(row["steps"] * tokens / 1e6),
                "seconds": whole(row["curve"]["seconds"][-1]),
                "ms a step": number(row["ms"]),
                "memory, MiB": "" if row["peak_memory_mib"] is None else whole(row["peak_memory_mib"]),
                f"loss at step {common[-1]:,}": loss_text(row["curve"]["loss"][len(common) - 1]),
                "loss at the end": loss_text(row["final_loss"]),
                "held-out loss": loss_text(row.get("held_out_loss")),
            }
        lines.append(line)
    return markdown(pd.DataFrame(lines))


def sentences(result):
    """Return what compares the two runs, and our logits with those of transformers."""
    parts = []
    if difference := result.get("loss_difference"):
        most, mean = (number(difference[name], digits=2) for name in ("largest", "mean"))
        parts.append(
            f"The losses of both are at most {most} nats apart in the first {difference['first_steps']:,} steps, and "
            f"{mean} on average in all {difference['steps']:,}."
        )
    if theirs := result["transformers"]:
        version = result["peers"].get("transformers", "")
        parts.append(
            f"transformers {version} has loaded the saved model; its logits differ from ours by at most "
            f"{theirs['logit_difference']:.1e} of the largest."
        )
    else:
        parts.append("transformers has not loaded the saved model.")
    return " ".join(parts)


def text_block(theirs):
    """Return the beginning of the text that transformers has drawn, as a block; empty without transformers."""
    if not theirs:
        return ""
    # Three backticks would end the block.
    text = printable(theirs["prompt"] + theirs["text"]).replace("```", "'''")
    lines = [line[:MOST_CHARACTERS].rstrip() for line in text.split("\n")[:MOST_LINES]]
    prompt = f"The first {len(theirs['prompt'])} characters are of the held-out text"
    return (
        f"{prompt}, the others are the model's (temperature {TEMPERATURE}):\n\n```text\n" + "\n".join(lines) + "\n```"
    )


def training_section(folder):
    """Show the newest run: its model, a line for ours and PyTorch's, the picture, and the text."""
    run = newest_run(folder)
    if run.empty:
        return NOT_MEASURED
    result = run["result"].iloc[0]
    config, data = result["config"], result["data"]
    model = (
        f"**{result['model']}'s layers**, {run['device'].iloc[0]}: "
        f"{number(result['parameters'] / 1e6)} million weights, {config['batch_size']} x {config['seq_len']:,} bytes a "
        f"step, {result['precision']}, {result['num_steps']:,} steps on {number(data['bytes'] / 1e6)} MB of text, "
        f"{data['name']}. Losses are in nats, in brackets in bits a byte."
    )
    picture = "![The loss over the seconds of training, with our kernels and with PyTorch's](./training.svg)"
    return paragraphs(
        model, run_table(result), sentences(result), picture, text_block(result["transformers"]), provenance(run)
    )
