#!/usr/bin/env python3
"""Check an exercise: each task prints PASS, or FAIL and why.

    python exercises/check.py exercise1                 what you wrote in exercises/exercise1_triton_basics.py
    python exercises/check.py exercise1 --solution      the solution

Without a GPU the kernels run in Triton's interpreter, in seconds.
Exit codes: 0 all tasks pass, 1 some do not yet, 2 the request cannot be met.
"""

import importlib.util
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

import exercises.checks  # noqa: E402, F401 (first: without a GPU it has Triton interpret)
import tiny_llama_v3 as llama  # noqa: E402
from exercises.checks import exercise1, exercise2, exercise3, puzzles  # noqa: E402
from exercises.checks.common import Wrong  # noqa: E402
from tiny_llama_v3 import exit_code_of  # noqa: E402


class Exercise(NamedTuple):
    file: str  # the participant's, in this folder
    solution: str
    checks: ModuleType


EXERCISES = {
    "puzzles": Exercise("puzzles.py", "solutions/puzzles.py", puzzles),
    "exercise1": Exercise("exercise1_triton_basics.py", "solutions/exercise1_triton_basics.py", exercise1),
    "exercise2": Exercise("exercise2_swiglu_optimization.py", "solutions/exercise2_swiglu_optimization.py", exercise2),
    "exercise3": Exercise("exercise3_flash_attention.py", "solutions/exercise3_flash_attention.py", exercise3),
}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(check, exercise):
    """Why a task fails, or None."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of kernels with holes in the interpreter
            check(exercise)
    except Wrong as wrong:
        return str(wrong)
    except NotImplementedError as blank:
        return f"not written yet, {blank}"
    except Exception as error:  # whatever the code under test does
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == exercise.__file__
        ]
        place = f" in line {lines[-1]} of {Path(exercise.__file__).name}" if lines else ""
        return f"{type(error).__name__}{place}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def run(argv):
    parser = llama.Parser("check.py", __doc__)
    parser.add_argument("exercise", choices=EXERCISES)
    parser.add_argument("--solution", action="store_true", help="check the solution instead")
    options = parser.parse_args(argv)
    if llama.triton is None:
        raise llama.UsageError("Triton is not installed: pip install triton (on Linux)")
    file, solution, checks = EXERCISES[options.exercise]
    path = HERE / (solution if options.solution else file)
    try:
        exercise = load(path)
    except Exception as error:  # a syntax error, say
        line = getattr(error, "lineno", None)
        print(f"FAIL  {path.name} cannot be imported{f', line {line}' if line else ''}: {error}")
        return 1
    tasks = checks.TASKS
    failed = 0
    for name, check in tasks.items():
        reason = verdict(check, exercise)
        failed += reason is not None
        print(f"FAIL  {name}: {reason}" if reason else f"PASS  {name}", flush=True)
    print(f"{options.exercise}: {len(tasks) - failed} of {len(tasks)} tasks pass")
    return int(failed > 0)


def main(argv=None):
    return exit_code_of(lambda: run(argv), "check.py")


if __name__ == "__main__":
    sys.exit(main())
