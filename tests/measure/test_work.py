"""The counts of bytes and operations, by hand at sizes that are all different."""

import pytest
import torch

import tiny_llama_v3 as llama
from measure import work
from tiny_llama import hardware

V, W = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(5)  # 30 and 20 bytes
R, PARTIAL = torch.empty(3), torch.empty(7, 5)  # 12 and 140 bytes
SCORES = 2 * 6 * 8 * 8 * 4  # half of the pairs of queries and keys, two operations a dimension
Q, WIDE = torch.empty(2, 8, 6, 4), torch.empty(1, 8193, device="meta")  # 1,536 and 32,772 bytes


@pytest.mark.parametrize("name, arguments, expected", [
    ("rmsnorm_backward", (V, V, W, R, V, V, PARTIAL), (292, 10 * 15)),
    ("column_sum", (PARTIAL, W), (160, 35)),
    ("layer_norm", (V, W, V, R, R), (104, 6 * 15)),
    ("layer_norm", (V, W, V, R, R, W, V, V), (184, 8 * 15)),
    ("layer_norm_backward", (V, V, W, R, R, V), (134, 13 * 15)),
    ("layer_norm_backward", (V, V, W, R, R, V, V, V, PARTIAL, False, True), (334, 16 * 15)),
    ("rmsnorm", (V, W, V, R), (92, 4 * 15)),
    ("rmsnorm", (V, W, V, R, V, V), (152, 5 * 15)),  # with the addition of a branch
    ("attention_backward_dq", (Q, R), (1548, 3 * SCORES)),
    ("attention_backward_dkdv", (Q, R), (1548, 4 * SCORES)),
    ("attention_backward_fused", (Q, R), (1548, 7 * SCORES)),
    ("rope", (10, 4, R, R), (104, 30)),
    ("swiglu_activation", (PARTIAL, V), (170, 5 * 15)),
    ("swiglu_activation_backward", (V, PARTIAL), (310, 10 * 15)),
    ("swiglu_matmul", (W[:, None], W, PARTIAL, V), (210, (4 + 5) * 15)),
    ("token_order", (R, R), (36, 3 * 9)),
    ("embedding_backward", (R, R, V, PARTIAL), (12 + 12 + 30 + 2 * 60, 15)),
    ("adamw", (V, None, W, PARTIAL, R), (2 * 182 + 20, 15 * 15)),
    ("cross_entropy", (WIDE[:, 1:], R, W), (2 * 32768 + 32, 8 * 8192)),
    ("cross_entropy", (WIDE, R, W), (2 * 32772 + 32, 11 * 8193)),  # exponentiated twice
    ("scale", (R,), (12, 0)),
])  # fmt: skip
def test_a_call_by_hand(name, arguments, expected):
    assert getattr(work, name)(*arguments) == expected


@pytest.mark.parametrize("name, millions", [
    # Without norms and biases; the tied head counts once.
    ("SmolLM-135M", 134.48), ("SmolLM-360M", 361.76), ("Qwen2.5-0.5B", 493.96), ("TinyLlama-1.1B", 1034.42),
    ("Llama-3.2-1B", 1235.75), ("GPT-2 as a LLaMA", 151.84), ("heads of 80", 186.45), ("heads of 96", 102.43),
    ("1,023 tokens", 100.07), ("ffn 1,365", 39.45),
])  # fmt: skip
def test_a_shape_has_as_many_weights_as_its_model(name, millions):
    config = llama.Config(**work.SHAPES[name])
    assert hardware.count_matrix_weights(config) / 1e6 == pytest.approx(millions, abs=0.01)
    assert config.tokens_per_step == (8184 if name == "1,023 tokens" else 8192)
    assert config.untied_head == (name == "TinyLlama-1.1B") and len(work.SHAPES) == 10
