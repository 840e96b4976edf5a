"""The findings, which no test runs: each is on its pages, is pinned, and says what it does in its exit code."""

import ast
import os
import re
import subprocess

import pytest

from tests import ROOT

SCRIPTS = {path.stem: path.read_text() for path in sorted((ROOT / "findings").glob("*.sh"))}
LISTED = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "findings/README.md").read_text(), flags=re.M)
SURPRISES = (ROOT / "docs/surprises.md").read_text()
NAME = r"\b(?:torch|triton|transformers)_\w+\b"


def test_both_pages_have_every_finding_and_no_other():
    assert len(SCRIPTS) >= 8 and [name for name, _ in LISTED] == [*SCRIPTS]
    assert sorted(re.findall(rf"`({NAME})` \|$", SURPRISES, flags=re.M)) == [*SCRIPTS]


@pytest.mark.parametrize("name, packages", LISTED)
def test_a_finding_installs_what_its_row_says_and_nothing_of_ours(name, packages):
    """numpy is what torch needs to exchange arrays, and is no part of any finding."""
    (installed,) = re.findall(r"pip install --quiet (.*?);", SCRIPTS[name])
    pinned = dict(word.split("==") for word in installed.split())
    pinned.pop("numpy", None)
    assert {f"{package} {version}" for package, version in pinned.items()} == {*packages.split(", ")}
    assert not re.search(r"tiny_llama|nanogpt|\.\./", SCRIPTS[name])


PYTHON3 = """#!/bin/sh
mkdir -p venv/bin && echo "exit $PIP" >venv/bin/pip && echo "exit $CHECK" >venv/bin/python && chmod +x venv/bin/*
"""  # makes an environment whose programs do nothing


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_exit_code_is_that_of_the_check_or_2(tmp_path, name):
    (tmp_path / "python3").write_text(PYTHON3)
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for pip, check, expected in (0, 0, 0), (0, 1, 1), (1, 0, 2):
        environment = os.environ | {"PATH": path, "TMPDIR": str(tmp_path), "PIP": str(pip), "CHECK": str(check)}
        done = subprocess.run(["bash", ROOT / "findings" / f"{name}.sh"], env=environment)
        assert done.returncode == expected and [path.name for path in tmp_path.iterdir()] == ["python3"]


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_finding_cleans_up_and_tells_a_failed_install_from_a_change(text):
    assert "\nset -euo pipefail\n" in text and "\ntrap 'rm -rf \"$folder\"' EXIT\n" in text
    assert re.search(r"^\{ python3 -m venv venv && .*; \} \|\| exit 2$", text, flags=re.M)
    (code,) = re.findall(r"<<'END'\n(.*?)^END$", text, flags=re.M | re.S)
    assert ast.unparse(ast.parse(code).body[-1]) == "sys.exit(not as_stated)"
