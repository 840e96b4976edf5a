"""The counts of bytes and operations, by hand at sizes that are all different."""

from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from measure import work

# A step of 2 sequences of 48 tokens in fp32: a layer of 4 heads, 2 of them of keys and values, and a tied head.
CONFIG = llama.Config(batch_size=2, seq_len=48, hidden_dim=64, num_layers=1, num_heads=4, ffn_dim=320, vocab_size=70)
TOKENS = 96
X, ROW = 4 * TOKENS * 64, 4 * TOKENS  # bytes of all vectors, and of a value for each token
FFN, TABLES = TOKENS * 320, 2 * 4 * 48 * 8
SCORES = 2 * 4 * 48 * 48 * 16  # half of the pairs of queries and keys, two operations a dimension
PARAMETERS = 70 * 64 + 64 * (2 * 64 + 2 * 32 + 3 * 320) + 3 * 64
STEP = {  # {kernel: (bytes, operations)} of a call
    # The first norm reads x and writes y; the other two read x and the branch, and write the sum and y.
    "rmsnorm_kernel": (X * (2 + 4 + 4) / 3 + 4 * 64 + ROW, TOKENS * 64 * (4 + 5 + 5) / 3),
    # Two norms have the gradient of their residual to add.
    "rmsnorm_backward_kernel": (X * (3 + 4 + 4) / 3 + 4 * 64 + ROW, TOKENS * 64 * (9 + 10 + 10) / 3),
    "rope_kernel": (2 * 1.5 * X + TABLES, 3 * TOKENS * (64 + 32)),
    "flash_attention_kernel": (3 * X + 4 * ROW, 2 * SCORES),
    "flash_attention_backward_kernel": (6 * X + 4 * ROW + TABLES, 7 * SCORES),
    "flash_attention_backward_dq_kernel": (5 * X + 8 * ROW + TABLES, 3 * SCORES),
    "flash_attention_backward_dkdv_kernel": (4 * X + 8 * ROW + TABLES, 4 * SCORES),
    "swiglu_activation_kernel": (4 * 3 * FFN, 5 * FFN),
    "swiglu_activation_backward_kernel": (4 * 5 * FFN, 10 * FFN),
    "swiglu_kernel": (X + 4 * 640 * 64 + 4 * 3 * FFN, (4 * 64 + 5) * FFN),
    "cross_entropy_kernel": (2 * 70 * ROW + 4 * ROW, 8 * 70 * TOKENS),
    "embedding_backward_kernel": (2 * ROW + X + 2 * 4 * 70 * 64, TOKENS * 64),
    "adamw_kernel": (28 * PARAMETERS, 15 * PARAMETERS),  # weights and two moments in and out, a gradient in
}


@pytest.mark.parametrize("kernel", work.kernel_work(CONFIG))
def test_a_call_of_a_step_by_hand(kernel):
    assert work.kernel_work(CONFIG)[kernel] == pytest.approx(STEP[kernel])


def test_the_kernels_have_the_names_that_profilers_show():
    parts = (SimpleNamespace(constants={"PART": part}) for part in ("fused", "dq", "dkdv"))
    assert STEP.keys() <= vars(llama).keys() | set(map(llama.backward_kernel_name, parts))


V, W = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(5)  # 30 and 20 bytes
R, PARTIAL = torch.empty(3), torch.empty(7, 5)  # 12 and 140 bytes
Q, WIDE = torch.empty(2, 8, 6, 4), torch.empty(1, 8193, device="meta")  # 1,536 and 32,772 bytes


@pytest.mark.parametrize("name, arguments, expected", [
    ("rmsnorm_backward", (V, V, W, R, V, V, PARTIAL), (292, 10 * 15)),
    ("column_sum", (PARTIAL, W), (160, 35)),
    ("layer_norm", (V, W, V, R, R), (104, 6 * 15)),
    ("layer_norm", (V, W, V, R, R, W, V, V), (184, 8 * 15)),
    ("layer_norm_backward", (V, V, W, R, R, V), (134, 13 * 15)),
    ("layer_norm_backward", (V, V, W, R, R, V, V, V, PARTIAL, False, True), (334, 16 * 15)),
    ("attention_backward", (Q, R), (1548, 5 * 2 * 6 * 8 * 8 * 4)),
    ("cross_entropy", (WIDE[:, 1:], R, W), (2 * 32768 + 32, 8 * 8192)),
    ("cross_entropy", (WIDE, R, W), (2 * 32772 + 32, 11 * 8193)),  # exponentiated twice
    ("scale", (R,), (12, 0)),
    ("mean", (work.Work(2, 30), work.Work(4, 60), work.Work(12, 0)), (6, 30)),
])  # fmt: skip
def test_other_calls_by_hand(name, arguments, expected):
    assert getattr(work, name)(*arguments) == expected


def test_adamw_in_bf16_moves_less_than_pytorch_s():
    """Two halves of a weight and a gradient are in 16 bits; an untied head has weights of its own."""
    config = llama.dataclasses.replace(CONFIG, use_amp=True, untied_head=True)
    assert work.kernel_work(config)["adamw_kernel"].bytes == 26 * (PARAMETERS + 70 * 64)
