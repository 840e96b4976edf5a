"""Every script tells a wrong command line in one line that names the flag, and ends with exit code 2."""

import json
import os
import re
import subprocess
import sys

from tests import ROOT

FOLDERS = "benchmarks examples exercises nanogpt_triton offline profilers tiny_llama".split()
# What they are given is another's.
WITHOUT_FLAGS = {f"profilers/{name}.py" for name in ("as_main", "host_profile", "torch_profile")}
NEEDED = """
benchmarks/diff.py: before after
benchmarks/training.py: --data text
examples/hf_weights.py: folder
exercises/check.py: exercise1
exercises/contest/__main__.py: board results
exercises/scoreboard.py: class
offline/figures.py: kernel.amdgcn
profilers/compare.py: before after
profilers/counters.py: profile
profilers/hotspots.py: profile
profilers/plot.py: profile
profilers/summary.py: session --tool torch
profilers/rocprof_compute_kernels.py: workload
"""
NEEDED = dict(line.split(": ") for line in NEEDED.strip().splitlines())  # beside the flag
BY_PATH = ("exercises/check.py", "nanogpt_triton/", "run_triton_profiling.py", "tiny_llama_v3.py")  # others: python -m


def scripts():
    """Return our Python files that can be run; what participants edit has no command line."""
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")] + list(ROOT.glob("*.py"))
    runnable = [path for path in files if not path.is_symlink() and 'if __name__ == "__main__":' in path.read_text()]
    names = {str(path.relative_to(ROOT)) for path in runnable} - WITHOUT_FLAGS
    return sorted(name for name in names if not re.search(r"/(exercise\d|patient)", name))


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
    """All are run in one process: most of the time is PyTorch's."""
    cases = [(name, "--no-such-flag") for name in scripts()]
    assert len(cases) > 20 and NEEDED.keys() < {name for name, _ in cases}
    cases += [(f"profilers/{name}.py", "--top 0") for name in ("hotspots", "compare", "counters")]
    commands = []
    for name, wrong in cases:
        module = name.removesuffix(".py").replace("/", ".")
        started_as = str(ROOT / name) if name.startswith(BY_PATH) else module
        commands.append((started_as, [*NEEDED.get(name, "").split(), *wrong.split()]))
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for (name, wrong), (code, text) in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert code == 2 and text.count("\n") == 1 and "error: " in text, (name, text)
        assert all(word.lstrip("-") in text for word in wrong.split()), (name, text)
    assert not list(tmp_path.iterdir())
