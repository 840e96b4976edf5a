"""Our kernels in a LLaMA of the library transformers: RMSNorm, attention, SwiGLU and cross-entropy.

    from tiny_llama.hugging_face import swap_kernels
    model = swap_kernels(LlamaForCausalLM.from_pretrained(FOLDER).cuda())

The parameters stay those of transformers, so optimizers, Trainer and save_pretrained() work as before. Where Triton
cannot run, the same modules compute with plain PyTorch.

Our operations read the weights of the projections, which are not called. What would act there, such as an adapter, a
hook or a wrapper, is refused by name: when the kernels are put in, and at each forward(). With a cache, as in
generate(), attention is that of transformers.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

import tiny_llama_v3 as llama
from tiny_llama.groups import has_hooks

OPERATIONS = llama.default_operations()
SILU = type(ACT2FN["silu"])
# Keyword arguments that change nothing that our operations compute; check() sees is_causal.
HARMLESS = {"position_ids", "cache_position", "use_cache", "output_hidden_states", "output_attentions", "is_causal"}
HARMLESS |= {"num_items_in_batch", "ignore_index", "shift_labels"}  # of the loss


def check(**layers):
    """Raise UsageError for a layer, by name, that computes something else than our operations do with its weight."""
    for name, layer in layers.items():
        kind, parameters = type(layer), layer._parameters
        weight = parameters.get("weight")
        # What takes a place of ours is called, with its hooks.
        plain = "forward" not in vars(layer) if kind in PARTS else kind in (nn.Linear, SILU) and not has_hooks(layer)
        # Sharded, quantized and computed weights have other types.
        stored = not parameters or type(weight) is nn.Parameter and not weight.is_meta
        if not (plain and stored) or parameters.get("bias") is not None:
            remedy = "merge or remove adapters, hooks, wrappers, biases and offloading, or do not swap"
            raise llama.UsageError(f"swap_kernels: {name} ({kind}) is no plain layer with a weight in memory: {remedy}")


def refuse_unknown(keywords):
    """Raise ValueError for keyword arguments that could change what transformers computes."""
    names = {name for name, value in keywords.items() if value is not None} - HARMLESS
    if names:
        lacking = "no padding, packing or cache, and the same positions in all rows"
        makers = "torch.compile and packed position_ids make an attention_mask"
        raise ValueError(f"our attention has {lacking}: drop {', '.join(names)} ({makers})")


class StackedRowsFunction(torch.autograd.Function):
    """See stack_rows."""

    @staticmethod
    def forward(ctx, stack, *weights):
        ctx.rows = [len(weight) for weight in weights]
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx, gradient):
        return None, *gradient.split(ctx.rows)


def stack_rows(module, *linears):
    """Return one matrix of these layers' weights, which become views of it. Copied only once, and after a move."""
    weights, stack = [linear.weight for linear in linears], vars(module).get("stack")
    rows = [len(weight) for weight in weights]
    if stack is None or [part.data_ptr() for part in stack.split(rows)] != [weight.data_ptr() for weight in weights]:
        for weight in weights:
            storage = weight.untyped_storage()
            shared = storage.nbytes() > weight.nbytes and (stack is None or storage.data_ptr() != stack.data_ptr())
            if shared or weight.dtype != weights[0].dtype:
                what = "the weights of a layer share their memory, as in a flat buffer of DeepSpeed, or differ in type"
                raise llama.UsageError(f"swap_kernels: {what}: our kernels move them: do not swap")
        # What inference mode makes could not be trained.
        with torch.inference_mode(False):
            stack = module.stack = torch.cat([weight.detach() for weight in weights])
            for weight, part in zip(weights, stack.split(rows), strict=True):
                weight.data = part
    return StackedRowsFunction.apply(stack, *weights)


def outside_autocast(operation, *tensors, cast=True):
    """Return operation(*tensors). Our kernels refuse torch.autocast: the tensors are cast here, as it would do."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or OPERATIONS is llama.OPERATIONS["torch"]:
        return operation(*tensors)
    if cast:
        tensors = [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
    with torch.autocast(kind, enabled=False):
        return operation(*tensors)


class RMSNorm(LlamaRMSNorm):
    """Take the place of LlamaRMSNorm."""

    def forward(self, x):
        """x (..., hidden) -> the same shape, in its type"""
        check(norm=self)
        eps = self.variance_epsilon
        return outside_autocast(lambda x: OPERATIONS.rmsnorm(x, None, self.weight, eps)[0], x, cast=False)


class Rotary(LlamaRotaryEmbedding):
    """Take the place of LlamaRotaryEmbedding."""

    def forward(self, x, position_ids):
        """Return cos and sin (1, seq, head_dim / 2) in fp32, as our kernel reads them; of all rows if they differ."""
        if len(position_ids) > 1 and (position_ids == position_ids[:1]).all():
            position_ids = position_ids[:1]
        # transformers repeats the angles for both halves of a head, and in the type of x.
        tables = super().forward(x.new_empty(0, dtype=torch.float32), position_ids)
        return tuple(table[..., : table.shape[-1] // 2].contiguous() for table in tables)


class Attention(LlamaAttention):
    """Take the place of LlamaAttention."""

    def check(self, is_causal):
        """Raise UsageError if this is not the attention that our kernel computes."""
        check(self_attn=self, **self._modules)
        found = [self.config._attn_implementation, self.attention_dropout, is_causal, self.scaling]
        needed = ["sdpa", 0, True, self.head_dim**-0.5]
        if found != needed:
            names = "attn_implementation, attention_dropout, is_causal and scaling"
            raise llama.UsageError(f"swap_kernels: {names} are {found}: {needed} is what our kernel computes")

    def forward(self, hidden_states, position_embeddings, **others):
        """hidden_states (batch, seq, hidden) -> the same shape, and None"""
        cos, sin = position_embeddings
        if any(others.get(name) is not None for name in ("cache", "past_key_values")):  # the first from 5.24 on
            tables = tuple(torch.cat((half, half), -1).to(hidden_states.dtype) for half in (cos, sin))
            return super().forward(hidden_states, tables, **others)
        self.check(others.get("is_causal", self.is_causal))
        refuse_unknown(others if len(cos) == 1 else {"position_ids of each row": cos})
        shape = cos[0], sin[0], self.config.num_attention_heads, self.config.num_key_value_heads
        weights = stack_rows(self, self.q_proj, self.k_proj, self.v_proj), self.o_proj.weight
        # The tables of cos and sin stay in fp32.
        return outside_autocast(lambda *tensors: OPERATIONS.attention(*tensors, *shape), hidden_states, *weights), None


class SwiGLU(LlamaMLP):
    """Take the place of LlamaMLP."""

    def forward(self, x):
        """x (batch, seq, hidden) -> the same shape"""
        check(mlp=self, **self._modules)
        weights = stack_rows(self, self.gate_proj, self.up_proj), self.down_proj.weight
        return outside_autocast(OPERATIONS.swiglu, x, *weights)


def cross_entropy(logits, targets, ignore_index=-100):
    """Return the mean loss of logits (..., vocab) and targets (...). Our kernel overwrites the logits."""
    return outside_autocast(lambda x: OPERATIONS.cross_entropy(x, targets, ignore_index), logits, cast=False)


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **others):
    """Take the place of ForCausalLMLoss: labels (batch, seq) are shifted here, shift_labels are already."""
    refuse_unknown(others)
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    targets = targets.to(logits.device)
    loss = cross_entropy(logits.clone(), targets, ignore_index)  # the caller gets the logits
    if num_items_in_batch is None:
        return loss
    counted = (targets != ignore_index).sum()
    return torch.where(counted > 0, loss * counted, 0.0) / num_items_in_batch  # the mean of none is NaN


def before_forward(model, args, keywords):
    """Run before each forward(): refuse what FSDP2 has sharded, and have no cache unless one is asked for."""
    kinds = {type(model), type(model.model), *map(type, model.model.layers)}
    odd = kinds - {LlamaForCausalLM, LlamaModel, LlamaDecoderLayer}
    if odd:
        raise llama.UsageError(f"swap_kernels: {odd} is not supported: wrap nothing, or do not swap")
    return args, keywords | {"use_cache": bool(keywords.get("use_cache"))}


OURS = {LlamaRMSNorm: RMSNorm, LlamaRotaryEmbedding: Rotary, LlamaAttention: Attention, LlamaMLP: SwiGLU}
PARTS = {*OURS, *OURS.values()}


def swap_kernels(model):
    """Let a LlamaForCausalLM compute with our operations, and return it. UsageError if it computes something else."""
    if type(model) is not LlamaForCausalLM:
        raise llama.UsageError(f"swap_kernels: {type(model)} is not supported: give a LlamaForCausalLM")
    before_forward(model, (), {})
    check(norm=model.model.norm, rotary_emb=model.model.rotary_emb)
    for layer in model.model.layers:
        check(**layer._modules, **layer.mlp._modules)
        Attention.check(layer.self_attn, layer.self_attn.is_causal)
    for module in model.modules():
        module.__class__ = OURS.get(type(module), type(module))
    model.register_forward_pre_hook(before_forward, with_kwargs=True)
    model.loss_function = causal_loss
    return model
