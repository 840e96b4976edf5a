"""LayerNorm on Triton kernels. Where they cannot run, the same functions call PyTorch's and say so once.

from kernels import TRITON_AVAILABLE, triton_layer_norm
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from nanogpt_triton.kernels.layer_norm import (  # noqa: E402  (the repository must be on the path)
    TRITON_AVAILABLE,
    TritonLayerNorm,
    triton_add_layer_norm,
    triton_layer_norm,
)

__all__ = ["TRITON_AVAILABLE", "TritonLayerNorm", "triton_add_layer_norm", "triton_layer_norm"]
