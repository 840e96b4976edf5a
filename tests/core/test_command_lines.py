"""Every script tells a wrong command line in one line that names the flag, and ends with exit code 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_FLAGS = {"profiling/host_profile.py"}  # what it is given belongs to the program that it runs
NEEDED = {  # beside the flag
    "exercises/check.py": ["exercise1"],
    "exercises/performance_debugging/counted.py": ["--output-dir", "."],
    "exercises/scoreboard.py": ["class"],
    "profiling/compare.py": ["before", "after"],
    "profiling/counters.py": ["profile"],
    "profiling/hotspots.py": ["profile"],
    "profiling/plot.py": ["profile"],
    "profiling/summary.py": ["session", "--tool", "ncu"],
    "profiling/workload_kernels.py": ["workload"],
}


BY_PATH = ("exercises/check.py", "nanogpt_triton/", "run_triton_profiling.py", "tiny_llama_v3.py")  # others: python -m


def scripts():
    """Our Python files that can be run; those of the exercises that are to be filled in have no command line."""
    folders = [ROOT / name for name in ("benchmarks", "exercises", "nanogpt_triton", "profiling")]
    files = [path for folder in folders for path in folder.rglob("*.py")] + list(ROOT.glob("*.py"))
    runnable = [path for path in files if not path.is_symlink() and 'if __name__ == "__main__":' in path.read_text()]
    names = {str(path.relative_to(ROOT)) for path in runnable}
    return sorted(name for name in names - WITHOUT_FLAGS if not re.search(r"/exercise\d", name))


RUN_EACH = """
import contextlib, io, json, runpy, sys
answers = {}
for script, arguments in json.load(sys.stdin).items():
    sys.argv, output = [script, *arguments], io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            if script.endswith(".py"):
                runpy.run_path(script, run_name="__main__")
            else:
                sys.modules.pop(script, None)  # one that another has imported
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit:
        code = exit.code
    answers[script] = code, output.getvalue()
print(json.dumps(answers))
"""


def run_each(commands, folder):
    """{script: (exit code, stderr)} of {script: arguments}, in one process: most of a script's time is PyTorch's."""
    started_as = {
        script: str(ROOT / script) if script.startswith(BY_PATH) else script.removesuffix(".py").replace("/", ".")
        for script in commands
    }
    given = json.dumps({started_as[script]: arguments for script, arguments in commands.items()})
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, input=given,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return {script: answers[started] for script, started in started_as.items()}


def test_a_wrong_flag_ends_in_one_line(tmp_path):
    commands = {script: [*NEEDED.get(script, []), "--no-such-flag"] for script in scripts()}
    assert len(commands) > 20 and set(NEEDED) < set(commands)
    for script, (code, text) in run_each(commands, tmp_path).items():
        assert code == 2, (script, text)
        assert text.count("\n") == 1 and "error: " in text and "no-such-flag" in text, (script, text)
    assert list(tmp_path.iterdir()) == []


def test_there_is_one_parser_for_the_scripts_without_pytorch_and_one_for_the_others():
    visible = (path for path in ROOT.rglob("*.py") if not path.is_symlink())
    files = [path for path in visible if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    users = {str(path.relative_to(ROOT)) for path in files if "ArgumentParser" in path.read_text()}
    assert {name for name in users if not name.startswith("tests/")} == {
        "tiny_llama_v3.py", "profiling/command_line.py"
    }  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_number_of_kernels_is_positive(value, tmp_path):
    names = [f"profiling/{name}.py" for name in ("hotspots", "compare", "counters")]
    for script, (code, text) in run_each({n: [*NEEDED[n], "--top", value] for n in names}, tmp_path).items():
        assert code == 2 and text.count("\n") == 1, (script, text)
        assert "--top" in text and value in text, (script, text)
