"""Our kernels in a LLaMA of the library transformers: RMSNorm, attention, SwiGLU and cross-entropy.

    from tiny_llama.hugging_face import swap_kernels
    model = swap_kernels(LlamaForCausalLM.from_pretrained(FOLDER).cuda())

The parameters stay those of transformers, so optimizers, Trainer and save_pretrained() work as before. Where Triton
cannot run, the same modules compute with plain PyTorch.
"""

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

import tiny_llama_v3 as llama

OPERATIONS = llama.default_operations()


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
        eps = self.variance_epsilon
        return outside_autocast(lambda x: OPERATIONS.rmsnorm(x, None, self.weight, eps)[0], x, cast=False)


class Rotary(LlamaRotaryEmbedding):
    """Take the place of LlamaRotaryEmbedding."""

    def forward(self, x, position_ids):
        """Return cos and sin (seq, head_dim / 2) in fp32, as our kernel reads them."""
        if len(position_ids) > 1 and not (position_ids == position_ids[:1]).all():
            raise ValueError("our attention has the same positions in all rows: give no position_ids")
        # transformers repeats the angles for both halves of a head, and in the type of x.
        tables = super().forward(x.new_empty(0, dtype=torch.float32), position_ids[:1])
        return tuple(table[0, :, : table.shape[-1] // 2].contiguous() for table in tables)


class Attention(LlamaAttention):
    """Take the place of LlamaAttention."""

    def forward(self, hidden_states, position_embeddings, **others):
        """hidden_states (batch, seq, hidden) -> the same shape, and None"""
        lacking = "attention_mask", "cu_seq_lens_q", "past_key_values", "cache"  # of transformers 5.24 on
        if any(others.get(name) is not None for name in lacking):
            raise ValueError("our attention has no padding, packing or cache: give no mask, and use_cache=False")
        shape = *position_embeddings, self.config.num_attention_heads, self.config.num_key_value_heads
        weights = stack_rows(self, self.q_proj, self.k_proj, self.v_proj), self.o_proj.weight
        # The tables of cos and sin stay in fp32.
        return outside_autocast(lambda *tensors: OPERATIONS.attention(*tensors, *shape), hidden_states, *weights), None


class SwiGLU(LlamaMLP):
    """Take the place of LlamaMLP."""

    def forward(self, x):
        """x (batch, seq, hidden) -> the same shape"""
        weights = stack_rows(self, self.gate_proj, self.up_proj), self.down_proj.weight
        return outside_autocast(OPERATIONS.swiglu, x, *weights)


def cross_entropy(logits, targets, ignore_index=-100):
    """Return the mean loss of logits (..., vocab) and targets (...). Our kernel overwrites the logits."""
    return outside_autocast(lambda x: OPERATIONS.cross_entropy(x, targets, ignore_index), logits, cast=False)


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **_):
    """Take the place of ForCausalLMLoss: a label (batch, seq) is the token of its own position."""
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = cross_entropy(logits, targets, ignore_index)
    return loss if num_items_in_batch is None else loss * (targets != ignore_index).sum() / num_items_in_batch


def swap_kernels(model):
    """Let a LlamaForCausalLM compute with our operations, and return it. UsageError if it computes something else."""
    config = model.config
    if config.hidden_act != "silu" or config.attention_bias or config.mlp_bias or config.attention_dropout:
        raise llama.UsageError("swap_kernels: hidden_act must be 'silu', without biases and attention_dropout")
    ours = {LlamaRMSNorm: RMSNorm, LlamaRotaryEmbedding: Rotary, LlamaAttention: Attention, LlamaMLP: SwiGLU}
    for module in model.modules():
        module.__class__ = ours.get(type(module), type(module))
    model.loss_function = causal_loss
    config.use_cache = model.generation_config.use_cache = False
    return model
