"""The launches that are compiled are those of the launchers."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import tiny_llama_v3 as llama
from offline import recorded

pytestmark = pytest.mark.triton


def test_helpers_are_not_kernels():
    found = recorded.find_kernels([llama])
    assert "load_tile" not in found and "query_gradient" not in found  # called by kernels
    assert len(found) > 12 and all(name.endswith("_kernel") for name in found)


def test_the_alignment_of_an_address_is_in_bytes():
    assert recorded.seen_by_compiler(torch.zeros(8)[2:]).address == 8


def launch_of(tensor, scalar, block=64, warps=4):
    constants, options = (("BLOCK", block),), (("num_warps", warps),)
    return recorded.Launch("k", "k", (1,), (tensor, None), (scalar,), constants, options)


TENSOR = recorded.Tensor(torch.float32, (8, 64), 0, 2048)
COMPILED_APART = {  # what Triton compiles another kernel for
    "an address that is no multiple of 16": (replace(TENSOR, address=8), 48),
    "another type": (replace(TENSOR, dtype=torch.bfloat16), 48),
    "a storage of 2 GiB": (replace(TENSOR, storage_bytes=2**31), 48),
    "no tensor": (None, 48),
    "a number that is no multiple of 16": (TENSOR, 50),
    "1": (TENSOR, 1),
    "a number of 64 bits": (TENSOR, 2**31),
    "a float": (TENSOR, 48.0),
    "another constant": (TENSOR, 48, 128),
    "another number of warps": (TENSOR, 48, 64, 8),
}


@pytest.mark.parametrize("difference", COMPILED_APART)
def test_launches_that_triton_compiles_apart_have_other_keys(difference):
    assert launch_of(*COMPILED_APART[difference]).compiled_as != launch_of(TENSOR, 48).compiled_as


def test_launches_of_other_sizes_share_a_kernel():
    other = replace(TENSOR, shape=(16, 64), storage_bytes=4096)
    assert launch_of(other, 64).compiled_as == launch_of(TENSOR, 48).compiled_as


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_recorded_launches_are_the_scripts(arch):
    case = recorded.CASES["medium"]
    config = llama.Config(**case.sizes, use_amp=True)
    launches = recorded.record_step(config, arch)
    calls = Counter(launch.kernel for launch in launches)
    layers = config.num_layers
    assert calls["flash_attention_kernel"] == calls["rope_kernel"] == calls["swiglu_activation_kernel"] == layers
    assert calls["rmsnorm_kernel"] == calls["rmsnorm_backward_kernel"] == 2 * layers + 1
    assert calls["adamw_kernel"] == calls["cross_entropy_kernel"] == 1
    options = {dict(x.options).get("matrix_instr_nonkdim") for x in launches if "attention" in x.kernel}
    assert options == ({16} if arch == "gfx942" else {None})
    assert llama.get_gpu("cpu").type == "cpu"  # nothing stays patched


def test_the_case_decides_about_tf32_not_this_machine_s_library(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", lambda: False)  # ROCm without HIPBLASLT_ALLOW_TF32
    before = torch.get_float32_matmul_precision()
    for precision, expected in (("tf32", "tf32"), ("fp32", "ieee")):
        config = llama.Config(**recorded.CASES["small"].sizes, **recorded.PRECISIONS[precision])
        launches = recorded.record_step(config, "sm_90")
        assert {x.named_constants["PRECISION"] for x in launches if "attention" in x.kernel} == {expected}
    assert torch.get_float32_matmul_precision() == before
