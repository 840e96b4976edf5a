"""The Gluon kernel of SwiGLU and its products, compiled without a GPU: it fits, hardly spills, and overlaps."""

import re

import pytest

from tests.offline.machine_code import compile_kernels

PROGRAM = """
from tiny_llama import swiglu_hopper as hopper
rows, inner, ffn = 8192, 1024, 4096
def descriptor(shape, strides, *block):
    return make_descriptor(0, torch.bfloat16, shape, strides, block)
weight = descriptor((2, ffn, inner), (ffn * inner, inner, 1), 2, 128, 64), descriptor((inner, ffn), (ffn, 1), 64, 256)
a, gate_up = descriptor((rows, inner), (inner, 1), 128, 64), descriptor((2, rows, ffn), (ffn, 2 * ffn, 1), 2, 64, 32)
hidden = descriptor((rows, ffn), (ffn, 1), 64, 32)
compiled["swiglu"] = hopper.swiglu_hopper_kernel.warmup(
    a, weight[not FORWARD], gate_up, hidden, 64, 32, 16, FORWARD, num_warps=4, maxnreg=168, grid=(132,)
)
"""


@pytest.fixture(scope="module", params=[True, False], ids=["forward", "backward"])
def forward(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(forward, tmp_path_factory):
    program = f"FORWARD = {forward}" + PROGRAM
    return compile_kernels(program, tmp_path_factory.mktemp("cubin"))["swiglu"]


# Forward has the four pieces of a tile in a row, and a few addresses in local memory.
def test_it_fits_into_a_multiprocessor_and_hardly_spills(compiled, forward):
    assert compiled.fits() and compiled.stack <= (24 if forward else 0)
    assert compiled.warps == 12  # two consumers of four; the producers share the last four
    # None is stored or loaded while a product runs.
    beside = re.findall(r"HGMMA.*?DEPBAR", compiled.code, re.DOTALL)
    assert beside and not any(re.search(r"\b(STL|LDL)\b", code) for code in beside)


def test_the_sigmoids_run_while_a_product_does(compiled, forward):
    """Between the first instruction of a product and the wait for it stands a piece: 16 sigmoids of a thread."""
    # Each consumer has a product of four instructions beside a piece and one after it, for one piece or for four in a
    # row, and one after all pieces; the compiler adds no waits.
    waits, pieces = compiled.waits(), 4 if forward else 1
    assert [wait[:2] for wait in waits] == [(0, 4)] * 2 * (2 * pieces + 1)
    assert sum(wait[2] >= 16 for wait in waits) == 2 * pieces
