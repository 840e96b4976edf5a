"""The folders know each other in one direction only, and programs find them without editing sys.path."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tiny_llama_v3"
MAY_IMPORT = {  # a folder, or a module at the top: what of the project it may know beside itself
    SCRIPT: set(),
    "nanogpt_triton": {SCRIPT},
    "measure": {SCRIPT},
    "profiling": {SCRIPT, "measure", "nanogpt_triton"},  # whose kernels the compile report takes in
    "benchmarks": {SCRIPT, "measure", "nanogpt_triton", "profiling"},
    "run_triton_profiling": {SCRIPT, "measure", "benchmarks", "profiling"},
    "exercises": {SCRIPT, "measure", "nanogpt_triton", "profiling", "benchmarks"},
}
MAY_EDIT_PATH = {  # what people start by its path, and what starts another's program as if by its path
    "nanogpt_triton/train.py", "nanogpt_triton/sample.py", "exercises/check.py", "profiling/host_profile.py",
}  # fmt: skip


def is_ours(path):
    return not path.is_symlink() and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)


FILES = sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if is_ours(p) and "tests" not in p.parts)


def imports_of(tree):
    """The top-level names that a module imports, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module.split(".")[0]


def edits_of_sys_path(tree):
    """The lines that change sys.path, by a method of its or by assignment."""
    for node in ast.walk(tree):
        targets = [node.func.value] if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else []
        targets += node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            target = target.value if isinstance(target, ast.Subscript) else target
            if ast.unparse(target) == "sys.path":
                yield node.lineno


@pytest.mark.parametrize("file", FILES)
def test_arrows_point_down(file):
    room = file.split("/")[0].removesuffix(".py")
    known = set(imports_of(ast.parse((ROOT / file).read_text()))) & MAY_IMPORT.keys()
    assert known <= MAY_IMPORT[room] | {room}, f"{file} may not know {known - MAY_IMPORT[room]}"


def test_sys_path_is_edited_only_where_a_file_is_started_by_its_path():
    edits = {file: list(edits_of_sys_path(ast.parse((ROOT / file).read_text()))) for file in FILES}
    allowed = MAY_EDIT_PATH | {file for file in FILES if file.startswith("nanogpt_triton/data/")}
    assert {file: lines for file, lines in edits.items() if lines and (file not in allowed or len(lines) > 1)} == {}


def test_every_folder_of_modules_says_what_it_is():
    for folder in {(ROOT / file).parent for file in FILES} - {ROOT}:
        if (folder / "__init__.py").exists():
            assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder
