"""The profiling guide: its commands run, its messages are the scripts', its pictures and figures are measured ones."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiling import guide

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "README_PROFILING.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line != ". .venv/bin/activate"]
SHELL = [command for command in COMMANDS if ".sh" in command]
PYTHON = [command for command in COMMANDS if command.startswith("python ")]


def test_every_command_is_covered():
    assert len(COMMANDS) > 10 and sorted(SHELL + PYTHON) == sorted(COMMANDS)


@pytest.mark.parametrize("command", SHELL)
def test_scripts_understand_the_commands(command, tmp_path):
    command = command.replace("./", f"{ROOT}/").replace(".sh", ".sh --dry-run", 1)
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Tool: "), done.stderr


@pytest.mark.parametrize("words", sorted({re.match(r"python ((?:-m )?\S+)", command)[1] for command in PYTHON}))
def test_python_programs_say_what_they_do(words):
    done = subprocess.run([sys.executable, *words.split(), "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout and "Exit codes: 0 done" in done.stdout


def test_files_and_messages_exist():
    for name in re.findall(r"`((?:profiling/)?\w+\.(?:py|sh))`", GUIDE):
        assert (ROOT / name).exists() or (ROOT / "profiling" / name).exists(), name
    code = "".join(path.read_text() for path in [*ROOT.glob("*.sh"), *(ROOT / "profiling").glob("*.sh")])
    table = GUIDE.split("## When something fails")[1].split("\n\n")[1]
    messages = re.findall(r"^\| `([^`]*)` \|", table, flags=re.M)
    assert len(messages) == 8
    for message in messages:
        assert message.replace("/dev/kfd", "$KFD_DEVICE") in code, message


def test_the_guide_shows_what_was_measured():
    assert guide.main(["--check"]) == 0, "run python profiling/guide.py"


def test_generated_parts(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    monkeypatch.setattr(guide, "GUIDE", page)
    monkeypatch.setattr(guide, "RESULTS", tmp_path)
    text = "".join(f"<!-- begin: {name} -->\n<!-- end: {name} -->\n" for name in ("pictures", "overhead"))
    page.write_text(f"a\n{text}z\n")
    assert guide.main(["--check"]) == 1 and guide.main([]) == 0
    assert page.read_text().count("_Not measured yet._") == 2
    (tmp_path / "timeline_stage5.png").touch()
    row = {"tool": "torch.profiler", "ms": 9.0, "ratio": 2.0, "seconds": 12.0}
    result = {"environment": {"device": "A GPU", "torch": "2.11"}, "date": "2030-01-02T03:04:05"}
    result |= {"plain": {"ms": 4.5, "seconds": 8.0}, "scripts": {"get_trace.sh": row}}
    (tmp_path / "overhead.json").write_text(json.dumps(result))
    assert guide.main([]) == 0
    new = page.read_text()
    assert "![" in new and "(benchmarks/results/timeline_stage5.png)" in new and "Not measured" not in new
    assert "| `get_trace.sh` | torch.profiler | 9.00 | 2.00 |" in new and "A GPU, PyTorch 2.11, 2030-01-02" in new
    assert new.startswith("a\n") and new.endswith("\nz\n") and guide.main(["--check"]) == 0
    (tmp_path / "overhead.json").write_text("{")
    capsys.readouterr()
    assert guide.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "overhead.json cannot be read" in error
    (tmp_path / "overhead.json").unlink()
    assert guide.main([]) == 2  # what was measured is not dropped in silence
    assert "has a table of overhead" in capsys.readouterr().err and page.read_text() == new
