"""GPT-2's architecture on Triton kernels. Weights have the names of nanoGPT's checkpoints.

Shapes: B sequences of T tokens, C = n_embd, V = vocab_size. Scripts in this folder may import it as `model`.
"""

import dataclasses
import math
import os
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

if __name__ == "model":  # imported by a script in this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_llama_v3 as llama  # noqa: E402
from measure.command_line import UsageError  # noqa: E402
from nanogpt_triton.dataset import library, reading  # noqa: E402
from nanogpt_triton.kernels import (  # noqa: E402
    TRITON_AVAILABLE,
    torch_add_layer_norm,
    torch_attention,
    triton_add_layer_norm,
    triton_attention,
    triton_gelu,
)
from nanogpt_triton.kernels.attention import shape_obstacle  # noqa: E402

A100_FLOPS = 312e12  # a second, in bf16: the unit of nanoGPT's MFU
GPT2_SIZES = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),
}


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, up to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in Linear and LayerNorm, as in GPT-2


class Operations(NamedTuple):
    """Who computes what the modules leave open: the functions of nanogpt_triton.kernels, or PyTorch's."""

    add_layer_norm: Callable
    attention: Callable
    gelu: Callable


class Linear(nn.Linear):
    """nn.Linear, which writes the gradient of an owned weight to where its optimizer reads it."""

    is_owned = False  # by an optimizer that lets our functions write gradients: see GPTAdamW

    def forward(self, x):
        """x (..., K) -> (..., N), as nn.Linear."""
        # torch.compile would end a graph at each.
        if self.is_owned and self.bias is None and not torch.compiler.is_compiling():
            return llama.triton_linear(x, self.weight)
        return super().forward(x)


class LayerNorm(nn.Module):
    """LayerNorm after the addition to the residual stream. Without an addend, the stream is as it was."""

    def __init__(self, width, bias, add_layer_norm):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.add_layer_norm = add_layer_norm

    def forward(self, x, branch=None):
        """Return (x + branch, normalized): the residual stream, and what the next layer reads."""
        return self.add_layer_norm(x, branch, self.weight, self.bias)


class CausalSelfAttention(nn.Module):
    def __init__(self, config, attention):
        super().__init__()
        self.n_head, self.dropout, self.attention = config.n_head, config.dropout, attention
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        # One product for queries, keys and values.
        qkv = self.c_attn(x)
        # Our kernels are compiled for each T, which changes while text is generated, and drop nothing.
        if self.training and not self.dropout:
            o = self.attention(qkv, self.n_head)
        else:
            o = torch_attention(qkv, self.n_head, self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(o))


class MLP(nn.Module):
    def __init__(self, config, gelu):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.gelu = gelu

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config, operations):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias, operations.add_layer_norm)
        self.attn = CausalSelfAttention(config, operations.attention)
        self.ln_2 = LayerNorm(config.n_embd, config.bias, operations.add_layer_norm)
        self.mlp = MLP(config, operations.gelu)

    def forward(self, x, branch):
        """x and what the block before adds to it -> the same of this block: the next norm does the addition."""
        x, normalized = self.ln_1(x, branch)
        x, normalized = self.ln_2(x, self.attn(normalized))
        return x, self.mlp(normalized)


class GPT(nn.Module):
    """Made on the device given. layer_norm, attention, gelu: "triton", "torch", or "auto", Triton's where it can run.

    Without a device, "auto" expects that the model is moved to a GPU later if there is one. With fused_loss, a kernel
    computes the loss and overwrites the logits with their gradient.
    """

    is_owned = False  # as of Linear

    def __init__(self, config, layer_norm="auto", device=None, attention="auto", gelu="auto", fused_loss=False):
        super().__init__()
        if config.n_embd % config.n_head:
            raise UsageError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}: change one of them")
        choices = dict(layer_norm=layer_norm, attention=attention, gelu=gelu)
        operations = select_operations(config, choices, device)
        if fused_loss and (why := obstacle_to_triton(device)):
            raise UsageError(f"fused_loss: {why}")
        self.config, self.fused_loss = config, fused_loss
        ours = operations.add_layer_norm is triton_add_layer_norm and operations.attention is triton_attention
        self.is_ours = ours and fused_loss  # the loss, attention and the norms are
        with torch.device(device or torch.get_default_device()):
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(config.vocab_size, config.n_embd),
                    wpe=nn.Embedding(config.block_size, config.n_embd),
                    drop=nn.Dropout(config.dropout),
                    h=nn.ModuleList(Block(config, operations) for _ in range(config.n_layer)),
                    ln_f=LayerNorm(config.n_embd, config.bias, operations.add_layer_norm),
                )
            )
            self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        # Token embedding and output layer are one matrix, as in GPT-2.
        self.transformer.wte.weight = self.lm_head.weight
        self.init_weights()
        print(f"number of parameters: {self.get_num_params() / 1e6:.2f}M")

    @torch.no_grad()
    def init_weights(self):
        """Normal, 0.02 wide; what adds to the residual stream less, by the square root of the number of additions.

        Weights are drawn in nanoGPT's order, tied and c_proj's twice: on a CPU a seed gives the same weights as there.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.normal_(std=0.02 / math.sqrt(2 * self.config.n_layer))

    def get_num_params(self, non_embedding=True):
        """The number of parameters; non_embedding leaves out the position embeddings, as is the custom."""
        positions = self.transformer.wpe.weight.numel() if non_embedding else 0
        return sum(p.numel() for p in self.parameters()) - positions

    def forward(self, idx, targets=None):
        """Tokens idx and targets (B, T) -> logits (B, T, V) and the mean loss; without targets (B, 1, V) and None.

        With fused_loss there are no logits beside a loss: None.
        """
        parts, T = self.transformer, idx.shape[1]
        assert T <= self.config.block_size, f"{T} tokens are more than block_size={self.config.block_size}"
        weight = self.lm_head.weight
        # torch.compile calls our functions as they are.
        embedded = llama.triton_embedding(idx, weight) if self.is_owned else parts.wte(idx)
        x, branch = parts.drop(embedded + parts.wpe.weight[:T]), None
        for block in parts.h:
            x, branch = block(x, branch)
        # The last norm adds what the last block has left to add.
        _, normalized = parts.ln_f(x, branch)
        # To generate, the last position is enough, and the logits are the largest tensor of all.
        if targets is None:
            return self.lm_head(normalized[:, -1:]), None
        if self.is_owned and self.fused_loss:
            logits = llama.triton_linear(normalized, weight)  # of the weight with its padding
        elif normalized.is_cuda and not torch.compiler.is_compiling():  # torch.compile pads by itself
            logits = padded_logits(normalized, weight)
        else:
            logits = self.lm_head(normalized)
        # A target of -1 has no loss.
        if self.fused_loss:
            return None, llama.triton_cross_entropy(logits[..., : self.config.vocab_size], targets, -1)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits[..., : self.config.vocab_size], loss

    def crop_block_size(self, block_size):
        """Forget the positions beyond block_size."""
        self.config = dataclasses.replace(self.config, block_size=block_size)
        positions = self.transformer.wpe
        positions.weight = nn.Parameter(positions.weight[:block_size].detach().clone())

    @classmethod
    def from_pretrained(cls, model_type, override_args=None, layer_norm="auto", device=None, **choices):
        """Return OpenAI's weights of a name in GPT2_SIZES, by transformers. override_args may hold dropout.

        layer_norm, device and choices are those of GPT().
        """
        load = library("transformers", f"init_from={model_type}").GPT2LMHeadModel.from_pretrained
        config = GPTConfig(vocab_size=50257, **GPT2_SIZES[model_type], **(override_args or {}))
        model = cls(config, layer_norm, device, **choices)
        with reading(f"init_from={model_type}", "run this once with a network, or set HF_HOME to a whole copy"):
            try:
                theirs = load(model_type, local_files_only=True)
            except OSError:  # Is it missing? Without a network transformers would try for half a minute.
                hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
                urllib.request.urlopen(f"{hub}/{model_type}/resolve/main/config.json", timeout=10).close()
                theirs = load(model_type)
            model.load_state_dict(from_hugging_face(theirs.state_dict()))
        return model

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type=None):
        """Return AdamW, fused on device_type "cuda" (default: the weights'), that decays neither biases nor norms."""
        matrices, others = ([p for p in self.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]
        fused = (device_type or self.lm_head.weight.device.type) == "cuda"
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        """nanoGPT's: the FLOPs of that many sequences in dt seconds, masked too, as a share of an A100's in bf16."""
        flops_per_sequence = self.flops_per_token(unmasked=1) * self.config.block_size
        return flops_per_sequence * fwdbwd_per_iter / dt / A100_FLOPS

    def flops_per_token(self, unmasked=0.5):
        """Return the FLOPs of forward and backward: 6 a weight, and the attention's products (PaLM, appendix B).

        unmasked: the share of these products that counts. As in tiny_llama_v3.py, it is what must be computed.
        """
        products = 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
        return 6 * self.get_num_params() + unmasked * products

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Return tokens (B, T + max_new_tokens): idx (B, T), and what is drawn from the model after it."""
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1].float() / max(temperature, 1e-3)
            # What is less likely than the top_k-th token is not drawn at all.
            if top_k:
                kept, _ = logits.topk(min(top_k, logits.shape[-1]))
                logits[logits < kept[:, -1:]] = -math.inf
            idx = torch.cat([idx, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
        return idx


def obstacle_to_triton(device):
    """Return a line that says why Triton's kernels cannot run on a device, None if they can."""
    if TRITON_AVAILABLE and (llama.INTERPRETED or torch.device(device or "cuda").type == "cuda"):
        return None
    return f"Triton cannot run here (device={device})"


def select_operations(config, choices, device):
    """Return the Operations that choices, {name: "triton", "torch" or "auto"}, ask for, and print who computes what.

    UsageError for one that cannot be met.
    """
    names = dict(layer_norm="LayerNorm", attention="attention", gelu="GELU")
    ours, anywhere = {}, obstacle_to_triton(device)
    reasons = dict.fromkeys(choices, anywhere)
    if not anywhere and config.dropout:
        reasons["attention"] = f"the kernels drop nothing, and dropout is {config.dropout}"
    elif not anywhere:
        reasons["attention"] = shape_obstacle(1, config.block_size, 3 * config.n_embd, config.n_head)
    on_gpu = torch.device(device or "cuda").type == "cuda"  # the interpreter is used only where it is asked for
    for name, choice in choices.items():
        if choice == "triton" and reasons[name]:
            raise UsageError(f"{name}=triton: {reasons[name]}: use {name}=auto")
        ours[name] = choice == "triton" or choice == "auto" and on_gpu and not reasons[name]
    for who, is_ours in ("Triton-accelerated", True), ("PyTorch's", False):
        if is_ours in ours.values():
            print(f"using {who} {', '.join(names[name] for name in names if ours[name] == is_ours)}")
    return Operations(
        triton_add_layer_norm if ours["layer_norm"] else torch_add_layer_norm,
        triton_attention if ours["attention"] else torch_attention,
        triton_gelu if ours["gelu"] else F.gelu,
    )


def padded_logits(x, weight):
    """Return x (B, T, C) @ weight (V, C)^T, with columns of -inf up to a number that products are fast with.

    With GPT-2's 50,257 tokens they take 4 to 7 times as long: see llama.padded_length().
    """
    missing = llama.padded_length(len(weight)) - len(weight)
    if not missing:
        return F.linear(x, weight)
    bias = F.pad(weight.new_zeros(len(weight)), (0, missing), value=-math.inf)
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)), bias)


def from_hugging_face(state):
    """Return the weights under our names; transformers transposes its Conv1D's, and has the mask as a buffer."""
    transposed = "c_attn.weight", "c_proj.weight", "c_fc.weight"
    return {
        name: weight.t().contiguous() if name.endswith(transposed) else weight
        for name, weight in state.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }
