"""make affected: which tests a change can break."""

import subprocess
import sys

import pytest

from tests import affected

FILES = affected.git("ls-files", "--cached", "--others", "--exclude-standard")


@pytest.mark.parametrize("changed, used, unused", [
    ("benchmarks/diff.py", "tests/benchmarks/test_diff.py", "tests/profilers/test_doctor.py"),  # imported
    ("measure/timing.py", "tests/benchmarks/test_scaling.py", "tests/profilers/test_doctor.py"),  # by what is imported
    ("tiny_llama/fp8.py", "tests/core/test_model.py", "tests/profilers/test_profiling_docs.py"),  # by companion()
    ("get_trace.sh", "tests/profilers/test_profiling_scripts.py", "tests/core/test_model.py"),  # named in the text
    ("exercises/mistakes/puzzles.txt", "tests/workshop/test_mistakes.py", "tests/core/test_model.py"),  # of a folder
    ("docs/fp8.md", "tests/docs/test_docs.py", "tests/core/test_model.py"),  # a page
    ("tests/core/test_model.py", "tests/core/test_model.py", "tests/core/test_alone.py"),  # the test itself
])  # fmt: skip
def test_a_change_affects_what_uses_it(changed, used, unused):
    tests = affected.affected([changed], FILES)
    assert used in tests and unused not in tests and "tests/core/test_layout.py" in tests


def test_the_program_prints_the_files_of_what_changed():
    done = subprocess.run([sys.executable, affected.__file__, "HEAD"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= set(FILES)
