"""Faults planted where AMD GPUs alone go: in a copy of the script, or in the machine code. The emulator sees them."""

import ctypes
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from profiling import kernel_report
from tests.core import test_kernels
from tests.emulated.only import EMULATED, only_emulated

if EMULATED:
    from triton.runtime.errors import OutOfResources

    from profiling.emulator import driver
    from profiling.emulator.machine import Fault, Machine, Program

pytestmark = only_emulated
randn = test_kernels.randn
S_NOP = 0xBF800000


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """A function that has the tests run on a copy of the script, where wrong stands in the place of right."""

    def plant(right="", wrong=""):
        code = Path(llama.__file__).read_text()
        assert not right or code.count(right) == 1
        file = tmp_path / "tiny_llama_v3.py"
        file.write_text(code.replace(right, wrong) if right else code)
        spec = importlib.util.spec_from_file_location("faulty_tiny_llama_v3", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        for user in (kernel_report, driver, test_kernels):
            monkeypatch.setattr(user, "llama", module)

    return plant


def attention(randn, seq_len, head_dim=24):
    qkv, upstream, arguments = test_kernels.attention_inputs(randn, 1, seq_len, 4, 2, head_dim)
    ours, reference = (
        test_kernels.on_qkv(f, arguments)
        for f in (test_kernels.llama.triton_attention, test_kernels.llama.torch_attention)
    )
    test_kernels.assert_as_accurate_as_torch(ours, reference, [qkv], [upstream], torch.bfloat16)


def rmsnorm(randn):
    inputs, upstream = [randn(65, 512), None, randn(512)], [randn(65, 512)]
    ours, reference = (
        lambda *t, f=f: f(*t, 1e-5)[0] for f in (test_kernels.llama.triton_rmsnorm, test_kernels.llama.torch_rmsnorm)
    )
    test_kernels.assert_as_accurate_as_torch(ours, reference, inputs, upstream, torch.float32)


def run(kernel, randn):
    """One kernel's test, on the emulated GPU."""
    with driver.emulating(Machine(EMULATED, seed=1)):
        {
            "short attention": lambda: attention(randn, 104),
            "attention": lambda: attention(randn, 150),
            "rmsnorm": lambda: rmsnorm(randn),
        }[kernel]()


@pytest.mark.parametrize("kernel", ["short attention", "attention", "rmsnorm"])
def test_without_a_fault_it_passes(kernel, plant, randn):
    plant()
    run(kernel, randn)


ROWS = "(rows < n_rows)[:, None] & col_mask[None, :]"
FAULTS = {  # the kernel whose test sees it, what is right there, and what is planted
    "tile: blocks of queries counted as blocks of keys": (
        "short attention", "+ num_heads * cdiv(seq_len, t.BLOCK_M)", "+ num_heads * cdiv(seq_len, t.BLOCK_N)",
    ),
    "tile: more threads than there are": (
        "rmsnorm", '"amd":\n        warps //= 2', '"amd":\n        warps *= 8',
    ),
    "tile: programs for whole tiles only": (
        "attention", "lambda tile: (batch * num_heads, cdiv(seq_len, tile.BLOCK_M)),\n        (q, k, v, o, lse)",
        "lambda tile: (batch * num_heads, seq_len // tile.BLOCK_M),\n        (q, k, v, o, lse)",
    ),
    "tile: fewer queries than keys": (
        "short attention", "diagonal = block * BLOCK_M // BLOCK_N * BLOCK_N\n    q_grad",
        "diagonal = block * BLOCK_M\n    q_grad",
    ),
    "tile: queries that see the keys": (
        "attention", "begin = block * BLOCK_N // BLOCK_M * BLOCK_M",
        "begin = block * BLOCK_N // BLOCK_M * BLOCK_M + BLOCK_M",
    ),
    "mask: of rows, in a load": (
        "attention", f"tile = tl.load(ptrs, mask={ROWS}, other=0.0)",
        "tile = tl.load(ptrs, mask=(rows < n_rows + 200)[:, None] & col_mask[None, :], other=0.0)",
    ),
    "mask: of rows, in a store": (
        "attention", f"tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask={ROWS})",
        "tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=(rows < n_rows + 200)[:, None] & col_mask[None, :])",
    ),
    "mask: of a head's padding": (
        "attention", "return offsets, cols % (BLOCK_D // 2) < HEAD_DIM // 2", "return offsets, cols < BLOCK_D",
    ),
    "mask: none for a last tile that is not full": (
        "short attention", "shape[1] % tile.BLOCK_M == 0", "shape[1] % 8 == 0",
    ),
}  # fmt: skip


SEEN = r"error \S+, allowed|touches .* of|stores beside|out of resource: (shared memory|threads)"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_script_is_seen(fault, plant, randn):
    kernel, right, wrong = FAULTS[fault]
    plant(right, wrong)
    with pytest.raises((AssertionError, Fault, OutOfResources), match=SEEN):
        run(kernel, randn)


@pytest.fixture
def remove(plant, monkeypatch):
    """A function that puts s_nop into the place of every instruction of one name."""

    def remove(name):
        class Stripped(Program):
            def __init__(self, code, arch):
                super().__init__(code, arch)
                address = code.begin
                while address < code.begin + code.nbytes:
                    inst = self.decode(address)
                    if inst.op.name == name:
                        ctypes.c_uint32.from_address(address).value = S_NOP
                    address += inst.size()
                self.decoded.clear()

        plant()  # kernels that no launch has loaded yet
        monkeypatch.setattr(driver, "Program", Stripped)

    return remove


@pytest.mark.parametrize("kernel", ["short attention", "attention"])
def test_missing_barriers_are_seen(kernel, remove, randn):
    remove("S_BARRIER")
    with pytest.raises(AssertionError, match=SEEN):
        run(kernel, randn)


@pytest.mark.xfail(strict=True, reason="an instruction is done before the next begins: waits are not modelled")
def test_missing_waits_are_seen(remove, randn):
    remove("S_WAITCNT")
    with pytest.raises(AssertionError):
        run("attention", randn)
