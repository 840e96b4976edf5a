"""Print the test files that a change can break: those that were changed, and those that use a changed file.

    python tests/affected.py [COMMIT]      what changed since COMMIT (default: HEAD), new files included

A Python file uses what it imports, and the data of a folder that it names in quotation marks. A test, or a script of
the shell, also uses the files that its text names. A test of the pages uses every page. `make affected` runs these.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def module_of(name):
    """Return the module that a file is imported as: a/b.py and a/b/__init__.py are a.b."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def used_by(name, files):
    """Return which of the files the file of this name uses."""
    path = ROOT / name
    text = path.read_text(errors="replace") if path.is_file() else ""
    modules = set(re.findall(r"\b(?:from|import|-m) +([\w.]+)", text))
    modules |= {f"tiny_llama.{each}" for each in re.findall(r'companion\("(\w+)', text)}
    for package, names in re.findall(r"from ([\w.]+) import (\([^)]*\)|[\w, ]+)", text):
        modules |= {f"{package}.{each}" for each in re.findall(r"\w+", names)}
    used = {other for other in files if other.endswith(".py") and module_of(other) in modules}
    if name.endswith(".py"):
        folders = set(re.findall(r'"([a-z]\w+)"', text))
        used |= {other for other in files if other.endswith(".txt") and Path(other).parent.name in folders}
    if name.startswith("tests/") or not name.endswith(".py"):
        words = set(re.findall(r"[\w.-]+", text))
        used |= {other for other in files if "." in Path(other).name and Path(other).name in words}
    if name.startswith("tests/docs/"):
        used |= {other for other in files if other.endswith(".md")}
    return set(files) if name == "tests/core/test_layout.py" else used


def affected(changed, files):
    """Return the tests among the files that are in changed, or use what is, directly or through others."""
    users = {}
    for name in files:
        if name.endswith((".py", ".sh", ".slurm")):
            for other in used_by(name, files):
                users.setdefault(other, set()).add(name)
    found, pending = set(), list(changed)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += users.get(name, ())
    return sorted(name for name in found if re.fullmatch(r"tests/.*test_\w+\.py", name) and (ROOT / name).exists())


if __name__ == "__main__":
    known = git("ls-files", "--cached", "--others", "--exclude-standard")
    changed = git("diff", "--name-only", *sys.argv[1:] or ["HEAD"])
    print(*affected(changed + git("ls-files", "--others", "--exclude-standard"), known))
