"""Extracts the lines of tiny_llama_v3.py that implement a flag, which are marked with BUG."""

import ast
import functools
import inspect
import re
import textwrap
from typing import NamedTuple

import tiny_llama_v3 as llama

MARKED = re.compile(r"\bBUG (\w+)")


class Excerpt(NamedTuple):
    """Some lines of the script."""

    where: str  # the function that contains them
    first: int  # the number of their first line
    lines: list  # without their common indentation


@functools.cache
def script():
    """(the lines of the script, its statements in the order of their lines)."""
    text = inspect.getsource(llama)
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return text.splitlines(), sorted(statements, key=first_line)


def first_line(statement):
    """The first line of a statement, decorators included."""
    return min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))])


def holds(statement, number):
    return first_line(statement) <= number <= statement.end_lineno


def marked_statement(number):
    """The statement to which a mark in this line refers: its own, the function of a docstring, or the next one."""
    around = [statement for statement in script()[1] if holds(statement, number)]  # the outermost first
    innermost = around[-1]
    if isinstance(innermost, ast.Expr):
        return around[-2]
    if isinstance(innermost, (ast.FunctionDef, ast.ClassDef)):
        return next(statement for statement in innermost.body if statement.lineno > number)
    return innermost


def name_of_place(number):
    """The class and function that contain a line."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return ".".join(node.name for node in script()[1] if isinstance(node, kinds) and holds(node, number))


def excerpt(first, last):
    lines = textwrap.dedent("\n".join(script()[0][first - 1 : last])).splitlines()
    return Excerpt(name_of_place(last), first, lines)


def excerpts(flag):
    """Yields the Excerpts with marks of one of llama.BUGS, in their order."""
    for number, line in enumerate(script()[0], 1):
        mark = MARKED.search(line)
        if mark and mark[1] == flag:
            statement = marked_statement(number)
            yield excerpt(min(number, first_line(statement)), statement.end_lineno)


def excerpt_of(function):
    """The Excerpt of a whole function or class."""
    lines, first = inspect.getsourcelines(function)
    return excerpt(first, first + len(lines) - 1)
