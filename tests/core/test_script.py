"""The script as a text, and how it launches kernels without a GPU at hand."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama

TREE = ast.parse(Path(llama.__file__).read_text())
DEFINITIONS = [node for node in TREE.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
METHODS = [
    method
    for node in DEFINITIONS
    if isinstance(node, ast.ClassDef)
    and not node.name.endswith("Function")  # described by the function that applies it
    for method in node.body
    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and node.name != "Parser"
]
KERNELS = [node for node in DEFINITIONS if node.name.endswith("_kernel")]


@pytest.mark.parametrize("node", [*DEFINITIONS, *METHODS], ids=lambda node: node.name)
def test_everything_public_is_described(node):
    assert ast.get_docstring(node), f"line {node.lineno}: {node.name} has no docstring"


@pytest.mark.parametrize("node", KERNELS, ids=lambda node: node.name)
def test_a_kernel_gives_the_shape_of_what_each_pointer_points_to(node):
    text = ast.get_docstring(node)
    assert "Grid: " in text or "Each program walks" in text
    for argument in node.args.args:
        if argument.arg.endswith("_ptr"):
            assert argument.arg.removesuffix("_ptr") in text, f"{node.name} does not describe {argument.arg}"


def test_every_bug_is_marked_where_it_lives():
    text = Path(llama.__file__).read_text()
    for name in llama.BUGS:
        assert f"BUG {name}" in text, name
    asked_for = {name for names in llama.OPERATION_BUGS.values() for name in names}
    assert asked_for <= set(llama.BUGS)


class Kernel:
    """What launch() sees of a Triton kernel: public calls are counted, and give something that was compiled."""

    def __init__(self):
        self.public, self.direct = [], []
        self.compiled = SimpleNamespace(function=0, packed_metadata=0, run=lambda *args: self.direct.append(args))

    def __getitem__(self, grid):
        def call(*args, **constants):
            self.public.append((grid, args, constants))
            return self.compiled

        return call


@pytest.fixture
def kernel(monkeypatch):
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=driver))
    monkeypatch.setattr(llama, "triton", SimpleNamespace(runtime=runtime, __version__="9.9"))
    monkeypatch.setattr(llama, "COMPILED", {})
    monkeypatch.setattr(llama, "DIRECT_LAUNCH", SimpleNamespace(works=None))
    return Kernel()


def launch_twice(kernel):
    x = torch.zeros(4)
    for _ in range(2):
        llama.launch(kernel, (2, 3), (x, None), ((4, 1), 5), dict(BLOCK=8), num_warps=2)
    return x


@pytest.mark.parametrize("works", [True, False])
def test_a_second_launch_is_direct_where_that_works(kernel, monkeypatch, works):
    monkeypatch.setattr(llama, "try_direct_launch", lambda: works)
    x = launch_twice(kernel)
    public = ((2, 3), (x, None, (4, 1), 5), dict(BLOCK=8, num_warps=2, num_stages=2))
    direct = (2, 3, 1, 7, 0, 0, None, None, None, x.data_ptr(), None, (4, 1), 5, 8)
    assert kernel.public == ([public] if works else [public, public])
    assert kernel.direct == ([direct] if works else [])


def test_an_interpreted_kernel_is_launched_anew(kernel, monkeypatch):
    monkeypatch.setattr(llama, "try_direct_launch", pytest.fail)
    kernel.compiled = None
    launch_twice(kernel)
    assert len(kernel.public) == 2


@pytest.mark.parametrize("direct", ["raises", "does nothing", "works"])
def test_the_direct_launch_is_tried_and_compared(kernel, monkeypatch, capsys, direct):
    """A fake of scale_kernel multiplies by three at the public call; what the direct one does is up to it."""
    tensors = []

    def run(*args):
        if direct == "raises":
            raise TypeError("run() takes 3 arguments")
        if direct == "works":
            tensors[0] *= 3.0

    scale = Kernel()
    scale.compiled.run = run
    launch = Kernel.__getitem__

    def multiply(self, grid):
        if self is not scale:
            return launch(self, grid)
        return lambda x, *args, **constants: (tensors.append(x), x.mul_(3.0), self.compiled)[-1]

    monkeypatch.setattr(Kernel, "__getitem__", multiply)
    monkeypatch.setattr(llama, "scale_kernel", scale)
    for name in ("ones", "full"):  # on the GPU, had we one
        create = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, device, create=create: create(*args))
    launch_twice(kernel)
    assert (len(kernel.public), len(kernel.direct)) == ((1, 1) if direct == "works" else (2, 0))
    assert len(tensors) == 1  # tried once
    assert ("Triton 9.9 launches kernels in a new way" in capsys.readouterr().out) is (direct != "works")


def test_the_trial_does_not_spoil_a_capture(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch_twice(kernel)
    assert (len(kernel.public), len(kernel.direct)) == (2, 0)
    assert llama.DIRECT_LAUNCH.works is None  # it is tried later


def test_what_was_compiled_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(llama, "try_direct_launch", lambda: True)
    monkeypatch.setattr(llama, "COMPILED_LIMIT", 3)
    for size in range(10):
        llama.launch(kernel, (1,), (torch.zeros(1),), (size,), {})
        assert len(llama.COMPILED) <= 3
    assert len(kernel.public) == 10
