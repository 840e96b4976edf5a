"""Our kernels in a LLaMA of the library transformers: RMSNorm, attention, SwiGLU and cross-entropy.

    from tiny_llama.hugging_face import swap_kernels
    model = swap_kernels(LlamaForCausalLM.from_pretrained(FOLDER).cuda())

The parameters stay those of transformers, so optimizers, Trainer and save_pretrained() work as before. The projections
are still called, so adapters, hooks, quantization and FSDP work as well. What our kernels do not compute, such as
attention with a mask, after cached tokens, or tensors on a CPU, the code of transformers computes.
"""

import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook
from transformers import DynamicCache
from transformers.activations import ACT2FN
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
    rotate_half,
)

import tiny_llama_v3 as llama

SILU = type(ACT2FN["silu"])
# Attention that is causal where it has no mask, as ours is. Under another name, or after a user has registered another
# function under one of these, it may be anything.
FLASH = {f"flash_attention_{version}": flash_attention_forward for version in (2, 3, 4)}
CAUSAL = {"sdpa": sdpa_attention_forward} | FLASH
# Arguments of attention that only concern the code around it, or the loss; and what others say if they say nothing.
HARMLESS = {"position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits"}
HARMLESS |= {"num_items_in_batch", "ignore_index", "shift_labels"}
NEUTRAL = {"output_attentions": False, "is_causal": True}


def are_plain(*tensors):
    """Return whether our kernels take these tensors: of their types, where Triton runs, no shards of a DTensor."""

    def is_plain(tensor):
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type not in ("cuda", "cpu"):
            return False
        types = {tensor.dtype}
        if torch.is_autocast_enabled(tensor.device.type):
            types.add(torch.get_autocast_dtype(tensor.device.type))
        if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():  # of a model on several GPUs
            return False
        is_bf16 = torch.bfloat16 in types
        if is_bf16 and not llama.has_bf16(llama.get_gpu(tensor.device.type)):
            return False
        return types <= llama.KERNEL_DTYPES and not llama.triton_obstacle(tensor.device, use_amp=is_bf16)

    return all(map(is_plain, tensors))


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

    def is_ours(self, hidden_states, cos, cache, others):
        """Return whether our kernel computes this call without a mask; the other arguments are those of forward()."""
        name = self.config._attn_implementation
        return (
            are_plain(hidden_states, cos)
            and name in CAUSAL
            and ALL_ATTENTION_FUNCTIONS.get(name) is CAUSAL[name]
            and all(value is None or key in HARMLESS or value is NEUTRAL.get(key) for key, value in others.items())
            and not (self.training and self.attention_dropout)
            and self.is_causal
            and self.scaling == self.head_dim**-0.5
            and self.head_dim <= 128
            and len(cos) == 1
            and (cache is None or type(cache) is DynamicCache and cache.get_seq_length(self.layer_idx) == 0)
            and not (name in FLASH and len(hidden_states) == 1 and is_packed(others.get("position_ids"), cos))
        )

    @torch.compiler.disable
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, *args, **others):
        """hidden_states (batch, seq, hidden) -> the same shape, and None"""
        cache = others.pop("past_key_values", cache)  # its name in older releases
        cos, sin = position_embeddings  # (1 or batch, seq, head_dim)
        if attention_mask is not None or args or not self.is_ours(hidden_states, cos, cache, others):
            return super().forward(hidden_states, position_embeddings, attention_mask, cache, *args, **others)
        q, k, v = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            keys, values = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (k, v))
            cache.update(keys * cos[:, None] + rotate_half(keys) * sin[:, None], values, self.layer_idx)
        # transformers repeats the angles for both halves of a head, and in the type of x.
        tables = (table[0, :, : self.head_dim // 2].float().contiguous() for table in (cos, sin))
        heads = q.shape[-1] // self.head_dim, k.shape[-1] // self.head_dim
        o = llama.AttentionFunction.apply(torch.cat((q, k, v), dim=-1), *tables, *heads, ())
        return self.o_proj(o), None


def is_packed(position_ids, cos):
    """Return whether position_ids (1, seq) are those of several texts, which FlashAttention keeps apart.

    The answer waits for the GPU, so the first layer notes it on the cos that all layers of a forward pass share.
    """
    if not hasattr(cos, "is_packed"):
        cos.is_packed = position_ids is not None and find_packed_sequence_indices(position_ids) is not None
    return cos.is_packed


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
        is_silu = type(self.act_fn) is SILU and not llama.is_changed(self.act_fn) and not has_any_global_hook()
        if not is_silu or not are_plain(x):
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
    if isinstance(num_items_in_batch, torch.Tensor):  # which may be on another GPU
        num_items_in_batch = num_items_in_batch.to(loss.device)
    counted = (targets != ignore_index).sum()
    return torch.where(counted > 0, loss * counted, 0.0) / num_items_in_batch  # the mean of none is NaN


def are_texts(position_ids):
    """Return whether position_ids (batch, seq) are those of several texts in a row, each of which begins with 0."""
    after = position_ids[:, 1:][position_ids.diff() != 1]
    return after.numel() > 0 and not after.any().item()


@torch.compiler.disable
def warn_of_compilation():
    """Warn that a model with our kernels is being compiled, at run time: what is traced has no warnings."""
    warnings.warn(
        "torch.compile fuses nothing with our kernels, and where transformers then builds a mask, as without a cache, "
        "attention is not ours: call the swapped model without it",
        stacklevel=1,
    )


def before_forward(model, args, keywords):
    """Have no cache for packed texts, unless one is asked for: with one, transformers would mix them."""
    if torch.compiler.is_compiling():
        warn_of_compilation()
    given = {name for name, value in keywords.items() if value is not None}
    asked = given & {"attention_mask", "cache", "past_key_values", "use_cache"} or args[1:]
    if "position_ids" in given and not asked and are_texts(keywords["position_ids"]):
        keywords = keywords | {"use_cache": False}
    return args, keywords


OURS = {LlamaRMSNorm: RMSNorm, LlamaAttention: Attention, LlamaMLP: SwiGLU}
OURS = {theirs: ours for theirs, ours in OURS.items() if theirs.__module__.startswith("transformers.")}  # not Liger's
PLACES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "norm"}


def is_called(module):
    """Return whether a module, or one that it wraps, is ours and not hidden by a forward() that was set on it."""
    return any(
        type(part) in OURS.values()
        and ("forward" not in vars(part) or type(part).forward in map(function_of, vars(part).values()))
        for part in module.modules()
    )


def function_of(value):
    """Return the function of a bound method, else None."""
    return getattr(value, "__func__", None)


def swap_kernels(model):
    """Let a LlamaForCausalLM compute with our kernels, and return it. UsageError for another model.

    A warning names the modules that keep what others have put there, such as a forward() of their own.
    """
    if type(model) is not LlamaForCausalLM:
        kind = type(model).__name__
        raise llama.UsageError(f"swap_kernels: {kind} is not supported: give a LlamaForCausalLM, and compile it later")
    for module in model.modules():
        kind = type(module)
        if kind not in OURS:
            continue
        module.__class__ = OURS[kind]
        for name, value in vars(module).items():
            if function_of(value) is kind.forward:  # accelerate keeps it there, and calls it in the one that it has set
                vars(module)[name] = OURS[kind].forward.__get__(module)
    left = [n for n, module in model.named_modules() if n.rpartition(".")[2] in PLACES and not is_called(module)]
    if left:
        more = f" and {len(left) - 1} more" * (len(left) > 1)
        warnings.warn(
            f"swap_kernels: {left[0]}{more} had a class or a forward() of others, so our kernels do not compute there: "
            "call swap_kernels() first",
            stacklevel=2,
        )
    if before_forward not in model.model._forward_pre_hooks.values():
        model.model.register_forward_pre_hook(before_forward, with_kwargs=True)
    model.loss_function = causal_loss
    return model
