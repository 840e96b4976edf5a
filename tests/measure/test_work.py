"""The counts of bytes and operations: by hand at sizes that are all different, and against PyTorch's counter."""

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


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


X, COLS, ROWS = tensor(3, 5), tensor(5, dtype=torch.float32), tensor(3, dtype=torch.float32)  # 30, 20 and 12 bytes
PARTIAL = tensor(7, 5, dtype=torch.float32)  # 140 bytes
Q, KV, LSE = tensor(2, 8, 6, 4), tensor(2, 8, 3, 4), tensor(2, 6, 8, dtype=torch.float32)  # 768, 384, 384 bytes
TABLES = [tensor(8, 2, dtype=torch.float32)] * 2  # 64 bytes each
PRODUCT = 2 * 6 * 8 * 8 * 4  # half of the pairs of queries and keys, two operations a dimension
GATE_UP, HIDDEN = tensor(3, 10), tensor(3, 5)  # 60 and 30 bytes
GRADIENT = [LSE, Q, KV, KV]


@pytest.mark.parametrize("name, arguments, n_bytes, flop", [
    ("rmsnorm", (X, COLS, X, ROWS), 2 * 30 + 20 + 12, 4 * 15),
    ("rmsnorm", (X, COLS, X, ROWS, X, X), 4 * 30 + 20 + 12, 5 * 15),
    ("rmsnorm_backward", (X, X, COLS, ROWS, X), 3 * 30 + 20 + 12, 9 * 15),
    ("rmsnorm_backward", (X, X, COLS, ROWS, X, X, PARTIAL), 4 * 30 + 20 + 12 + 140, 10 * 15),
    ("column_sum", (PARTIAL, COLS), 160, 35),
    ("layer_norm", (X, COLS, X, ROWS, ROWS), 2 * 30 + 20 + 24, 6 * 15),
    ("layer_norm", (X, COLS, X, ROWS, ROWS, COLS, X, X), 4 * 30 + 40 + 24, 8 * 15),
    ("layer_norm_backward", (X, X, COLS, ROWS, ROWS, X), 3 * 30 + 20 + 24, 13 * 15),
    ("layer_norm_backward", (X, X, COLS, ROWS, ROWS, X, X, X, PARTIAL, False, True), 5 * 30 + 184, 16 * 15),
    ("attention", (Q, KV, KV, Q, LSE), 2 * 768 + 3 * 384, 2 * PRODUCT),
    ("attention_backward", (Q, KV, KV, Q, Q, *GRADIENT), 4 * 768 + 5 * 384, 5 * PRODUCT),
    ("attention_backward_dq", (Q, KV, KV, Q, Q, LSE, LSE, Q, *TABLES), 4 * 768 + 4 * 384 + 128, 3 * PRODUCT),
    ("attention_backward_dkdv", (Q, KV, KV, Q, LSE, LSE, KV, KV), 2 * 768 + 6 * 384, 4 * PRODUCT),
    ("attention_backward_fused", (Q, KV, KV, Q, Q, *GRADIENT, *TABLES), 4 * 768 + 5 * 384 + 128, 7 * PRODUCT),
    ("rope", (10, 2, *TABLES), 40 + 128, 30),
    ("swiglu_activation", (GATE_UP, HIDDEN), 90, 5 * 15),
    ("swiglu_activation_backward", (HIDDEN, GATE_UP), 30 + 2 * 60, 10 * 15),
    ("swiglu_matmul", (tensor(3, 7), tensor(10, 7), GATE_UP, HIDDEN), 42 + 140 + 90, (4 * 7 + 5) * 15),
    ("cross_entropy", (X, ROWS, COLS), 2 * 30 + 12 + 20, 8 * 15),
    ("cross_entropy", (tensor(1, 8192), ROWS, ROWS), 4 * 8192 + 24, 8 * 8192),
    ("cross_entropy", (tensor(1, 8193), ROWS, ROWS), 4 * 8193 + 24, 11 * 8193),  # exponentiated twice
    ("scale", (ROWS,), 12, 0),
    ("embedding_backward", (ROWS, X, PARTIAL), 12 + 30 + 2 * 140, 15),
    ("adamw", (X, X, HIDDEN, PARTIAL, PARTIAL), 2 * (60 + 280) + 30, 15 * 15),
])  # fmt: skip
def test_bytes_and_operations_by_hand(name, arguments, n_bytes, flop):
    assert getattr(work, name)(*arguments) == (n_bytes, flop)


def test_the_mean_of_several_calls():
    assert work.mean(work.Work(2, 30), work.Work(4, 60), work.Work(12, 0)) == (6, 30)


def test_a_kernel_of_the_script_each():
    """Under the names that profilers show."""
    parts = (SimpleNamespace(constants={"PART": part}) for part in ("fused", "dq", "dkdv"))
    names = {name for name in vars(llama) if name.endswith("_kernel")} | set(map(llama.backward_kernel_name, parts))
    assert set(KERNELS) <= names


def test_bytes_of_a_step_by_hand():
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


def test_products_are_those_that_pytorch_counts():
    q, k, v = (torch.randn(2 * 4, 64, 32, requires_grad=True) for _ in range(3))
    scores = q @ k.transpose(1, 2)
    o = scores.softmax(-1) @ v
    forward = counted(lambda: (q @ k.transpose(1, 2)).softmax(-1) @ v)
    backward = counted(lambda: torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))
    again = counted(lambda: q @ k.transpose(1, 2))  # the kernels do not keep the scores
    assert KERNELS["flash_attention_kernel"].flop == forward / 2  # half of it is masked
    heads = tensor(2, 64, 4, 32)
    assert work.attention_backward(*[heads] * 9).flop == (backward + again) / 2
    # The two halves of the gradient make the scores and o_grad v^T each for themselves.
    halves = [KERNELS[f"flash_attention_backward_{half}_kernel"].flop for half in ("dq", "dkdv")]
    assert KERNELS["flash_attention_backward_kernel"].flop == sum(halves) == (backward + again + 2 * again) / 2
    x, weight = torch.randn(TOKENS, 128), torch.randn(2 * 512, 128)
    assert KERNELS["swiglu_kernel"].flop == counted(lambda: F.linear(x, weight)) + 5 * TOKENS * 512
