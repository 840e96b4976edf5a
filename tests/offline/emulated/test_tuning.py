"""Autotuning on the emulator takes the first configuration that can be launched."""

import pytest
import torch

from tests.offline.selection import only_emulated

pytestmark = only_emulated

triton = pytest.importorskip("triton")
tl = triton.language

TOO_MANY_WAVES = triton.Config({"SIZE": 7}, num_warps=64)
CONFIGS = [TOO_MANY_WAVES, *(triton.Config({"SIZE": size}, num_warps=1) for size in (5, 3, 2))]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def size_kernel(out, n, SIZE: tl.constexpr):
    tl.store(out, SIZE)


def test_the_first_configuration_that_can_be_launched(emulated):
    """The others are not tried, in each tuning anew; what is tuned is not tuned again."""
    out = torch.zeros(1, dtype=torch.int32)
    for n, launches in ((33, 2), (33, 3), (34, 5)):
        out.zero_()
        size_kernel[(1,)](out, n)
        assert (out.item(), emulated.n_launches) == (5, launches)
