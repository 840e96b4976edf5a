"""Every script tells a wrong command line in one line that names the flag, and ends with exit code 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_FLAGS = {"profilers/host_profile.py", "examples/tritonbench_rows.py"}  # what they are given is another's
NEEDED = {  # beside the flag
    "benchmarks/diff.py": ["before", "after"], "examples/hf_weights.py": ["folder"],
    "exercises/check.py": ["exercise1"], "exercises/scoreboard.py": ["class"],
    "profilers/compare.py": ["before", "after"], "profilers/counters.py": ["profile"],
    "profilers/hotspots.py": ["profile"], "profilers/plot.py": ["profile"],
    "profilers/summary.py": ["session", "--tool", "ncu"], "profilers/rocprof_compute_kernels.py": ["workload"],
}  # fmt: skip
BY_PATH = ("exercises/check.py", "nanogpt_triton/", "run_triton_profiling.py", "tiny_llama_v3.py")  # others: python -m


def scripts():
    """Our Python files that can be run; those of the exercises that are to be filled in have no command line."""
    folders = ("benchmarks", "examples", "exercises", "nanogpt_triton", "offline", "profilers")
    files = [path for name in folders for path in (ROOT / name).rglob("*.py")] + list(ROOT.glob("*.py"))
    runnable = [path for path in files if not path.is_symlink() and 'if __name__ == "__main__":' in path.read_text()]
    names = {str(path.relative_to(ROOT)) for path in runnable}
    return sorted(name for name in names - WITHOUT_FLAGS if not re.search(r"/exercise\d", name))


RUN_EACH = """
import contextlib, io, json, runpy, sys
answers = []
for script, arguments in json.load(sys.stdin):
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
    answers.append((code, output.getvalue()))
print(json.dumps(answers))
"""


def test_a_wrong_command_line_ends_in_one_line(tmp_path):
    """An unknown flag, and numbers that are not positive; all in one process: most of the time is PyTorch's."""
    commands = [(script, "--no-such-flag", []) for script in scripts()]
    assert len(commands) > 20 and set(NEEDED) < {script for script, *_ in commands}
    for name in ("hotspots", "compare", "counters"):
        commands += [(f"profilers/{name}.py", "--top", [value]) for value in ("0", "-3", "many")]
    given = []
    for script, flag, values in commands:
        module = script.removesuffix(".py").replace("/", ".")
        started_as = str(ROOT / script) if script.startswith(BY_PATH) else module
        given.append((started_as, [*NEEDED.get(script, []), flag, *values]))
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(given), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for command, (code, text) in zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True):
        _, flag, values = command
        assert code == 2 and text.count("\n") == 1 and "error: " in text, (command, text)
        assert all(word in text for word in [flag.lstrip("-"), *values]), (command, text)
    assert not list(tmp_path.iterdir())
