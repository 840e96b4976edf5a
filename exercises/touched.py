"""Draw which elements of its tensors each program of a kernel touches, and by which lanes."""

from contextlib import suppress
from unittest import mock

import numpy as np

from exercises.checks.memory import Watch, addresses
from measure.drawing import INK, MUTED, SHEET_WIDTH, TINTS, Sheet

LARGEST, SMALLEST, READABLE = 44, 3, 34  # widths of a cell; from READABLE on it has numbers in it
COLUMNS, MOST_ROWS = 12, 24  # of a tensor of one dimension; of any


def watched(check, exercise):
    """Return the Watch of the first launch in a check, or None; whether the check passes does not matter."""
    # A wrong kernel is drawn too: the picture may show what is wrong with it.
    with mock.patch.object(Watch, "kept", []) as kept, suppress(Exception):
        check(exercise)
    return next((watch for watch in kept if watch.accesses), None)


def element(sheet, x, y, size, offset, owners, exists):
    """Draw an element with the programs that touch it, {program: lane}; dashed if there is none, ! if no element."""
    # An element that several programs touch has a strip of each.
    several = sorted(owners)[:4]
    for strip, program in enumerate(several):
        width = size / len(several)
        sheet.box(x + width * strip, y, width, size, TINTS[program % 4])
    if not (exists and owners):
        sheet.box(x, y, size, size)
    outside = "!" if owners and not exists else ""
    if size >= READABLE:
        middle, lanes = x + size / 2, {*owners.values()}
        sheet.text(middle, y + size / 2, f"{offset}{outside}", "center", INK if owners else MUTED)
        if len(lanes) == 1:
            sheet.text(middle, y + size - 7, *lanes, "center", MUTED, size=12)
    elif outside and size >= 12:
        sheet.text(x + size / 2, y + size / 2 + 5, outside, "center")


def panel(sheet, top, tensor, words, accesses):
    """Draw what one load or store touches of a tensor, in rows of the tensor. Return its lower edge."""
    owners = {}  # {offset: {program: lane}}
    for program, offsets, lanes, _ in accesses:
        for offset, lane in zip(offsets.tolist(), lanes.tolist(), strict=True):
            owners.setdefault(offset, {})[program] = lane
    own = {*((addresses(tensor) - tensor.data_ptr()) // tensor.element_size()).tolist()}
    last, columns = max(own), max(tensor.stride())
    # What a mask leaves out lies behind the end, or in a matrix within the next row.
    if tensor.ndim == 1:
        masked = np.concatenate([left_out for *_, left_out in accesses])
        last = int(max(last, *masked[masked <= last + COLUMNS], 0))
        columns = min(last + 1, COLUMNS)
    rows = min(last // columns + 1, MOST_ROWS)
    size = min(LARGEST, max(SMALLEST, (SHEET_WIDTH - 24) // columns))
    if rows * columns <= last:
        words += f", rows 0 to {rows - 1}"
    if owners.keys() - own:
        words += " and OUTSIDE of it (!)"
    sheet.text(12, top + 16, words)
    for offset in range(min(rows * columns, last + 1)):
        row, column = divmod(offset, columns)
        x, y = 12 + size * column, top + 26 + size * row
        element(sheet, x, y, size, offset, owners.get(offset, {}), offset in own)
    return top + 26 + size * rows + 18


def picture(watch, task):
    """Return the SVG of all loads and stores of a launch."""
    sheet, top = Sheet(task), 84
    sheet.text(12, 48, "each program has a color;\na cell shows the offset and, below it, the lane", color=MUTED)
    for (line, verb, name), accesses in sorted(watch.accesses.items()):
        top = panel(sheet, top, watch.tensors[name], f"line {line} {verb} {name}", accesses)
    return sheet.svg(top)
