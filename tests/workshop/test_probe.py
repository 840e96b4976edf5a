"""The probe of the interpreter: where it is as strict as a GPU."""

import pytest
import torch

import tiny_llama_v3 as llama
from exercises.checks import ON_GPU
from exercises.probe import Strict, observed_by

pytestmark = [
    pytest.mark.skipif(llama.triton is None, reason="Triton is not installed"),
    pytest.mark.skipif(ON_GPU, reason="the interpreter does not run"),
]
tl = llama.tl


@llama.jit
def times_one(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    one = (rows == cols).to(tl.float32).to(x.dtype)
    tl.store(y_ptr + offsets, tl.dot(x, one), mask=offsets < n_elements)


def product(x, n_elements=256):
    y = torch.zeros(16, 16)
    with observed_by(Strict()):
        times_one[(1,)](x, y, n_elements, BLOCK=16)
    return y


def test_fp32_is_rounded_to_ten_bits_and_bf16_multiplied_as_numbers():
    x = torch.full((16, 16), 1 + 3 * 2.0**-12)  # between 1 and 1 + 2**-10, and nearer to that
    assert torch.equal(product(x), torch.full_like(x, 1 + 2.0**-10))
    assert torch.equal(product(x.bfloat16() * 3), torch.full_like(x, 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_a_mask_leaves_out_is_infinite(dtype):
    y = product(torch.ones(16, 16, dtype=dtype), n_elements=8)
    assert not y.flatten()[:8].isfinite().any() and not y.flatten()[8:].any()  # 0 * inf is in each sum
