"""make affected: which tests a change can break."""

import subprocess
import sys

import pytest

from tests import ROOT, affected

FILES = affected.git("ls-files", "--cached", "--others", "--exclude-standard")


# A file that was changed, a test that uses it, one that does not, and how.
CHANGES = """
benchmarks/diff.py   benchmarks/test_diff.py    profilers/test_doctor.py  imported
benchmarks/record.py benchmarks/test_record.py  profilers/test_doctor.py  behind other imports
exercises/checks/exercise1.py workshop/test_mistakes.py profilers/test_doctor.py  by what is imported, indented
measure/timing.py    benchmarks/test_scaling.py docs/test_findings.py  by what is imported
tiny_llama/fp8.py    core/test_model.py         profilers/test_profiling_docs.py  by companion()
get_trace.sh         profilers/test_profiling_scripts.py core/test_model.py  named in the text
exercises/mistakes/puzzles.txt workshop/test_mistakes.py core/test_model.py  of a folder
docs/fp8.md          docs/test_docs.py          core/test_model.py  a page
tests/core/test_model.py core/test_model.py     core/test_alone.py  the test itself
"""


@pytest.mark.parametrize("row", CHANGES.strip().splitlines())
def test_a_change_affects_what_uses_it(row):
    changed, used, unused, *_ = row.split()
    tests = affected.affected([changed], FILES)
    assert {f"tests/{used}", "tests/core/test_layout.py"} <= set(tests)
    assert f"tests/{unused}" not in tests


def test_the_program_prints_the_files_of_what_changed():
    done = subprocess.run([sys.executable, affected.__file__, "HEAD"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= set(FILES)


@pytest.mark.parametrize("status", [0, 1])
def test_make_runs_the_tests_that_it_is_told_and_none_after_an_error(tmp_path, status):
    python, calls = tmp_path / "python", tmp_path / "calls"
    told = f"echo tests/core/test_alone.py; exit {status}"
    python.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\ncase "$1" in tests/affected.py) {told};; esac\n')
    python.chmod(0o755)
    command = ["make", "-o", ".venv/dev.stamp", "affected", f"VENV_PYTHON={python}", "SINCE=a1b2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    asked, *run = [line for line in calls.read_text().splitlines() if not line.startswith("-c")]
    assert asked == "tests/affected.py a1b2" and (done.returncode == 0) == (status == 0)
    assert [line.split()[-1] for line in run] == ["tests/core/test_alone.py"] * (1 - status)
