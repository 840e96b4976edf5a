"""Compare two results: which times, losses and sizes differ by more than the noise.

    python -m benchmarks.diff before.json after.json
    python -m benchmarks.diff before/ after/            several runs a side, as --output-dir collects them

The results are of tiny_llama_v3.py or benchmarks.steps. A time is faster or slower if the 95 % intervals of the two
medians do not overlap (ratio_of_medians in measure/timing.py). Clocks and other jobs differ more between processes than
between steps: with several runs a side, the bounds are widened by the largest ratio between two runs of one side. With
one run a side this ratio is not known. Other figures differ if their ranges do not overlap.

Exit codes: 0 done, 2 a result cannot be read, or the results were made in different ways.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

if not __package__:
    print("run it from the root as python -m benchmarks.diff", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure.command_line import Failure, Parser, program
from measure.results import damage_reported, read_result
from measure.tables import number
from measure.timing import LEAST_TIMES, percentiles, ratio_of_medians, spread_of_medians
from profilers.hotspots import show

WITHOUT_EFFECT = ("output_dir", "profile", "check", "comm_timeout")  # on a step
DEFAULTS = {field.name: field.default for field in dataclasses.fields(llama.Config)}  # of results from before a field
VERSIONS = ("python", "torch", "triton", "cuda", "hip", "driver", "numpy", "commit")  # which a comparison may be about


class Result(NamedTuple):
    """Of a file: how it was made, {name: times in ms} and {name: figure without a spread}."""

    settings: dict
    times: dict
    figures: dict


def settings_of(config, prefix=""):
    return {prefix + name: value for name, value in (DEFAULTS | config).items() if name not in WITHOUT_EFFECT}


def read_run(result):
    """The Result of tiny_llama_v3.py."""
    summary, steps = result["summary"], result["steps"]
    if summary["diverged"]:
        raise Failure(f"{result.path}: the run diverged, so its times do not count")
    times = {"step": [step["batch_ms"] for step in steps]}
    times |= {phase: [step["phase_ms"][phase] for step in steps] for phase in summary["phase_ms"]}
    times["host"] = [step["host_ms"] for step in steps]
    kernels = summary["kernels"] if isinstance(summary["kernels"], dict) else {}  # otherwise why they were not counted
    names = {"first_loss": "first loss", "final_loss": "final loss", "held_out_loss": "held-out loss"}
    names |= {"peak_memory_mib": "memory, MiB", "parameters_with_gradient": "weights with a gradient"}
    figures = {text: summary.get(name) for name, text in names.items()} | kernels
    made = {name: result[name] for name in ("implementation", "precision")}
    return Result(settings_of(result["config"]) | made, times, figures)


def read_steps(result):
    """The Result of benchmarks.steps."""
    settings, times, figures = {}, {}, {}
    for size, measured in result["sizes"].items():
        settings |= settings_of(measured["config"], f"{size}: ")
        rows = {f"{size}: {name}": row for name, row in measured["rows"].items() if not row["error"]}
        times |= {name: row["windows_ms"] for name, row in rows.items()}
        figures |= {f"{name}, MiB": row["peak_memory_mib"] for name, row in rows.items()}
    return Result(settings, times, figures)


def read(path):
    """The Result of a file; Failure or UsageError if there is none."""
    result = read_result(path)
    reader = read_steps if result.get("benchmark") == "steps" else read_run if "operations" in result else None
    if reader is None:
        raise Failure(f"{path} is no result of tiny_llama_v3.py or benchmarks.steps")
    with damage_reported(path.parent, path.name):
        settings, times, figures = reader(result)
        environment = result["environment"] or {}
    settings |= {name: environment.get(name) for name in ("device", "arch", *VERSIONS)}
    is_interpreted = settings["arch"] == "cpu" and settings.get("implementation") == "triton"
    return Result(settings, {} if is_interpreted else times, figures)


def read_side(path):
    """The Results of a file or a folder."""
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise Failure(f"{path} holds no *.json: give a result, or a folder of them")
    return [read(each) for each in paths]


def differences(results):
    """{setting: its values}, where they are not the same. What one of the results lacks is not compared."""
    settings = [result.settings for result in results]
    values = {name: {str(each[name]): None for each in settings if name in each} for name in settings[0]}
    return {name: " / ".join(different) for name, different in values.items() if len(different) > 1}


def change_of_times(before, after):
    """The cells of a row: both sides, the ratio, and what it means. A side is the times of each of its runs."""
    sides = [[time for run in runs for time in run] for runs in (before, after)]
    figures = [[number(value) for value in percentiles(side).values()] for side in sides]
    cells = [f"{median} ({low} – {high})" for low, median, high in figures]
    ratio = ratio_of_medians(sides[1], sides[0], max(spread_of_medians(before), spread_of_medians(after)))
    if min(map(len, sides)) < LEAST_TIMES:
        return *cells, number(ratio.value), f"unknown: fewer than {LEAST_TIMES} times"
    word = "same" if not ratio.differs else "slower" if ratio.value > 1 else "faster"
    return *cells, number(ratio.value), f"{word} ({number(ratio.low)} – {number(ratio.high)})"


def change_of_figures(before, after):
    """As change_of_times(), of a figure of each run."""
    ends = [[f"{v:,}" if type(v) is int else number(v, 6) for v in (min(side), max(side))] for side in (before, after)]
    cells = [" – ".join(dict.fromkeys(texts)) for texts in ends]
    ratio = number(sum(after) * len(before) / (sum(before) * len(after))) if sum(before) else ""
    word = "higher" if min(after) > max(before) else "lower" if max(after) < min(before) else "same"
    return *cells, ratio, word if cells[0] != cells[1] else "same"  # in six digits


def rows_of(before, after):
    """The rows of the table, of everything that all Results of both sides have."""
    for field, unit, change in (("times", ", ms", change_of_times), ("figures", "", change_of_figures)):
        for name in getattr(before[0], field):
            sides = [[getattr(result, field).get(name) for result in side] for side in (before, after)]
            if all(value not in (None, []) for side in sides for value in side):
                yield f"{name}{unit}", *change(*sides)


@program("diff")
def main(argv):
    parser = Parser("diff", __doc__)
    parser.add_argument("before", type=Path, help="a result, or a folder of results")
    parser.add_argument("after", type=Path, help="what to compare with it")
    parser.add_argument("--anyway", action="store_true", help="also if devices or settings differ, which are listed")
    options = parser.parse_args(argv)
    before, after = read_side(options.before), read_side(options.after)
    different = differences(before + after)
    prohibited = [f"{name} ({values})" for name, values in different.items() if name not in VERSIONS]
    if prohibited and not options.anyway:
        raise Failure(f"the results differ in {', '.join(prohibited)}: give --anyway to compare them all the same")
    for name, values in ({"runs": f"{len(before)} / {len(after)}"} | different).items():
        print(f"{name}: {values}")
    table = pd.DataFrame(rows_of(before, after), columns=["figure", "before", "after", "after / before", "change"])
    print(f"\n{show(table)}")
    if len(before + after) == 2:
        print("\nOne run a side: how much two processes differ at the same work is not known. Compare folders of runs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
