"""The tree: which part may import which, what is described, and what every test has."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, COMPANIONS = "tiny_llama_v3", "tiny_llama"
PACKAGES = "tiny_llama measure nanogpt_triton profilers offline benchmarks examples exercises".split()
# What import-linter does not see, modules at the top and folders without __init__.py: the parts that they may import.
UNSEEN = {
    f"{SCRIPT}.py": "",
    "run_triton_profiling.py": f"{SCRIPT} tiny_llama measure offline benchmarks",
    "exercises/solutions/": "",
    "nanogpt_triton/config/": "",
    "nanogpt_triton/data/": "measure nanogpt_triton",
}
# What people start by its path, what starts or loads another's program so, and what writes notebooks.
MAY_EDIT_PATH = """
tiny_llama_v3.py tiny_llama/audit.py nanogpt_triton/train.py nanogpt_triton/sample.py nanogpt_triton/model.py
nanogpt_triton/kernels/__init__.py exercises/check.py exercises/generate.py profilers/as_main.py
profilers/torch_profile.py
""".split()
SLOW_TESTS = """
tests/core/test_layout.py::test_every_test_has_a_case_that_is_not_slow
tests/examples/test_examples.py::test_the_real_model_itself
tests/offline/test_gate.py::test_a_spoiled_tile_is_named
tests/offline/test_gate.py::test_arguments_are_those_of_a_launch
tests/offline/test_gate.py::test_the_kernels_of_the_script_pass_on_every_architecture
tests/offline/test_gate.py::test_occupancy_is_the_compilers
tests/offline/test_gate.py::test_oldest_triton_compiles_too
tests/offline/test_gate.py::test_products_use_the_matrix_instructions_of_their_type
tests/workshop/test_notebooks.py::test_a_notebook_runs_with_the_solutions
tests/workshop/test_puzzles.py::test_the_solutions_compile_for_gpus_and_debugging_is_as_the_page_says
""".split()  # whatever the case


def files_in(folder):
    """Ours, sorted."""
    for path in sorted(folder.iterdir()):
        if not path.is_symlink() and not path.name.startswith(".") and path.name not in ("build", "__pycache__"):
            yield from files_in(path) if path.is_dir() else [path]


PATHS = {str(path.relative_to(ROOT)): path for path in files_in(ROOT)}
TREES = {
    name: ast.parse(path.read_text())
    for name, path in PATHS.items()
    if path.suffix == ".py" and not name.startswith("tests/")
}


def imports_of(tree):
    """Yield the names that a module imports, wherever it does so; a function's is that of its module, a dot and it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name):
    return name.split("/")[0].removesuffix(".py")


def undescribed(name, tree):
    """What is public and has no docstring: modules, and in script and companions what they and their classes define."""
    nodes = {name: tree}
    if part_of(name) in (SCRIPT, COMPANIONS):
        for node in tree.body:
            # A Function is described by what applies it.
            is_function = getattr(node, "name", "").endswith("Function")
            inner = node.body if isinstance(node, ast.ClassDef) and not is_function else []
            nodes |= {each.name: each for each in (node, *inner) if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    return [label for label, node in nodes.items() if not label.startswith("_") and not ast.get_docstring(node)]


def test_everything_public_of_script_and_companions_is_described():
    missing = {name: undescribed(name, tree) for name, tree in TREES.items()}
    assert not {name: labels for name, labels in missing.items() if labels}


def test_imports_point_down_and_go_in_no_circle(monkeypatch, capsys):
    """By the contracts of pyproject.toml, which name every package."""
    from importlinter import cli  # not at the top, so that the other tests run where it is missing

    monkeypatch.chdir(ROOT)
    code = cli.lint_imports(no_cache=True, no_logo=True)
    assert code == 0, capsys.readouterr().out
    assert {name.split("/")[0] for name in TREES if "/" in name} == {*PACKAGES}
    assert cli.use_cases.read_user_options().session_options["root_packages"] == PACKAGES


def unseen(path):
    """Return the key of UNSEEN that a path begins with, or None."""
    return next((key for key in UNSEEN if path.startswith(key)), None)


def test_what_import_linter_does_not_see_is_known():
    packages = {name.removesuffix("__init__.py") for name in TREES if name.endswith("/__init__.py")}
    folders = {name: {f"{folder}/" for folder in Path(name).parents} - {"./"} for name in TREES}
    hidden = [name for name, around in folders.items() if not around or around - packages]
    assert {unseen(name) for name in hidden} == UNSEEN.keys()


def test_what_import_linter_does_not_see_imports_down_too():
    """What imports others of them is imported by its neighbors only: there is no circle."""
    wrong = []
    for name, tree in TREES.items():
        own = unseen(name)
        allowed = UNSEEN[own].split() if own else [SCRIPT, *PACKAGES]
        for imported in imports_of(tree):
            part = imported.split(".")[0]
            if part in (SCRIPT, "run_triton_profiling", *PACKAGES):
                there = unseen(imported.replace(".", "/") + "/")
                if part not in allowed or there and UNSEEN[there] and there != own:
                    wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_the_script_imports_companions_in_one_place_only():
    text, names = PATHS[f"{SCRIPT}.py"].read_text(), set()
    assert text.count("import_module") == 1
    for node in ast.walk(TREES[f"{SCRIPT}.py"]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "companion":
            names.add(ast.literal_eval(node.args[0]))
    assert names and all(f"{COMPANIONS}/{name}.py" in PATHS for name in names), names


def test_sys_path_is_edited_only_where_a_file_is_started_by_its_path():
    edit = re.compile(r"^ *sys\.path(?:\.\w+\(|\[.*\] = | = )", re.M)
    edits = {name: edit.findall(PATHS[name].read_text()) for name in TREES}
    allowed = {file for file in TREES if file in MAY_EDIT_PATH or file.startswith("nanogpt_triton/data/")}
    assert not {file: found for file, found in edits.items() if len(found) > (file in allowed)}


def test_there_is_one_parser_for_the_script_and_one_for_all_other_programs():
    programs = [name for name in TREES if "ArgumentParser" in PATHS[name].read_text()]
    assert programs == ["measure/command_line.py", f"{SCRIPT}.py"]


WRITTEN_DIRECTLY = {  # the file: how often it writes in place
    "exercises/contest/judge.py": 2,  # into a scratch folder, which is removed
    "exercises/check.py": 1,  # a trace of a judge that hangs, for its parent
    "profilers/record.py": 1,  # a part of a recording, which is marked until it is complete
    "profilers/recording.py": 3,  # the log, and that mark
    "tiny_llama/distributed.py": 1,  # os.devnull
    "tiny_llama/kernel_table.py": 1,  # a table beside a trace, in a folder that an error names
}


def writes(node):
    """Whether a node of a syntax tree writes a file by its path."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    modes = [*node.args[:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return name in ("write_text", "write_bytes") or name == "open" and any(re.fullmatch("[wax]b?", t) for t in texts)


def unsafe_writes(node, is_safe=False):
    """Yield the nodes that write a file which nothing renames to its place or removes when it is incomplete."""
    if isinstance(node, ast.With):
        names = r"\b(replacing|replacing_files|TemporaryDirectory)\("
        is_safe |= any(re.search(names, ast.unparse(item)) for item in node.items)
    if writes(node) and not is_safe:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from unsafe_writes(child, is_safe)


def test_a_file_is_written_whole_or_not_at_all():
    """The script has its own: a scratch file beside the result."""
    written = {name: len([*unsafe_writes(tree)]) for name, tree in TREES.items()}
    assert {name: count for name, count in written.items() if count} == WRITTEN_DIRECTLY


LIST_CASES = """
import sys
import pytest

class Cases:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            print(item.nodeid.split("[")[0], item.get_closest_marker("slow") and "slow")

sys.exit(pytest.main(["-p", "no:cacheprovider", "-n", "0", "--collect-only"], [Cases()]))
"""


@pytest.mark.slow
def test_every_test_has_a_case_that_is_not_slow():
    """Except in files that say at their top that they are slow."""
    done = subprocess.run([sys.executable, "-c", LIST_CASES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    cases = {tuple(line.rsplit(" ", 1)) for line in done.stdout.splitlines() if line.endswith((" slow", " None"))}
    functions, fast = {function for function, _ in cases}, {function for function, mark in cases if mark == "None"}
    is_slow = re.compile(r"^pytestmark = [^#\n]*\bslow\b", re.M)
    slow_files = {name for name in PATHS if name.startswith("tests/") and is_slow.search(PATHS[name].read_text())}
    slow = {function for function in functions - fast if function.split("::")[0] not in slow_files}
    assert len(functions) > 500 and slow == {*SLOW_TESTS}
