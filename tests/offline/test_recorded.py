"""The launches that are compiled are those of the launchers."""

from collections import Counter

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
