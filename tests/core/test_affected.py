"""make affected: which tests a change can break."""

import subprocess
import sys

import pytest

from tests import affected

FILES = affected.git("ls-files", "--cached", "--others", "--exclude-standard")


# A file that was changed, a test that uses it, one that does not, and how.
CHANGES = """
benchmarks/diff.py   benchmarks/test_diff.py    profilers/test_doctor.py  imported
measure/timing.py    benchmarks/test_scaling.py profilers/test_doctor.py  by what is imported
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
