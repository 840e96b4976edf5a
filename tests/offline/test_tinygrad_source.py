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


def refused(capsys, *arguments):
    assert emulate.main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_another_text_is_refused(copy, capsys):
    emulator_of(copy).write_text("before\nlds = 65\nafter\n")
    assert "is not the tinygrad that the patch is for: check out" in refused(capsys, "--tinygrad", str(copy))
    assert not source.FOLDER.exists()


def test_a_folder_without_an_emulator_is_refused(copy, tmp_path, capsys):
    assert "is not the tinygrad" in refused(capsys, "--tinygrad", str(tmp_path / "none"))


def test_without_a_network_the_remedy_is_named(copy, capsys, monkeypatch):
    monkeypatch.setattr(source, "REPOSITORY", str(copy / "nowhere"))
    assert "cannot be fetched" in (line := refused(capsys)) and "make emulate TINYGRAD=path" in line


def test_without_clang_the_remedy_is_named(copy, capsys, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler, which is not here: apt-get install clang" in refused(capsys, "--tinygrad", str(copy))


def test_fetched_once(copy, monkeypatch):
    def fetch(folder):
        return shutil.copytree(copy, folder)

    monkeypatch.setattr(source, "fetch", fetch)
    patched = source.prepare()
    monkeypatch.delattr(source, "fetch")
    assert source.prepare() == patched


def test_every_place_of_the_patch_says_why():
    text = (source.ROOT / "offline/tinygrad.patch").read_text()
    reasons = re.findall(r"^@@ \S+ \S+ @@(.*)$", text, flags=re.M)
    assert len(reasons) > 10 and all(len(reason.split()) > 2 for reason in reasons)


@pytest.mark.parametrize("arguments", [["--architectures", "sm_90"], ["--seed", "x"], ["--no-such-flag"]])
def test_bad_usage_is_one_line(arguments, capsys):
    refused(capsys, *arguments)
