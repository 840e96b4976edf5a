"""Small models with the training kernels of others, for the audit of gradients.

    python -m tiny_llama.audit examples/audited.py:liger_rmsnorm

Each function imports its package, liger-kernel or flash-linear-attention, and returns (model, loss). They need a GPU;
docs/audit.md has the results.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import tiny_llama_v3 as llama

WIDTH, WORDS, HEADS = 32, 40, 2


class Model(nn.Module):
    """An embedding, a layer added to its output, and a head; its value is the loss."""

    def __init__(self, layer, loss=F.cross_entropy):
        super().__init__()
        self.embedding, self.layer, self.loss = nn.Embedding(WORDS, WIDTH), layer, loss
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("tokens", torch.randint(WORDS, (2, 17)))

    def forward(self):
        x = self.embedding(self.tokens[:, :-1])
        logits = self.head(x + self.layer(x))
        return self.loss(logits.flatten(0, 1), self.tokens[:, 1:].flatten())


class Gated(nn.Module):
    """A feed-forward layer around activation(gate, up)."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(self.activation(self.gate(x), self.up(x)))


class Attention(nn.Module):
    """The projections around mix(q, k, v), all (batch, tokens, heads, head_dim)."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (HEADS, -1)) for project in (self.q, self.k, self.v))
        return self.o(self.mix(q, k, v).flatten(-2))


def audited(layer, **options):
    """Return (model, loss) of a layer on the device of the run."""
    model = Model(layer, **options).to(llama.select_device("auto"))
    return model, model


def liger_rmsnorm():
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    return audited(nn.Sequential(LigerRMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))


def liger_rmsnorm_added():
    """Add the norm's output directly, so that its backward pass shares the incoming gradient with the residual."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    return audited(LigerRMSNorm(WIDTH))


def liger_swiglu():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return audited(Gated(LigerSiLUMulFunction.apply))


def liger_cross_entropy():
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    return audited(nn.Linear(WIDTH, WIDTH), loss=LigerCrossEntropyLoss())


def fla_swiglu():
    from fla.modules.activations import swiglu

    return audited(Gated(swiglu))


def fla_retention():
    from fla.ops.retention import fused_recurrent_retention

    return audited(Attention(lambda *qkv: fused_recurrent_retention(*qkv)[0]))


def fla_gated_linear_attention():
    from fla.ops.gla import fused_recurrent_gla

    return audited(Attention(lambda q, k, v: fused_recurrent_gla(q, k, v, F.logsigmoid(k + v))[0]))
