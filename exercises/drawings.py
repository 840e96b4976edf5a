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
    return "-inf" if value == -math.inf else f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:g}"


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
    ((scores, block_size), *_) = puzzles.SOFTMAX
    masked = block_size - len(scores)
    x = torch.tensor([*map(float, scores), *[-math.inf] * masked], dtype=torch.float64)
    p = torch.exp(x - x.max())
    sheet = Sheet(f"A row of {len(scores)} in a block of {block_size}: max {x.max():g}, sum {p.sum():.2f}")
    for line, (label, values) in enumerate({"x": x, "x - max": x - x.max(), "exp": p, "/ sum": p / p.sum()}.items()):
        y = 44 + 55 * line
        sheet.text(82, y + 30, label, "right")
        row(sheet, 92, y, 47, [TINTS[0]] * len(scores) + [None] * masked, map(shown, values.tolist()))
    return sheet.svg(268)


def matmul():
    ((n_rows, n_cols, n_inner, block), *_) = puzzles.MATMUL
    left, top, tile, gap = 16, 74, 5 * block, 32
    sheet, program = Sheet(f"Tiles of {block} x {block}"), (1, 0)

    def matrix(x, y, name, rows, cols, color_of):
        """Draw its tiles; dashed is what they have beyond its edges."""
        sheet.text(x, y - 8, f"{name} {rows} x {cols}")
        for i in range(llama.cdiv(rows, block)):
            for j in range(llama.cdiv(cols, block)):
                place = x + tile * j, y + tile * i
                sheet.box(*place, tile, tile)
                width, height = (5 * min(block, size - block * at) for size, at in ((cols, j), (rows, i)))
                sheet.box(*place, width, height, color_of(i, j))

    z_left, z_top = (start + tile * llama.cdiv(n_inner, block) + gap for start in (left, top))
    matrix(z_left, top, "y", n_inner, n_cols, lambda i, j: TINTS[i + 1] if j == program[1] else GROUND)
    matrix(left, z_top, "x", n_rows, n_inner, lambda i, j: TINTS[j + 1] if i == program[0] else GROUND)
    matrix(z_left, z_top, "z", n_rows, n_cols, lambda i, j: TINTS[0] if (i, j) == program else GROUND)
    words = f"program {program[0]}, {program[1]} adds to its", "tile of z the products of", "tiles of the same color"
    for line, part in enumerate(words):
        sheet.text(left, top + 60 + 24 * line, part)
    return sheet.svg(z_top + tile * llama.cdiv(n_rows, block) + 14)


SCORES, VALUES, TILE = (1, 3, 5, 2, 0, 4, 6, 1), (10, 20, 30, 40, 50, 60, 70, 80), 2


def online_softmax(shown_tiles=range(4)):
    """The frames of these tiles of keys; all, with what follows from them, or one large frame for a slide."""
    scores, values = torch.tensor([SCORES], dtype=torch.float64), torch.tensor(VALUES, dtype=torch.float64)[:, None]
    m, l, acc = torch.full((1,), -math.inf).double(), torch.zeros(1).double(), torch.zeros(1, 1).double()
    tiles, height, scale = len(SCORES) // TILE, 128, 9
    single = len(shown_tiles) == 1
    title = (
        f"Tile {shown_tiles[0] + 1} of {tiles}"
        if single
        else "Scores of one query, two at a time; values 10, 20, ... 80"
    )
    sheet = Sheet(title)
    for tile in range(tiles):
        start, end, before = TILE * tile, TILE * (tile + 1), m
        m, l, acc = fold(m, l, acc, scores[:, start:end], values[start:end])
        if tile not in shown_tiles:
            continue
        top = 40 + height * shown_tiles.index(tile)
        floor = top + 86
        for key, score in enumerate(SCORES):
            x, tall = 20 + 24 * key, 4 + scale * score
            sheet.box(x, floor - tall, 20, tall, TINTS[start <= key] if key < end else None)
            sheet.text(x + 10, floor + 18, score, "center", MUTED)
        sheet.line((16, 216), [floor - 4 - scale * m.item()] * 2)
        factor = math.exp(before.item() - m.item())
        lines = (f"m = {m.item():g}", f"old sums x e^({before.item():g} - {m.item():g}) = {shown(factor)}",
                 f"l = {l.item():.3f}", f"acc = {acc.item():.2f}")  # fmt: skip
        for line, words in enumerate(lines):
            sheet.text(228, top + 22 + 22 * line, words)
    bottom = 40 + height * len(shown_tiles)
    if single:
        return sheet.svg(bottom)
    sheet.text(20, bottom + 8, f"acc / l = {(acc / l).item():.3f}, as from all {len(SCORES)} scores at once")
    return sheet.svg(bottom + 28)


LEVELS = (  # (name, who uses it) and two lines each of an H100 (SXM) and an MI300X
    ("multiprocessors", "run the programs", ("132", "64 warps of 32"), ("304", "32 waves of 64")),
    ("registers", "of each thread", ("256 KiB", "each"), ("512 KiB", "each")),
    ("shared memory, LDS", "of one program", ("228 KiB", "each"), ("64 KiB", "each")),
    ("L2 cache", "of all programs", ("50 MB", ""), ("8 x 4 MB", "and 256 MB")),
    ("HBM", "of all programs", ("80 GB", "3.35 TB/s"), ("192 GB", "5.3 TB/s")),
)


def gpu():
    sheet, height, apart = Sheet("Where a kernel runs, and where its data lies"), 56, 74
    for x, name in ((208, "H100"), (344, "MI300X")):
        sheet.text(x, 58, name, color=MUTED)
    for (name, users, *sizes), y, color in zip(LEVELS, range(70, 440, apart), [*TINTS, GROUND], strict=True):
        sheet.box(12, y, SHEET_WIDTH - 24, height, color)
        for x, lines in zip((22, 208, 344), ((name, users), *sizes), strict=True):
            for line, words in enumerate(lines):
                sheet.text(x, y + 23 + 22 * line, words)
        if y > 70:
            sheet.line((60, 60), (y - apart + height, y))
    return sheet.svg(440)


LIMITS = (  # what limits a step, what of it shows that, and the shares of it in which host, memory and arithmetic work
    ("launches", "gaps on the device", (1.0, 0.25, 0.15)),
    ("memory", "as fast as a copy", (0.3, 0.95, 0.2)),
    ("arithmetic", "close to the peak", (0.3, 0.35, 0.9)),
)


def limits():
    sheet, left, width = Sheet("One step: what works all the time?"), 132, SHEET_WIDTH - 152
    for index, (name, sign, shares) in enumerate(LIMITS):
        y = 48 + 136 * index
        sheet.text(12, y + 14, f"{name}: {sign}")
        for line, (worker, share) in enumerate(zip(("host", "memory", "arithmetic"), shares, strict=True)):
            top, limiting = y + 24 + 28 * line, share == max(shares)
            sheet.text(left - 10, top + 17, worker, "right", MUTED)
            sheet.box(left, top, width, 22)
            # What limits works without a break; the others work in bursts.
            bursts = 1 if limiting else 6
            for burst in range(bursts):
                sheet.box(left + width * burst / bursts, top, width * share / bursts, 22, TINTS[limiting])
    return sheet.svg(440)


def grouped():
    """The programs that compute the tiles, row after row and in groups; in color those that run at the same time."""
    ((down, across, group), *_) = puzzles.GROUPED
    size, together = 44, 2 * group
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
