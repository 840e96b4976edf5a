"""The probe of the interpreter: it sees what kernels do without changing it, and is as strict as a GPU."""

import pytest
import torch

import tiny_llama_v3 as llama
from exercises.checks import ON_GPU
from exercises.probe import Observer, Strict, observed_by

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


class Events(Observer):
    """Keep what is seen: the name of each event, and how many elements it touches."""

    def __init__(self):
        self.seen = []

    def load(self, access):
        self.seen.append(("load", int(access.mask.sum())))

    def store(self, access):
        self.seen.append(("store", int(access.mask.sum())))

    def atomic(self, access, loads):
        self.seen.append(("atomic" if loads else "exchange", int(access.mask.sum())))

    def dot(self, product):
        self.seen.append(("dot", product.sides[0].data.size))


@llama.jit
def by_pointers(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(
        y_ptr + offsets, tl.load(x_ptr + offsets, cache_modifier=".cg", volatile=True), eviction_policy="evict_first"
    )


@llama.jit
def by_descriptors(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [n_elements], [1], [BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [n_elements], [1], [BLOCK])
    y.store([0], x.load([0]))


@llama.jit
def by_rows_of_descriptors(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    rows = tl.arange(0, 8)
    x = tl.make_tensor_descriptor(x_ptr, [8, 8], [8, 1], [1, 8])
    y = tl.make_tensor_descriptor(y_ptr, [8, 8], [8, 1], [1, 8])
    y.scatter(x.gather(rows, 0), rows, 0)


@llama.jit
def by_an_exchange(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.atomic_xchg(y_ptr + offsets, tl.load(x_ptr + offsets), mask=offsets < n_elements, sem="relaxed")


@llama.jit
def by_an_addition(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offsets, tl.load(x_ptr + offsets), mask=offsets < n_elements)


@llama.jit
def by_comparing(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    for index in range(5):
        tl.atomic_cas(y_ptr + index, 0, tl.load(x_ptr + index), scope="gpu")


@llama.jit
def by_a_product(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    one = (tl.arange(0, 16)[:, None] == tl.arange(0, 16)[None, :]).to(tl.float32)
    acc = tl.zeros([16, 16], tl.float32)
    y = tl.dot(tl.load(x_ptr + offsets), one, acc=acc, input_precision="ieee", out_dtype=tl.float32)
    tl.store(y_ptr + offsets, y)


@pytest.mark.parametrize("kernel, size, copied, seen", [
    (by_pointers, 8, 8, [("load", 8), ("store", 8)]),
    (by_descriptors, 8, 5, [("load", 5), ("store", 5)]),
    (by_rows_of_descriptors, 64, 64, [("load", 8)] * 8 + [("store", 8)] * 8),
    (by_an_exchange, 8, 5, [("load", 8), ("exchange", 5)]),
    (by_an_addition, 8, 5, [("load", 8), ("atomic", 5)]),
    (by_comparing, 8, 5, [("load", 1), ("atomic", 1)] * 5),
    (by_a_product, 256, 256, [("load", 256), ("dot", 256), ("store", 256)]),
], ids=lambda kernel: getattr(kernel, "__name__", ""))  # fmt: skip
def test_what_kernels_do_is_seen_and_done(kernel, size, copied, seen):
    dtype = torch.float32 if kernel is by_a_product else torch.int32  # the interpreter exchanges no fp32
    x, y = torch.arange(1, size + 1, dtype=dtype), torch.zeros(size, dtype=dtype)
    with observed_by(events := Events()):
        kernel[(1,)](x, y, copied, BLOCK=8)
    assert events.seen == seen
    assert torch.equal(y, torch.where(torch.arange(size) < copied, x, 0))
