#!/usr/bin/env python3
"""Check an exercise: each task prints PASS, or FAIL and the reason. exercises/progress.json keeps the progress.

    python exercises/check.py exercise1                 your code in exercises/exercise1_triton_basics.py
    python exercises/check.py exercise1 --task rms      one of its tasks, by the beginning of its name
    python exercises/check.py puzzles --task 1          or by its number on the page
    python exercises/check.py exercise1 --solution      the solution, at the end
    python exercises/check.py exercise1 --time          time your kernels that pass, or count what they move
    python exercises/check.py puzzles --task copy --show    draw the elements that each program touches
    python exercises/check.py                           the progress and the next task
    python exercises/check.py patient                   a program in which you find the mistakes yourself
    python exercises/check.py before                    the test before the workshop: ten minutes, one answer each
    python exercises/check.py examination               the test after it: thirty minutes; begins by writing its file

Kernels run in Triton's interpreter, in seconds; if there is a GPU, kernels that pass are then compiled and checked
there. Each task has a process of its own, so that a crash or an endless loop ends only this task. Exit codes: 0 all
tasks pass, 1 some do not yet, 2 the request cannot be met, 130 interrupted.
"""

import faulthandler
import inspect
import linecache
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

try:
    import torch

    import exercises.checks  # noqa: F401 (first: without a GPU it has Triton interpret)
    import tiny_llama_v3 as llama
    from exercises import own_kernels
    from exercises.checks import ON_GPU, examination, exercise1, exercise2, exercise3, patient, puzzles
    from exercises.checks.common import NotYet, Wrong, load
    from exercises.checks.mutants import MISTAKES, explain
    from exercises.jupyter import CELLS
    from exercises.progress_file import Progress, participant_name, steps_of
    from measure.command_line import Parser, printable, program, replacing
    from measure.device import require_triton
except ImportError as error:
    print(f"check.py: error: {error}: activate .venv, restore the file or install requirements.txt", file=sys.stderr)
    sys.exit(2)

WIDTH = 100  # of a line on the terminal
LIMIT = 60  # seconds for a task
LONGEST = 1000  # characters of an error's message
EXTRAS = {
    "time": "time your kernels that pass beside others; without a GPU, count",
    "show": "draw which elements each program of a kernel touches",
    "debug": "run in this process without a limit, so that breakpoint() works",
}


class Exercise(NamedTuple):
    file: str  # the participant's, in this folder; its solution has the same name
    checks: ModuleType


EXERCISES = {
    "puzzles": Exercise("puzzles.py", puzzles),
    "exercise1": Exercise("exercise1_triton_basics.py", exercise1),
    "exercise2": Exercise("exercise2_swiglu_optimization.py", exercise2),
    "exercise3": Exercise("exercise3_flash_attention.py", exercise3),
}
COUNTED = EXERCISES | {"patient": Exercise("patient.py", patient)}  # in the progress; without blanks or notebook
JUDGED = COUNTED | {  # and the tests at the two ends of the workshop, on code that nobody has seen
    "before": Exercise("before.py", examination.BEFORE),
    "examination": Exercise("examination.py", examination),
}
SOLUTIONS = HERE / "solutions"


# ----------------------------------------------------------------------------------------------------------------------
# Errors of the participant's code

OUTSIDE = "a load or store went outside of its tensor: is there a mask, and are the strides right?"


def cause_of(text):
    """Return the usual cause of an error, which exercises/mistakes/errors.txt finds by patterns of its text; or ""."""
    for entry in (MISTAKES / "errors.txt").read_text().strip().split("\n\n")[1:]:
        *patterns, cause = entry.splitlines()
        if re.search("|".join(patterns), text):
            return f"; {cause}"
    return ""


def line_of(error, path):
    """Return the line of path in which an error was raised, or None."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    source, node = getattr(error, "src", None), getattr(error, "node", None)
    if source and hasattr(node, "lineno"):  # Triton's CompilationError, with lines of the kernel
        before, found, _ = "".join(linecache.getlines(str(path))).partition(source.strip())
        if found:
            return before.count("\n") + node.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)


def describe(error, path):
    """Describe an exception of the participant's code: its type, line, message and usual cause."""
    chain = [error]
    while chain[-1].__cause__ is not None:  # of an InterpreterError it is the original error
        chain.append(chain[-1].__cause__)
    error, line = chain[-1], next(filter(None, (line_of(link, path) for link in reversed(chain))), None)
    kind, said, place = type(error).__name__, str(getattr(error, "error_message", None) or error).strip(), ""
    if not said:  # an assert without words, of Triton for example: its condition tells
        said = traceback.extract_tb(error.__traceback__)[-1].line or ""
    found = f"{kind}: {said}"
    if line:
        place, found = f" in line {line} of {path.name}", linecache.getline(str(path), line) + found
    return f"{kind}{place}: {''.join(said.splitlines()[:1])[:LONGEST]}{cause_of(found)}"


# ----------------------------------------------------------------------------------------------------------------------
# Judging one task, in this process


class Verdict(NamedTuple):
    passed: bool
    message: str | None = None  # the reason why it fails
    begun: bool = True  # False if the function is not filled in
    imported: bool = True  # False if the file cannot be
    report: tuple = (), None  # of --time or --show: lines, SVG or None


def blanks_of(function):
    """Return the blanks in a function that are not filled in."""
    while hasattr(function, "fn"):  # of an autotuner, and of a kernel
        function = function.fn
    # What is no function is the answer to a question.
    return " and ".join(re.findall(r"FILL ME IN \(.*?\)", inspect.getsource(function))) if callable(function) else ""


def judge_wrong(wrong, blanks, task, solution):
    """Return the Verdict on a wrong result: a usual mistake that gives the same, else the check's own hint."""
    # On a GPU the edits of the solution would have to be compiled.
    mistake = None if ON_GPU or wrong.case is None else explain(wrong, task, solution)
    if blanks and (wrong.is_empty() or mistake and mistake.given):
        return Verdict(False, f"not written yet, {blanks}; once it is, take the comment away", begun=False)
    return Verdict(False, f"{wrong.fact}: {mistake.words if mistake else wrong.hint}")


def judge(path, exercise, name):
    """Return the Verdict on a task of the file at path."""
    task, solution = exercise.checks.TASKS[name], SOLUTIONS / exercise.file
    try:
        module = load(path)
    except (Exception, SystemExit) as error:
        return Verdict(False, f"{path.name} cannot be imported: {describe(error, path)}", imported=False)
    try:
        if not hasattr(module, name):
            remedy = "run its cell first" if path.name == CELLS else "the line that defines it has to be as it was"
            return Verdict(False, f"there is no {name} in {path.name}: {remedy}", begun=False)
        task(module)
    except Wrong as wrong:
        return judge_wrong(wrong, blanks_of(getattr(module, name)), task, solution)
    except NotImplementedError as blank:
        return Verdict(False, f"not written yet, {blank}", begun=False)
    except NotYet as reason:
        return Verdict(False, str(reason), begun=False)
    except (Exception, SystemExit) as error:
        return Verdict(False, describe(error, path))
    return Verdict(True)


def report(path, exercise, task, extra):
    """Return Verdict.report for the file at path; extra: "time" or "show"."""
    from exercises import touched

    reference = load(SOLUTIONS / exercise.file)  # before the participant's
    try:
        module = load(path)
        if extra == "time":
            # Other tasks have no kernel that can be timed.
            return (own_kernels.report(task, module, reference) if task in own_kernels.CASES else []), None
        watch = touched.watched(exercise.checks.TASKS[task], module)
    except Exception as error:
        return [f"no {dict(show='picture').get(extra, extra)}: {describe(error, path)}"], None
    return ([], touched.picture(watch, task)) if watch else (["it loads and stores nothing"], None)


# ----------------------------------------------------------------------------------------------------------------------
# Judging a task in a process of its own


def interpreting():
    """The multiprocessing context whose processes interpret kernels."""
    if not ON_GPU:
        return multiprocessing.get_context("fork")
    # Forks of another process that interprets kernels and does not use the GPU, which forks would lose.
    multiprocessing.set_forkserver_preload(["numpy", "torch", "triton"])
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        multiprocessing.forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def judge_and_send(connection, path, exercise, task, limit, trace, extra):
    """Runs in the process and sends the Verdict.

    trace: a file for the stack if a signal or the limit ends the process. extra: "show", "time" or None. What fails is
    not timed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    if sys.stdout:  # None if it is closed
        sys.stdout.reconfigure(line_buffering=True)  # so that output before a crash is not lost
    torch.set_num_threads(1)
    with open(trace, "w") as file:
        faulthandler.enable(file, all_threads=False)
        faulthandler.dump_traceback_later(limit, exit=True, file=file)
        verdict = judge(path, JUDGED[exercise], task)
        if extra and verdict.imported and (verdict.passed or extra == "show"):
            verdict = verdict._replace(report=report(path, JUDGED[exercise], task, extra))
        connection.send(tuple(verdict))


def judge_apart(context, path, exercise, task, limit, extra=None):
    """Return the Verdict of a process of the context, which ends itself after limit seconds."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        ours, theirs = context.Pipe(duplex=False)
        args = theirs, path, exercise, task, limit, trace, extra
        process = context.Process(target=judge_and_send, args=args, daemon=True)
        process.start()
        # So that recv() ends when the process does.
        theirs.close()
        try:
            return Verdict(*ours.recv())
        except EOFError:
            process.join()
            stack = trace.read_text() if trace.exists() else ""
        finally:
            process.kill()
            process.join()
    # The innermost call comes first.
    frames = re.findall(r'File "(.*)", line (\d+) in', stack)
    place = next((f" in line {line} of {path.name}" for file, line in frames if file == str(path)), "")
    if stack.startswith("Timeout"):
        return Verdict(False, f"did not end within {limit:g} s{place}: is there an endless loop?")
    if process.exitcode >= 0:
        return Verdict(False, f"ended with exit code {process.exitcode} before it was judged: what ends the process?")
    name = signal.Signals(-process.exitcode).name
    hint = "was there too little memory?" if name == "SIGKILL" else OUTSIDE
    return Verdict(False, f"killed by {name}{place}: {hint}")


def judge_everywhere(path, exercise, task, extra=None):
    """Judge a task interpreted, which detects undefined values and lines of errors, then compiled on a GPU."""
    checks = JUDGED[exercise].checks
    to_compile = ON_GPU and task in getattr(checks, "COMPILED", checks.TASKS)
    to_time = to_compile and extra == "time"
    verdict = judge_apart(interpreting(), path, exercise, task, LIMIT, None if to_time else extra)
    if not (to_compile and verdict.passed):
        return verdict
    # Compilers take their time, and each of the tiles that are timed is another kernel.
    context, limit = multiprocessing.get_context("spawn"), LIMIT * (5 if to_time else 1)
    compiled = judge_apart(context, path, exercise, task, limit, "time" if to_time else None)
    if not compiled.passed:
        compiled = compiled._replace(message=f"right in the interpreter, but: {compiled.message}")
    return compiled if to_time else compiled._replace(report=verdict.report)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def show(text):
    """Print a paragraph of lines of at most WIDTH characters."""
    layout = dict(subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
    print(textwrap.fill(printable(text), WIDTH, **layout), flush=True)


def all_tasks():
    return steps_of(*COUNTED)


def summary(progress, exercise=None):
    """Return the number of tasks done and the next one: of this exercise, of later ones, then of earlier ones.

    The test before comes before all of them, and the examination after them.
    """
    tasks = all_tasks()
    left = [pair for pair in tasks if not progress.state(*pair)["passed"]]
    done = f"{len(tasks) - len(left)} of {len(tasks)} done"
    states = progress.content["exercises"]
    tried = {name for name in states if any(state["attempts"] for state in states[name].values())}
    test = "before" if left else "examination"
    if not left or not (tried or exercise):
        return done if test in tried else f"{done}; next: python exercises/check.py {test}"
    begin = next(place for place, pair in enumerate(tasks) if exercise in (None, pair[0]))
    name, task = min(left, key=lambda pair: tasks.index(pair) < begin)
    return f"{done}; next: {task} ({name})"


def show_progress(progress):
    show(f"Of {progress.content['participant']}, in {progress.path}:")
    for name, task in all_tasks():
        state = progress.state(name, task)
        attempts = f"{state['attempts']} attempt{'s' * (state['attempts'] != 1)}"
        told = f"done, {attempts}" if state["passed"] else f"not yet, {attempts}" if state["attempts"] else "not begun"
        print(f"  {name:10} {task:26} {told}")
    print(summary(progress))


def task_called(exercise, given):
    """Return the task of an exercise with this name or number, or the only one whose name begins so."""
    tasks = [task for _, task in steps_of(exercise)]
    numbered = tasks[int(given) - 1 : int(given)] if given.isdecimal() else []
    found = numbered or [task for task in tasks if task == given] or [task for task in tasks if task.startswith(given)]
    if len(found) != 1:
        reason = "fits more than one" if found else "is none"
        raise llama.UsageError(f"--task {given} {reason} of the tasks: {', '.join(found or tasks)}")
    return found[0]


def parse(argv):
    parser = Parser("check.py", __doc__)
    add = parser.add_argument
    add("exercise", nargs="?", choices=JUDGED, help="default: show what is done")
    add("--task", metavar="NAME", help="only this task: its name, the beginning of it, or its number")
    extra = parser.add_mutually_exclusive_group()
    for name, what in EXTRAS.items():
        extra.add_argument(f"--{name}", dest="extra", action="store_const", const=name, help=what)
    folder = "for the pictures of --show (default: the current folder)"
    add("--output-dir", type=Path, default=Path(), metavar="DIR", help=folder)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--solution", action="store_true", help="check the solution, without keeping the progress")
    source.add_argument("--file", type=Path, help="check this file instead of the one in exercises/")
    add("--progress", type=Path, metavar="FILE", help="its file (default: exercises/progress.json)")
    add("--name", type=participant_name, help="of the participant (default: the user's)")
    options = parser.parse_args(argv)
    if not options.exercise and (options.task or options.extra or options.solution or options.file):
        raise llama.UsageError(f"name an exercise: {', '.join(EXERCISES)}")
    if options.file and not (options.file.is_file() and options.file.suffix == ".py"):
        raise llama.UsageError(f"--file {options.file} is no Python file: name one")
    if options.extra == "debug" and ON_GPU:
        raise llama.UsageError("--debug needs the interpreter: put TRITON_INTERPRET=1 before the command")
    if options.extra == "show":
        llama.writable_folder("--output-dir", options.output_dir)
    return options


def open_progress(options):
    path = options.progress or HERE / "progress.json"
    llama.writable_folder("--progress", path.parent)
    return Progress(path, options.name)


def show_verdict(verdict, task, options):
    """Print a verdict and its report, whose picture becomes a file."""
    show(f"PASS  {task}" if verdict.passed else f"FAIL  {task}: {verdict.message}")
    lines, svg = verdict.report
    if svg:
        picture = options.output_dir / f"{task}_{options.extra}.svg"
        with replacing(picture) as file:
            file.write_text(svg, encoding="utf-8")
        lines = [*lines, f"picture: {picture}"]
    print("".join(f"      {printable(line)}\n" for line in lines), end="", flush=True)


@program("check.py")
def main(argv):
    options = parse(argv)
    require_triton()
    if options.exercise is None:
        show_progress(open_progress(options))
        return 0
    exercise = JUDGED[options.exercise]
    tasks = exercise.checks.TASKS
    if options.task is not None:
        tasks = [task_called(options.exercise, options.task)]
        if options.extra == "time" and tasks[0] not in own_kernels.CASES:
            raise llama.UsageError(f"--time does not time {tasks[0]}: choose one of {', '.join(own_kernels.CASES)}")
    progress = None if options.solution else open_progress(options)
    folder = SOLUTIONS if options.solution else HERE
    path = (options.file or folder / exercise.file).resolve()
    if options.exercise == "examination" and not path.exists():
        with replacing(path) as file:
            file.write_text(examination.given(), encoding="utf-8")
        print(f"Your examination is {path}: mend it, and check again")
    if not path.is_file():
        raise llama.UsageError(f"there is no {path}: restore it with git, or name yours by --file")
    if options.exercise == "before" and progress:
        tasks = [task for task in tasks if not progress.state("before", task)["attempts"]]
        if not tasks:
            raise llama.UsageError(f"the first answers count, which are in {progress.path}: go on with the workshop")
    passed = 0
    for task in tasks:
        if options.extra == "debug":
            verdict = judge(path, exercise, task)
        else:
            verdict = judge_everywhere(path, options.exercise, task, options.extra)
        if not verdict.imported:
            show(f"FAIL  {verdict.message}")
            return 1
        passed += verdict.passed
        show_verdict(verdict, task, options)
        if progress:
            progress.record(options.exercise, task, *verdict[:3])
    # Of a single task, the line above says it all.
    if options.task is None:
        print(f"{options.exercise}: {passed} of {len(tasks)} tasks pass" + " in the solution" * options.solution)
    if progress and options.exercise != "examination":  # nothing comes after it
        print(summary(progress, options.exercise if options.exercise in COUNTED else None))
    return int(passed < len(tasks))


if __name__ == "__main__":
    sys.exit(main())
