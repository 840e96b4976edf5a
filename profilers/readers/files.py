"""What the readers share: errors about files, JSON and CSV files, and tables whose figures can be."""

import contextlib
import functools
import gzip
import io
import json
import re
import sys

import numpy as np
import pandas as pd

from measure.command_line import UsageError, printable, require_file
from profilers.kernel_names import short_name

NAME = re.compile(r'(?<="name": ").*?(?=",\s*"(?:ph|cat|pid|tid|ts|dur|args)": )')  # of an event of a trace
UNESCAPED = re.compile(r'(?<!\\)"|\\(?!["\\/bfnrtu])')
WORDS = ["Name", "Counter"]  # columns; all others but labels are numbers
PROCESS = ["Guid", "Pid"]  # labels that tell the processes in a file apart, empty where they are not known
QUEUE = ["Queue", "Stream"]  # on which kernels run one after the other, of a process and an Agent, a GPU
LABELS = [*PROCESS, "Agent", *QUEUE]
LAST = 2**63 - 1  # ns that a clock can count
LONGEST = 2**53  # ns, 104 days
OVERLAP = 0.01  # of the kernels' time: so much is not worth a word
OF_OTHERS = {  # a column of a file that lacks others: whose it is
    "Dispatch_ID": ", but of rocprof-compute: rocprof-compute analyze -p FOLDER",
    "AverageNs": ", but of rocprof v1: record with rocprofv3",
    "BeginNs": ", but of rocprof v1: record with rocprofv3",
    "Counter_Value": " since ROCm 6.3, whose counters have times: record with ROCm 6.4 or newer",
}
shown = functools.cache(printable)  # of a few names that fill long columns


class Unreadable(UsageError):
    """A profile cannot be read; the message names the file, the problem and the remedy."""


class OtherFormat(Unreadable):
    """A file is of another program than its name says."""


@contextlib.contextmanager
def reported(path):
    """Turn what parsers raise, and what contents of another kind raise where they are used, into Unreadable."""
    require_file(path)
    if path.exists() and not path.stat().st_size:
        raise Unreadable(f"{path} is empty, as where a profiler was ended before it wrote: profile again")
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unreadable(f"{path} is damaged or incomplete ({lines[0]}): profile again") from error


@functools.cache  # a report reads a file several times
def note(text):
    print(printable(f"note: {text}"), file=sys.stderr)


def name_of(path):
    """Return the name of a file as it was before gzip."""
    return path.name.removesuffix(".gz")


def read_text(path):
    """Return the text of a file, which gzip may have compressed."""
    data = path.read_bytes()
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    return data.decode("utf-8-sig", errors="replace")  # the profilers write the bytes of a name as they are


def note_slowed(path):
    note(f"{path}: times are those of kernels while they were counted, which slows them")


@functools.lru_cache(maxsize=1)  # parsing may take seconds
def read_json(path):
    """Return the contents of a file of JSON, in which C++ may have written nan, inf, and tabs or quotes in names."""
    text = read_text(path)
    try:
        return json.loads(text, strict=False)
    except ValueError:
        text = re.sub(r"(?<=: )-?(nan|inf)(?=[,}\s])", "NaN", text)
        text = NAME.sub(lambda name: UNESCAPED.sub(r"\\\g<0>", name[0]), text)
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated") or re.fullmatch(r"[\w.+-]*\s*", text[error.pos :]):
            raise ValueError("it is cut off") from error
        raise Unreadable(
            f"{path} is whole, but no JSON ({error}), and to profile again would change nothing: mend this place"
        ) from error


def read_csv(path, columns, labels=()):
    """Read the columns {name in the file: new name} of a CSV file, and of the labels those that it has."""
    # A number that is cut off is still one: without its newline the last line cannot be trusted.
    text = read_text(path)
    if not text.endswith("\n"):
        raise ValueError("its last line is cut off")
    table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)  # a name may be "nan"
    if missing := columns.keys() - set(table):
        remedy = next((each for name, each in OF_OTHERS.items() if name in table), "")
        raise Unreadable(f"{path} has no column {min(missing)}: it is no such file of rocprofv3{remedy}")
    if len(table) and not isinstance(table.index, pd.RangeIndex):  # pandas takes the first field for an index
        raise ValueError("rows have too many fields")
    columns = columns | {name: label for name, label in dict(labels).items() if name in table}
    return table[list(columns)].rename(columns=columns)


def usable(path, rows):
    """Return the rows whose figures can be, with names that a terminal only shows; a note counts the others."""
    texts = [*WORDS, *LABELS]
    numbers = {name: pd.to_numeric(rows[name], errors="coerce") for name in rows if name not in texts}
    figures = pd.DataFrame(numbers, rows.index)
    # NaN lies in no range. An unsigned duration of a kernel that ends before it starts is beyond 2^63.
    are_good = (figures.ge(0) & figures.lt(2.0**63)).all(axis="columns")
    are_good &= figures.get("Start", 0) <= figures.get("End", 2.0**63)
    if "End" in figures:  # a clock that has run for a second was not at 0 when a kernel started: 0 is no stamp
        are_good &= figures["Start"].gt(0) | figures["End"].lt(1e9)
        are_good &= figures["End"] - figures["Start"] < LONGEST
    if "MaxNs" in figures:
        are_good &= figures["Calls"].ge(1) & figures["MinNs"].le(figures["MaxNs"])
        are_good &= figures["MaxNs"].le(figures["TotalDurationNs"])
    if bad := (~are_good).sum():
        first = rows[~are_good].iloc[0]
        words = ", ".join(short_name(str(first[name])) for name in WORDS if name in rows)
        told = ", ".join(f"{name} {first[name]}" for name in figures)
        reason = f"{bad} of {len(rows)} rows have figures that cannot be, the first of {words}: {told}"
        if bad == len(rows) and "Counter" not in rows:
            raise ValueError(reason)
        note(f"{path}: {reason}: left out")
    shares = figures.get("Percentage", pd.Series(100)).sum()
    if len(rows) and not 99 < shares < 101:
        note(f"{path}: its percentages add up to {shares:.1f}, not to 100: does it lack kernels?")
    good = rows[are_good].copy()
    for name in good:
        if name in WORDS:
            good[name] = good[name].map(shown)
        elif name not in LABELS:  # again, as beside NaN large numbers lost their last digits
            good[name] = pd.to_numeric(good[name])
    return good.astype({name: "int64" for name in ("Start", "End") if name in good})


def one_at_a_time(path, rows):
    """Return dispatches of which none lasts beyond the start of the next one of its queue; a note counts those cut.

    A queue runs one kernel after the other. A GPU that stamps an end late, when it has waited for something else, would
    let one kernel have the time of many. What programmatic dependent launch lets overlap counts once, too.
    """
    rows = rows.reset_index(drop=True)
    lasting = rows[rows["Start"] < rows["End"]]
    if len(rows) and lasting.empty:
        raise ValueError(f"all {len(rows)} kernels last 0 ns")
    if without := len(rows) - len(lasting):
        note(f"{path}: {without} of {len(rows)} kernels last 0 ns: were their times recorded?")
    labels = [label for label in LABELS if label in rows]
    queued = lasting[lasting[[label for label in QUEUE if label in rows]].ne("").any(axis="columns")]
    following = (
        queued.sort_values(["Start", "End"])
        .groupby(labels, sort=False, dropna=False)["Start"]
        .shift(-1, fill_value=LAST)
    )
    ends = queued["End"].clip(upper=following)
    extra = queued["End"] - ends
    if extra.sum() > OVERLAP * (ends - queued["Start"]).sum():
        cut = f"{(extra > 0).sum()} of {len(rows)} kernels last beyond the start of the next one of their stream"
        note(f"{path}: {cut}, {extra.max() / 1e6:.3f} ms the most: cut there, as a stream runs one after the other")
    rows.loc[ends.index, "End"] = ends
    return rows


def intervals(rows=()):
    """Return a table of Name, Start and End (integers, ns): of kernels on the device, or of ranges on the host."""
    table = pd.DataFrame(rows, columns=["Name", "Start", "End"])
    return table.astype({"Start": "int64", "End": "int64"})


def within(rows, *windows):
    """Return the rows whose Start lies within one of the windows, (start, end) in ns."""
    inside = np.zeros(len(rows), dtype=bool)
    for window in windows:
        inside |= rows["Start"].between(*window).to_numpy()
    return rows[inside]
