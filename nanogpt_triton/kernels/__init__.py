"""Operations of a GPT on Triton kernels. Where they cannot run, the same functions call PyTorch's and say so once.

from nanogpt_triton.kernels import TRITON_AVAILABLE, triton_layer_norm    or, in that folder, from kernels
"""

import sys
from pathlib import Path

if __name__ == "kernels":  # imported by a script in its parent folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanogpt_triton.kernels.attention import torch_attention, triton_attention  # noqa: E402
from nanogpt_triton.kernels.gelu import triton_gelu  # noqa: E402
from nanogpt_triton.kernels.layer_norm import (  # noqa: E402
    TritonLayerNorm,
    torch_add_layer_norm,
    triton_add_layer_norm,
    triton_layer_norm,
)
from nanogpt_triton.kernels.operators import TRITON_AVAILABLE  # noqa: E402

__all__ = [
    "TRITON_AVAILABLE",
    "TritonLayerNorm",
    "torch_add_layer_norm",
    "torch_attention",
    "triton_add_layer_norm",
    "triton_attention",
    "triton_gelu",
    "triton_layer_norm",
]
