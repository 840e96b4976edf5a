"""Draw the pictures of the puzzles, from their solutions and checks, and of the online softmax."""

import functools
import math

import torch

import exercises.checks  # noqa: F401 (first: without a GPU it has Triton interpret)
from exercises import touched
from exercises.checks import puzzles
from exercises.solutions import puzzles as solutions
from exercises.solutions.exercise3_flash_attention import fold
from measure.drawing import MUTED, TINTS, Sheet


def touches(task):
    """Draw what the solution of a puzzle touches in the first case of its check."""
    watch = touched.watched(puzzles.TASKS[task], solutions)
    return touched.picture(watch, task, with_lines=False)


SCORES, VALUES = (1, 3, 5, 2, 0, 4, 6, 1), (10, 20, 30, 40, 50, 60, 70, 80)
TILE = 2  # keys
HEIGHT = 128  # of a frame


def online_softmax(shown=range(4)):
    """Draw a frame for each of these tiles of keys: all of them for the page, or one for a slide."""
    scores = torch.tensor(SCORES, dtype=torch.float64)
    values = torch.tensor(VALUES, dtype=torch.float64)
    m, l, acc = scores.new_full((1,), -math.inf), scores.new_zeros(1), scores.new_zeros(1, 1)
    title = "Scores of one query, two at a time; values 10, 20, ... 80"
    if len(shown) == 1:
        title = f"Tile {shown[0] + 1} of {len(SCORES) // TILE}"
    sheet = Sheet(title)
    for tile in range(max(shown) + 1):
        keys, before = slice(TILE * tile, TILE * (tile + 1)), m.item()
        # The solution of exercise 3 computes what the picture says.
        m, l, acc = fold(m, l, acc, scores[None, keys], values[keys, None])
        if tile in shown:
            frame(sheet, 40 + HEIGHT * shown.index(tile), keys, before, m.item(), l.item(), acc.item())
    bottom = 40 + HEIGHT * len(shown)
    if len(shown) == 1:
        return sheet.svg(bottom)
    sheet.text(20, bottom + 8, f"acc / l = {(acc / l).item():.3f}, as from all {len(SCORES)} scores at once")
    return sheet.svg(bottom + 28)


def frame(sheet, top, keys, before, m, l, acc):
    """Draw the scores as bars, the maximum as a line, and write the sums; before is the maximum before this tile."""
    floor = top + 86
    for key, score in enumerate(SCORES):
        # A tile's own scores have another color than those before; those that follow are dashed.
        color = TINTS[keys.start <= key] if key < keys.stop else None
        x, height = 20 + 24 * key, 4 + 9 * score
        sheet.box(x, floor - height, 20, height, color)
        sheet.text(x + 10, floor + 18, score, "center", MUTED)
    sheet.line((16, 216), [floor - 4 - 9 * m] * 2)
    factor = f"{math.exp(before - m):.2f}".rstrip("0").rstrip(".")
    words = f"m = {m:g}\nold sums x e^({before:g} - {m:g}) = {factor}\nl = {l:.3f}\nacc = {acc:.2f}"
    sheet.text(228, top + 22, words)


TOUCHES = {
    1: "copy_kernel",
    2: "masked_copy_kernel",
    3: "grid_copy_kernel",
    4: "outer_sum_kernel",
    5: "transpose_kernel",
    6: "row_sum_kernel",
    8: "row_max_kernel",
}
DRAWINGS = {f"puzzle{number}": functools.partial(touches, task) for number, task in TOUCHES.items()}
DRAWINGS["online_softmax"] = online_softmax
DRAWINGS |= {f"online_softmax{tile + 1}": functools.partial(online_softmax, [tile]) for tile in (0, 1, 3)}
