"""How the kernels for Hopper are launched, without a GPU at hand."""

import pytest
import torch

from tests.core.test_script import Kernel

hopper = pytest.importorskip("tiny_llama.hopper", reason="Triton is older than 3.6, or there is none")


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(hopper, "COMPILED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: f"stream of {i}", raising=False)
    return Kernel()


def described(rows=256, columns=128, dtype=torch.bfloat16, block=(64, 128)):
    return hopper.descriptor(torch.zeros(rows, columns, dtype=dtype), *block)


def floats(first=0):
    """Return four numbers that begin so many after an address that is a multiple of 16 bytes."""
    return torch.zeros(8)[first : first + 4]


def launch(kernel, a=None, b=None, lse=None, number=5, constants=(True,), programs=132, **options):
    arguments = described() if a is None else a, described() if b is None else b, floats() if lse is None else lse
    hopper.launch(kernel, programs, (*arguments, number), constants, **options)
    return *arguments, number, *constants


def test_a_second_launch_calls_what_was_compiled(kernel):
    """On other tensors, of other sizes, with as many programs as are asked for now."""
    first = launch(kernel, maxnreg=168)
    second = launch(kernel, described(rows=512), described(columns=256), floats(4), programs=78, maxnreg=168)
    assert kernel.public == [((132, 1, 1), first, dict(num_warps=4, maxnreg=168))]
    (direct,) = kernel.direct
    assert direct[:9] == (78, 1, 1, "stream of 0", "handle", "metadata", None, None, None)
    assert all(given is own for given, own in zip(direct[9:], second, strict=True))
    assert (direct[9].shape, direct[10].shape) == ([512, 128], [256, 256])


CHANGES = {
    "type of the first": lambda: dict(a=described(dtype=torch.float16)),
    "type of another": lambda: dict(b=described(dtype=torch.float16)),
    "rows of a tile": lambda: dict(a=described(block=(128, 128))),
    "columns of a tile": lambda: dict(b=described(block=(64, 64))),
    "type behind an address": lambda: dict(lse=floats().bfloat16()),
    "alignment": lambda: dict(lse=floats(1)),
    "number": lambda: dict(number=6),
    "constant": lambda: dict(constants=(False,)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_launch_that_differs_is_compiled_anew(kernel, change):
    """And found again, as is what was compiled before it."""
    for number in range(2):
        launch(kernel)
        launch(kernel, **change())
        assert kernel.counts() == (2, 2 * number)


def test_each_kernel_and_device_has_what_was_compiled_for_it(kernel, monkeypatch):
    other = Kernel()
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch(kernel)
        launch(other)
    assert kernel.counts() == other.counts() == (2, 1)
    assert kernel.direct[0][3] == "stream of 0"


@pytest.mark.parametrize("differs", ["address", "type", "shape", "strides", "block"])
def test_a_descriptor_is_kept_for_one_tensor_and_tile(differs):
    """Of all that it describes: where the tensor lies, its type, shape and strides, and the tile."""
    x = torch.zeros(4, 16, 64, dtype=torch.bfloat16)
    others = dict(address=x[1:], type=x.view(torch.float16), shape=x[:3], strides=x.view(16, 4, 64).transpose(0, 1))
    block = (1, 16, 32) if differs == "block" else (1, 8, 64)
    other = others.get(differs, x)
    kept, found = hopper.descriptor(x, 1, 8, 64), hopper.descriptor(other, *block)
    assert hopper.descriptor(x, 1, 8, 64) is kept is not found
    for tensor, tile, desc in ((x, (1, 8, 64), kept), (other, block, found)):
        assert desc.base.data_ptr() == tensor.data_ptr() and desc.base.dtype == tensor.dtype
        assert (desc.shape, desc.strides) == (list(tensor.shape), list(tensor.stride()))
        assert desc.block_shape == list(tile)
