"""The script as a text, and how it launches kernels without a GPU at hand."""

import ast
import collections
import re
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama

LINES = Path(llama.__file__).read_text().split("\n")
TREE = ast.parse("\n".join(LINES))
DEFINITIONS = [node for node in TREE.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
KERNELS = [node for node in DEFINITIONS if node.name.endswith("_kernel")]


@pytest.mark.parametrize("node", KERNELS, ids=lambda node: node.name)
def test_a_kernel_gives_the_shape_of_what_each_pointer_points_to(node):
    text = ast.get_docstring(node)
    assert "Grid: " in text or "Each program walks" in text
    pointers = [argument for argument in node.args.args if argument.arg.endswith("_ptr")]
    for argument in pointers:
        assert re.search(r"_ptr,  # .*\(.*\)|_ptr,  # .*like ", LINES[argument.lineno - 1]), argument.arg
    assert pointers


class Kernel:
    """What launch() sees of a Triton kernel: calls of itself and of what it was compiled to are kept."""

    def __init__(self):
        self.public, self.direct, self.compiled = [], [], self.Compiled()
        self.compiled.calls = self.direct

    def __getitem__(self, grid):
        return lambda *args, **constants: self.public.append((grid, args, constants)) or self.compiled

    class Compiled:
        function, packed_metadata = "handle", "metadata"

        def run(self, x, y, z, *arguments):
            stream, *own = arguments[:6]
            assert stream.startswith("stream of ") and own == ["handle", "metadata", None, None, None]
            self.calls.append(((x, y, z), arguments[6:]))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(llama, "COMPILED", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: f"stream of {i}", raising=False)
    monkeypatch.setattr(llama, "triton_obstacle", lambda device: None)  # on a machine with a GPU nothing is interpreted
    return Kernel()


Pair = collections.namedtuple("Pair", "M N")


def launch(kernel, x, stride=4, block=8, warps=2, pair=Pair(1, 2), **options):  # noqa: B008  (a tuple)
    llama.launch(kernel, (2, 3), (x, x), ((stride, 1), 5), dict(BLOCK=block, C=pair), num_warps=warps, **options)


def test_a_second_launch_calls_what_was_compiled(kernel):
    x, y = torch.zeros(4), torch.zeros(4)
    launch(kernel, x)
    launch(kernel, y)
    ((grid, args, constants),) = kernel.public
    assert grid == (2, 3) and args == (x, x, (4, 1), 5)
    pair = constants.pop("C")
    assert constants == dict(BLOCK=8, num_warps=2, num_stages=2)
    assert type(pair) is Pair and [type(value) for value in pair] == [llama.tl.constexpr] * 2
    assert [value.value for value in pair] == [1, 2]
    assert kernel.direct == [((2, 3, 1), (y.data_ptr(), y.data_ptr(), (4, 1), 5, 8, (1, 2)))]


@pytest.mark.parametrize("change", [
    dict(x=torch.zeros(4, dtype=torch.bfloat16)), dict(x=torch.zeros(6)[2:]), dict(stride=8), dict(block=16),
    dict(pair=Pair(1, 3)), dict(warps=4), dict(num_stages=3), dict(matrix_instr_nonkdim=16),
], ids=["type", "alignment", "stride", "constant", "tuple of constants", "warps", "stages", "option"])  # fmt: skip
def test_a_launch_that_differs_is_compiled_anew(kernel, change):
    launch(kernel, torch.zeros(4))
    launch(kernel, **{"x": torch.zeros(4)} | change)
    assert len(kernel.public) == 2 and not kernel.direct


@pytest.mark.parametrize("hip, compiled", [("7.0", 2), (None, 1)])
def test_amd_s_kernels_for_storage_beyond_32_bits_are_compiled_anew(kernel, monkeypatch, hip, compiled):
    monkeypatch.setattr(torch.version, "hip", hip)
    for elements in (2**29 - 4, 2**29):
        launch(kernel, torch.empty(elements, device="cpu")[:4])  # its memory is never touched
    assert len(kernel.public) == compiled


def test_another_kernel_is_compiled_anew(kernel):
    other = Kernel()
    for each in (kernel, other, kernel, other):
        launch(each, torch.zeros(4))
    assert [len(calls) for k in (kernel, other) for calls in (k.public, k.direct)] == [1, 1, 1, 1]


def test_each_device_has_a_compiled_kernel_of_its_own(kernel, monkeypatch):
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, device=device: device)
        launch(kernel, torch.zeros(4))
    assert (len(kernel.public), len(kernel.direct)) == (2, 1)


def test_an_interpreted_kernel_is_launched_anew(kernel):
    kernel.compiled = None
    launch(kernel, torch.zeros(4))
    launch(kernel, torch.zeros(4))
    assert len(kernel.public) == 2


def test_what_was_compiled_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(llama, "COMPILED_LIMIT", 3)
    for size in range(10):
        llama.launch(kernel, (1,), (torch.zeros(1),), (size,), {})
        assert len(llama.COMPILED) <= 3
    assert len(kernel.public) == 10
