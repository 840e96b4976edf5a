"""The counts of bytes and operations, against counts made in another way."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import tiny_llama_v3 as llama
from measure import work

CONFIG = llama.Config(batch_size=2, seq_len=64, hidden_dim=128, num_layers=1, num_heads=4, vocab_size=96)
KERNELS = work.kernel_work(CONFIG)
TOKENS = 2 * 64


def test_a_kernel_of_the_script_each():
    """Under the names that profilers show."""
    parts = (SimpleNamespace(constants={"PART": part}) for part in ("fused", "dq", "dkdv"))
    names = {name for name in vars(llama) if name.endswith("_kernel")} | set(map(llama.backward_kernel_name, parts))
    assert set(KERNELS) <= names


def test_bytes_by_hand():
    parameters = sum(p.numel() for p in llama.TinyLlamaTriton(CONFIG).parameters())
    assert KERNELS["adamw_kernel"].bytes == 28 * parameters  # weights and two moments in and out, a gradient in
    split = work.kernel_work(llama.dataclasses.replace(CONFIG, use_amp=True))["adamw_kernel"]
    assert split.bytes == 26 * parameters  # the gradient is in bf16
    small = 4 * 128 + 4 * TOKENS  # weight and rstd
    # The first norm reads x and writes y; the other two read x and the branch, and write the sum and y.
    assert KERNELS["rmsnorm_kernel"].bytes == pytest.approx(4 * TOKENS * 128 * (2 + 4 + 4) / 3 + small)
    # Two norms have the gradient of their residual to add.
    assert KERNELS["rmsnorm_backward_kernel"].bytes == pytest.approx(4 * TOKENS * 128 * (4 + 4 + 3) / 3 + small)
    assert KERNELS["swiglu_activation_backward_kernel"].bytes == 5 * 4 * TOKENS * 512
    assert KERNELS["cross_entropy_kernel"].bytes == 2 * 4 * TOKENS * 96 + 8 * TOKENS + 2 * 4 * TOKENS


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_products_of_attention_are_those_that_pytorch_counts_half_of_them_masked():
    q, k, v = (torch.randn(2 * 4, 64, 32, requires_grad=True) for _ in range(3))
    scores = q @ k.transpose(1, 2)
    o = scores.softmax(-1) @ v
    forward = counted(lambda: (q @ k.transpose(1, 2)).softmax(-1) @ v)
    backward = counted(lambda: torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))
    again = counted(lambda: q @ k.transpose(1, 2))  # the kernels do not keep the scores
    assert KERNELS["flash_attention_kernel"].flop == forward / 2
    heads = torch.empty(2, 64, 4, 32, device="meta")
    assert work.attention_backward(*[heads] * 9).flop == (backward + again) / 2
    # The two halves of the gradient make the scores and o_grad v^T each for themselves.
    halves = [KERNELS[f"flash_attention_backward_{half}_kernel"].flop for half in ("dq", "dkdv")]
    assert KERNELS["flash_attention_backward_kernel"].flop == sum(halves) == (backward + again + 2 * again) / 2


def test_products_of_the_naive_swiglu():
    x, weight = torch.randn(TOKENS, 128), torch.randn(2 * 512, 128)
    assert KERNELS["swiglu_kernel"].flop == counted(lambda: F.linear(x, weight)) + 5 * TOKENS * 512


def test_a_long_row_is_exponentiated_twice():
    rows = torch.empty(1, device="meta")
    short, long = (work.cross_entropy(torch.empty(1, n, device="meta"), rows, rows) for n in (8192, 8193))
    assert short.flop == 8 * 8192 and long.flop == 11 * 8193


def test_an_addition_more_is_counted():
    x = torch.empty(4, 8, device="meta")
    plain, added = work.rmsnorm(x, x[0], x, x[:, 0]), work.rmsnorm(x, x[0], x, x[:, 0], x, x)
    assert added.flop - plain.flop == 32 and added.bytes - plain.bytes == 2 * x.nbytes
