"""Digests change with the code that is measured, and with nothing else."""

import importlib

import pytest

from measure import digest

SCRIPT = '''
"""A module."""
import functools
import package.other as helpers
from package import shared

LIMIT = 3  # of steps
UNUSED, USED = 1, 2


def unrelated():
    return 4


class Step:
    """A step."""

    def run(self):
        """Run."""
        return helpers.double(LIMIT) + shared() + USED


def main():
    return Step().run()
'''
OTHER = (
    "import unknown\n\n\ndef double(x):\n    return unknown.triple(x) - half(x)\n\n\ndef half(x):\n    return x / 2\n"
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A function that changes a text in a file, and returns whether the digest of Step is another one by that."""
    monkeypatch.setattr(digest, "ROOT", tmp_path)
    files = {
        "script.py": SCRIPT,
        "package/__init__.py": "from package.inner import shared\n",
        "package/other.py": OTHER,
    }
    files["package/inner.py"] = "def shared():\n    return 1\n"
    (tmp_path / "package").mkdir()

    def digest_with(changes):
        for name, text in files.items():
            (tmp_path / name).write_text(text.replace(*changes[name]) if name in changes else text)
        for cached in (digest.module, digest.neighbours, digest.digest_of):
            cached.cache_clear()
        return digest.digest_of(("script.Step",))

    yield lambda name, old, new: digest_with({name: (old, new)}) != digest_with({})
    for cached in (digest.module, digest.neighbours, digest.digest_of):
        cached.cache_clear()


@pytest.mark.parametrize("name, old, new", [
    ("script.py", "LIMIT = 3", "LIMIT = 4"),
    ("script.py", "UNUSED, USED = 1, 2", "UNUSED, USED = 1, 3"),
    ("script.py", "+ USED", "- USED"),
    ("script.py", "class Step", "@functools.cache\nclass Step"),
    ("package/other.py", "unknown.triple", "unknown.double"),
    ("package/other.py", "x / 2", "x / 3"),
    ("package/inner.py", "return 1", "return 2"),
    ("package/inner.py", "return 1", "if True:\n        return 1"),
])  # fmt: skip
def test_a_change_of_what_is_measured_shows(project, name, old, new):
    assert project(name, old, new)


@pytest.mark.parametrize("name, old, new", [
    ("script.py", "return 4", "return 5"),
    ("script.py", "return Step().run()", "return None"),
    ("script.py", "# of steps", "# of a run"),
    ("script.py", '"""A step."""', '"""A step,\n    of two."""'),
    ("script.py", '        """Run."""\n', ""),
    ("script.py", "    def run", "\n    # why\n\n    def run"),
    ("script.py", "import functools", "import itertools"),
    ("package/inner.py", "def shared", "def more():\n    pass\n\n\ndef shared"),
])  # fmt: skip
def test_nothing_else_shows(project, name, old, new):
    assert not project(name, old, new)


def test_a_result_knows_whether_its_code_has_changed(project):
    project("script.py", "", "")
    result = {"measured": ["script.Step"], "digest": digest.digest_of(("script.Step",))}
    assert not digest.has_changed(result)
    assert digest.has_changed(result | {"digest": "0"})
    assert digest.has_changed(result | {"measured": ["script.Removed"]})
    assert digest.has_changed({}), "of before there were digests"
    with pytest.raises(KeyError, match="script.Removed"):
        digest.digest_of(("script.Step", "script.Removed"))


@pytest.mark.parametrize("name, clock", [
    ("fp8_layer", "Bench"), ("kernels", "Bench"), ("layer_norm", "Bench"),
    ("gpt", "in_turns"), ("scaling", "in_turns"), ("steps", "in_turns"),
])  # fmt: skip
def test_the_clock_of_a_benchmark_is_part_of_what_it_measures(name, clock):
    benchmark = importlib.import_module(f"benchmarks.{name}")
    assert ("measure.timing", clock) in digest.covered(benchmark.MEASURED)
