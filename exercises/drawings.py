"""The pictures of the puzzles, drawn from their solutions and checks, of the online softmax and of a GPU."""

import functools
import math

import torch

import exercises.checks  # noqa: F401 (first: without a GPU it has Triton interpret)
import tiny_llama_v3 as llama
from exercises import touched
from exercises.checks import puzzles
from exercises.solutions import puzzles as solutions
from exercises.solutions.exercise3_flash_attention import fold
from measure.drawing import GROUND, MUTED, SHEET_WIDTH, TINTS, Sheet


def shown(value):
    """Return a number for a cell: three digits at most."""
    if value % 1 and math.isfinite(value):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:g}"


def row(sheet, x, y, size, colors, words):
    """Draw squares with words in them, which are faint where a square has no colour."""
    for place, (color, word) in enumerate(zip(colors, words, strict=True)):
        left = x + size * place
        sheet.box(left + 1, y + 1, size - 2, size - 2, color)
        sheet.text(left + size / 2, y + size / 2 + 6, word, "center", **{} if color else {"color": MUTED})


def touches(task):
    """What the solution of a puzzle touches in the first case of its check."""
    return touched.picture(touched.watched(puzzles.TASKS[task], solutions), task, with_lines=False)


def softmax():
    """The steps of a softmax over one row, from above to below."""
    ((scores, block_size), *_) = puzzles.SOFTMAX
    # What the mask leaves out is loaded as -inf: it changes neither the maximum nor the sum.
    x = torch.full((block_size,), -math.inf, dtype=torch.float64)
    x[: len(scores)] = torch.as_tensor(scores)
    p = torch.exp(x - x.max())
    colors = [TINTS[0] if math.isfinite(one) else None for one in x]
    sheet = Sheet(f"A row of {len(scores)} in a block of {block_size}: max {x.max():g}, sum {p.sum():.2f}")
    steps = {"x": x, "x - max": x - x.max(), "exp": p, "/ sum": p / p.sum()}
    for y, (label, values) in zip(range(44, 264, 55), steps.items(), strict=True):
        sheet.text(82, y + 30, label, "right")
        row(sheet, 92, y, 47, colors, map(shown, values.tolist()))
    return sheet.svg(268)


def matmul():
    """The tiles of x and y whose products one program adds to its tile of z."""
    ((n_rows, n_cols, n_inner, block), *_) = puzzles.MATMUL
    sheet, left, top, tile = Sheet(f"Tiles of {block} x {block}"), 16, 74, 5 * block
    z_left, z_top = (start + tile * llama.cdiv(n_inner, block) + 32 for start in (left, top))
    steps, others = TINTS[1:], [GROUND] * 3
    # Colors of the tiles, row after row. Program 1, 0 has the second row of tiles of x, and the first column of y.
    for name, x, y, rows, cols, colors in (
        ("y", z_left, top, n_inner, n_cols, zip(steps, others, strict=True)),
        ("x", left, z_top, n_rows, n_inner, (others, steps)),
        ("z", z_left, z_top, n_rows, n_cols, (others, (TINTS[0], GROUND))),
    ):
        sheet.text(x, y - 8, f"{name} {rows} x {cols}")
        for i, row_colors in enumerate(colors):
            for j, color in zip(range(llama.cdiv(cols, block)), row_colors, strict=False):
                place = x + tile * j, y + tile * i
                # Dashed is what a tile has beyond the edges of its matrix.
                sheet.box(*place, tile, tile)
                width, height = (5 * min(block, size - block * at) for size, at in ((cols, j), (rows, i)))
                sheet.box(*place, width, height, color)
    sheet.text(left, top + 60, "program 1, 0 adds to its\ntile of z the products of\ntiles of the same color")
    return sheet.svg(z_top + tile * llama.cdiv(n_rows, block) + 14)


SCORES, VALUES, TILE = (1, 3, 5, 2, 0, 4, 6, 1), (10, 20, 30, 40, 50, 60, 70, 80), 2


def online_softmax(shown_tiles=range(4)):
    """The frames of these tiles of keys; all, with what follows from them, or one large frame for a slide."""
    scores, values = (torch.tensor(row, dtype=torch.float64) for row in (SCORES, VALUES))
    m, l, acc = scores.new_full((1,), -math.inf), scores.new_zeros(1), scores.new_zeros(1, 1)
    height, scale = 128, 9
    title = "Scores of one query, two at a time; values 10, 20, ... 80"
    if len(shown_tiles) == 1:
        title = f"Tile {shown_tiles[0] + 1} of {len(SCORES) // TILE}"
    sheet = Sheet(title)
    for tile, start in enumerate(range(0, len(SCORES), TILE)):
        end, before = start + TILE, m
        # The solution of exercise 3 computes what the picture says.
        m, l, acc = fold(m, l, acc, scores[None, start:end], values[start:end, None])
        if tile not in shown_tiles:
            continue
        top = 40 + height * shown_tiles.index(tile)
        floor = top + 86
        # A tile's own scores have another color than those before; those that follow are dashed.
        for key, score in enumerate(SCORES):
            x, tall = 20 + 24 * key, 4 + scale * score
            sheet.box(x, floor - tall, 20, tall, TINTS[start <= key] if key < end else None)
            sheet.text(x + 10, floor + 18, score, "center", MUTED)
        sheet.line((16, 216), [floor - 4 - scale * m.item()] * 2)
        factor = math.exp(before.item() - m.item())
        sums = f"m = {m.item():g}\nold sums x e^({before.item():g} - {m.item():g}) = {shown(factor)}\n"
        sheet.text(228, top + 22, f"{sums}l = {l.item():.3f}\nacc = {acc.item():.2f}")
    bottom = 40 + height * len(shown_tiles)
    if len(shown_tiles) == 1:
        return sheet.svg(bottom)
    sheet.text(20, bottom + 8, f"acc / l = {(acc / l).item():.3f}, as from all {len(SCORES)} scores at once")
    return sheet.svg(bottom + 28)


LEVELS = (  # name and user of each level of memory, and its size in an H100 (SXM) and in an MI300X
    ("multiprocessors\nrun the programs", "132\n64 warps of 32", "304\n32 waves of 64"),
    ("registers\nof each thread", "256 KiB\neach", "512 KiB\neach"),
    ("shared memory, LDS\nof one program", "228 KiB\neach", "64 KiB\neach"),
    ("L2 cache\nof all programs", "50 MB", "8 x 4 MB\nand 256 MB"),
    ("HBM\nof all programs", "80 GB\n3.35 TB/s", "192 GB\n5.3 TB/s"),
)


def gpu():
    """The memories of a GPU, the fastest on top."""
    sheet, columns = Sheet("Where a kernel runs, and where its data lies"), (22, 208, 344)
    for x, name in zip(columns, ("", "H100", "MI300X"), strict=True):
        sheet.text(x, 58, name, color=MUTED)
    for level, y, color in zip(LEVELS, range(70, 440, 74), [*TINTS, GROUND], strict=True):
        sheet.box(12, y, SHEET_WIDTH - 24, 56, color)
        for x, words in zip(columns, level, strict=True):
            sheet.text(x, y + 23, words)
        # A line leads to the level above.
        if y > 70:
            sheet.line((60, 60), (y - 18, y))
    return sheet.svg(440)


LIMITS = (  # what limits a step, what of it shows that, and the shares of it in which host, memory and arithmetic work
    ("launches", "gaps on the device", (1.0, 0.25, 0.15)),
    ("memory", "as fast as a copy", (0.3, 0.95, 0.2)),
    ("arithmetic", "close to the peak", (0.3, 0.35, 0.9)),
)


def limits():
    """What works all the time in a step, and what waits for it."""
    sheet, left, width = Sheet("One step: what works all the time?"), 132, SHEET_WIDTH - 152
    for (name, sign, shares), y in zip(LIMITS, range(62, 470, 136), strict=True):
        sheet.text(12, y, f"{name}: {sign}")
        for worker, share in zip(("host", "memory", "arithmetic"), shares, strict=True):
            y += 28
            sheet.text(left - 10, y - 1, worker, "right", MUTED)
            sheet.box(left, y - 18, width, 22)
            # What limits works without a break; the others work in bursts.
            limiting = share == max(shares)
            bursts = 1 if limiting else 6
            for burst in range(bursts):
                sheet.box(left + width * burst / bursts, y - 18, width * share / bursts, 22, TINTS[limiting])
    return sheet.svg(440)


def grouped():
    """The programs that compute the tiles, row after row and in groups; in color those that run at the same time."""
    ((down, across, group), *_) = puzzles.GROUPED
    size, together = 44, 2 * group
    # In groups, those that run at once need fewer different tiles of x and y.
    sheet = Sheet(f"Which program computes which tile; {together} run at once")
    for left, words, groups in ((16, "row after row", 1), (256, f"in groups of {group} rows", group)):
        sheet.text(left, 62, words, color=MUTED)
        for i, programs in enumerate(puzzles.order_of_programs(down, across, groups).tolist()):
            colors = [TINTS[1] if program < together else GROUND for program in programs]
            row(sheet, left, 76 + size * i, size, colors, programs)
    return sheet.svg(90 + size * down)


DRAWINGS = {
    **{f"puzzle{number}": functools.partial(touches, task) for number, task in enumerate(list(puzzles.TASKS)[:8], 1)},
    "puzzle7": softmax, "puzzle9": matmul, "puzzle10": grouped, "online_softmax": online_softmax, "gpu": gpu,
    "limits": limits,
    **{f"online_softmax{tile + 1}": functools.partial(online_softmax, [tile]) for tile in (0, 1, 3)},
}  # fmt: skip
