"""A contest on one card: the least seconds to a loss. README.md in this folder has the rules.

    python -m exercises.contest run ENTRY.py                     judge an entry: a warm-up and three seeds
    python -m exercises.contest run ENTRY.py --division laptop   in another division than the device's own
    python -m exercises.contest board FOLDER                     write FOLDER/board.html from the results in it

Exit codes of run: 0 the target was reached with all seeds, 1 it was not, or the entry was refused, 2 the request cannot
be met. Of board: 0 done, 1 a file was left out, 2 there is nothing to show. Of both: 130 interrupted, and then nothing
is written.
"""

import os
import signal
import sys
from pathlib import Path

import tiny_llama_v3 as llama
from exercises.contest import board, judge
from exercises.contest.task import DIVISIONS
from exercises.progress_file import participant_name
from measure.command_line import Parser, program
from measure.results import ResultFile
from tiny_llama.files import open_input, printable

MOST_BYTES = 2**16  # of an entry: enough for code, and not for a model
RESULTS = Path(__file__).parent / "results"


def parse(argv):
    parser = Parser("python -m exercises.contest", __doc__)
    add = parser.add_argument
    add("command", choices=("run", "board"))
    add("path", type=Path, metavar="ENTRY.py|FOLDER", help="what to judge, or where the results are")
    add("--division", choices=DIVISIONS, help="of run (default: the device's own)")
    add("--name", type=participant_name, help="of run: the participant (default: the name of the file)")
    add("--output-dir", default=str(RESULTS), metavar="DIR", help="of run (default: exercises/contest/results)")
    return parser.parse_args(argv)


def run(options):
    """Judge an entry, write the result, and return the exit code."""
    path = options.path
    if not hasattr(os, "killpg"):
        raise llama.UsageError("run cannot end what an entry starts on this system: use Linux, WSL or macOS")
    try:
        with open_input(path, MOST_BYTES) as file:
            entry = file.read()
    except OSError as error:
        raise llama.UsageError(f"{path} cannot be read ({error.strerror}): give the file of an entry") from error
    device = llama.select_device("auto")
    division = judge.choose_division(options.division, device)
    folder = llama.writable_folder("--output-dir", options.output_dir)
    result = judge.judge(path, entry, options.name or printable(path.stem), division, device)
    file = ResultFile(folder, result)
    file.save(result)
    median = f"reached, median {result['median_seconds']:.1f} s" if result["reached"] else "not reached"
    print(f"{result['participant']}: {median}\nResult: {file.path}")
    return 0 if result["reached"] else 1


@program("contest")
def main(argv):
    options = parse(argv)
    return run(options) if options.command == "run" else board.write(options.path)


if __name__ == "__main__":
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # Windows has the first alone
        if signal.getsignal(number) != signal.SIG_IGN:  # as of nohup
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the entry must not go on alone
    sys.exit(main())
