"""Our kernels in a LLaMA of the library transformers: RMSNorm, attention, SwiGLU and cross-entropy.

    from tiny_llama.hugging_face import swap_kernels
    model = swap_kernels(LlamaForCausalLM.from_pretrained(FOLDER).cuda())

The parameters stay those of transformers, so optimizers, Trainer and save_pretrained() work as before. The projections
are still called, so adapters, hooks, quantization and FSDP work as well. What our kernels do not compute, such as
attention with a mask or a cache, or tensors on a CPU, the code of transformers computes.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaRMSNorm

import tiny_llama_v3 as llama

RUN_TRITON = llama.default_operations() is llama.OPERATIONS["triton"]
SILU = type(ACT2FN["silu"])
# Arguments of attention that only concern the code around it, or the loss.
HARMLESS = {"position_ids", "cache_position", "use_cache", "output_hidden_states"}
HARMLESS |= {"num_items_in_batch", "ignore_index", "shift_labels"}


def are_plain(*tensors):
    """Return whether our kernels take these tensors: of their types, where Triton runs, no shards of a DTensor."""
    return RUN_TRITON and all(
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.dtype in llama.KERNEL_DTYPES
        and (tensor.is_cuda or llama.INTERPRETED)
        for tensor in tensors
    )


def outside_autocast(operation, *arguments):
    """Return operation(*arguments), whose types stay: our kernels compute in fp32, and refuse torch.autocast."""
    with torch.autocast(arguments[0].device.type, enabled=False):
        return operation(*arguments)


class RMSNorm(LlamaRMSNorm):
    """Take the place of LlamaRMSNorm."""

    @torch.compiler.disable
    def forward(self, x):
        """x (..., hidden) -> the same shape, in its type"""
        if not are_plain(x, self.weight):
            return super().forward(x)
        y, _ = outside_autocast(llama.triton_rmsnorm, x, None, self.weight, self.variance_epsilon)
        return y


class Attention(LlamaAttention):
    """Take the place of LlamaAttention."""

    @torch.compiler.disable
    def forward(self, hidden_states, position_embeddings, **others):
        """hidden_states (batch, seq, hidden) -> the same shape, and None"""
        cos, sin = position_embeddings  # (1 or batch, seq, head_dim)
        given = {name for name, value in others.items() if value is not None}
        dropout = self.training and self.attention_dropout
        is_usual = self.is_causal and self.scaling == self.head_dim**-0.5 and self.head_dim <= 128 and len(cos) == 1
        if given - HARMLESS or dropout or not is_usual or not are_plain(hidden_states, cos):
            return super().forward(hidden_states, position_embeddings, **others)
        q, k, v = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
        # transformers repeats the angles for both halves of a head, and in the type of x.
        tables = (table[0, :, : self.head_dim // 2].float().contiguous() for table in (cos, sin))
        heads = q.shape[-1] // self.head_dim, k.shape[-1] // self.head_dim
        o = llama.AttentionFunction.apply(torch.cat((q, k, v), dim=-1), *tables, *heads, ())
        return self.o_proj(o), None


class ActivationFunction(torch.autograd.Function):
    """silu(gate) * up of gate_up (rows, 2 n), which its backward pass overwrites."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return llama.swiglu_activation(gate_up)

    @staticmethod
    @llama.first_derivative_only
    def backward(ctx, hidden_grad):
        (gate_up,) = ctx.saved_tensors
        llama.swiglu_activation_backward_(hidden_grad.contiguous(), gate_up)
        torch.autograd.graph.increment_version(gate_up)  # lets autograd refuse a second run
        return gate_up


class SwiGLU(LlamaMLP):
    """Take the place of LlamaMLP."""

    @torch.compiler.disable
    def forward(self, x):
        """x (batch, seq, hidden) -> the same shape"""
        if type(self.act_fn) is not SILU or not are_plain(x):
            return super().forward(x)
        gate_up = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)
        return self.down_proj(ActivationFunction.apply(gate_up.flatten(0, -2)).view(*x.shape[:-1], -1))


def cross_entropy(logits, targets, ignore_index=-100):
    """Return the mean loss of logits (..., vocab) and targets (...). Our kernel overwrites the logits."""
    return outside_autocast(llama.triton_cross_entropy, logits, targets, ignore_index)


@torch.compiler.disable
def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **others):
    """Take the place of ForCausalLMLoss: labels (batch, seq) are the tokens at their positions."""
    if not are_plain(logits):
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    targets = targets.to(logits.device)
    loss = cross_entropy(logits.clone(), targets, ignore_index)  # the caller gets the logits
    if num_items_in_batch is None:
        return loss
    counted = (targets != ignore_index).sum()
    return torch.where(counted > 0, loss * counted, 0.0) / num_items_in_batch  # the mean of none is NaN


def without_cache(model, args, keywords):
    """Have no cache unless one is asked for, as generate() does: with one, transformers computes attention."""
    return args, {"use_cache": False} | keywords


def swap_kernels(model):
    """Let a LlamaForCausalLM compute with our kernels, and return it. UsageError for another model."""
    if type(model) is not LlamaForCausalLM:
        raise llama.UsageError(f"swap_kernels: {type(model).__name__} is not supported: give a LlamaForCausalLM")
    ours = {LlamaRMSNorm: RMSNorm, LlamaAttention: Attention, LlamaMLP: SwiGLU}
    for module in model.modules():
        module.__class__ = ours.get(type(module), type(module))
    model.register_forward_pre_hook(without_cache, with_kwargs=True)
    model.loss_function = causal_loss
    return model
