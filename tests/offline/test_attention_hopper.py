"""The Gluon kernels for Hopper, compiled without a GPU: they fit, hardly spill, and keep two products under way."""

import re

import pytest

from tests.offline.machine_code import compile_kernels

# A packed (4, 2048, 24 * head_dim) of 16 heads of queries and 4 of keys and values, and what an H100 compiles for it.
PROGRAM = """
from tiny_llama import attention_hopper as hopper
def desc(heads, rows=hopper.HALF):
    shape, packed = (4, 2048, heads, head_dim), (2048 * 24 * head_dim, 24 * head_dim, head_dim, 1)
    return make_descriptor(0, torch.bfloat16, shape, packed, (1, rows.value, 1, 128))
def parts(heads):
    count = 1 if head_dim == 64 else 2
    shape = 4, count, 2048, heads, head_dim // count
    packed = 2048 * 24 * head_dim, head_dim // count, 24 * head_dim, head_dim, 1
    return make_descriptor(0, torch.bfloat16, shape, packed, (1, count, 64, 1, 64))
lse, rows = torch.empty(4, 16, 2048, device="meta"), make_descriptor(0, torch.float32, (64, 2048), (2048, 1), (1, 64))
q, k, rest = parts(16), parts(4), (lse, lse, 0.0884, 0.1275, pairs)
launches = {
    "flash_attention": (desc(16), *[desc(4, hopper.BLOCK)] * 2, desc(16), lse, 16, 4, 64, 2048, 0.1275),
    "flash_attention_backward_dq": (q, k, k, q, q, q, lse, lse, *rest),
    "flash_attention_backward_dkdv": (q, k, k, q, k, k, rows, rows, *rest),
}
for name, arguments in launches.items():
    options = {} if name == "flash_attention" else dict(maxnreg=168)
    kernel = getattr(hopper, name + "_hopper_kernel")
    compiled[name] = kernel.warmup(*arguments, num_warps=4, grid=(132,), **options)
"""
FORWARD, DQ, DKDV = "flash_attention", "flash_attention_backward_dq", "flash_attention_backward_dkdv"


@pytest.fixture(scope="module", params=[(128, 64), (128, 0), (80, 40), (64, 32)], ids=["rotary", "plain", "80", "64"])
def case(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(case, tmp_path_factory):
    head_dim, pairs = case
    program = f"head_dim, pairs = {head_dim}, {pairs}" + PROGRAM
    return compile_kernels(program, tmp_path_factory.mktemp("cubin"))


# The consumers of dkdv have 224 of 240 registers in products under way. What else they need, mostly addresses, is kept
# in local memory, stored before a loop: 48 bytes with Triton 3.6, up to 160 with 3.9, where a step reads 20 of them.
@pytest.mark.parametrize("kernel, stack_limit", [(FORWARD, 0), (DQ, 0), (DKDV, 176)])
def test_it_fits_into_a_multiprocessor_and_hardly_spills(compiled, case, kernel, stack_limit):
    found = compiled[kernel]
    assert found.fits() and found.stack <= (stack_limit if case[0] > 64 else 0)
    assert found.warps == 12  # two consumers of four, and the producer's one with three that idle
    # Nothing is stored between the first wait of a step and its last.
    assert not any(
        "STL" in step for step in re.findall(r"DEPBAR\S* gsb0, 0x2.*?DEPBAR\S* gsb0, 0x0", found.code, re.DOTALL)
    )


def test_the_softmax_runs_while_the_second_product_does(compiled):
    """Between the wait for the scores and the wait for all, a thread has the exponentials of half a row of 128."""
    waits = compiled[FORWARD].waits()
    under_way = [now for before, now in zip(waits, waits[1:], strict=False) if before[0] == 1]
    # A step and a tile's first step, in both consumers. Of the first, the diagonal, one consumer needs half.
    assert len(under_way) == 4 and all(found[0] == 0 and found[2] >= 32 for found in under_way)
    assert sorted(found[2] for found in under_way)[1] >= 60
    # Sixteen instructions, eight for each product, are issued before the first wait; the compiler adds no others.
    assert sum(wait == 1 and products == 16 for wait, products, _ in waits) == 4


@pytest.mark.parametrize("kernel, waits, products", [(DQ, [2, 1, 0], [20, 0, 0]), (DKDV, [2, 1, 1, 0], [16, 0, 8, 0])])
def test_backward_waits_only_where_it_is_written(compiled, case, kernel, waits, products):
    """Where the compiler finds a product under way that must not be, it waits after each instruction: 80 times."""
    found = compiled[kernel].waits()
    if case[0] == 64:  # four instructions multiply 64 columns, as well as 64 rows, in steps of 16
        products = {DQ: [12, 0, 0], DKDV: [12, 0, 4, 0]}[kernel]
    # In both consumers a step under a mask, one without, and the last products of a tile.
    assert len(found) == 2 * (2 * len(waits) + 1)
    steps = [found[n : n + len(waits)] for n, (wait, *_) in enumerate(found) if wait == 2]
    assert len(steps) == 4
    for step in steps:
        assert [(wait, issued) for wait, issued, _ in step] == list(zip(waits, products, strict=True))
    # While the second product runs, a thread computes the exponentials of its 32 scores, or of half under a mask.
    exponentials = sorted(step[1][2] for step in steps)
    assert exponentials[0] >= 16 and exponentials[2:] == [32, 32]
