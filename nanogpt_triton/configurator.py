"""Settings of a script: the defaults of a dataclass, then config files and --key=value, in the order given.

    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False

A config file is a Python program. It is executed, as nanoGPT does: it sees the settings so far as variables, and those
that it assigns count. nanoGPT's own scripts execute this file, which sets their global variables in the same way.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import sys
import typing
from pathlib import Path

from measure.command_line import UsageError, exit_code_of
from nanogpt_triton.dataset import read_text, reading


class Count(int):
    """The type of a setting that is at least 1."""


class Share(float):
    """The type of a setting from 0 to nearly 1."""


# PyTorch's sizes and seeds have 64 bits, and sizes are multiplied. Infinity and NaN are within no limits.
LIMITS = {Count: (1, 2**31 - 1), Share: (0, 0.9999), int: (0, 2**63 - 1), float: (0, sys.float_info.max)}


def configure(settings_class, argv, description):
    """Return a settings_class with what the command line sets."""
    if {"-h", "--help"} & set(argv):
        print(description or "")  # python -OO has none
        for base in settings_class.__mro__[:-1]:
            # The comments of the fields say what they are for.
            print(re.sub(r"^ *(\w+): .*? = ", r"    --\1=", inspect.getsource(base), flags=re.M))
        raise SystemExit(0)
    fields = {field.name: field for field in dataclasses.fields(settings_class)}
    choices = {name: typing.get_args(field.type) for name, field in fields.items()}
    given = read({name: field.default for name, field in fields.items()}, argv, choices)
    for key, value in given.items():
        limits = LIMITS.get(fields[key].type)
        if limits and not limits[0] <= value <= limits[1]:
            raise UsageError(f"{key}={value} is not from {limits[0]} to {limits[1]}")
    return settings_class(**given)


def read(defaults, argv, choices=None):
    """Print and return {key: value} of what the command line sets.

    Each value is one of its choices, {key: values}, or where there are none of the type of its default.
    """
    given = {}
    for argument in argv:
        is_file = not argument.startswith("-")
        assigned = execute(argument, defaults | given) if is_file else parse(argument)
        for key, value in assigned.items():
            if key not in defaults:
                # A file may have variables of its own, but one that resembles a key is a mistyped key.
                nearest = difflib.get_close_matches(key.replace("-", "_"), defaults, n=1, cutoff=0.8)
                if not is_file or nearest and nearest[0] not in assigned:
                    remedy = f"did you mean {nearest[0]}?" if nearest else "--help lists the keys"
                    raise UsageError(f"{argument}: there is no key {key}: {remedy}")
                continue
            kind = type(defaults[key])
            if kind is float and type(value) is int:
                with reading(argument, f"give a smaller {key}"):
                    value = float(value)
            values = (choices or {}).get(key)
            if not (repr(value) in map(repr, values) if values else type(value) is kind):  # 1 == True
                if argument == f"--{key}":  # the value may follow after a space
                    raise UsageError(f"{argument} has no value: write {argument}=VALUE, such as {defaults[key]!r}")
                if values:
                    raise UsageError(f"{key}={value} is none of {', '.join(map(str, values))}")
                raise UsageError(f"{argument}: {key} = {value!r} is no {kind.__name__}, such as {defaults[key]!r}")
            print(f"overriding: {key} = {value!r}")
            given[key] = value
    return given


def parse(argument):
    """Return {key: value} of --key=value; --key alone means True."""
    key, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--"):
        raise UsageError(f"{argument}: write --key=value, or the name of a config file")
    try:
        return {key: ast.literal_eval(text) if equals else True}
    except Exception:  # a text without quotes
        return {key: text}


def execute(name, variables):
    """Run a config file. Return {name: value} of the variables that it has made or changed."""
    before, source = dict(variables), read_text(name)
    with reading(name, "mend it, or give another"):  # whatever it raises
        exec(compile(source, name, "exec"), variables)
    return {key: value for key, value in variables.items() if key not in before or value is not before[key]}


def configure_script(variables, argv):
    """Set those global variables of a script that are plain values. If that fails, end with one line and code 2."""
    plain = {key: value for key, value in variables.items() if type(value) in (bool, int, float, str) and key.islower()}
    code = exit_code_of(lambda: variables.update(read(plain, argv[1:])), Path(argv[0]).name)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":  # exec(open("configurator.py").read()), as in nanoGPT's scripts
    configure_script(globals(), sys.argv)
