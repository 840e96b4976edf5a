"""Write a notebook from each exercise's page and file.

    python -m exercises.generate      writes exercises/notebooks/

A notebook has the text of the page, its `python` blocks as cells, and its `sh` blocks as cells of the magic %%terminal.
After each paragraph that contains **Write** or **Mend** come the functions that it names, to be completed, and a check.

Exit codes: 0 done, 2 the request cannot be met.
"""

import re
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.generate", file=sys.stderr)
    sys.exit(2)
import jupytext  # `make test` and `make notebooks` install it
import nbformat

from exercises import check
from exercises.jupyter import definitions
from measure.command_line import Parser, program, replacing

HERE = Path(__file__).resolve().parent
SETUP = """\
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # in Colab: "https://github.com/OWNER/NAME", your copy; elsewhere, open the notebook inside a copy
if REPOSITORY and not Path("project").exists():
    subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, "project"], check=True)
here = Path("project" if REPOSITORY else "").resolve()
os.chdir(next((folder for folder in (here, *here.parents) if (folder / "tiny_llama_v3.py").exists()), here))
sys.path.insert(0, os.getcwd())

from exercises.jupyter import start  # not found? See REPOSITORY above

check = start("{exercise}")

{imports}"""
USE = """\
*This is [{page}]({page}) as a notebook. Complete the cells marked `FILL ME IN`, run them, and then the check below
each; a check sees the cells that have been run. Kernels in cells run in Triton's interpreter; checks use a GPU as well
where there is one.*"""


KERNEL = """\
---
jupyter:
  kernelspec: {display_name: Python 3, language: python, name: python3}
---

"""


def parts_of(exercise, folder="."):
    """Return (imports, {name: source} of functions and classes) of a file to complete, or of a solution."""
    text = (HERE / folder / check.EXERCISES[exercise].file).read_text()
    found = definitions([text])
    imports = "\n".join(source for name, source in found.items() if name == source)
    return imports, {name: source for name, source in found.items() if source.startswith(("@", "def ", "class "))}


def blanks_of(text, left):
    """Take what Markdown asks to write from left, {name: source}, with what stands between the first and the last."""
    # A page asks for them in the words of its text, each in backquotes, up to the end of the paragraph.
    asked = re.findall(r"\*\*(?:Write|Mend)\*\*(.*?)(?:\n\n|$)", text, flags=re.S)
    names = [name for words in asked for name in re.findall(r"`(\w+)`", words) if name in left]
    order = list(left)
    places = sorted(map(order.index, names))
    return {name: left.pop(name) for name in order[places[0] : places[-1] + 1]} if places else {}


def command_cell(exercise, command, setup):
    """Return the source of the cell for a command of a terminal; None if the check of each task has it."""
    if re.match(r"\. \S+/activate$", command):
        return setup
    # In a notebook check() judges the cells; the command would judge the file.
    called = re.fullmatch(rf"python exercises/check.py {exercise}(?: --task (\w+))?(?: --(time|show))?", command)
    if not called:
        return f"%%terminal\n{command}"
    task, extra = called.groups()
    words = [f'"{task}"'] * bool(task) + [f"{extra}=True"] * bool(extra)
    return f"check({', '.join(words)})" if extra or not task else None


def cells_of(exercise):
    """Yield (kind, source) of a notebook, where kind is "markdown", "code", or "blank" for code that may raise."""
    tasks = check.EXERCISES[exercise].checks.TASKS
    imports, left = parts_of(exercise)
    module, functions = Path(check.EXERCISES[exercise].file).stem, "|".join(left)
    title, _, text = (HERE / f"{module}.md").read_text().partition("\n")
    text = f"{KERNEL}{title}\n\n{USE.format(page=f'{module}.md')}\n{text}"
    # Jupytext keeps a region as one cell, and makes cells of Bash, which is not to be run here.
    text = re.sub("<details>.*?</details>", r"<!-- #region -->\n\g<0>\n<!-- #endregion -->", text, flags=re.S)
    text = text.replace("```bash\n", "```console\n")
    for cell in jupytext.reads(text, {"extension": ".md", "split_at_heading": True}).cells:
        if cell.cell_type == "markdown":
            yield "markdown", re.sub(r"\]\((?!https?:|#)", "](../", cell.source)
            blanks = blanks_of(cell.source, left)
            yield from (("code", source) for source in blanks.values())
            checks = [f'check("{name}")' for name in blanks if name in tasks]
            if checks:
                yield "code", "\n".join(checks)
        elif cell.source.startswith("%%sh\n"):
            setup = SETUP.format(exercise=exercise, imports=imports)
            source = command_cell(exercise, cell.source.removeprefix("%%sh\n"), setup)
            if source:
                yield "code", source
        else:
            # The notebook defines itself what the page's blocks import from the file.
            code = re.sub(rf"(?m)^from exercises(\.{module} import .*| import {module}\b.*)\n+", "", cell.source)
            code = code.replace(f"{module}.", "")
            yield "blank" if re.search(rf"\b({functions})\b", code) else "code", code


def notebook(exercise):
    """Return the notebook of an exercise, as JSON."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = nbformat.v4.new_notebook(metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    # Ids count up, so that a notebook is the same in every run.
    for number, (kind, source) in enumerate(cells_of(exercise)):
        new = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        metadata = {"tags": ["raises-exception"]} if kind == "blank" else {}  # as long as its functions are incomplete
        made.cells.append(new(source, id=f"{exercise}-{number}", metadata=metadata))
    return nbformat.writes(made) + "\n"


def published():
    """Return {path: text} of all files to write."""
    folder = HERE / "notebooks"
    return {(folder / each.file).with_suffix(".ipynb"): notebook(name) for name, each in check.EXERCISES.items()}


@program("generate.py")
def main(argv):
    Parser("generate.py", __doc__).parse_args(argv)
    for path, text in published().items():
        with replacing(path) as file:
            file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
