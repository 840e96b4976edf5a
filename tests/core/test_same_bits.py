"""Each kernel of a training step writes the same bits again: with the warps that it has, and with two.

The first run on an AMD GPU runs this by itself: there a compiler may add up the products of few warps in any order.
"""

import collections

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY

pytestmark = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


def bits_of(tensors):
    return [x.clone().reshape(-1).view(torch.uint8) for x in tensors]


def repeated(launch, differ):
    """launch(), but with each number of warps twice; differ: {(name of a kernel, warps): how often its bits did}."""

    def launch_again(kernel, grid, tensors, *arguments, num_warps=4, **options):
        given = [x.clone() for x in tensors]
        for warps in sorted({2, num_warps}):
            results = []
            for _ in range(2):
                for x, before in zip(tensors, given, strict=True):
                    if not torch.equal(*bits_of([x, before])):
                        x.data.copy_(before)  # autograd does not see it
                launch(kernel, grid, tensors, *arguments, num_warps=warps, **options)
                results.append(bits_of(tensors))
            differ[kernel.fn.__name__, warps] += not all(map(torch.equal, *results))

    return launch_again


@pytest.mark.parametrize("use_amp", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_every_kernel_writes_the_same_bits_again(make_step, device, monkeypatch, use_amp):
    differ, config = collections.Counter(), llama.Config() if device == "cuda" else TINY
    step = make_step(config, use_amp=use_amp, impl="triton")
    monkeypatch.setattr(llama, "launch", repeated(llama.launch, differ))
    step.run()
    print(*differ.items(), sep="\n")
    assert len(differ) > 20 and not +differ


def test_other_bits_are_found():
    def add_noise(kernel, grid, tensors, num_warps):
        tensors[0].add_(torch.rand(2) if num_warps == 2 else 1)

    differ, x = collections.Counter(), torch.zeros(2)
    repeated(add_noise, differ)(llama.scale_kernel, (1,), (x,))
    assert [*differ.values()] == [1, 0] and x.tolist() == [1, 1]
