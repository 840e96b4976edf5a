"""Opening what a person names: a regular file of a bounded size, or an error in one line, at once."""

import math
import os
import subprocess
import sys

import pytest

from tiny_llama import files


@pytest.mark.parametrize("make, named", [
    (None, "No such file"), (os.mkdir, "Is a directory"), (os.mkfifo, "not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    (lambda path: path.write_text("12345"), "5 bytes, which are more than 4"),
])  # fmt: skip
def test_what_is_no_file_of_a_moderate_size_is_refused_at_once(tmp_path, make, named):
    make and make(tmp_path / "x")
    with pytest.raises(OSError, match=f"{named}.*: '.*x'$"):
        files.open_input(tmp_path / "x", most_bytes=4)


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "x").write_bytes(b"\r\n\xff")
    with files.open_input(tmp_path / "x", most_bytes=3) as file:
        assert file.read() == b"\r\n\xff"
    subprocess.run([sys.executable, "-S", files.__file__], check=True)  # without any package


def test_a_part_is_whole_or_an_error(tmp_path):
    """Also beyond the 32 bits of a file without a limit; the file has one byte there, and holes before it."""
    with open(tmp_path / "x", "wb") as file:
        file.seek(2**32)
        file.write(b"!")
    with files.open_input(tmp_path / "x", math.inf) as file:
        assert files.read_part(file, 2**32 - 1, 2) == b"\0!" and files.read_part(file, 2**32, 1) == b"!"
        for start, count in ((2**32, 2), (2**32 + 1, 1)):
            with pytest.raises(OSError, match="shorter.*: '.*x'$"):
                files.read_part(file, start, count)


def test_files_are_replaced_together_or_not_at_all(tmp_path, monkeypatch):
    """In the order of their names, after both are on the disk; what is missing leaves both as they were."""

    def replace(*texts):
        with files.replacing_files(tmp_path, ["b", "a"]) as folder:
            for name, text in zip("ab", texts, strict=False):
                (folder / name).write_text(text)
        return [(tmp_path / name).read_text() for name in "ab"]

    assert replace("1", "2") == ["1", "2"]
    (tmp_path / "a").chmod(0o640)
    with pytest.raises(FileNotFoundError):
        replace("3")
    assert [(tmp_path / name).read_text() for name in "ab"] == ["1", "2"]
    calls = []
    monkeypatch.setattr(os, "fsync", lambda number: calls.append("on the disk"))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: rename(old, new) or calls.append(new.name))
    assert replace("3", "4") == ["3", "4"] and calls == ["on the disk", "on the disk", "b", "a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640 and sorted(os.listdir(tmp_path)) == ["a", "b"]
