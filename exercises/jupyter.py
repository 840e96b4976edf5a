"""What the notebooks call: checks of what their cells define, and commands as a terminal runs them."""

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from itertools import pairwise
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CELLS = "cells.py"  # the file in which a check finds what cells define


def name_of(node, source):
    """Return the name under which a statement is kept: of a function, class or constant; an import's is its source."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return source
    # What has a name in small letters may need what ran in the notebook alone.
    target = ast.unparse(node.targets) if isinstance(node, ast.Assign) else ""
    return target if target.isupper() else getattr(node, "name", None)


def definitions(cells):
    """Return {name: source} of what cells import, define or set to a constant, the last of each name."""
    found = {}
    for cell in cells:
        # A cell with a magic or a mistake defines nothing that a check could see.
        try:
            body = ast.parse(cell).body
        except SyntaxError:
            continue
        begins = [min(part.lineno for part in (node, *getattr(node, "decorator_list", ()))) for node in body]
        lines = cell.splitlines()
        # A blank to fill in is a comment, which the syntax tree does not have: what follows a statement is its own.
        for node, (begin, end) in zip(body, pairwise([*begins, len(lines) + 1]), strict=True):
            source = "\n".join(lines[begin - 1 : end - 1]).rstrip()
            name = name_of(node, source)
            if name != source:  # no import, which what stands before may need
                found.pop(name, None)
            found[name] = source
    found.pop(None, None)
    return found


def execute(command):
    """Run a command at the top of the project, with this python, not interpreted; yield its output line by line."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # A notebook's kernel need not be started from the environment whose Python it is.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen(command, cwd=ROOT, env=environment, errors="replace", **pipes) as process:
        yield from iter(lambda: process.stdout.readline(10_000), "")  # a line may be endless


def terminal(line, cell):
    """The magic %%terminal: run a cell in bash, unless it says that it needs a GPU and there is none."""
    reason = re.search("^# needs a GPU: (.*)", cell, flags=re.M)
    if reason and not torch.cuda.is_available():
        print(f"not run without a GPU: {reason[1]}")
        return
    for output in execute(["bash", "-c", cell]):
        print(output, end="")


def with_lines_shown(told, source):
    """Return what a check told, with the lines of source in place of their numbers, which it hides."""
    lines = {str(number): f"`{line.strip()}`" for number, line in enumerate(source.splitlines(), start=1)}
    return re.sub(r"\bline\s+(\d+)(?:\s+of\s+\S+\.py)?", lambda m: lines.get(m[1], m[0]), told)


def start(exercise):
    """Prepare the notebook of an exercise; return check(task=None, ...), which judges what its cells define.

    Kernels of its cells are interpreted, also where there is a GPU, so that print and breakpoint() work in them.
    """
    from IPython.display import SVG, display

    os.environ["TRITON_INTERPRET"] = "1"
    sys.breakpointhook = sys.__breakpointhook__  # Jupyter's stops only where its own debugger is attached
    shell = get_ipython()  # noqa: F821 (a notebook has it)
    shell.register_magic_function(terminal, "cell")

    def check(task=None, time=False, show=False):
        # A process of its own, as check.py has for everybody: an endless loop does not take the notebook with it.
        source = "\n\n\n".join(definitions(shell.user_ns["In"]).values()) + "\n"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / CELLS
            path.write_text(source, encoding="utf-8")
            command = [sys.executable, ROOT / "exercises" / "check.py", exercise, "--file", path]
            command += ["--task", str(task)] * bool(task) + ["--time"] * time + ["--show"] * show
            output = deque(execute([*command, "--output-dir", folder]), maxlen=10_000)  # may be endless
            print(with_lines_shown("".join(line for line in output if folder not in line), source))
            for picture in sorted(Path(folder).glob("*.svg")):
                display(SVG(filename=str(picture)))

    return check
