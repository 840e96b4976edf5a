"""Settings of a script: the defaults of a dataclass, then config files and --key=value, in the order given.

    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False

A config file consists of `key = literal` lines. It is parsed, never executed.
"""

import ast
import dataclasses
import difflib
import math
import sys
import textwrap
from pathlib import Path

from tiny_llama_v3 import UsageError

NOT_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)  # what ast.literal_eval may raise
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


def configure(settings_class, argv, description):
    """An instance of settings_class, and {key: value} of what argv set."""
    if any(argument in ("-h", "--help") for argument in argv):
        print_help(settings_class, description)
        raise SystemExit(0)
    fields = {field.name: field for field in dataclasses.fields(settings_class)}
    given = {}
    try:
        for argument in argv:
            given |= (read_argument if argument.startswith("-") else read_file)(argument, fields)
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


def read_file(name, fields):
    path = Path(name)
    try:
        body = ast.parse(path.read_text(encoding="utf-8"), name).body
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {name} cannot be read ({error}): options are written --key=value") from error
    except NOT_LITERAL as error:
        line = getattr(error, "lineno", "?")
        raise UsageError(f"{name}:{line}: not Python: {getattr(error, 'msg', error)}") from error
    given = {}
    for statement in body:
        place = f"{name}:{statement.lineno}"
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):
                continue  # a docstring
            case ast.Assign(targets=[ast.Name(id=key)], value=expression):
                field = known_field(key, fields, place)
                try:
                    value = ast.literal_eval(expression)
                except NOT_LITERAL:
                    source = ast.unparse(expression)
                    raise UsageError(f"{place}: {key} = {source} is not a literal: write the value itself") from None
                given[key] = checked(value, field, f"{place}: {key}")
            case _:
                raise UsageError(f"{place}: only lines of the form key = literal are read, and nothing is executed")
    return given


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
