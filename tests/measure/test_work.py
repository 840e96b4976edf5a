"""The counts of bytes and operations, by hand at sizes that are all different."""

import pytest
import torch

from measure import work

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
