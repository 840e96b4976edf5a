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
from exercises.svg import WIDTH, box, labelled_rows, picture, row, shown, text


def touches(task):
    """What the solution of a puzzle touches in the first case of its check."""
    return touched.picture(touched.watched(puzzles.TASKS[task], solutions), task, with_lines=False)


def softmax():
    ((scores, block_size), *_) = puzzles.SOFTMAX
    lanes = [float(score) for score in scores] + [-math.inf] * (block_size - len(scores))
    largest = max(lanes)
    p = [math.exp(score - largest) for score in lanes]
    kinds = ["p0"] * len(scores) + ["off"] * (block_size - len(scores))
    rows = [("x", lanes), ("x - max", [score - largest for score in lanes]), ("exp", p),
            ("/ sum", [q / sum(p) for q in p])]  # fmt: skip
    drawn = labelled_rows([(label, kinds, map(shown, values)) for label, values in rows], 47, 92, gap=8)
    return picture(f"A row of {len(scores)} in a block of {block_size}: max {largest:g}, sum {sum(p):.2f}", 268, drawn)


def matmul():
    ((n_rows, n_cols, n_inner, block), *_) = puzzles.MATMUL
    left, top, scale, gap = 16, 74, 5, 32
    program = 1, 0

    def matrix(x, y, name, rows, cols, kind_of):
        """Its tiles; dashed is what they have beyond its edges."""
        parts = [text(x, y - 8, f"{name} {rows} x {cols}")]
        for i in range(llama.cdiv(rows, block)):
            for j in range(llama.cdiv(cols, block)):
                corner = x + scale * block * j, y + scale * block * i
                height, width = min(block, rows - block * i), min(block, cols - block * j)
                parts += [box(*corner, scale * block, scale * block, "off"),
                          box(*corner, scale * width, scale * height, kind_of(i, j))]  # fmt: skip
        return "".join(parts)

    z_left = left + scale * block * llama.cdiv(n_inner, block) + gap
    z_top = top + scale * block * llama.cdiv(n_inner, block) + gap
    steps = "p1", "p2", "p3"
    parts = [
        matrix(z_left, top, "y", n_inner, n_cols, lambda i, j: steps[i] if j == program[1] else "cell"),
        matrix(left, z_top, "x", n_rows, n_inner, lambda i, j: steps[j] if i == program[0] else "cell"),
        matrix(z_left, z_top, "z", n_rows, n_cols, lambda i, j: "p0" if (i, j) == program else "cell"),
    ]
    words = f"program {program[0]}, {program[1]} adds to its", "tile of z the products of", "tiles of the same color"
    parts += [text(left, top + 60 + 24 * line, part) for line, part in enumerate(words)]
    return picture(f"Tiles of {block} x {block}", z_top + scale * block * llama.cdiv(n_rows, block) + 14, *parts)


SCORES, VALUES, TILE = (1, 3, 5, 2, 0, 4, 6, 1), (10, 20, 30, 40, 50, 60, 70, 80), 2


def online_softmax(shown_tiles=range(4)):
    """The frames of these tiles of keys; all, with what follows from them, or one large frame for a slide."""
    scores, values = torch.tensor([SCORES], dtype=torch.float64), torch.tensor(VALUES, dtype=torch.float64)[:, None]
    m, l, acc = torch.full((1,), -math.inf).double(), torch.zeros(1).double(), torch.zeros(1, 1).double()
    parts, height, scale = [], 128, 9
    for frame, start in enumerate(range(0, len(SCORES), TILE)):
        end, before = start + TILE, m
        m, l, acc = fold(m, l, acc, scores[:, start:end], values[start:end])
        if frame not in shown_tiles:
            continue
        top = 40 + shown_tiles.index(frame) * height
        floor = top + 86
        for key, score in enumerate(SCORES):
            x, tall = 20 + 24 * key, 4 + scale * score
            parts += [box(x, floor - tall, 20, tall, "p1" if start <= key < end else "p0" if key < end else "off")]
            parts += [text(x + 10, floor + 18, score, "middle faint")]
        level = floor - 4 - scale * m.item()
        parts += [f'<line x1="16" x2="216" y1="{level:g}" y2="{level:g}"/>']
        factor = math.exp(before.item() - m.item())
        lines = (f"m = {m.item():g}", f"old sums x e^({before.item():g} - {m.item():g}) = {shown(factor)}",
                 f"l = {l.item():.3f}", f"acc = {acc.item():.2f}")  # fmt: skip
        parts += [text(228, top + 22 + 22 * index, words) for index, words in enumerate(lines)]
    wanted = (torch.softmax(scores, 1) @ values).item()
    assert math.isclose(wanted, (acc / l).item())
    bottom = 40 + len(shown_tiles) * height
    if len(shown_tiles) == 1:
        return picture(f"Tile {shown_tiles[0] + 1} of {len(SCORES) // TILE}", bottom, *parts)
    parts += [text(20, bottom + 8, f"acc / l = {(acc / l).item():.3f}, as from all {len(SCORES)} scores at once")]
    return picture("Scores of one query, two at a time; values 10, 20, ... 80", bottom + 28, *parts)


LEVELS = (  # (name, who uses it) and two lines each of an H100 (SXM) and an MI300X
    ("multiprocessors", "run the programs", ("132", "64 warps of 32"), ("304", "32 waves of 64")),
    ("registers", "of each thread", ("256 KiB", "each"), ("512 KiB", "each")),
    ("shared memory, LDS", "of one program", ("228 KiB", "each"), ("64 KiB", "each")),
    ("L2 cache", "of all programs", ("50 MB", ""), ("8 x 4 MB", "and 256 MB")),
    ("HBM", "of all programs", ("80 GB", "3.35 TB/s"), ("192 GB", "5.3 TB/s")),
)


def gpu():
    parts, height, gap = [text(208, 58, "H100", "faint"), text(344, 58, "MI300X", "faint")], 56, 18
    for index, (name, users, *sizes) in enumerate(LEVELS):
        y = 70 + index * (height + gap)
        parts += [box(12, y, WIDTH - 24, height, f"p{index}" if index < 4 else "cell")]
        for x, lines in zip((22, 208, 344), ((name, users), *sizes), strict=True):
            parts += [text(x, y + 23 + 22 * line, words) for line, words in enumerate(lines)]
        if index:
            parts += [f'<line x1="60" x2="60" y1="{y - gap}" y2="{y}"/>']
    return picture("Where a kernel runs, and where its data lies", 70 + len(LEVELS) * (height + gap), *parts)


LIMITS = (  # what limits a step, what of it shows that, and the shares of it in which host, memory and arithmetic work
    ("launches", "gaps on the device", (1.0, 0.25, 0.15)),
    ("memory", "as fast as a copy", (0.3, 0.95, 0.2)),
    ("arithmetic", "close to the peak", (0.3, 0.35, 0.9)),
)


def limits():
    parts, left, width = [], 132, WIDTH - 152
    for index, (name, sign, shares) in enumerate(LIMITS):
        y = 48 + 136 * index
        parts += [text(12, y + 14, f"{name}: {sign}")]
        for line, (worker, share) in enumerate(zip(("host", "memory", "arithmetic"), shares, strict=True)):
            top, kind = y + 24 + 28 * line, f"p{1 if share == max(shares) else 0}"
            parts += [text(left - 10, top + 17, worker, "end faint"), box(left, top, width, 22, "off")]
            # What limits works without a break; the others work in bursts.
            bursts = 1 if share == max(shares) else 6
            parts += [box(left + width * i / bursts, top, width * share / bursts, 22, kind) for i in range(bursts)]
    return picture("One step: what works all the time?", 440, *parts)


def grouped():
    """The programs that compute the tiles, row after row and in groups; in color those that run at the same time."""
    ((down, across, group), *_) = puzzles.GROUPED
    size, together, parts = 44, 2 * group, []
    for left, words, groups in ((16, "row after row", 1), (256, f"in groups of {group} rows", group)):
        parts += [text(left, 62, words, "faint")]
        for i, programs in enumerate(puzzles.order_of_programs(down, across, groups).tolist()):
            kinds = ["p1" if program < together else "cell" for program in programs]
            parts += [row(left, 76 + size * i, size, kinds, programs)]
    return picture(f"Which program computes which tile; {together} run at once", 90 + size * down, *parts)


DRAWINGS = {
    **{f"puzzle{number}": functools.partial(touches, task) for number, task in enumerate(list(puzzles.TASKS)[:8], 1)},
    "puzzle7": softmax, "puzzle9": matmul, "puzzle10": grouped, "online_softmax": online_softmax, "gpu": gpu,
    "limits": limits,
    **{f"online_softmax{tile + 1}": functools.partial(online_softmax, [tile]) for tile in (0, 1, 3)},
}  # fmt: skip
