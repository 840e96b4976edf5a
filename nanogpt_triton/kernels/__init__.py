"""LayerNorm on Triton kernels. Where they cannot run, the same functions call PyTorch's and say so once.

from nanogpt_triton.kernels import TRITON_AVAILABLE, triton_layer_norm
"""

from nanogpt_triton.kernels.layer_norm import (
    TRITON_AVAILABLE,
    TritonLayerNorm,
    triton_add_layer_norm,
    triton_layer_norm,
)

__all__ = ["TRITON_AVAILABLE", "TritonLayerNorm", "triton_add_layer_norm", "triton_layer_norm"]
