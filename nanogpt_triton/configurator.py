"""Settings of a script: the defaults of a dataclass, then config files and --key=value, in the order given.

    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False

A config file has lines `key = value`: a literal, arithmetic on literals, or text with str(time.time()) in it. It is
parsed, never executed. For a script of nanoGPT's, which executes this file, it sets global variables in the same way.
"""

import ast
import dataclasses
import difflib
import math
import operator
import sys
import textwrap
import time
from pathlib import Path

from measure.command_line import exit_code_of
from tiny_llama_v3 import UsageError

# What ast.literal_eval and arithmetic may raise
NOT_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, ArithmeticError)
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
LARGEST = 2**31 - 1
LONGEST = 1000


def setting(default, help, at_least=None, at_most=None, choices=None):
    """A dataclass field with what --help says about it and which values it takes; of a text, how many characters."""
    if type(default) is str and at_least is None:
        at_least = int(default != "")
    if at_most is None:
        at_most = {int: LARGEST, str: LONGEST}.get(type(default))
    metadata = {"help": help, "at_least": at_least, "at_most": at_most, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def configure(settings_class, argv, description, ignored=()):
    """A settings_class, and {key: value} of what argv set. Config files may have keys of ignored (None: any)."""
    if any(argument in ("-h", "--help") for argument in argv):
        print_help(settings_class, description)
        raise SystemExit(0)
    fields = {field.name: field for field in dataclasses.fields(settings_class)}
    given = {}
    try:
        for argument in argv:
            is_file = not argument.startswith("-")
            given |= read_file(argument, fields, ignored) if is_file else read_argument(argument, fields)
    except UsageError as error:
        text = str(error)
        raise UsageError(text if len(text) < LONGEST else f"{text[:300]} ... {text[-300:]}") from error
    return settings_class(**given), given


def read_argument(argument, fields):
    key, equals, text = argument.removeprefix("--").partition("=")
    field = known_field(key, fields, argument) if argument.startswith("--") else None
    if field is None:
        raise UsageError(f"{argument}: write --key=value, or the name of a config file")
    if not equals:
        if field.type is not bool:
            raise UsageError(f"{argument} lacks a value: write --{key}={field.default}")
        return {key: True}
    if field.type is str and text[:1] not in "'\"" or text == "":
        value = text
    else:
        try:
            value = ast.literal_eval(text)
        except NOT_LITERAL:
            value = text
    return {key: checked(value, field, argument)}


def read_file(name, fields, ignored):
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text, name).body
    except (OSError, UnicodeDecodeError) as error:
        ours = Path(__file__).parent
        remedy = f"change to the folder {ours}" if (ours / name).exists() else "options are written --key=value"
        raise UsageError(f"config file {name} cannot be read ({error}): {remedy}") from error
    except NOT_LITERAL as error:
        line = getattr(error, "lineno", "?")
        raise UsageError(f"{name}:{line}: not Python: {getattr(error, 'msg', error)}") from error
    given = {}
    for statement in body:
        place = f"{name}:{statement.lineno}"
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):
                continue  # a docstring
            case ast.Import(names=names) if all(alias.name in sys.stdlib_module_names for alias in names):
                continue  # which sets nothing, and is not carried out
            case ast.Assign(targets=[ast.Name(id=key)]) if key not in fields and (ignored is None or key in ignored):
                continue
            case ast.Assign(targets=[ast.Name(id=key)], value=expression):
                field = known_field(key, fields, place)
                try:
                    value = folded(expression)
                except NOT_LITERAL:
                    source = " ".join(ast.get_source_segment(text, expression).split())
                    reason = "cannot be computed from literals alone: write the value itself"
                    raise UsageError(f"{place}: {key} = {source} {reason}") from None
                given[key] = checked(value, field, f"{place}: {key}")
            case _:
                raise UsageError(f"{place}: only lines key = literal are read, none is executed: take this one out")
    return given


def folded(expression):
    """The value of literals, of arithmetic on them, and of str(time.time()); one of NOT_LITERAL for all else."""
    match expression:
        case ast.BinOp(left=left, op=op, right=right):
            left, right = folded(left), folded(right)
            texts = isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add)
            numbers = all(isinstance(side, int | float) and abs(side) <= sys.maxsize for side in (left, right))
            if type(op) not in OPERATORS or not texts and (not numbers or isinstance(op, ast.Pow) and abs(right) > 100):
                raise ValueError  # other types, or a number whose size would exhaust the machine
            return OPERATORS[type(op)](left, right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -folded(operand)
        case ast.Call() if ast.unparse(expression) == "str(time.time())":
            return str(time.time())
    return ast.literal_eval(expression)


def known_field(key, fields, place):
    if key in fields:
        return fields[key]
    nearest = difflib.get_close_matches(key.replace("-", "_"), fields, n=1, cutoff=0.5)
    remedy = f"did you mean {nearest[0]}?" if nearest else "--help lists the keys"
    raise UsageError(f"{place}: there is no key {key}: {remedy}")


def checked(value, field, place):
    """value, if its type and range suit the field."""
    if field.type is float and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is not field.type or value in (math.inf, -math.inf):
        wanted = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}[field.type]
        raise UsageError(f"{place}: {value!r} is not {wanted}, such as {field.default!r}")
    choices, at_least, at_most = (field.metadata[name] for name in ("choices", "at_least", "at_most"))
    if choices and value not in choices:
        nearest = difflib.get_close_matches(value, choices, n=1)
        guess = f" ({nearest[0]}?)" if nearest else ""
        raise UsageError(f"{place}: {value!r} is none of {', '.join(choices)}{guess}")
    if field.type is str and not at_least <= len(value) <= at_most:
        raise UsageError(f"{place}: there are {len(value)} characters: give {at_least} to {at_most}")
    if field.type is str:
        return value
    if at_least is not None and value < at_least:
        raise UsageError(f"{place}: {value} is below {at_least}, the least possible")
    if at_most is not None and value > at_most:
        raise UsageError(f"{place}: {value} is above {at_most}, the most possible")
    return value


def print_help(settings_class, description):
    print(f"{description.strip()}\n\nKeys and defaults:")
    for field in dataclasses.fields(settings_class):
        choices = field.metadata["choices"]
        text = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
        print(textwrap.fill(f"--{field.name}={field.default}", initial_indent="  "))
        print(textwrap.fill(text, 100, initial_indent="        ", subsequent_indent="        "))


def configure_script(variables, argv):
    """Sets those global variables of a script that are plain values; if it fails, one line and exit code 2."""
    fields = [
        (name, type(value), setting(value, ""))
        for name, value in variables.items()
        if type(value) in (bool, int, float, str) and name.islower() and not name.startswith("_")
    ]
    settings_class = dataclasses.make_dataclass("Settings", fields)
    code = exit_code_of(lambda: variables.update(configure(settings_class, argv[1:], "", None)[1]), Path(argv[0]).name)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":  # exec(open("configurator.py").read()), as in nanoGPT's scripts
    configure_script(globals(), sys.argv)
