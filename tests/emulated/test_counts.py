"""Classes of instructions, and accesses to LDS."""

import pytest

from emulated import counts


@pytest.mark.parametrize(("name", "offsets", "access"), [
    ("DS_READ_B128", (0x10, 0x01), ("read", 16, (0x110,))), ("DS_WRITE_B16_D16_HI", (2, 0), ("write", 2, (2,))),
    ("DS_READ2_B64", (1, 3), ("read", 8, (8, 24))), ("DS_WRITE2ST64_B32", (0, 2), ("write", 4, (0, 512))),
    ("DS_READ_U16", (0, 0), ("read", 2, (0,))), ("DS_READ_B64_TR_B16", (0, 0), ("read", 8, (0,))),
    ("DS_BPERMUTE_B32", (0, 0), None), ("DS_SWIZZLE_B32", (0, 0), None),
])  # fmt: skip
def test_accesses_to_lds(name, offsets, access):
    assert counts.local_access(name, *offsets) == access


@pytest.mark.parametrize(("name", "class_"), [
    ("V_MFMA_F32_32X32X8_BF16", "matrix"), ("V_ADD_F32_E32", "vector"), ("GLOBAL_LOAD_DWORDX4", "global memory"),
    ("BUFFER_STORE_SHORT", "global memory"), ("BUFFER_LOAD_USHORT", "global memory"), ("DS_BPERMUTE_B32", "LDS"),
    ("S_LOAD_DWORDX2", "scalar"), ("S_BARRIER", "scalar"),
])  # fmt: skip
def test_classes(name, class_):
    assert counts.class_of(name) == class_
