"""The notebooks are what the pages and the stubs say, and run as they are and with the solutions."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests import ROOT

nbformat = pytest.importorskip("nbformat", reason="make test installs it")
nbclient = pytest.importorskip("nbclient", reason="make test installs it")
from exercises import check, generate, jupyter  # noqa: E402 (generate needs them)

pytestmark = pytest.mark.triton


def test_notebooks_are_what_their_sources_make(tmp_path, monkeypatch):
    texts = generate.published()
    assert [path.name for path, text in texts.items() if path.read_text() != text] == [], "make notebooks"
    written = {tmp_path / path.name: text for path, text in texts.items()}
    monkeypatch.setattr(generate, "published", lambda: written)
    assert generate.main([]) == 0 and all(path.read_text() == text for path, text in written.items())


@pytest.mark.parametrize("name", check.EXERCISES)
def test_every_function_of_a_stub_stands_in_a_cell_and_every_task_has_a_check(name):
    code = [source for kind, source in generate.cells_of(name) if kind != "markdown"]
    assert {code.count(source) for source in generate.parts_of(name)[1].values()} == {1}
    checks = re.findall(r'^check\("(\w+)"\)$', "\n".join(code), flags=re.M)
    assert sorted(checks) == sorted(check.EXERCISES[name].checks.TASKS)


def test_a_page_becomes_cells_in_its_order(tmp_path, monkeypatch):
    page = """# Title
```sh
. .venv/bin/activate
```
## One
**Write** `f`, as `g` does.

Some more.
```sh
python exercises/check.py exercise3 --task f --show
python exercises/check.py
```
<details>Hint [link](there.md)
```python
1
```
</details>

```python
from exercises.exercise3_flash_attention import f

f()
```
```sh
python exercises/check.py exercise3 --time
```
```bash
out
```
"""
    stub = "import math\n\n\ndef f():\n    # FILL ME IN\n    ...\n\n\ndef g():\n    pass\n"
    for ending, text in ((".md", page), (".py", stub)):
        (tmp_path / f"exercise3_flash_attention{ending}").write_text(text)
    monkeypatch.setattr(generate, "HERE", tmp_path)
    (kind, title), (_, setup), *cells = generate.cells_of("exercise3")
    assert title.startswith("# Title\n\n*This is [exercise3_flash") and setup.endswith(
        'check = start("exercise3")\n\nimport math'
    )
    assert cells == [
        ("markdown", "## One\n**Write** `f`, as `g` does.\n\nSome more."),
        ("code", "def f():\n    # FILL ME IN\n    ..."),
        ("code", "def g():\n    pass"),
        ("code", "%%terminal\npython exercises/check.py exercise3 --task f --show\npython exercises/check.py"),
        ("markdown", "<details>Hint [link](../there.md)\n```python\n1\n```\n</details>"),
        ("blank", "f()"),
        ("code", "check(time=True)"),
        ("markdown", "```console\nout\n```"),
    ]


def test_definitions_are_the_last_of_each_name():
    cells = ["", "# nothing", "import math", "A = 1\n@wrap\n# how\ndef f():\n    return A\n    # a blank", "def f(:",
             "print(f())\nb = [f()]", "A = math.log2(8)", "class C:\n    pass", "import math"]  # fmt: skip
    namespace, found = {"wrap": lambda function: function}, jupyter.definitions(cells)
    exec("\n".join(found.values()), namespace)
    assert namespace["f"]() == 3 and "C" in namespace and "b" not in namespace
    assert found["f"].startswith("@wrap\n# how\n") and found["f"].endswith("# a blank")
    again = jupyter.definitions([*cells, "def f():\n    return 'last'"])
    assert list(again.items())[-1] == ("f", "def f():\n    return 'last'")


def test_the_number_of_a_line_is_shown_as_what_stands_in_it():
    told = "ValueError in line 2 of\n      puzzles.py: line 99, and line 1 twice"
    assert jupyter.with_lines_shown(told, "a = 1\n    b = 2") == "ValueError in `b = 2`: line 99, and `a = 1` twice"


def test_a_terminal_cell_runs_at_the_top_with_this_python_and_says_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    jupyter.terminal("", "pwd\ncommand -v python\necho ${TRITON_INTERPRET:-compiled} && nothing_like_this")
    where, python, mode, error = capsys.readouterr().out.splitlines()
    assert where == str(ROOT) and Path(python).parent == Path(sys.executable).parent and mode == "compiled"
    assert "not found" in error
    monkeypatch.setattr(jupyter.torch.cuda, "is_available", lambda: False)
    jupyter.terminal("", "# needs a GPU: for this reason\necho run")
    assert capsys.readouterr().out == "not run without a GPU: for this reason\n"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project without what the notebooks do not need; a check writes what is done into it."""
    folder = tmp_path_factory.mktemp("notebooks") / "project"
    ignored = shutil.ignore_patterns(".?*", "__pycache__", "tests", "results", "docs", "progress.json")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", check.EXERCISES)
def test_a_notebook_runs_with_the_solutions(name, copy, monkeypatch):
    """Without the cells of a terminal, which tests/docs runs from the page, and checks of a task: check() has all."""
    monkeypatch.setenv("IPYTHONDIR", str(copy.parent / "ipython"))
    path = (copy / "exercises" / "notebooks" / check.EXERCISES[name].file).with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    blanks, solutions = (generate.parts_of(name, folder)[1] for folder in (".", "solutions"))
    solutions = {source: solutions[function] for function, source in blanks.items()}
    notebook.cells = [cell for cell in notebook.cells if not re.match(r'%%terminal|check\("', cell.source)]
    for cell in notebook.cells:
        cell.source = solutions.get(cell.source, cell.source)
    notebook.cells.append(nbformat.v4.new_code_cell("check()"))  # a part may come after the notebook's own one
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    told = {cell.source: "".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells}
    tasks = len(check.EXERCISES[name].checks.TASKS)
    assert f"{name}: {tasks} of {tasks} tasks pass" in told["check()"]
    assert name == "puzzles" or "x bound" in told["check(time=True)"]
