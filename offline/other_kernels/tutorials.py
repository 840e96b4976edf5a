"""Kernels of Triton's tutorials as cases for others.py, from a checkout of Triton.

A tutorial is a script that also runs and draws benchmarks. Only its definitions are executed, and what they need.
"""

import ast
import operator
import pkgutil
import re
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F

from offline.other_kernels import EPS, TUTORIALS, plain_layer_norm, registry, targets

CASES, case = registry()

# ----------------------------------------------------------------------------------------------------------------------
# Loading


def names_in(code):
    """Return the names that compiled code uses, also within its functions and classes."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return {*code.co_names}.union(*inner)


def is_definition(node):
    """Tell whether a statement defines a function or a class that is no benchmark."""
    decorators = " ".join(ast.unparse(each) for each in getattr(node, "decorator_list", ()))
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and "perf_report" not in decorators


def targets_of(node):
    """Return the names that a statement assigns or imports."""
    stored = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    imports = [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)]
    return stored | {(alias.asname or alias.name).split(".")[0] for each in imports for alias in each.names}


def load(path):
    """Return the module of a script, in which only its definitions and what they use were executed.

    What they use are imports, assignments, and ifs with assignments. One that fails is passed over: the definition
    that needs it will say so.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    compiled = {node: compile(ast.Module([node], []), str(path), "exec") for node in tree.body}
    kept = {node for node in tree.body if is_definition(node)}
    useful = ast.Import | ast.ImportFrom | ast.Assign | ast.If | ast.Try
    others = [node for node in tree.body if isinstance(node, useful)]
    while True:
        used = set().union(*(names_in(compiled[node]) for node in kept))
        needed = {node for node in others if targets_of(node) & used} - kept
        if not needed:
            break
        kept |= needed
    module = types.ModuleType(re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where Triton looks for what a kernel uses
    for node in tree.body:
        if node in kept:
            try:
                exec(compiled[node], module.__dict__)
            except Exception:
                if is_definition(node):
                    raise
    return module


def find_kernel(place, folder):
    """Return what a place names: "package.module:name", or "tutorial.py:name" of the folder of tutorials."""
    file, _, name = place.partition(":")
    if file.endswith(".py"):
        return operator.attrgetter(name)(load(Path(folder, file)))
    return pkgutil.resolve_name(place)


def version(folder):
    """Return {"tutorials": the version of Triton that their checkout has}, empty if it does not say."""
    file = Path(folder or "").resolve().parent / "triton" / "__init__.py"
    found = re.search(r"__version__ = ['\"](.+?)['\"]", file.read_text()) if folder and file.exists() else None
    return {TUTORIALS: found[1]} if found else {}


# ----------------------------------------------------------------------------------------------------------------------
# Cases


@case("01-vector-add.py:add", has_backward=False)
def vector_add(kernel, randn):
    return kernel, torch.add, [randn(2077), randn(2077)]


@case("02-fused-softmax.py:softmax", has_backward=False)
def softmax(kernel, randn):
    return kernel, lambda x: x.softmax(-1), [randn(23, 181)]


@case("03-matrix-multiplication.py:matmul", torch.float16, has_backward=False)
def product(kernel, randn):
    return lambda a, b: kernel(a, b, "leaky_relu"), lambda a, b: F.leaky_relu(a @ b), [randn(45, 70), randn(70, 77)]


@case("04-low-memory-dropout.py:dropout", has_backward=False)
def dropout(kernel, randn):
    kept = (randn(2077) > 0).to(torch.int32)
    return lambda x: kernel(x, kept, 0.5), lambda x: 2 * kept * x, [randn(2077)]


@case("04-low-memory-dropout.py:seeded_dropout", has_backward=False)
def seeded_dropout(kernel, randn):
    """Which numbers are dropped is the kernel's choice; the seed repeats it, and about a half are left."""
    chosen = {}

    def ours(x):
        result = kernel(x, 0.5, 123)
        chosen["mask"] = result != 0
        if not torch.equal(result, kernel(x, 0.5, 123)) or abs(chosen["mask"].float().mean() - 0.5) > 0.05:
            raise ArithmeticError("the seed does not repeat the choice, or it is no half")
        return result

    return ours, lambda x: 2 * chosen["mask"] * x, [randn(2077)]


@case("05-layer-norm.py:LayerNorm.apply")
def layer_norm(kernel, randn):
    inputs = [randn(9, 77), randn(77), randn(77)]
    return lambda x, w, b: kernel(x, (77,), w, b, EPS), plain_layer_norm, inputs


@case("06-fused-attention.py:_attention.apply", torch.float16)
def attention(kernel, randn):
    future = torch.ones(128, 128, dtype=torch.bool).triu(1)

    def plain(q, k, v):
        return (q @ k.mT * 0.5).masked_fill(future, float("-inf")).softmax(-1) @ v

    return lambda q, k, v: kernel(q, k, v, True, 0.5, False), plain, [randn(1, 2, 128, 64) for _ in range(3)]


@case("07-extern-functions.py:asin_kernel", has_backward=False)
def arc_sine(kernel, randn):
    def ours(x):
        y = torch.empty_like(x)
        kernel[(3,)](x, y, len(x), BLOCK_SIZE=1024)
        return y

    return ours, torch.asin, [randn(2077).sin()]


@case("08-grouped-gemm.py:group_gemm_fn", torch.float16, has_backward=False)
def grouped_products(kernel, randn):
    def plain(*x):
        return [a @ b for a, b in zip(x[::2], x[1::2], strict=True)]

    inputs = [randn(128, 64), randn(64, 128), randn(256, 128), randn(128, 128)]
    return lambda *x: kernel(x[::2], x[1::2]), plain, inputs


@case("09-persistent-matmul.py:matmul_kernel_persistent", torch.float16, has_backward=False)
def persistent_product(kernel, randn):
    def ours(a, b):
        (m, k), n = a.shape, b.shape[1]
        c = torch.empty(m, n, dtype=a.dtype)
        kernel[(1,)](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), NUM_SMS=1)  # a program for all tiles
        return c

    return ours, torch.matmul, [randn(45, 70), randn(70, 270)]


@case("10-block-scaled-matmul.py:block_scaled_matmul_kernel_cdna4", has_backward=False)
def block_scaled_product(kernel, randn):
    """Of numbers of 4 bits, e2m1, with a power of two for each 32 of them; gfx950 alone multiplies them."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = [targets(128 * 256, 16).view(128, 256).to(torch.uint8) for _ in range(2)]
    packed = [each[:, ::2] | each[:, 1::2] << 4 for each in codes]
    exponents = torch.full((128, 8), 127, dtype=torch.uint8)
    numbers = [torch.cat([table, -table])[each.long()] for each in codes]

    def ours(factor):
        a, b, c = packed[0], packed[1].T, torch.empty(128, 128)
        scales = exponents.view(4, 256)  # all alike, so in any order
        sizes = 128, 128, 128, *a.stride(), *b.stride(), 0, *c.stride(), *scales.stride(), *scales.stride()
        kernel[(1, 1)](a, b, c, scales, scales, *sizes, 128, 128, 256, 16, num_warps=8, matrix_instr_nonkdim=16)
        return c * factor

    return ours, lambda factor: numbers[0].to(factor.dtype) @ numbers[1].to(factor.dtype).T * factor, [randn(1)]
