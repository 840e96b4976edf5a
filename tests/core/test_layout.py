"""The tree: which part may import which, what is described, and what every test has."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, COMPANIONS = "tiny_llama_v3", "tiny_llama"
BELOW = {SCRIPT, COMPANIONS, "measure"}
MAY_IMPORT = {  # a folder, or a module at the top: what of the project it may import beside itself
    SCRIPT: set(),
    COMPANIONS: {SCRIPT},
    "measure": {SCRIPT, COMPANIONS},
    "nanogpt_triton": BELOW,
    "profilers": BELOW,
    "offline": BELOW | {"nanogpt_triton"},  # whose kernels are compiled as well
    "benchmarks": BELOW | {"nanogpt_triton", "profilers", "offline"},
    "run_triton_profiling": BELOW | {"benchmarks", "offline"},
    "examples": BELOW | {"nanogpt_triton", "benchmarks"},
    "exercises": BELOW | {"nanogpt_triton", "profilers", "offline", "benchmarks"},
}
# What people start by its path, what starts another's program so, and what writes notebooks.
MAY_EDIT_PATH = """
tiny_llama_v3.py nanogpt_triton/train.py nanogpt_triton/sample.py nanogpt_triton/model.py
nanogpt_triton/kernels/__init__.py exercises/check.py exercises/generate.py profilers/host_profile.py
""".split()
SLOW_TESTS = """
tests/core/test_layout.py::test_every_test_has_a_case_that_is_not_slow
tests/offline/test_gate.py::test_a_spoiled_tile_is_named
tests/offline/test_gate.py::test_arguments_are_those_of_a_launch
tests/offline/test_gate.py::test_every_kernel_passes_on_every_architecture
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
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in TREES}


def imports_of(tree):
    """The modules that a module imports, wherever it does so: (line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            rest = len(modules) < len(node.names)
            yield from ((node.lineno, name) for name in [*sorted(modules), *[node.module] * rest])


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


def test_imports_point_down():
    wrong = []
    for name, tree in TREES.items():
        allowed = MAY_IMPORT[part_of(name)] | {part_of(name)}
        for line, imported in imports_of(tree):
            part = imported.split(".")[0]
            if part in MAY_IMPORT and part not in allowed:
                wrong.append(f"{name}:{line} imports {imported}")
    assert wrong == []


def test_imports_go_in_no_circle():
    graph = {module: {name for _, name in imports_of(TREES[file])} & MODULES.keys() for module, file in MODULES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules


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
    "exercises/check.py": 1,  # a trace of a judge that hangs, for its parent
    "profilers/record.py": 1,  # a part of a recording, which is marked until it is complete
    "profilers/recording.py": 3,  # the log, and that mark
    "tiny_llama/distributed.py": 1,  # os.devnull
    "tiny_llama/profiler.py": 1,  # a table beside a trace, in a folder that an error names
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
        is_safe |= any(re.search(r"\b(replacing|TemporaryDirectory)\(", ast.unparse(item)) for item in node.items)
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
    is_slow = re.compile(r"^pytestmark = .*\bslow\b", re.M)
    slow_files = {name for name in PATHS if name.startswith("tests/") and is_slow.search(PATHS[name].read_text())}
    slow = {function for function in functions - fast if function.split("::")[0] not in slow_files}
    assert len(functions) > 500 and slow == {*SLOW_TESTS}
