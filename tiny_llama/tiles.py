"""Tiles of attention of your own: the file that the variable TINY_LLAMA_TILES names.

    {
     "device": "AMD Instinct MI300X",
     "arch": "gfx942",
     "measured": "2030-01-02",
     "attention": {"half 64 forward": [128, 64, 4, 2]}
    }

A key of "attention" is the operands (half, tf32, ieee), the dimensions of a head as a power of two, and one of PASSES;
its value is BLOCK_M, BLOCK_N, warps and stages, as in ATTENTION_TILES. What the file does not name comes from there.
`python -m benchmarks.tiles --write FILE` writes such a file for the card that it runs on.
"""

import json
import os

import tiny_llama_v3 as llama
from tiny_llama.files import open_input, printable

VARIABLE = "TINY_LLAMA_TILES"
KEYS = {  # what each word of a key can be
    "operands": ("half", "tf32", "ieee"),
    "head": ("16", "32", "64", "128"),
    "pass": llama.PASSES,
}
BOUNDS = {"BLOCK_M": (16, 256), "BLOCK_N": (16, 256), "warps": (1, 16), "stages": (1, 8)}
REMEDY = f"mend it, or measure again (python -m benchmarks.tiles), or unset {VARIABLE}"


def read(path, gpu):
    """Return the tiles of a file, {key: [BLOCK_M, BLOCK_N, warps, stages]}; UsageError unless all of it is right.

    gpu is the Gpu that it must have been made for.
    """
    try:
        with open_input(path, most_bytes=2**20) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"no JSON: {error}"
        raise wrong(path, "", f"cannot be read ({reason})") from error
    if not isinstance(content, dict):
        raise wrong(path, "", "is no object of JSON")
    names = "device", "arch", "measured", "attention"
    for name in [*content, *names]:
        if name not in names:
            raise wrong(path, name, f"is unknown, give {', '.join(names)}")
        kind = dict if name == "attention" else str
        if not isinstance(content.get(name), kind):
            expected = "an object" if kind is dict else "a text"
            raise wrong(path, name, f"is {json.dumps(content.get(name))}, and should be {expected}")
    made_for, here = (content["device"], content["arch"]), (gpu.name, gpu.arch)
    if made_for != here:
        raise wrong(path, "device", "is {} ({}), and this is {} ({})".format(*made_for, *here))
    for key, tile in content["attention"].items():
        validate(path, key, tile)
    return content["attention"]


def validate(path, key, tile):
    """Raise UsageError for an entry of "attention" that is no key of a tile, or no tile."""
    name, words = f"attention: {key}", key.split(" ")
    if len(words) != len(KEYS):
        raise wrong(path, name, f"is no key, give {', '.join(KEYS)}, as in half 64 forward")
    for word, (part, known) in zip(words, KEYS.items(), strict=True):
        if word not in known:
            raise wrong(path, name, f"has the {part} {word!r}, give one of {', '.join(known)}")
    if not isinstance(tile, list) or len(tile) != len(BOUNDS) or any(type(value) is not int for value in tile):
        raise wrong(path, name, f"is {json.dumps(tile)[:60]}, give whole numbers for {', '.join(BOUNDS)}")
    for value, (part, (least, most)) in zip(tile, BOUNDS.items(), strict=True):
        if not least <= value <= most:
            raise wrong(path, name, f"has {part} {value}, give {least} to {most}")
        if part != "stages" and value & (value - 1):
            raise wrong(path, name, f"has {part} {value}, give a power of two")


def wrong(path, name, reason):
    """Return the UsageError about a file, or about what is called so in it."""
    place = f"{VARIABLE}={path}" + (f": {name}" if name else "")
    return llama.UsageError(printable(f"{place} {reason}: {REMEDY}"))


def describe(device_type):
    """Return the line that a run prints which uses such a file."""
    tiles = (f"{key} {tile}" for key, tile in llama.own_tiles(device_type).items())
    return printable(f"Tiles of {os.environ[VARIABLE]}: {'; '.join(tiles)}")
