"""The Gluon kernel of SwiGLU and its products, compiled without a GPU: it fits, spills nothing, and overlaps."""

import re

import pytest

from tests.offline.machine_code import machine_code

PROGRAM = """
from tiny_llama import swiglu_hopper as hopper
rows, inner, ffn = 8192, 1024, 4096
def descriptor(shape, strides, *block):
    return make_descriptor(0, torch.bfloat16, shape, strides, block)
weight = descriptor((2, ffn, inner), (ffn * inner, inner, 1), 2, 128, 64), descriptor((inner, ffn), (ffn, 1), 64, 256)
a, gate_up = descriptor((rows, inner), (inner, 1), 128, 64), descriptor((2, rows, ffn), (ffn, 2 * ffn, 1), 2, 64, 32)
hidden = descriptor((rows, ffn), (ffn, 1), 64, 32)
compiled = hopper.swiglu_hopper_kernel.warmup(
    a, weight[not FORWARD], gate_up, hidden, 64, 32, 16, FORWARD, num_warps=4, maxnreg=168, grid=(132,)
)
"""


@pytest.fixture(scope="module", params=["forward", "backward"])
def compiled(request, tmp_path_factory):
    return machine_code(f"FORWARD = {request.param == 'forward'}" + PROGRAM, tmp_path_factory.mktemp("cubin"))


def test_it_fits_into_a_multiprocessor_and_spills_nothing(compiled):
    assert compiled.fits() and compiled.local == 0
    assert compiled.warps == 12  # two consumers of four; the producers share the last four


def test_the_sigmoids_run_while_a_product_does(compiled):
    """Between the four instructions of a product and the wait for it stand a piece's exponentials, 16 a thread."""
    code = re.findall(r"WARPGROUP\.DEPBAR\S* \S+ (0x\w+)|(MUFU\.EX2)|(HGMMA)", compiled.code)
    waits, exponentials, products = [], 0, 0
    for wait, exponential, product in code:
        exponentials += bool(exponential and products)
        products += bool(product)
        if wait:
            waits.append((wait, products, exponentials))
            exponentials = products = 0
    # Each consumer has a product beside a piece, and two alone; the compiler adds no waits.
    assert sorted(waits) == sorted([("0x0", 4, 16), ("0x0", 4, 0), ("0x0", 4, 0)] * 2)
