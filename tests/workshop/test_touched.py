"""The picture of what a kernel touches has every element at its place, and what the mask leaves out."""

import numpy as np
import torch

from exercises import touched
from measure.drawing import Sheet


def cells(tensor, *accesses):
    """Return {what stands in a cell: its (x, y)} of accesses: (program, offsets, offsets that are left out)."""
    sheet = Sheet("")
    accesses = [(n, np.array(own), np.arange(len(own)), np.array(out, int)) for n, own, out in accesses]
    touched.panel(sheet, 0, tensor, "line 7 reads x", accesses)
    of_lanes = 12  # the size of their numbers
    return {text.get_text(): text.get_position() for text in sheet.axes.texts if text.get_size() != of_lanes}


def test_what_a_mask_leaves_out_behind_the_end_is_drawn():
    assert {*cells(torch.zeros(5), (0, [0, 1, 2, 3], []), (1, [4], [5, 6, 7]))} >= {*map(str, range(8))}


def test_rows_are_those_of_the_memory():
    """Of 3 columns in rows of 5, the last two are no elements, and the next row begins below the first element."""
    found = cells(torch.zeros(2, 5)[:, :3], (0, [0, 1, 2], []), (1, [5, 6], []))
    (x, y), (x_below, y_below) = found["0"], found["5"]
    assert x == x_below and y < y_below and found["6"][0] == found["1"][0]
