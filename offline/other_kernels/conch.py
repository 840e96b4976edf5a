"""Kernels of Conch: forward passes."""

import torch
import torch.nn.functional as F

from offline.other_kernels import EPS, angles, plain_rms_norm, registry, rotated, targets

CASES, case = registry()


@case("conch.ops.activation.silu_and_mul:silu_and_mul", has_backward=False)
def silu_and_half(kernel, randn):
    return kernel, lambda x: F.silu(x[:, :77]) * x[:, 77:], [randn(5, 154)]


@case("conch.ops.activation.gelu_tanh_and_mul:gelu_tanh_and_mul", has_backward=False)
def gelu_and_half(kernel, randn):
    return kernel, lambda x: F.gelu(x[:, :77], approximate="tanh") * x[:, 77:], [randn(5, 154)]


@case("conch.ops.normalization.rms_norm:rms_norm", has_backward=False)
def norm_of_rows(kernel, randn):
    return lambda x, w: kernel(x, w, EPS), plain_rms_norm, [randn(5, 77), randn(77)]


@case("conch.ops.normalization.rms_norm:fused_add_rms_norm", has_backward=False)
def norm_of_sums(kernel, randn):
    def plain(x, residual, weight):
        return plain_rms_norm(x + residual, weight), x + residual

    return lambda x, r, w: kernel(x, r, w, EPS), plain, [randn(5, 77), randn(5, 77), randn(77)]


@case("conch.ops.normalization.gemma_rms_norm:gemma_rms_norm", has_backward=False)
def norm_with_offset(kernel, randn):
    return lambda x, w: kernel(x, w, EPS), lambda x, w: plain_rms_norm(x, 1 + w), [randn(5, 77), randn(77)]


@case("conch.ops.embedding.rotary_embedding:rotary_embedding", has_backward=False)
def rotary_of_positions(kernel, randn):
    cos, sin = angles(randn, 19, 16)
    positions = targets(7, 19)

    def plain(*heads):
        tables = [table[positions, None] for table in (cos, sin)]
        return [rotated(x.unflatten(-1, (-1, 32)), *tables).flatten(-2) for x in heads]

    return lambda q, k: kernel(positions, q, k, 32, torch.cat([cos, sin], -1)), plain, [randn(7, 96), randn(7, 32)]


@case("conch.ops.quantization.int8:scaled_int8_quant", has_backward=False)
def bytes_of_numbers(kernel, randn):
    """It cuts digits off, as its own reference does."""

    def plain(x):
        return (x / 0.02).clamp(-128, 127).trunc()

    return lambda x: kernel(x, torch.tensor([0.02]))[0], plain, [randn(5, 77)]


@case("conch.ops.quantization.fp8:scaled_fp8_quant", has_backward=False)
def rounding_to_fp8(kernel, randn):
    rounded = {}  # the type, of which a chip has one

    def ours(x):
        result = kernel(x, torch.tensor([0.02]))[0]
        rounded["dtype"] = result.dtype
        return result.to(x.dtype)

    def plain(x):
        largest = torch.finfo(rounded["dtype"]).max
        return (x / 0.02).clamp(-largest, largest).to(rounded["dtype"]).to(x.dtype)

    return ours, plain, [randn(5, 77)]


@case("conch.ops.vision.nms:nms", has_backward=False)
def non_maximum_suppression(kernel, randn):
    corners = randn(23, 2).abs()
    boxes, scores = torch.cat([corners, corners + randn(23, 2).abs() + 0.1], 1), randn(23)

    def overlap(one, others):
        low, high = torch.maximum(one[:2], others[:, :2]), torch.minimum(one[2:], others[:, 2:])
        both = (high - low).clamp(0).prod(-1)
        return both / ((one[2:] - one[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(-1) - both)

    def plain(boxes, scores):
        left, kept = scores.argsort(descending=True), []
        while len(left):
            kept.append(left[0])
            left = left[1:][overlap(boxes[left[0]], boxes[left[1:]]) <= 0.3]
        return torch.stack(kept).to(scores.dtype)

    return lambda b, s: kernel(b, s, 0.3).to(s.dtype), plain, [boxes, scores]


@case("conch.ops.vllm.reshape_and_cache:reshape_and_cache", has_backward=False)
def store_in_pages(kernel, randn):
    slots = randn(12).argsort()[:7]  # each is written once

    def paged(store):
        def stored(keys, values):
            pages = [torch.zeros(3, 4, 2, 32, dtype=keys.dtype) for _ in range(2)]  # pages, tokens, heads, dim
            store(keys, values, *pages)
            return pages

        return stored

    def plain(keys, values, key_pages, value_pages):
        key_pages.view(12, 2, 32)[slots], value_pages.view(12, 2, 32)[slots] = keys, values

    return paged(lambda *x: kernel(*x, slots)), paged(plain), [randn(7, 2, 32), randn(7, 2, 32)]
