"""Faults planted where AMD GPUs alone go: in a copy of the script, or in the machine code. The emulator sees them."""

import ctypes
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from offline import recorded
from tests.core import test_kernels
from tests.offline import plugin
from tests.offline.selection import EMULATED, only_emulated

if EMULATED:
    from triton.runtime.errors import OutOfResources

    from offline.emulator import driver
    from offline.emulator.machine import Fault, Program, name_of

pytestmark = only_emulated
randn = test_kernels.randn
S_NOP = 0xBF800000


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """A function that has the tests run on a copy of the script, where wrong stands in the place of right."""

    def plant(right="", wrong=""):
        file = tmp_path / "tiny_llama_v3.py"
        file.write_text(SCRIPT.read_text().replace(right, wrong))
        spec = importlib.util.spec_from_file_location("faulty_tiny_llama_v3", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        # That blocks of queries are taken for blocks of keys shows where these differ.
        for gpu in ("rdna", "gfx120"):
            *others, _ = module.ATTENTION_TILES[gpu, "half", 64]
            module.ATTENTION_TILES[gpu, "half", 64] = *others, (32, 64, 8, 1)
        for user in (recorded, plugin, test_kernels):
            monkeypatch.setattr(user, "llama", module)

    return plant


def attention(randn, seq_len, head_dim=24):
    operation = test_kernels.attention(randn, 1, seq_len, 4, 2, head_dim)
    test_kernels.assert_as_accurate_as_torch(*operation, torch.bfloat16)


def rmsnorm(randn):
    inputs, upstream = [randn(65, 512), None, randn(512)], [randn(65, 512)]
    norms = test_kernels.llama.triton_rmsnorm, test_kernels.llama.torch_rmsnorm
    ours, reference = (lambda *t, norm=norm: norm(*t, 1e-5)[0] for norm in norms)
    test_kernels.assert_as_accurate_as_torch(ours, reference, inputs, upstream, torch.float32)


def run(kernel, randn):
    """One kernel's test, on the emulated GPU."""
    check, *sizes = {"short attention": (attention, 104), "attention": (attention, 150), "rmsnorm": (rmsnorm,)}[kernel]
    with plugin.our_gpu(EMULATED):
        check(randn, *sizes)


@pytest.mark.parametrize("kernel", ["short attention", "attention", "rmsnorm"])
def test_without_a_fault_it_passes(kernel, plant, randn):
    plant()
    run(kernel, randn)


FAULTS = {  # the kernel whose test sees it, what is right there, and what is planted
    "tile: blocks of queries counted as blocks of keys": (
        "short attention", '"fused": (math.prod(by_queries) +',
        '"fused": (batch * num_heads * cdiv(seq_len, tile.BLOCK_N) +'),
    "tile: more threads than there are": (
        "rmsnorm", "warps = min(max(4, cols // 2048)", "warps = 16 * min(max(4, cols // 2048)"),
    "tile: programs for whole tiles only": (
        "attention", "by_queries = batch * num_heads, cdiv(seq_len, tile.BLOCK_M)",
        "by_queries = batch * num_heads, seq_len // tile.BLOCK_M"),
    "tile: fewer queries than keys": (
        "short attention", "q_grad = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)\n"
        "    diagonal = block * C.BLOCK_M // C.BLOCK_N * C.BLOCK_N",
        "q_grad = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)\n    diagonal = block * C.BLOCK_M"),
    "tile: queries that see the keys": (
        "attention", "begin = block * C.BLOCK_N // C.BLOCK_M * C.BLOCK_M",
        "begin = block * C.BLOCK_N // C.BLOCK_M * C.BLOCK_M + C.BLOCK_M"),
    "mask: of rows, in a load": (
        "attention", "mask = ((rows < n_rows) | EVEN)", "mask = ((rows < n_rows + 200) | EVEN)"),
    "mask: of rows, in a store": (
        "attention", "store(ptrs, tile, (rows < n_rows)[:, None]", "store(ptrs, tile, (rows < n_rows + 200)[:, None]"),
    "mask: of a head's padding": (
        "attention", "(cols % HALF < C.HEAD_DIM // 2)", "(cols < C.BLOCK_D)"),
    "mask: none for a last tile that is not full": (
        "short attention", "seq_len % max(tile.BLOCK_M, tile.BLOCK_N) == 0", "seq_len % 8 == 0"),
}  # fmt: skip
SCRIPT = Path(llama.__file__)
for fault, (_, right, _) in FAULTS.items():  # also where tests are skipped: what changes nothing tests nothing
    assert SCRIPT.read_text().count(right) == 1, f"{fault}: the script must have this text once: {right}"

SEEN = r"error \S+, allowed|touches byte .* of|out of resource: (shared memory|threads)"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_script_is_seen(fault, plant, randn):
    kernel, right, wrong = FAULTS[fault]
    plant(right, wrong)
    with pytest.raises((AssertionError, Fault, OutOfResources), match=SEEN):
        run(kernel, randn)


@pytest.mark.parametrize("kernel", ["short attention", "attention"])
def test_missing_barriers_are_seen(kernel, plant, randn, monkeypatch):
    class Stripped(Program):
        def __init__(self, code, arch):
            super().__init__(code, arch)
            address = code.begin
            while address < code.begin + code.nbytes:
                inst = self.decode(address)
                if name_of(inst).startswith("S_BARRIER"):
                    ctypes.c_uint32.from_address(address).value = S_NOP
                address += inst.size()
            self.decoded.clear()

    plant()  # kernels that no launch has loaded yet
    monkeypatch.setattr(driver, "Program", Stripped)
    with pytest.raises(AssertionError, match=SEEN):
        run(kernel, randn)
