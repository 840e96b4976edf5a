"""A program under the host profile runs as if it had been started by itself."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(folder, *words):
    """The host profile of a program, started in a folder; it writes out.pstats there."""
    command = [sys.executable, "-m", "profilers.host_profile", "out.pstats", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_a_program_under_the_host_profile_is_on_its_own(tmp_path):
    """It has its arguments, its folder on the path, and its exit code, as if it had been started itself."""
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "program.py").write_text("import sys, beside\nprint(beside.WORD, *sys.argv[1:])\nsys.exit(5)\n")
    (tmp_path / "elsewhere").mkdir()
    done = start(tmp_path / "elsewhere", str(tmp_path / "program.py"), "--flag", "1")
    assert done.returncode == 5 and "found --flag 1\n" in done.stdout and "Ordered by: internal time" in done.stdout
    assert (tmp_path / "elsewhere" / "out.pstats").stat().st_size


def test_its_error_is_a_traceback(tmp_path):
    (tmp_path / "program.py").write_text("open('absent')\n")
    done = start(tmp_path, str(tmp_path / "program.py"))
    assert done.returncode == 1 and "Traceback" in done.stderr and "open('absent')" in done.stderr
