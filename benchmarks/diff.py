"""Compare two results: which times, losses and sizes differ by more than the noise.

    python -m benchmarks.diff before.json after.json
    python -m benchmarks.diff before/ after/            several runs a side, as --output-dir collects them

The results are of tiny_llama_v3.py or benchmarks.steps. A time is faster or slower if the 95 % intervals of the two
medians do not overlap (ratio_of_medians in measure/timing.py). Clocks and other jobs differ more between processes than
between steps: with several runs a side, the bounds are widened by the largest ratio between two runs of one side. With
one run a side this ratio is not known. Other figures differ if their ranges do not overlap. What some results lack, as
a row that failed or was not run, is named below the table with the reason.

Exit codes: 0 done, 1 a time was measured on one side only, or not in all of its runs, 2 a result cannot be read, the
results were made in different ways, or they have no figure in common.
"""

import sys
from pathlib import Path
from statistics import mean

import pandas as pd

if not __package__:
    print("run it from the root as python -m benchmarks.diff", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, UsageError, program
from measure.results import damage_reported, is_figure, read_result
from measure.tables import number, show
from measure.timing import LEAST_TIMES, percentiles, ratio_of_medians, spread_of_medians

WITHOUT_EFFECT = ("output_dir", "profile", "check", "comm_timeout")  # on a step
VERSIONS = ("python", "torch", "triton", "cuda", "hip", "driver", "numpy", "commit")
SUBJECTS = (*VERSIONS, "processes")  # what a comparison may be about
FIGURES = ("first_loss", "final_loss", "held_out_loss", "peak_memory_mib", "parameters_with_gradient")


class Reason(str):
    """Why there is no figure, in its place, in one line."""

    def __new__(cls, text):
        return super().__new__(cls, " ".join(str(text).split()))


def is_measured(value):
    """Return whether a figure has a value; None is one without a reason."""
    return value is not None and not isinstance(value, Reason)


def read_run(result):
    """Return the settings and figures of a result of tiny_llama_v3.py."""
    summary, steps = result["summary"], pd.json_normalize(result["steps"])
    if summary["diverged"]:
        raise UsageError(f"{result.path}: the run diverged, so its times do not count")
    config, done, world = result["config"], len(result["steps"]), summary.get("world")
    settings = config | {name: result[name] for name in ("implementation", "precision")}
    settings["processes"] = world["size"] if world else 1
    if done < config.get("num_steps", done):
        settings["num_steps"] = f"interrupted after {done} of {config['num_steps']}"
    # A list is of times, which have a spread; another figure is one of a run.
    columns = {"step": "batch_ms", "host": "host_ms"} | {phase: f"phase_ms.{phase}" for phase in summary["phase_ms"]}
    figures = {f"{name}, ms": steps[column].tolist() for name, column in columns.items()}
    figures |= {name.replace("_", " ").replace("mib", "MiB"): summary.get(name) for name in FIGURES}
    counted = summary["kernels"]
    figures |= counted if isinstance(counted, dict) else dict.fromkeys(("kernels", "launches"), Reason(counted))
    environment = result["environment"] or {}
    if settings["implementation"] == "triton" and "cpu" in (environment.get("arch"), config.get("device")):
        interpreted = Reason("times of Triton's interpreter")
        figures = {name: interpreted if isinstance(value, list) else value for name, value in figures.items()}
    return settings, figures


def read_steps(result):
    """Return the settings and figures of a result of benchmarks.steps."""
    settings, figures = {}, {}
    for size, measured in result["sizes"].items():
        settings |= {f"{size}: {name}": value for name, value in measured["config"].items()}
        for name, row in measured["rows"].items():
            error = row["error"] and Reason(row["error"])
            figures[f"{size}: {name}, ms"] = error or list(row["windows_ms"]) or Reason("no windows")
            figures[f"{size}: {name}, MiB"] = error or row["peak_memory_mib"]
    return settings, figures


def read(path):
    """Return what a file says: {setting: value}, and {name: times in ms, another figure, or a Reason}."""
    result = read_result(path)
    reader = read_steps if result.get("benchmark") == "steps" else read_run if "operations" in result else None
    if reader is None:
        raise UsageError(f"{path} is no result of tiny_llama_v3.py or benchmarks.steps")
    with damage_reported(path):
        settings, figures = reader(result)
        environment = result["environment"] or {}
        settings |= {name: environment.get(name) for name in ("device", "arch", *VERSIONS)}
        for name, value in figures.items():
            is_time = name.endswith(", ms")
            if is_measured(value) and not all(map(is_figure, value if is_time else [value])):
                result.refuse(name, value)
    return {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}, figures


def read_side(path):
    """Return ([settings], [figures]) of a file or a folder."""
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise UsageError(f"{path} holds no *.json: give a result, or a folder of them")
    return tuple(zip(*map(read, paths), strict=True))


def differences(settings):
    """Return {setting: its values} where they are not the same. What one of the results lacks is not compared."""
    # Texts, as values of JSON may be lists.
    table = pd.DataFrame(settings, dtype=object)
    texts = {name: values.dropna().astype(str).unique() for name, values in table.items()}
    return {name: " / ".join(values) for name, values in texts.items() if len(values) > 1}


def change_of_times(*sides):
    """Return the cells of a row: both sides, the ratio, and what it means. A side is the times of each of its runs."""
    before, after = (sum(runs, []) for runs in sides)
    cells = ["{1} ({0} – {2})".format(*map(number, percentiles(times).values())) for times in (before, after)]
    # The noise between processes is that of the more restless side.
    ratio = ratio_of_medians(after, before, max(map(spread_of_medians, sides)))
    if min(len(before), len(after)) < LEAST_TIMES:
        meaning = f"unknown: fewer than {LEAST_TIMES} times"
    else:
        word = "same" if not ratio.differs else "slower" if ratio.value > 1 else "faster"
        meaning = f"{word} ({number(ratio.low)} – {number(ratio.high)})"
    return *cells, number(ratio.value), meaning


def six_digits(value):
    return f"{value:,}" if isinstance(value, int) else number(value, 6)


def change_of_figures(before, after):
    """Return the cells as change_of_times() does, of a figure of each run; what is alike in six digits is the same."""
    cells = [" – ".join(dict.fromkeys(map(six_digits, (min(side), max(side))))) for side in (before, after)]
    ratio = number(mean(after) / mean(before)) if any(before) else ""
    # A figure differs if no run of one side has what a run of the other has.
    word = "higher" if min(after) > max(before) else "lower" if max(after) < min(before) else "same"
    return *cells, ratio, word if cells[0] != cells[1] else "same"


def values_of(sides):
    """Yield each figure that a result has, and its values in the results of both sides."""
    for name in dict.fromkeys(name for side in sides for figures in side for name in figures):
        yield name, [[figures.get(name) for figures in side] for side in sides]


def rows_of(sides):
    """Yield the rows of the table, of everything that all results of both sides have."""
    for name, (before, after) in values_of(sides):
        if all(map(is_measured, before + after)):
            change = change_of_times if isinstance(before[0], list) else change_of_figures
            yield name, *change(before, after)


def gaps_of(sides):
    """Return ({why it is not compared: [names of figures]}, whether a time is among those that some results have).

    A figure that is None in all results, or for which they have no field, is none that could be compared.
    """
    gaps, has_time = {}, False
    for name, values in values_of(sides):
        together = sum(values, [])
        if all(map(is_measured, together)) or all(value is None for value in together):
            continue
        has_time |= any(isinstance(value, list) for value in together)
        before, after = (" / ".join(dict.fromkeys(map(state_of, side))) for side in values)
        reason = before if before == after else f"before {before}, after {after}"
        gaps.setdefault(reason, {})[name.removesuffix(", ms").removesuffix(", MiB")] = None
    return gaps, has_time


def state_of(value):
    """Return whether a figure was measured, or why not."""
    return "measured" if is_measured(value) else value or "not measured"


@program("diff")
def main(argv):
    parser = Parser("diff", __doc__)
    parser.add_argument("before", type=Path, help="a result, or a folder of results")
    parser.add_argument("after", type=Path, help="what to compare with it")
    parser.add_argument("--anyway", action="store_true", help="also if devices or settings differ, which are listed")
    options = parser.parse_args(argv)
    settings, figures = zip(read_side(options.before), read_side(options.after), strict=True)
    different = differences(sum(settings, ()))
    prohibited = [f"{name} ({values})" for name, values in different.items() if name not in SUBJECTS]
    if prohibited and not options.anyway:
        raise UsageError(f"the results differ in {', '.join(prohibited)}: give --anyway to compare them all the same")
    print(f"runs: {' / '.join(str(len(side)) for side in figures)}")
    for name, values in different.items():
        print(f"{name}: {values}")
    if unknown := [each for side in settings for each in side if each["device"] is None]:
        print(f"device: not known of {len(unknown)} of the results")
    table = pd.DataFrame(rows_of(figures), columns=["figure", "before", "after", "after / before", "change"])
    if len(table):
        print(f"\n{show(table)}")
    gaps, is_time_missing = gaps_of(figures)
    if gaps:
        print()
    for reason, names in gaps.items():
        print(f"Not compared: {', '.join(names)}: {reason}")
    if table.empty:
        raise UsageError("the results have no figure in common: measure the same on both sides")
    if all(len(side) == 1 for side in figures):
        print("\nOne run a side: how much two processes differ at the same work is not known. Compare folders of runs.")
    return int(is_time_missing)


if __name__ == "__main__":
    sys.exit(main())
