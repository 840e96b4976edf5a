"""Kernels of Liger Kernel."""

import torch
import torch.nn.functional as F

from offline.other_kernels import EPS, angles, plain_layer_norm, plain_rms_norm, registry, rotated, targets

CASES, case = registry()


@case("liger_kernel.ops:LigerRMSNormFunction.apply")
def rms_norm(kernel, randn):
    return lambda x, w: kernel(x, w, EPS), plain_rms_norm, [randn(5, 77), randn(77)]


@case("liger_kernel.ops:LigerFusedAddRMSNormFunction.apply")
def fused_add_rms_norm(kernel, randn):
    def plain(x, residual, weight):
        added = x + residual
        return plain_rms_norm(added, weight), added

    return lambda x, r, w: kernel(x, r, w, EPS), plain, [randn(5, 77), randn(5, 77), randn(77)]


@case("liger_kernel.ops:LigerModulatedRMSNormFunction.apply")
def modulated_rms_norm(kernel, randn):
    def plain(x, weight, scale, shift):
        return (1 + scale)[:, None] * plain_rms_norm(x, weight) + shift[:, None]

    inputs = [randn(2, 5, 77), randn(77), randn(2, 77), randn(2, 77)]
    return lambda x, w, scale, shift: kernel(x, w, scale, shift, EPS), plain, inputs


@case("liger_kernel.ops:LigerLayerNormFunction.apply")
def layer_norm(kernel, randn):
    return lambda x, w, b: kernel(x, w, b, EPS), plain_layer_norm, [randn(5, 77), randn(77), randn(77)]


@case("liger_kernel.ops:LigerGroupNormFunction.apply")
def group_norm(kernel, randn):
    def plain(x, weight, bias):
        return F.group_norm(x, 3, weight, bias, EPS)

    return lambda x, w, b: kernel(x, w, b, 6, 3, EPS), plain, [randn(2, 6, 35), randn(6), randn(6)]


@case("liger_kernel.ops:LigerDyTFunction.apply")
def dyt(kernel, randn):
    def plain(x, alpha, gamma, beta):
        return gamma * torch.tanh(alpha * x) + beta

    return kernel, plain, [randn(2, 5, 77), randn(1), randn(77), randn(77)]


@case("liger_kernel.ops:LigerPolyNormFunction.apply")
def poly_norm(kernel, randn):
    def plain(x, weight, bias):
        powers = [F.rms_norm(x**power, x.shape[-1:], eps=EPS) for power in (3, 2, 1)]
        return sum(w * each for w, each in zip(weight, powers, strict=True)) + bias

    return lambda x, w, b: kernel(x, w, b, EPS), plain, [randn(5, 77), randn(3), randn(())]


@case("liger_kernel.ops:LigerSiLUMulFunction.apply")
def swiglu(kernel, randn):
    return kernel, lambda a, b: F.silu(a) * b, [randn(5, 77), randn(5, 77)]


@case("liger_kernel.ops:LigerGELUMulFunction.apply")
def geglu(kernel, randn):
    return kernel, lambda a, b: F.gelu(a, approximate="tanh") * b, [randn(5, 77), randn(5, 77)]


@case("liger_kernel.ops:LigerReLUSquaredFunction.apply")
def relu_squared(kernel, randn):
    return kernel, lambda x: F.relu(x) ** 2, [randn(5, 77)]


@case("liger_kernel.ops:LigerSoftmaxFunction.apply")
def softmax(kernel, randn):
    return kernel, lambda x: x.softmax(-1), [randn(5, 77)]


def projected(x):
    """Project the last dimension onto the probabilities (Martins and Astudillo, 2016)."""
    ordered = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    sums = ordered.cumsum(-1) - 1
    support = (ordered * ranks > sums).sum(-1, keepdim=True)
    return F.relu(x - sums.gather(-1, support - 1) / support)


@case("liger_kernel.ops:LigerSparsemaxFunction.apply")
def sparsemax(kernel, randn):
    return lambda x: kernel(x, -1), projected, [randn(5, 77)]


@case("liger_kernel.ops:LigerCrossEntropyFunction.apply")
def cross_entropy(kernel, randn):
    labels = targets(6, 301, ignored=True)

    def ours(logits):
        return kernel(logits, labels, None, -100, 1e-2, 0.1)[0]  # weights, ignored, factor of z, smoothing

    def plain(logits):
        z = 1e-2 * (logits.logsumexp(-1) ** 2)[labels != -100].mean()
        return F.cross_entropy(logits, labels, label_smoothing=0.1) + z

    return ours, plain, [4 * randn(6, 301)]


@case("liger_kernel.ops:LigerFusedLinearCrossEntropyFunction.apply")
def fused_linear_cross_entropy(kernel, randn):
    labels = targets(6, 101, ignored=True)

    def plain(x, weight, bias):
        return F.cross_entropy(F.linear(x, weight, bias), labels)

    return lambda x, w, b: kernel(x, w, labels, b)[0], plain, [randn(6, 33), randn(101, 33), randn(101)]


@case("liger_kernel.ops:LigerKLDivLossFunction.apply")
def kl_div(kernel, randn):
    truth = randn(6, 77).softmax(-1)

    def plain(x):
        return F.kl_div(x, truth.to(x.dtype), reduction="batchmean")

    return lambda x: kernel(x, truth), plain, [randn(6, 77).log_softmax(-1)]


@case("liger_kernel.ops:LigerJSDFunction.apply")
def jsd(kernel, randn):
    teacher = randn(6, 77).log_softmax(-1)

    def plain(student, beta=0.3):
        p, q = teacher.to(student.dtype).exp(), student.exp()
        mean = beta * p + (1 - beta) * q
        loss = beta * p * (p / mean).log() + (1 - beta) * q * (q / mean).log()
        return loss.sum() / len(student)

    return lambda x: kernel(x, teacher, None, 0.3), plain, [randn(6, 77).log_softmax(-1)]


@case("liger_kernel.ops:LigerTVDLossFunction.apply")
def tvd(kernel, randn):
    other = randn(6, 77).softmax(-1)

    def plain(p):
        return (p - other.to(p.dtype)).abs().sum() / 2 / len(p)

    return lambda p: kernel(p, other), plain, [randn(6, 77).softmax(-1)]


@case("liger_kernel.ops:LigerFusedLinearJSDFunction.apply")
def fused_linear_jsd(kernel, randn):
    teacher, head = randn(6, 19), randn(77, 19)

    def plain(student, weight):
        p = F.linear(teacher, head).to(student.dtype).log_softmax(-1).exp()
        q = F.linear(student, weight).log_softmax(-1).exp()
        mean = (p + q) / 2
        return (p * (p / mean).log() + q * (q / mean).log()).sum() / 2 / len(student)

    return lambda x, w: kernel(x, w, teacher, head), plain, [randn(6, 33), randn(77, 33)]


@case("liger_kernel.ops:LigerRopeFunction.apply")
def rope(kernel, randn):
    cos, sin = angles(randn, 7, 8)

    def ours(q, k):  # it writes over its inputs, which may not be leaves
        both = (torch.cat([table, table], -1)[None] for table in (cos, sin))
        return kernel(q.clone(), k.clone(), *both)

    def plain(*heads):
        return [rotated(x, cos, sin) for x in heads]

    return ours, plain, [randn(2, 3, 7, 16), randn(2, 1, 7, 16)]


@case("liger_kernel.ops:LigerLlama4RopeFunction.apply")
def llama4_rope(kernel, randn):
    cos, sin = angles(randn, 7, 8)

    def plain(*heads):
        table = torch.complex(cos, sin)[:, None]
        pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in heads]
        return [torch.view_as_real(x * table.to(x.dtype)).flatten(-2) for x in pairs]

    def ours(q, k):
        return kernel(q.clone(), k.clone(), torch.complex(cos, sin))

    return ours, plain, [randn(2, 7, 3, 16), randn(2, 7, 1, 16)]


@case("liger_kernel.ops:LigerQwen2VLMRopeFunction.apply")
def qwen2vl_mrope(kernel, randn):
    cos, sin = angles(randn, 3, 2, 7, 8)
    sections = [2, 3, 3]  # of a half of the head: time, height, width

    def ours(q, k):
        both = (torch.cat([table, table], -1) for table in (cos, sin))
        return kernel(q.clone(), k.clone(), *both, sections)

    def plain(*heads):
        parts = [[each[i] for i, each in enumerate(table.split(sections, -1))] for table in (cos, sin)]
        tables = [torch.cat(part, -1)[:, None] for part in parts]
        return [rotated(x, *tables) for x in heads]

    return ours, plain, [randn(2, 3, 7, 16), randn(2, 1, 7, 16)]


@case("liger_kernel.ops:LigerMultiTokenAttentionFunction.apply")
def multi_token_attention(kernel, randn):
    future = torch.ones(17, 17, dtype=torch.bool).triu(1)

    def plain(scores, weight, bias):
        probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
        return F.conv2d(probabilities, weight, bias, padding=1).masked_fill(future, 0)

    return lambda *x: kernel(*x, 1, 1), plain, [randn(2, 3, 17, 17), randn(3, 3, 3, 3), randn(3)]


@case("liger_kernel.ops:LigerFusedNeighborhoodAttentionFunction.apply")
def neighborhood_attention(kernel, randn):
    place = torch.arange(21)
    is_far = (place[:, None] - place).abs() > 2

    def plain(q, k, v):
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(is_far, float("-inf"))
        return scores.softmax(-1) @ v

    return lambda *x: kernel(*x, 5), plain, [randn(1, 2, 21, 16) for _ in range(3)]


@case("liger_kernel.ops.experimental.embedding:LigerEmbeddingFunction.apply")
def embedding(kernel, randn):
    tokens = targets(11, 19).view(1, 11)
    return lambda w: kernel(w, tokens), lambda w: F.embedding(tokens, w), [randn(19, 33)]


@case("liger_kernel.ops:LigerAttnResFunction.apply")
def attn_res(kernel, randn):
    def plain(blocks, query, weight):
        scores = (plain_rms_norm(blocks, weight) * query).sum(-1, keepdim=True)
        return (scores.softmax(0) * blocks).sum(0)

    return lambda *x: kernel(*x, EPS), plain, [randn(3, 2, 5, 33), randn(33), randn(33)]


@case("liger_kernel.ops:GrpoLossFunction.apply")
def grpo_loss(kernel, randn):
    tokens, advantages, before = targets(10, 77).view(2, 5), randn(2), randn(2, 5) - 4

    def ours(logits):
        # No reference, masks or temperature; clipped at 0.8 and 1.2, each token by itself.
        return kernel(logits, before, None, tokens, advantages, None, 1.0, 0.0, 0.2, 0.2, False, "grpo", None, False)[0]

    def plain(logits):
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        ratio, gain = (chosen - before.to(chosen.dtype)).exp(), advantages.to(chosen.dtype)[:, None]
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)

    return ours, plain, [randn(2, 6, 77)]
