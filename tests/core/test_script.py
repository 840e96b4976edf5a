"""How the script launches kernels, without a GPU at hand."""

import collections
import os

import pytest
import torch

import tiny_llama_v3 as llama


def test_later_compilers_are_asked_to_fuse_products_and_sums():
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] in ("0", "1")  # set by the import, unless somebody had chosen


def test_what_other_code_may_import_is_there():
    assert all(hasattr(llama, name) for name in llama.__all__)


class Kernel:
    """What launch() sees of a Triton kernel, and of what it was compiled to: calls of both are kept."""

    function, packed_metadata = "handle", "metadata"

    def __init__(self, interpreted=False):
        self.public, self.direct = [], []
        self.compiled = None if interpreted else self

    def __getitem__(self, grid):
        return lambda *args, **constants: self.public.append((grid, args, constants)) or self.compiled

    def run(self, *arguments):
        self.direct.append(arguments)

    def counts(self):
        return len(self.public), len(self.direct)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(llama, "COMPILED", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: f"stream of {i}", raising=False)
    monkeypatch.setattr(llama, "triton_obstacle", lambda device: None)  # on a machine with a GPU nothing is interpreted
    return Kernel()


Pair = collections.namedtuple("Pair", "M N")


def launch(kernel, x=None, stride=4, number=5, block=8, warps=2, pair=(1, 2), **options):
    x = torch.zeros(4) if x is None else x
    constants = dict(BLOCK=block, C=Pair(*pair))
    llama.launch(kernel, (2, 3), (x, x), (stride, number), constants, num_warps=warps, **options)


def test_a_second_launch_calls_what_was_compiled(kernel):
    x, y = torch.zeros(4), torch.zeros(4)
    launch(kernel, x)
    launch(kernel, y)
    ((grid, args, constants),) = kernel.public
    assert grid == (2, 3) and args == (x, x, 4, 5)
    pair = constants.pop("C")
    assert constants == dict(BLOCK=8, num_warps=2, num_stages=2)
    assert type(pair) is Pair and [value.value for value in pair] == [1, 2]
    # The grid in three dimensions, and what Triton's launcher takes; then the kernel's own arguments.
    own = "stream of -1", "handle", "metadata", None, None, None
    address = y.data_ptr()
    assert kernel.direct == [(2, 3, 1, *own, address, address, 4, 5, 8, (1, 2))]


CHANGES = {
    "type": dict(x=torch.zeros(4, dtype=torch.bfloat16)),
    "alignment": dict(x=torch.zeros(6)[2:]),
    "stride": dict(stride=8),
    "type of a number": dict(number=5.0),
    "constant": dict(block=16),
    "tuple of constants": dict(pair=(1, 3)),
    "warps": dict(warps=4),
    "stages": dict(num_stages=3),
    "option": dict(matrix_instr_nonkdim=16),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_launch_that_differs_is_compiled_anew(kernel, change):
    launch(kernel)
    launch(kernel, **change)
    assert kernel.counts() == (2, 0)


def test_another_kernel_is_compiled_anew_and_an_interpreted_one_never(kernel):
    others = Kernel(), Kernel(interpreted=True)
    for each in (kernel, *others) * 2:
        launch(each)
    assert [each.counts() for each in (kernel, *others)] == [(1, 1), (1, 1), (2, 0)]


@pytest.mark.parametrize("hip, compiled", [("7.0", 2), (None, 1)])
def test_amd_s_kernels_for_storage_beyond_32_bits_are_compiled_anew(kernel, monkeypatch, hip, compiled):
    monkeypatch.setattr(torch.version, "hip", hip)
    torch.utils.deterministic.fill_uninitialized_memory = False  # these gigabytes are never touched
    for elements in (2**29 - 4, 2**29):
        launch(kernel, torch.empty(elements)[:4])
    assert len(kernel.public) == compiled


def test_each_device_has_a_compiled_kernel_of_its_own(kernel, monkeypatch):
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, device=device: device)
        launch(kernel)
    assert kernel.counts() == (2, 1)


def test_what_was_compiled_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(llama, "COMPILED_LIMIT", 3)
    for block in range(10):
        launch(kernel, block=block)
        assert len(llama.COMPILED) <= 3
    assert len(kernel.public) == 10
