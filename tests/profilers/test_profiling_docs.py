"""The profiling guide: its commands run, its messages are the scripts', its pictures and figures are measured ones."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "README_PROFILING.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.S)
LINES = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if not line.startswith((". .venv", "# needs "))]
SHELL = [command for command in COMMANDS if ".sh" in command]
PYTHON = [command for command in COMMANDS if command.startswith("python ")]


def test_every_command_is_covered():
    assert len(COMMANDS) > 8 and sorted(SHELL + PYTHON) == sorted(COMMANDS)


@pytest.mark.parametrize("command", SHELL)
def test_scripts_understand_the_commands(command, tmp_path):
    command = command.replace("./", f"{ROOT}/").replace(".sh", ".sh --dry-run", 1)
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Tool: "), done.stderr


@pytest.mark.parametrize("words", sorted({re.match(r"python ((?:-m )?\S+)", command)[1] for command in PYTHON}))
def test_python_programs_say_what_they_do(words, python):
    done = subprocess.run([python, *words.split(), "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout and "Exit codes: 0 done" in done.stdout


def test_files_and_messages_exist():
    for name in re.findall(r"`((?:profilers/)?\w+\.(?:py|sh))`", GUIDE):
        assert (ROOT / name).exists() or (ROOT / "profilers" / name).exists(), name
    code = "".join(path.read_text() for path in (ROOT / "profilers").glob("*.py"))
    table = GUIDE.split("## When something fails")[1].split("\n\n")[1]
    messages = re.findall(r"^\| `([^`]*)` \|", table, flags=re.M)
    assert len(messages) == 16
    for message in messages:
        for part in message.replace("/dev/kfd", "{device}").split("…"):
            assert part in code, message
