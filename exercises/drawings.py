"""The pictures of the puzzles and of the online softmax as SVG, drawn from the cases of their checks, and of a GPU.

A picture is 480 wide, so that its letters can be read on a telephone, and has a background of its own, light or dark as
the reader's system is. A colour is a program, a dashed cell one that the mask leaves out.
"""

import functools
import math
from xml.sax.saxutils import escape

import torch

import tiny_llama_v3 as llama
from exercises.checks import puzzles
from exercises.solutions.exercise3_flash_attention import fold

WIDTH = 480
STYLE = """
svg { --back: #ffffff; --ink: #1f2328; --faint: #6e7781; --line: #afb8c1; --cell: #f3f5f7;
  --p0: #b6d8ff; --p1: #ffd08a; --p2: #aae3b4; --p3: #e2c5ff }
@media (prefers-color-scheme: dark) { svg { --back: #0d1117; --ink: #e6edf3; --faint: #9198a1; --line: #57606a;
  --cell: #21262d; --p0: #1f4f85; --p1: #7a5210; --p2: #1f6131; --p3: #5b3a86 } }
.back { fill: var(--back) } .cell { fill: var(--cell); stroke: var(--line) }
.p0, .p1, .p2, .p3 { stroke: var(--line) }
.p0 { fill: var(--p0) } .p1 { fill: var(--p1) } .p2 { fill: var(--p2) } .p3 { fill: var(--p3) }
.off { fill: none; stroke: var(--line); stroke-dasharray: 3 3 }
.mark { fill: none; stroke: var(--ink); stroke-width: 2.5 }
text { fill: var(--ink); font: 16px ui-sans-serif, system-ui, sans-serif } .middle { text-anchor: middle }
.faint { fill: var(--faint) } .end { text-anchor: end } line { stroke: var(--ink); stroke-width: 1.5 }
"""


# ----------------------------------------------------------------------------------------------------------------------
# What pictures are made of: each returns SVG


def text(x, y, words, kind=""):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(str(words))}</text>'


def box(x, y, width, height, kind):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def cell(x, y, size, kind, words=""):
    """A square with a number in it, which is faint where the cell is not there."""
    faint = " faint" if kind == "off" else ""
    return box(x + 1, y + 1, size - 2, size - 2, kind) + text(x + size / 2, y + size / 2 + 6, words, f"middle{faint}")


def row(x, y, size, kinds, words):
    return "".join(
        cell(x + size * i, y, size, kind, word) for i, (kind, word) in enumerate(zip(kinds, words, strict=True))
    )


def labelled_rows(rows, size, left, top=44, gap=14):
    """[(label, kinds, words)] below each other."""
    parts = []
    for index, (label, kinds, words) in enumerate(rows):
        y = top + index * (size + gap)
        parts += [text(left - 10, y + size / 2 + 6, label, "end"), row(left, y, size, kinds, words)]
    return "".join(parts)


def picture(title, height, *parts):
    """An SVG document; the title stands in the picture, and is what a screen reader says."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        + "\n".join([box(0, 0, WIDTH, height, "back"), text(12, 26, title), *parts])
        + "\n</svg>\n"
    )


def shown(value):
    """A number in a cell: three digits at most."""
    return "-inf" if value == -math.inf else f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:g}"


# ----------------------------------------------------------------------------------------------------------------------
# The pictures


def copy():
    ((block_size,), *_) = puzzles.COPY
    kinds, numbers = ["p0"] * block_size, range(block_size)
    rows = [("x", ["cell"] * block_size, [f"x{i}" for i in numbers]), ("offsets", kinds, numbers),
            ("y", kinds, [f"x{i}" for i in numbers])]  # fmt: skip
    return picture(f"One program, a block of {block_size}", 210, labelled_rows(rows, 44, 92))


def masked_copy():
    ((n, block_size), *_) = puzzles.MASKED_COPY
    missing = block_size - n
    kinds = ["p0"] * n + ["off"] * missing
    rows = [
        ("x", ["cell"] * n + ["off"] * missing, [f"x{i}" for i in range(n)] + ["?"] * missing),
        ("offsets", kinds, range(block_size)),
        ("mask", kinds, ["T"] * n + ["F"] * missing),
        ("y", kinds, [f"x{i}" for i in range(n)] + ["?"] * missing),
    ]
    title = f"A block of {block_size} for {n} elements: ? is not yours"
    return picture(title, 268, labelled_rows(rows, 44, 92))


def grid_copy():
    ((n, block_size), *_) = puzzles.GRID_COPY
    programs = llama.cdiv(n, block_size)
    lanes = range(programs * block_size)
    kinds = [f"p{i // block_size}" if i < n else "off" for i in lanes]
    rows = [("x, y", kinds, [f"x{i}" if i < n else "?" for i in lanes]), ("offsets", kinds, lanes)]
    ids = "".join(
        text(70 + 33 * block_size * (program + 0.5), 150, f"program {program}", "middle") for program in range(programs)
    )
    return picture(f"{programs} programs, a block of {block_size} each", 166, labelled_rows(rows, 33, 70), ids)


def outer_sum():
    ((n_rows, n_cols, block_m, block_n), *_) = puzzles.OUTER_SUM
    size, left, top = 44, 100, 96
    parts = [
        text(left - 6, top - 22, "y[None, :]", "end faint"),
        text(12, top + size * block_m + 24, "x[:, None]", "faint"),
    ]
    parts += [row(left, top - 50, size, ["p1" if j < n_cols else "off" for j in range(block_n)],
                  [f"y{j}" if j < n_cols else "?" for j in range(block_n)])]  # fmt: skip
    for i in range(block_m):
        parts += [cell(left - 50, top + size * i, size, "p2" if i < n_rows else "off", f"x{i}" if i < n_rows else "?")]
        inside = [i < n_rows and j < n_cols for j in range(block_n)]
        words = [i * n_cols + j if there else "" for j, there in enumerate(inside)]
        parts += [row(left, top + size * i, size, ["p0" if there else "off" for there in inside], words)]
    parts += [text(left + 4, top + size * block_m + 24, "in a cell of z: its offset from z_ptr", "faint")]
    title = f"A block of {block_m} x {block_n} for z of {n_rows} x {n_cols}"
    return picture(title, top + size * block_m + 40, *parts)


def transpose():
    ((n_rows, n_cols, stride_row, _, block_m, block_n), *_) = puzzles.TRANSPOSE
    size, top = 38, 74

    def program(i, j):
        return f"p{i // block_m * llama.cdiv(n_cols, block_n) + j // block_n}"

    parts = [
        text(16, top - 12, f"x: rows {stride_row} apart", "faint"),
        text(316, top - 12, "y: x transposed", "faint"),
    ]
    for i in range(n_rows):
        kinds = [program(i, j) if j < n_cols else "off" for j in range(stride_row)]
        count = stride_row if i < n_rows - 1 else n_cols
        parts += [row(16, top + size * i, size, kinds[:count], [i * stride_row + j for j in range(count)])]
    for j in range(n_cols):
        kinds, offsets = zip(*((program(i, j), j * n_rows + i) for i in range(n_rows)), strict=True)
        parts += [row(316, top + size * j, size, kinds, offsets)]
    for number in range(4):
        x, y = 16 + 146 * (number % 2), top + size * 3 + 18 + 32 * (number // 2)
        ids = divmod(number, llama.cdiv(n_cols, block_n))
        parts += [box(x, y, 18, 18, f"p{number}"), text(x + 26, y + 15, f"program {ids[0]}, {ids[1]}")]
    return picture(f"Tiles of {block_m} x {block_n}; in a cell: its offset", top + size * n_cols + 18, *parts)


def row_sum():
    ((n_rows, n_cols, stride_row, block_size), *_) = puzzles.ROW_SUM
    size, left = 31, 84
    in_memory = []
    for i in range(n_rows):
        padding = stride_row - n_cols if i < n_rows - 1 else 0
        kinds = [f"p{i}"] * n_cols + ["off"] * padding
        in_memory += [(f"row {i}", kinds, range(i * stride_row, i * stride_row + len(kinds)))]
    parts = [labelled_rows(in_memory, size, left, gap=4), text(12, 182, "program 1, block by block:")]
    for index, start in enumerate(range(0, n_cols, block_size)):
        y = 196 + index * (size + 6)
        cols = range(start, start + block_size)
        parts += [text(left - 10, y + 21, f"start {start}", "end"),
                  row(left, y, size, ["p1" if j < n_cols else "off" for j in cols],
                      [stride_row + j if j < n_cols else "0" for j in cols]),
                  text(left + size * block_size + 14, y + 21, "its sum is added to total", "faint")]  # fmt: skip
    title = f"Rows of {n_cols}, {stride_row} apart, in blocks of {block_size}"
    return picture(title, 196 + llama.cdiv(n_cols, block_size) * (size + 6) + 8, *parts)


def softmax():
    ((scores, block_size), *_) = puzzles.SOFTMAX
    lanes = [float(score) for score in scores] + [-math.inf] * (block_size - len(scores))
    largest = max(lanes)
    p = [math.exp(score - largest) for score in lanes]
    kinds = ["p0"] * len(scores) + ["off"] * (block_size - len(scores))
    rows = [
        ("x", lanes),
        ("x - max", [score - largest for score in lanes]),
        ("exp", p),
        ("/ sum", [q / sum(p) for q in p]),
    ]
    drawn = labelled_rows([(label, kinds, map(shown, values)) for label, values in rows], 47, 92, gap=8)
    return picture(f"A row of {len(scores)} in a block of {block_size}: max {largest:g}, sum {sum(p):.2f}", 268, drawn)


def row_max():
    ((n_cols, _, block_size), *_) = puzzles.ROW_MAX
    size, left, top, gap = 44, 70, 74, 10
    blocks = range(0, n_cols, block_size)
    right = left + len(blocks) * (size * block_size + gap) + 14
    parts = [text(right, top - 12, "y", "middle faint")]
    for index, start in enumerate(blocks):
        x = left + index * (size * block_size + gap)
        parts += [text(x, top - 12, f"start {start}", "faint")]
        for i, values in enumerate(puzzles.ROWS_WITH_MAXIMA):
            y = top + i * (size + 6)
            block = values[start : start + block_size]
            missing = block_size - len(block)
            parts += [row(x, y, size, [f"p{i}"] * len(block) + ["off"] * missing, [*block, *[""] * missing])]
            if max(values) in block:
                parts += [box(x + size * block.index(max(values)) + 1, y + 1, size - 2, size - 2, "mark")]
    for i, values in enumerate(puzzles.ROWS_WITH_MAXIMA):
        y = top + i * (size + 6) + size / 2 + 6
        parts += [text(left - 10, y, f"row {i}", "end"), text(right, y, max(values), "middle")]
    return picture(
        f"Rows of {n_cols} in blocks of {block_size}, and what y should be", top + 3 * (size + 6) + 8, *parts
    )


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
    words = (
        f"program {program[0]}, {program[1]} adds to its tile",
        "of z the products of the",
        "tiles of the same colour",
    )
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
            parts += [
                box(left + width * burst / bursts, top, width * share / bursts, 22, kind) for burst in range(bursts)
            ]
    return picture("One step: what works all the time?", 440, *parts)


DRAWINGS = {
    "puzzle1": copy, "puzzle2": masked_copy, "puzzle3": grid_copy, "puzzle4": outer_sum, "puzzle5": transpose,
    "puzzle6": row_sum, "puzzle7": softmax, "puzzle8": row_max, "puzzle9": matmul, "online_softmax": online_softmax,
    "gpu": gpu, "limits": limits,
    **{f"online_softmax{tile + 1}": functools.partial(online_softmax, [tile]) for tile in (0, 1, 3)},
}  # fmt: skip
