"""Write the tables of what our kernels cost in lines of code, and what they save in a step and alone."""

import ast
import collections
import inspect
import re

import pandas as pd

import tiny_llama_v3 as llama
from benchmarks.kernels import APART
from benchmarks.pages.kernel_tables import KERNELS, OURS
from benchmarks.pages.long_table import first_device, long_table, markdown, newest, paragraphs, provenance, texts
from benchmarks.pages.training_steps import OURS as OUR_STEP
from benchmarks.pages.training_steps import PLAIN, WITH_OUR_OPTIMIZER, complete_sizes
from measure.tables import NOT_MEASURED, number

FUSED = "sdpa compile graph"  # PyTorch's fused attention, and what torch.compile fuses
SECTIONS = {"add + RMSNorm": 6, "attention": 7, "SwiGLU": 8, "cross-entropy": 9, "AdamW": 10}  # of the script
# References in PyTorch's operations, and what only the mistakes of the stages run.
NOT_OURS = re.compile("torch_|sdpa_|TorchAdamW|swiglu_kernel|swiglu_naive_matmul|badly_strided")


def code_lines(node):
    """Return how many lines of code a function or class has, as ast writes it: no comment, docstring or empty line."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part) is not None:
            part.body[:1] = [] if len(part.body) > 1 else [ast.Pass()]
    return sum(map(bool, map(str.strip, ast.unparse(node).splitlines())))


def lines_of(source):
    """Return {section of the script: (lines of its kernels, lines around them: launches, tiles, autograd)}."""
    headings = {
        source[: found.start()].count("\n") + 1: int(found[1]) for found in re.finditer(r"(?m)^# (\d+) ", source)
    }
    lines = collections.defaultdict(lambda: [0, 0])
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not NOT_OURS.match(node.name):
            section = max((at, number) for at, number in {0: 0, **headings}.items() if at < node.lineno)[1]
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            lines[section][not is_kernel] += code_lines(node)
    return lines


def tens(count):
    """Format a number of lines to tens, so that not every change of the script changes the page."""
    return f"{round(count, -1):,}"


def saved(sizes, before, after):
    """Return {size: text of the ms that one row of a step saves of another}, where one result has both.

    Both took turns with ours, at other moments: their ratios to ours are compared, as a clock may have changed between.
    """
    cells = {}
    for size, rows in sizes.items():
        named = rows.set_index("row").reindex([before, after])
        ms, errors = named["ms median"], named["error"]
        ours = named["ratio median"].where(named.index != OUR_STEP, 1.0)  # ours divided by each
        if str(errors[before]).startswith("OutOfMemoryError"):
            cells[size] = "out of memory without"
        elif named["file"].nunique() == 1 and ours.notna().all() and ms.notna().all():
            cells[size] = f"{number(ms[before] * (1 - ours[before] / ours[after]))} of {number(ms[before])}"
    return cells


def steps_table(sizes, lines):
    """Return a line for each thing that one can add to plain PyTorch, with what it saves of a step at each size."""
    optimizer, others = sum(lines[10]), sum(sum(lines[number]) for number in range(6, 10))
    parts = [
        ("`--impl sdpa --compile`", 0, PLAIN, FUSED),
        ("our AdamW", optimizer, FUSED, WITH_OUR_OPTIMIZER),
        ("all other kernels", others, WITH_OUR_OPTIMIZER, OUR_STEP),
    ]
    return pd.DataFrame(
        {"saves, ms a step": name, "lines of ours": tens(count), **saved(sizes, before, after)}
        for name, count, before, after in parts
    ).reindex(columns=["saves, ms a step", "lines of ours", *sizes])


def kernel_rows(rows):
    """Return the newest cases of the kernels in SECTIONS, of one device's long table, with their kernel and size."""
    rows = newest(rows[~rows["group"].isin(APART)], "group")
    # "attention backward, (8, 128, 8/4, 64)" belongs to "attention, (8, 128, 8/4, 64)".
    parts = {
        "kernel": rows["case"].map(lambda case: case.partition(", ")[0].removesuffix(" backward")),
        "size": rows["case"].map(lambda case: case.partition(", ")[2]),
    }
    rows = rows.assign(**parts)
    return rows[rows["kernel"].isin(list(SECTIONS)) & (rows["size"] != "")]


def alone_table(rows, lines):
    """Return a line for each kernel and size of kernel_rows(), forward and backward together."""
    # Where a pass has no time, both together have none.
    ms = rows.assign(ms=rows["us"].where(rows["error"].isna()) / 1e3).pivot_table(
        "ms", ["kernel", "size"], "row", aggfunc=lambda ms: ms.sum(skipna=False), sort=False, dropna=False
    )
    ms = ms.reindex(columns=[OURS, "torch", "compile"]).dropna(subset=[OURS])
    counts = [lines[SECTIONS[kernel]] for kernel, _ in ms.index]
    table = {
        "forward and backward, ms a call": [f"{kernel}, {size}" for kernel, size in ms.index],
        "lines: kernels + around them": [" + ".join(map(tens, pair)) for pair in counts],
        "ours": texts(ms[OURS], number).values,
        "saves of PyTorch's": texts(ms["torch"] - ms[OURS], number).values,
        "saves of compiled": texts(ms["compile"] - ms[OURS], number).values,
    }
    return pd.DataFrame(table)


def kernel_costs_section(folder):
    """Show both tables of the first device."""
    sizes, rows = complete_sizes(folder), kernel_rows(first_device(long_table(folder, *KERNELS)))
    lines, parts = lines_of(inspect.getsource(llama)), []
    if sizes:
        steps = pd.concat(sizes.values())
        shown = steps[steps["row"].isin([PLAIN, FUSED, WITH_OUR_OPTIMIZER, OUR_STEP])]
        parts += [markdown(steps_table(sizes, lines)), provenance(shown)]
    if len(rows):
        parts += [markdown(alone_table(rows, lines)), provenance(rows)]
    return paragraphs(*parts) or NOT_MEASURED
