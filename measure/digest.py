"""Digests of code, by which a page can tell whether what a result measured has changed since.

A digest covers definitions of the project and all that they refer to, but no comments, docstrings and blank lines.
"""

import ast
import functools
import hashlib
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What measured code refers to and does not depend on: the command line and what is printed.
LEFT_OUT = {"Config", "BUGS", "STAGES", "UsageError", "Unavailable", "Heartbeat", "describe", "companion"}


class Module:
    """The definitions at the top of a file, {name: node}, and what its imports refer to, {name: "module.name"}."""

    def __init__(self, path):
        text = path.read_text(encoding="utf-8")
        tree, self.lines = ast.parse(text), text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                self.lines[row - 1] = self.lines[row - 1][:column]
        self.definitions, self.imports = {}, {}
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names = [getattr(n, "name", getattr(n, "id", None)) for t in targets for n in getattr(t, "elts", [t])]
            self.definitions |= dict.fromkeys(filter(None, names), node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                self.imports |= {alias.asname or alias.name: prefix + alias.name for alias in node.names}

    def code(self, name):
        """The lines of a definition."""
        node = self.definitions[name]
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        left_out = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner, clean=False):
                left_out.update(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
        rows = (row for row in range(first, node.end_lineno + 1) if row not in left_out)
        return "\n".join(filter(None, (self.lines[row - 1].rstrip() for row in rows)))

    def references(self, name):
        """What a definition refers to, as "module.name" of this module or of an imported one."""
        for node in ast.walk(self.definitions[name]):
            attributes = []
            while isinstance(node, ast.Attribute):
                attributes.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name):
                yield ".".join([self.imports.get(node.id, node.id), *attributes])


@functools.cache
def module(name):
    """The Module of this name, or None if it is not the project's."""
    path = ROOT / name.replace(".", "/")
    paths = path.with_suffix(".py"), path / "__init__.py"
    return next((Module(path) for path in paths if path.is_file()), None)


def place(reference, origin):
    """(module, definition) that a reference in the module origin means, or None."""
    parts = reference.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if found := module(".".join(parts[:count])):
            if parts[count] in found.imports:
                return place(found.imports[parts[count]], None)
            return (".".join(parts[:count]), parts[count]) if parts[count] in found.definitions else None
    return (origin, parts[0]) if origin and parts[0] in module(origin).definitions else None


@functools.cache
def neighbours(where, name):
    """{(module, definition)} that a definition refers to."""
    found = {place(reference, where) for reference in set(module(where).references(name))}
    return {definition for definition in found - {None} if definition[1] not in LEFT_OUT}


def covered(names):
    """{(module, definition)}: those with these names, "module.name", and all that they refer to. KeyError: no such."""
    pending = [place(name, None) for name in names]
    if None in pending:
        raise KeyError(names[pending.index(None)])
    found = set()
    while pending:
        here = pending.pop()
        if here not in found:
            found.add(here)
            pending += neighbours(*here)
    return found


@functools.cache
def digest_of(names):
    """The digest of covered(names), a tuple; 12 hexadecimal digits."""
    texts = (f"{where}.{name}\n{module(where).code(name)}\n" for where, name in sorted(covered(names)))
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def has_changed(result):
    """Whether the code that a result measured has changed since, or is not known."""
    try:
        return digest_of(tuple(result.get("measured", ["before there were digests"]))) != result.get("digest")
    except KeyError:
        return True
