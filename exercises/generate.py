"""Write the pictures of the puzzles, and a notebook from each exercise's page and file.

    python -m exercises.generate            write exercises/pictures/ and exercises/notebooks/
    python -m exercises.generate --check    name files that are out of date, and exit with 1 if there are any

A notebook has the text of the page, its `python` blocks as cells, and its `sh` blocks as cells of the magic %%terminal.
After each paragraph that contains **Write** or **Mend** come the functions that it names, to be completed, and a check.

Exit codes: 0 done, 1 something is out of date, 2 the request cannot be met.
"""

import ast
import os
import re
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.generate", file=sys.stderr)
    sys.exit(2)
if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: what kernels touch is seen in the interpreter
import tiny_llama_v3 as llama
from exercises import check, drawings
from exercises.jupyter import source_of
from measure.command_line import Parser, program, replacing

HERE = Path(__file__).resolve().parent
SETUP = """\
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # in Colab: where to clone the project from; elsewhere, open the notebook inside a copy of it
if REPOSITORY and not Path("project").exists():
    subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, "project"], check=True)
here = Path("project" if REPOSITORY else "").resolve()
os.chdir(next((folder for folder in (here, *here.parents) if (folder / "tiny_llama_v3.py").exists()), here))
sys.path.insert(0, os.getcwd())

from exercises.jupyter import start  # not found? See REPOSITORY above

check = start("{exercise}")

{imports}"""
USE = """\
*This is [{page}](../{page}) as a notebook. Complete the cells marked `FILL ME IN`, run them, and then the check below
each; a check sees the cells that have been run. Kernels in cells run in Triton's interpreter; checks use a GPU as well
where there is one.*"""


class Stub:
    """A file to complete, or a solution: its imports, and the source of each definition."""

    def __init__(self, exercise, folder="."):
        self.module = Path(check.EXERCISES[exercise].file).stem
        text = (HERE / folder / f"{self.module}.py").read_text()
        self.definitions, imports = {}, []
        for node in ast.parse(text).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports.append(ast.unparse(node))
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.definitions[node.name] = source_of(node, text)
        self.imports = "\n".join(imports)

    def take(self, names):
        """The sources from the first to the last of names, without those taken before."""
        left = list(self.definitions)
        places = sorted(map(left.index, names))
        return [self.definitions.pop(name) for name in left[places[0] : places[-1] + 1]] if places else []


def parts_of(text):
    """Yields (language, code) of a page's blocks, ("details", text) of folded parts, (None, text) of paragraphs."""
    for part in re.split(r"(<details>.*?</details>|^```\w*\n.*?^```$)", text, flags=re.M | re.S):
        fence = re.match(r"```(\w*)\n(.*)\n```$", part, flags=re.S)
        if fence:
            yield fence.groups()
        elif part.startswith("<details>"):
            yield "details", part
        else:
            yield from ((None, paragraph) for paragraph in re.split(r"\n\n+", part.strip("\n")) if paragraph)


def cells_of(exercise):
    """[(kind, source)] of a notebook, where kind is "markdown", "code", or "blank" for code that may raise."""
    stub, tasks = Stub(exercise), check.EXERCISES[exercise].checks.TASKS
    page, names = f"{stub.module}.md", list(stub.definitions)
    title, _, text = (HERE / page).read_text().partition("\n")
    cells, asked = [("markdown", f"{title}\n\n{USE.format(page=page)}")], []
    for language, content in [*parts_of(text), (None, "## ")]:
        if language or content.startswith("## "):  # after the paragraphs with the tasks
            cells += [("code", source) for source in stub.take(asked)]
            calls = "\n".join(f'check("{name}")' for name in asked if name in tasks)
            cells += [("code", calls)] if calls else []
            asked = []
        check_of = language == "sh" and re.fullmatch(
            rf"python exercises/check.py {exercise}(?: --task (\w+))?(?: --(time|show))?", content
        )
        if language == "sh" and re.match(r"\. \S+/activate$", content):
            cells.append(("code", SETUP.format(exercise=exercise, imports=stub.imports)))
        elif check_of:
            task, extra = check_of.groups()
            words = [f'"{task}"'] * bool(task) + [f"{extra}=True"] * bool(extra)
            cells += [("code", f"check({', '.join(words)})")] * bool(extra or not task)  # each task has its own check
        elif language == "sh":
            cells.append(("code", f"%%terminal\n{content}"))
        elif language == "python":
            code = re.sub(rf"(?m)^from exercises(\.{stub.module} import .*| import {stub.module}\b.*)\n+", "", content)
            code = code.replace(f"{stub.module}.", "")  # the notebook defines it itself
            cells.append(("blank" if any(re.search(rf"\b{name}\b", code) for name in names) else "code", code))
        elif language in (None, "details"):
            asks = re.search(r"\*\*(?:Write|Mend)\*\*(.*)", content, flags=re.S)
            asked += [name for name in re.findall(r"`(\w+)`", asks[1]) if name in stub.definitions] if asks else []
            cells.append(("markdown", re.sub(r"\]\((?!https?:|#)", "](../", content)))
        elif language != "sh":
            cells.append(("markdown", f"```{language}\n{content}\n```"))
    if stub.definitions:
        raise llama.UsageError(f"{page} asks nowhere to **Write** {', '.join(stub.definitions)}")
    return joined(cells[:-1])


def joined(cells):
    """Joins the Markdown cells of each section."""
    result = cells[:1]
    for kind, source in cells[1:]:
        if kind == result[-1][0] == "markdown" and not source.startswith("## "):
            result[-1] = kind, f"{result[-1][1]}\n\n{source}"
        else:
            result.append((kind, source))
    return result


def notebook(exercise):
    """The notebook of an exercise, as JSON."""
    import nbformat  # `make test` and `make notebooks` install it

    made = nbformat.v4.new_notebook()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for number, (kind, source) in enumerate(cells_of(exercise)):
        new = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        metadata = {"tags": ["raises-exception"]} if kind == "blank" else {}  # as long as its functions are incomplete
        made.cells.append(new(source, id=f"{exercise}-{number}", metadata=metadata))
    nbformat.validate(made)
    return nbformat.writes(made) + "\n"


def published():
    """{path: text} of all files to write."""
    pictures = {HERE / "pictures" / f"{name}.svg": draw() for name, draw in drawings.DRAWINGS.items()}
    names = {name: Path(exercise.file).with_suffix(".ipynb") for name, exercise in check.EXERCISES.items()}
    return pictures | {HERE / "notebooks" / path: notebook(name) for name, path in names.items()}


@program("generate.py")
def main(argv):
    parser = Parser("generate.py", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    try:
        texts = published()
    except ModuleNotFoundError as error:
        raise llama.UsageError(f"{error.name} is not installed: make notebooks, or pip install {error.name}") from error
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        print(f"{path.relative_to(HERE.parent)} {'is out of date' if options.check else 'written'}")
        if not options.check:
            with replacing(path) as file:
                file.write_text(texts[path], encoding="utf-8")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
