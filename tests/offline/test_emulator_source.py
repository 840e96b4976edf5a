"""Where the emulator comes from: what is not its commit is refused, in one line with a remedy."""

import re
import shutil
import subprocess
import sys

import pytest

from offline import emulate
from offline.emulator import source
from tests import ROOT


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder with a file of each part of the emulator; its text is taken to be the right one."""
    folder = tmp_path / "tinygrad"
    for part in source.EMULATOR:
        file = folder / part if part.endswith(".py") else folder / part / "emu.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("lds = 64\n")
    monkeypatch.setattr(source, "FOLDER", tmp_path / ".emulator")
    monkeypatch.setattr(source, "DIGEST", source.digest_of(folder))
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "clang").touch(mode=0o755)
    (programs / "git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(programs))
    return folder


def emulator_of(folder):
    return folder / "test/mockgpu/amd/emu.py"


def test_a_copy_is_kept(copy):
    kept = source.prepare(copy)
    assert emulator_of(kept).read_text() == emulator_of(copy).read_text()
    shutil.rmtree(copy)
    assert source.prepare() == kept
    assert [path.name for path in source.FOLDER.iterdir()] == [kept.name]  # nothing half made is left


@pytest.mark.parametrize("fault, arguments, told", [
    ("another text", ["--tinygrad", "tinygrad"], "is not the tinygrad that the emulator is made for: check out"),
    ("", ["--tinygrad", "none"], "--tinygrad: .*/none is no folder: check out"),
    ("no network", [], "cannot be fetched (.*): give a folder with it, --tinygrad PATH or make emulate TINYGRAD=PATH"),
    ("", ["--tinygrad", "tinygrad", "--", "-q", "gone/test_it.py::test_it"], "gone/test_it.py is not there: after --"),
    ("", ["--tinygrad", "tinygrad", "--architectures", "gfx1250"], "invalid choice: 'gfx1250' .* 'gfx1100', 'gfx1201'"),
    ("no clang", ["--tinygrad", "tinygrad"], "needs clang, which is not here: apt-get install clang"),
])  # fmt: skip
def test_what_is_missing_or_wrong_is_told_in_one_line(copy, capsys, monkeypatch, fault, arguments, told):
    monkeypatch.chdir(copy.parent)
    if fault == "another text":
        emulator_of(copy).write_text("lds = 65\n")
    if fault == "no clang":
        (copy.parent / "programs" / "clang").unlink()
    monkeypatch.setattr(source, "REPOSITORY", str(copy / "nowhere"))
    assert emulate.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line) and not list(copy.parent.glob(".emulator/*"))


@pytest.mark.parametrize("codes, code", [([0, 0], 0), ([0, 1], 1), ([5, 0], 1)])
def test_one_failure_of_several_architectures_counts(copy, monkeypatch, codes, code):
    left = dict(zip(("gfx942", "gfx950"), codes, strict=True))
    monkeypatch.setattr(emulate, "run_tests", lambda arch, options: left.pop(arch))
    assert emulate.main(["--tinygrad", str(copy), "--architectures", "gfx942", "gfx950"]) == code and not left


def test_a_folder_that_is_named_is_looked_at_though_there_is_a_copy(copy, tmp_path):
    source.prepare(copy)
    with pytest.raises(source.NoSource, match="other is no folder"):
        source.prepare(tmp_path / "other")


def test_what_is_compiled_for_another_processor_is_kept_elsewhere(tmp_path):
    names = []
    for flags in ("sse avx", "sse", "sse"):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nMHz : {len(names)}\nflags : {flags}\nbugs : none\n\n")
        names.append(source.processor(tmp_path / "cpuinfo"))
    assert names[0] != names[1] == names[2] and source.processor(tmp_path / "none") == "any"


def test_fetched_once(copy, monkeypatch):
    monkeypatch.setattr(source, "fetch", lambda folder: shutil.copytree(copy, folder))
    with monkeypatch.context() as patch, pytest.raises(source.NoSource, match="is not the tinygrad"):
        patch.setattr(source, "DIGEST", "of another text")
        source.prepare()
    kept = source.prepare()
    monkeypatch.delattr(source, "fetch")
    assert source.prepare() == kept


def test_the_plugin_says_where_it_emulates_nothing(tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "offline.pytest_plugin", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "\nnot emulated: give --emulate=ARCH\n" in done.stdout
