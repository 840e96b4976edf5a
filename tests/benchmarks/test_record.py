"""benchmarks.record: what is current, what is measured again, and when it stops."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import record, steps
from exercises.performance_debugging import replay

NAMES = {"cuda": "Some GPU", "cpu": "CPU"}
CUDA, CPU = map(torch.device, NAMES)
NOW, BEFORE = "1" * 40, "0" * 40  # commits


def result(command, commit=NOW, device="Some GPU", **fields):
    environment = {"device": device, "torch": "2.11", "triton": "3.6", "commit": commit}
    return {"command": command, "date": "2030-01-02", "environment": environment} | fields


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """(folder of results, commands that were run) of a machine with Some GPU, with two parts and a rare one."""
    commands = []
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "PARTS", [record.Part("python -m one", 10), record.Part("python -m two", 20)])
    monkeypatch.setattr(record, "RARE", [record.Part("python -m rare", 30)])
    monkeypatch.setattr(llama, "select_device", lambda name: CUDA)
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu(kind, NAMES[kind], "", 100, 32))
    monkeypatch.setattr(record, "has_changed", lambda result: result["environment"]["commit"] not in (NOW, "HEAD"))
    monkeypatch.setattr(record, "measure", lambda part, device: commands.append(part.command) or True)
    return tmp_path, commands


def save(folder, **results):
    for name, contents in results.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))


def test_every_part_is_a_command_that_its_program_takes():
    for part in record.PARTS + record.RARE:
        program, *words = shlex.split(part.command)
        if words[0] == "-m":
            module = importlib.import_module(words[1])
            options = words[2:] and module.parse(words[2:])
            assert module is not steps or steps.ANCHOR in sum(options.rows or [steps.GROUPS["sweep"]], [])
        elif program == record.REPLAY:
            assert replay.parse(words) and part.name == "stages"
        else:
            llama.parse_config(words[1:], words[0])
    shapes = [part for part in record.PARTS if "shapes" in part.command]
    assert sum(part.seconds for part in shapes) <= 600
    assert sum(part.seconds for part in record.PARTS) <= 2400 + 600


def test_the_recorded_results_can_be_read(capsys):
    """All of them, whoever wrote them."""
    assert record.main([]) == 0, capsys.readouterr().err


CODE = """
def step(self):
    \"\"\"Run it.\"\"\"
    # All of it.
    return 1

def load_state_dict(self, weights):
    return 2
"""


@pytest.mark.parametrize("old, new, changed", [
    ("", "", False), ("return 1", "return 3", True), ("1\n", "1\n\nRATE = 4\n", True), ("return 1", "return (", True),
    ("# All of it.", "# Most of it.", False), ('"Run it."', '"Do not."', False), ("    # All of it.\n", "", False),
    ("return 2", "return 4", False), ("return 1", "return 'Run it.'", True), ("def step", "def other", True),
    ('"""Run it."""', "self.wait()", True),
])  # fmt: skip
def test_code_has_changed_if_what_is_timed_has(tmp_path, monkeypatch, old, new, changed):
    def git(*words):
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(record, "ROOT", tmp_path)
    script, added = tmp_path / "tiny_llama_v3.py", tmp_path / "tiny_llama/new_hopper.py"
    git("init")
    script.write_text(CODE)
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=b", "commit", "-m", "one")
    now = git("rev-parse", "HEAD")
    assert old in CODE
    script.write_text(CODE.replace(old, new))
    (tmp_path / "README.md").write_text("measured")
    for commit in (now, f"{now[:12]}-dirty"):
        assert record.has_changed(result("python -m one", commit)) == changed
    assert record.has_changed(result("python -m one", BEFORE)) and record.has_changed(result("python -m one", None))
    added.parent.mkdir()
    added.write_text("")
    git("add", ".")
    assert record.has_changed(result("python -m one", now)), "a file that is new"
    script.unlink()
    assert record.has_changed(result("python -m one", now)), "a file that is gone"


@pytest.mark.parametrize("flags, one, expected", [
    ("--all", result("python -m one"), ["two"]),  # it is current
    ("--all", result("python -m one", BEFORE), ["one", "two"]),
    ("--all", result("python -m one", device="Another GPU"), ["one", "two"]),
    ("--all --time-limit 15", {}, ["one"]), ("--all --time-limit 9", {}, []), ("--rare", {}, ["rare"]), ("", {}, []),
])  # fmt: skip
def test_what_is_not_current_is_measured_in_time(recording, capsys, flags, one, expected):
    folder, commands = recording
    save(folder, a=one)
    assert record.main(flags.split()) == 0 and commands == [f"python -m {name}" for name in expected]
    is_late = "--time-limit" in flags
    assert ("Left for the next time: python -m two\n" in capsys.readouterr().out) == is_late


def test_results_of_code_in_no_commit_are_announced_as_such(recording, capsys, monkeypatch):
    """They would be measured again by every call."""
    assert record.main(["--all"]) == 0 and "git has no commit" not in capsys.readouterr().out
    monkeypatch.setattr(record, "has_changed", lambda result: True)
    assert record.main(["--all"]) == 0 and "note: git has no commit of this code" in capsys.readouterr().out


def test_without_git_everything_has_changed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert record.has_changed(result("python -m one", "HEAD"))


def test_a_part_that_fails_is_named(recording, capsys, monkeypatch):
    monkeypatch.setattr(record, "measure", lambda part, device: part.command != "python -m one")
    assert record.main(["--all"]) == 1 and "Failed in 0 s: python -m one\n" in capsys.readouterr().out


def test_listing_needs_no_gpu_and_measuring_does(recording, capsys, monkeypatch):
    save(recording[0], a=result("python -m one"), b=result("python -m two", BEFORE), c={"command": "compiled"})
    monkeypatch.setattr(llama, "select_device", lambda name: CPU)
    listed = "python -m two  # --all, 20 s\npython -m rare  # --rare, 30 s\n"
    assert record.main([]) == 0 and capsys.readouterr().out == listed
    assert record.main(["--all"]) == 2 and "measuring needs a GPU, and there is none" in capsys.readouterr().err
    save(recording[0], b=result("python -m two"), d=result("python -m rare"))
    assert record.main([]) == 0 and capsys.readouterr().out.endswith("every part is current\n")


@pytest.mark.parametrize("command, expected", [
    ("python -m one --a", [sys.executable, "-m", "one", "--a", "--output-dir", "FOLDER"]),
    # What follows -- is another program's.
    (f"{record.REPLAY} --a -- --b", [str(record.ROOT / record.REPLAY), "--a", "--output", "FOLDER", "--", "--b"]),
])  # fmt: skip
def test_a_command_writes_into_a_folder_of_its_own(monkeypatch, command, expected):
    def run(words, cwd):
        assert expected == ["FOLDER" if Path(word).is_dir() else word for word in words]
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setattr(record.subprocess, "run", run)
    assert not record.measure(record.Part(command, 1, "one"), CPU)


@pytest.mark.parametrize("part, written, kept", [
    # Results of a benchmark stay as they are; a run of the script gets its fields.
    (record.Part("python -m one", 1), {"one": result("python -m one", benchmark="one"), "two": {"benchmark": "two",
     "environment": {"device": "A"}}}, [("one", "python -m one", "Some GPU"), ("two", None, "A")]),
    (record.Part("python run", 1, "run"), {"a": {"steps": []}}, [("run", "python run", "CPU")]),
])  # fmt: skip
def test_results_are_kept_if_the_command_succeeds(tmp_path, monkeypatch, part, written, kept):
    def run(command, cwd):
        save(Path(command[command.index("--output-dir") + 1]), **written)
        return subprocess.CompletedProcess(command, returncode)

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record.subprocess, "run", run)
    monkeypatch.setattr(record.hardware, "environment", lambda device: {"device": NAMES[device.type]})
    for returncode, expected in ((1, []), (0, kept)):
        assert record.measure(part, CPU) == (returncode == 0)
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
        assert [(r["benchmark"], r.get("command"), r["environment"]["device"]) for r in found] == expected
    assert [path.name.split("_")[0] for path in sorted(tmp_path.iterdir())] == [name for name, *_ in kept]
    assert "date" in found[0]
