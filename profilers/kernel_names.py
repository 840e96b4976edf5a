"""Finds the operation of the model that a kernel computes, its colour in pictures, and its plain name."""

import functools
import re

# The first pattern that matches a kernel's name decides. Triton kernels have the names of their functions; a matrix
# product is recognized by its library, and its name does not show the layer.
OPERATIONS = {
    # rocprofv3 --kernel-rename: the range around the launch
    r"^layers\.\d+ forward$": "layer",
    r"^layers\.\d+ backward$": "layer backward",
    r"^optimizer$": "optimizer",
    # tiny_llama_v3.py and nanogpt_triton
    r"^rmsnorm_kernel": "RMSNorm",
    r"^(rmsnorm_backward|column_sum)_kernel": "RMSNorm backward",
    r"^layer_?norm\w*backward|^_?layer_?norm_bwd": "LayerNorm backward",
    r"^_?layer_?norm": "LayerNorm",
    r"^gelu_backward_kernel": "GELU backward",
    r"^gelu_kernel": "GELU",
    r"^flash_attention_backward": "attention backward",
    r"^flash_attention_(hopper_)?kernel": "attention",
    r"^rope_kernel|rotary_embedding": "rotary embedding",
    r"^swiglu_kernel": "SwiGLU matrix product, naive",
    r"^swiglu_hopper_kernel": "SwiGLU and its product",
    r"^swiglu_activation_backward_kernel": "SwiGLU backward",
    r"^swiglu_activation_kernel": "SwiGLU",
    r"^(cross_entropy|scale)_kernel": "cross-entropy",
    r"^(embedding_backward|token_order)_kernel": "embedding backward",
    r"^adamw_kernel": "optimizer",
    r"^fp8_quantize_kernel": "rounding to FP8",
    # NCCL and RCCL; some kernels serve any collective
    r"^nccl.*ReduceScatter": "reduce-scatter",
    r"^nccl.*AllGather": "all-gather",
    r"^nccl|all_reduce|cross_device_reduce": "collective",
    r"^Memcpy PtoP": "copy between GPUs",  # by a copy engine; also how NCCL gathers registered memory
    # code that torch.compile generates; its names list the operators, those around a product or attention too
    r"^triton_(poi|per|red|for)_|cpp_fused_": "fused by torch.compile",
    # fused attention: flash, cuDNN, memory-efficient, AOTriton, CK, paged
    r"(flash|[Ff]mha|sdpa|attention|attn|_efficient_).*([Bb]wd|backward|bprop)|^bwd_(kernel|pre)": (
        "attention backward"
    ),
    r"flash_fwd|[Ff]mha|sdpa|scaled_dot_product|attention|attn_fwd": "attention",
    # libraries' matrix products: rocBLAS and hipBLASLt (Tensile), cuBLAS, CUTLASS
    r"^(Custom_)?Cijk_|rocblas|hipblas|cublas|cutlass|nvjet|gemm|gemv|splitK|xmma|wgmma|_matmul_|^bmm_"
    r"|aten::(mm|bmm|addmm|matmul|linear)$": "matrix product",
    r"^triton_tem_": "fused by torch.compile",
    # PyTorch's own kernels, and on a CPU its operators
    r"(multi_tensor|foreach|[Ff]used).*([Aa]dam|addc)|aten::_(fused_adam|foreach_)": "optimizer",
    r"lpnorm|LpNorm|linalg_vector_norm|NormTwo": "gradient norm",
    r"nll_loss|log_softmax|LogSoftMax|cross_entropy": "cross-entropy",
    r"[Ss]oft_?[Mm]ax": "softmax",
    r"embedding_(dense_)?backward|embedding.*[Gg]rad|compute_grad_weight": "embedding backward",
    r"embedding|index_?select|indexSelect|gather": "embedding",
    r"(?i:(layer|rms|batch|group)_?norm.*(backward|grad|bwd))|GammaBeta": "norm backward",
    r"(?i:(layer|rms|batch|group)_?norm)|RowwiseMoments": "norm",
    r"[Mm]em(cpy|set)|copy|(?<![Pp]re)[Ff]ill|zero_|__amd_rocclr|CatArray|aten::(cat|clone|contiguous)": "copy or fill",
    r"distribution|philox|random": "random numbers",
    r"reduce|aten::(sum|mean|max|norm)": "reduction",
    r"elementwise|aten::(add|mul|div|sub|pow|rsqrt|sqrt|silu|sigmoid|neg|exp|addcmul|addcdiv|lerp)\w*$": "elementwise",
}
COLLECTIVES = ("reduce-scatter", "all-gather", "collective", "copy between GPUs")
OTHER = "other"
OPERATION_PATTERNS = [(re.compile(pattern), operation) for pattern, operation in OPERATIONS.items()]

# Each family has a hue, the same in every picture; the backward pass has the lighter colour of a pair.
COLORS = {
    "layer": "#3f7f93", "layer backward": "#a3c6d0",
    "matrix product": "#1f77b4", "fused by torch.compile": "#843c39",
    "attention": "#2ca02c", "attention backward": "#98df8a", "rotary embedding": "#00594f", "softmax": "#8ca252",
    "rounding to FP8": "#c9a227",
    "SwiGLU": "#ff7f0e", "SwiGLU backward": "#ffbb78", "SwiGLU matrix product, naive": "#a63603",
    "SwiGLU and its product": "#fd8d3c",
    "RMSNorm": "#9467bd", "RMSNorm backward": "#c5b0d5",
    "GELU": "#637939", "GELU backward": "#c3d68b",
    "LayerNorm": "#d62728", "LayerNorm backward": "#ff9896",
    "norm": "#8c564b", "norm backward": "#c49c94",
    "embedding": "#17becf", "embedding backward": "#9edae5", "cross-entropy": "#e377c2",
    "optimizer": "#bcbd22", "gradient norm": "#e7e29a",
    "reduce-scatter": "#b5179e", "all-gather": "#f72585", "collective": "#ffb3d9",
    "copy between GPUs": "#f76fb3",
    "elementwise": "#393b79", "reduction": "#9c9ede", "random numbers": "#5f9ea0",
    "copy or fill": "#7f7f7f", OTHER: "#d9d9d9",
}  # fmt: skip


@functools.cache
def operation_of(kernel_name):
    """The operation of the model that a kernel computes, or "other"."""
    return next((operation for pattern, operation in OPERATION_PATTERNS if pattern.search(kernel_name)), OTHER)


def short_name(kernel_name, width=60):
    """A kernel's name in one line, without the decoration of C++ and cuBLAS, shortened in its middle to the width."""
    name = re.sub(r"^void |\(anonymous namespace\)::|\bat::native::|\bat::", "", " ".join(kernel_name.split()))
    name = re.sub(r"\((?!anonymous)[^()]*\)( \[clone[^]]*\])?$", "", name)
    name = re.sub(r"^cutlass::Kernel2<(\w+)>$", r"\1", name)
    name = re.sub(r"(b?f\d+)(_?\1)+(?=_)", r"\1", name)  # cuBLAS names the type of each operand
    name = re.sub(r"(tilesize\w+?)_stage\d\w+_execute((_split_k)?)_kernel__5x_cublas$", r"\1\2", name)
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
