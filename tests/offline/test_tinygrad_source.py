"""Where the emulator comes from: what is not the text that the patch is for is refused, in one line with a remedy."""

import re
import shutil

import pytest

from offline import emulate
from offline import tinygrad_source as source


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder with a file of each part of the emulator; its text is taken to be the right one."""
    folder = tmp_path / "tinygrad"
    for part in source.EMULATOR:
        file = folder / part if part.endswith(".py") else folder / part / "emu.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before\nlds = 64\nafter\n")
    patch = tmp_path / "tinygrad.patch"
    name = "test/mockgpu/amd/emu.py"
    patch.write_text(f"--- a/{name}\n+++ b/{name}\n@@ -1,3 +1,3 @@ more\n before\n-lds = 64\n+lds = 160\n after\n")
    monkeypatch.setattr(source, "PATCH", patch)
    monkeypatch.setattr(source, "FOLDER", tmp_path / ".emulator")
    monkeypatch.setattr(source, "DIGEST", source.digest_of(folder))
    monkeypatch.setenv("CC", "sh")  # is there
    return folder


def emulator_of(folder):
    return folder / "test/mockgpu/amd/emu.py"


def test_the_copy_is_patched_and_the_original_stays(copy):
    patched = source.prepare(copy)
    assert "160" in emulator_of(patched).read_text() and "64" in emulator_of(copy).read_text()
    assert source.prepare(copy) == patched
    assert [path.name for path in source.FOLDER.iterdir()] == [patched.name]  # nothing half made is left


@pytest.mark.parametrize("fault, arguments, told", [
    ("another text", ["--tinygrad", "tinygrad"], "is not the tinygrad that the patch is for: check out"),
    ("", ["--tinygrad", "none"], "is not the tinygrad"),
    ("no network", [], "cannot be fetched (.*): give a folder with it, make emulate TINYGRAD=path"),
    ("no clang", ["--tinygrad", "tinygrad"], "no-such-compiler, which is not here: apt-get install clang"),
])  # fmt: skip
def test_what_is_missing_or_wrong_is_told_in_one_line(copy, capsys, monkeypatch, fault, arguments, told):
    monkeypatch.chdir(copy.parent)
    if fault == "another text":
        emulator_of(copy).write_text("before\nlds = 65\nafter\n")
    monkeypatch.setenv("CC", "no-such-compiler" if fault == "no clang" else "sh")
    monkeypatch.setattr(source, "REPOSITORY", str(copy / "nowhere"))
    assert emulate.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line) and not list(copy.parent.glob(".emulator/*"))


def test_fetched_once(copy, monkeypatch):
    monkeypatch.setattr(source, "fetch", lambda folder: shutil.copytree(copy, folder))
    with monkeypatch.context() as patch, pytest.raises(source.UsageError, match="is not the tinygrad"):
        patch.setattr(source, "DIGEST", "of another text")
        source.prepare()
    patched = source.prepare()
    monkeypatch.delattr(source, "fetch")
    assert source.prepare() == patched
