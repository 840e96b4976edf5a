"""Train a small LLaMA to continue a text, and print its loss, the time of a step and the tokens a second.

    python exercises/patient.py
    TRITON_INTERPRET=1 python -m tiny_llama.audit exercises/patient.py:audited

A token of the text mostly follows from the one before it. Two kernels are in Triton; without a GPU its interpreter runs
them. Check with: python exercises/check.py patient
"""

import itertools
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

VOCAB_SIZE, DIM, HEADS, HIDDEN_DIM, LAYERS = 64, 64, 4, 128, 2
BATCH_SIZE, SEQ_LEN, LEARNING_RATE, EPS = 8, 32, 3e-3, 1e-5


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, n_rows, eps, N_COLS: tl.constexpr, BLOCK_M: tl.constexpr):
    """y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps). Each program computes BLOCK_M rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, N_COLS)
    offsets, mask = rows[:, None] * N_COLS + cols, rows[:, None] < n_rows
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / N_COLS + eps)
    tl.store(y_ptr + offsets, x * rstd[:, None] * tl.load(weight_ptr + cols), mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y, rstd = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        grid = (triton.cdiv(rstd.numel(), 64),)
        rms_norm_kernel[grid](x, weight, y, rstd, rstd.numel(), EPS, N_COLS=x.shape[-1], BLOCK_M=64)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, y_grad):
        x, weight, rstd = ctx.saved_tensors
        normed, scaled = x * rstd, y_grad * weight
        x_grad = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return x_grad, (y_grad * normed).flatten(0, -2).sum(0)


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """y = silu(gate) * up. Each program computes BLOCK_SIZE elements."""
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0)
    tl.store(y_ptr + offsets, gate * tl.sigmoid(gate) * up, mask=mask)


class SiluMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        y = torch.empty_like(gate)
        silu_mul_kernel[(triton.cdiv(y.numel(), 4096),)](gate, up, y, y.numel(), BLOCK_SIZE=4096)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx, y_grad):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return y_grad * up * (sigmoid + silu * (1 - sigmoid)), y_grad * silu


def silu_mul(gate, up):
    """Return silu(gate) * up, for tensors without gaps."""
    return SiluMulFunction.apply(gate, up)


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Norm(nn.Module):
    """y = x / sqrt(mean(x^2) + EPS) * weight, along the last dimension."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        return RMSNormFunction.apply(x.contiguous(), self.weight)


def rotary(x):
    """Return x (batch, heads, seq, channels) with pairs of channels rotated by angles that grow with the position."""
    half = x.shape[-1] // 2
    positions, pairs = torch.arange(x.shape[-2], device=x.device), torch.arange(half, device=x.device)
    angles = positions[:, None] * 10000.0 ** (-pairs / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class Layer(nn.Module):
    """x + attention(norm(x)), and then x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, HIDDEN_DIM, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN_DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(silu_mul(self.gate(normed), self.up(normed)))


class Model(nn.Module):
    """Logits of the next token, (batch, seq, vocab): the head multiplies by the embedding, without a scale."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, DIM)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers, self.norm = nn.Sequential(*(Layer() for _ in range(LAYERS))), Norm()

    def forward(self, tokens):
        return F.linear(self.norm(self.layers(self.embedding(tokens))), self.embedding.weight)


# ----------------------------------------------------------------------------------------------------------------------
# Training


def text(batch_size=BATCH_SIZE):
    """Return tokens (batch, seq) of a text in which three of four tokens follow from the one before."""
    following = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(VOCAB_SIZE, (batch_size, SEQ_LEN))
    for here in range(1, SEQ_LEN):
        follows = torch.rand(batch_size) < 0.75
        tokens[:, here] = torch.where(follows, following[tokens[:, here - 1]], tokens[:, here])
    return tokens.to(DEVICE)


def loss(logits, tokens):
    """Return the mean cross-entropy of the next tokens, a scalar; the last logits of a sequence have none."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model, tokens):
    """Compute the gradients of all weights of a batch, and return its loss."""
    model.zero_grad()
    value = loss(model(tokens), tokens)
    value.backward()
    return value.detach()


def clock(step, number):
    """Call step so many times, and return the ms that it takes, and what each call has returned."""
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    losses = [step()]  # compiles and allocates, once
    synchronize()
    start = time.perf_counter()
    losses += [step() for _ in range(number - 1)]
    synchronize()
    return (time.perf_counter() - start) * 1e3 / (number - 1), losses


def train(number=20):
    """Train for so many steps, and print."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = itertools.cycle([text() for _ in range(number)])

    def step():
        value = gradients(model, next(batches))
        optimizer.step()
        return value

    ms, losses = clock(step, number)
    for here, value in enumerate(losses):
        print(f"step {here:2}: loss {value:.4f}")
    print(f"{ms:.2f} ms a step, {BATCH_SIZE * SEQ_LEN * 1e3 / ms:.0f} tokens a second")


def audited():
    """Return a model and the loss of a small batch, for python -m tiny_llama.audit."""
    torch.manual_seed(0)
    model, tokens = Model().to(DEVICE), text(batch_size=1)
    return model, lambda: loss(model(tokens), tokens)


if __name__ == "__main__":
    train()
