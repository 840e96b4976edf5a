"""Groups of layers: what llama.TransformerBlock.forward computes, for several layers in one autograd.Function.

Autograd spends 10 to 40 us of the host on each Function and direction, more than most kernels of a small model run. And
the weight gradients of a small model are too small to fill a device: a group computes those of one kind of weight as
one batched product, for which the inputs of all its layers lie side by side. A step captured in a graph takes 0.90 of
the time with the small size, and about as long with the others.
"""

import itertools

import torch
import torch.nn as nn

import tiny_llama_v3 as llama

GROUP_BYTES = 2**27  # of gradients in a group: all layers of small, 2 of medium, 1 of large
WEIGHTS, INPUTS, SAVED = 6, 5, 8  # tensors of a layer: parameters, inputs of its products, what else backward needs
PLAIN = (llama.TritonRMSNorm, llama.TritonAttention, llama.TritonRMSNorm, llama.TritonSwiGLU)


def make_groups(layers, stretches, config):
    """Return the LayerGroups of a ModuleList, none of them beyond one of the stretches, lists of successive layers."""
    width = 2 * config.hidden_dim + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer_bytes = config.tokens_per_step * width * (2 if config.use_amp else 4)
    # Groups are as even as the number of layers allows.
    size = llama.cdiv(config.num_layers, llama.cdiv(config.num_layers, max(1, GROUP_BYTES // layer_bytes)))
    groups, first = [], 0
    for stretch in stretches:
        for start in range(0, len(stretch), size):
            last = first + len(stretch[start : start + size])
            groups.append(LayerGroup(layers, slice(first, last), config.bugs))
            first = last
    groups[-1].place = slice(groups[-1].place.start, None)  # also layers that somebody appends
    return groups


def parts_of(layer):
    """Return the modules of a TransformerBlock in the order in which it calls them."""
    return layer.attention_norm, layer.attention, layer.ffn_norm, layer.feed_forward


def is_plain(layer):
    """Return whether forward() does what is written there: no module has a hook, or another class or forward()."""
    parts = parts_of(layer) if type(layer) is llama.TransformerBlock else ()
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward"
    return tuple(map(type, parts)) == PLAIN and not any(vars(m).get(hook) for m in (layer, *parts) for hook in hooks)


def weights_of(layer):
    """Return the parameters of a TransformerBlock in the order of parameters()."""
    norm1, attention, norm2, feed_forward = parts_of(layer)
    products = feed_forward.gate_up_proj.weight, feed_forward.down_proj.weight
    return norm1.weight, attention.qkv_proj.weight, attention.o_proj.weight, norm2.weight, *products


class LayerGroup(nn.Module):
    """Successive TransformerBlocks of a model. Layers with a hook, or that were replaced, are called one by one."""

    def __init__(self, layers, place, bugs=()):
        super().__init__()
        self.model_layers, self.place, self.bugs = (layers,), place, bugs  # in a tuple, they are no submodule

    def layers(self):
        """Return the layers that the model has in this place now."""
        return list(self.model_layers[0])[self.place]

    def forward(self, residual, branch, cos, sin):
        """Compute TransformerBlock.forward of all layers in turn."""
        layers = self.layers()
        if layers and all(map(is_plain, layers)):
            weights = [weight for layer in layers for weight in weights_of(layer)]
            return GroupFunction.apply(self, layers, residual, branch, cos, sin, *weights)
        for layer in layers:
            residual, branch = layer(residual, branch, cos, sin)
        return residual, branch

    def forward_layer(self, layer, residual, branch, seq_len, tables, weights, inputs):
        """Fill the inputs; return residual, branch (rows, hidden) one layer on, and 8 tensors to save."""
        norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight = weights
        x1, o, x2, gate_up, hidden = inputs
        attention = layer.attention
        heads = attention.num_heads, attention.num_kv_heads
        residual1, _, rstd1 = llama.rmsnorm_forward(residual, branch, norm1, layer.attention_norm.eps, out=x1)
        qkv = torch.mm(x1, qkv_weight.t()).view(-1, seq_len, len(qkv_weight))
        out = o.view(-1, seq_len, heads[0], o.shape[1] // heads[0])
        q, k, v, _, lse = llama.attend(qkv, tables, *heads, self.bugs, out)
        y = torch.mm(o, o_weight.t())
        residual2, _, rstd2 = llama.rmsnorm_forward(residual1, y, norm2, layer.ffn_norm.eps, out=x2)
        if "triton_matmul_swiglu" in self.bugs:  # BUG triton_matmul_swiglu
            torch._foreach_copy_([gate_up, hidden], llama.swiglu_naive_matmul(x2, gate_up_weight))
        else:
            torch.mm(x2, gate_up_weight.t(), out=gate_up)
            llama.swiglu_activation(gate_up, out=hidden)
        y = torch.mm(hidden, down_weight.t())
        return residual2, y, residual1, rstd1, q, k, v, lse, residual2, rstd2

    def backward_layer(self, layer, residual_grad, next_y_grad, saved, tables, weights, inputs, grads):
        """Fill grads but y_grad, the first of them; return the gradient of both inputs, written to next_y_grad."""
        norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight = weights
        residual1, rstd1, q, k, v, lse, residual2, rstd2 = saved
        _, o, _, gate_up, _ = inputs
        y_grad, branch_grad, qkv_grad, partial1, partial2 = grads
        llama.swiglu_activation_backward_(torch.mm(y_grad, down_weight), gate_up)
        x_grad = torch.mm(gate_up, gate_up_weight)
        llama.rmsnorm_backward(x_grad, residual_grad, residual2, norm2, rstd2, branch_grad, partial2)
        o_grad = torch.mm(branch_grad, o_weight).view(q.shape)
        gradients = llama.split_heads(qkv_grad.view(*q.shape[:2], -1), q.shape[2], k.shape[2])
        llama.flash_attention_backward(o_grad, (q, k, v, o.view(q.shape), lse), gradients, tables)
        x_grad = torch.mm(qkv_grad, qkv_weight)
        return llama.rmsnorm_backward(x_grad, branch_grad, residual1, norm1, rstd1, next_y_grad, partial1)[0]


class GroupFunction(torch.autograd.Function):
    """See LayerGroup."""

    @staticmethod
    def forward(ctx, group, layers, residual, branch, cos, sin, *weights):
        ctx.group, ctx.layers, ctx.weights = group, layers, weights
        ctx.has_branch, shape = branch is not None, residual.shape
        residual, y = llama.as_rows(residual), llama.as_rows(branch) if ctx.has_branch else None
        (rows, hidden), (_, _, o_weight, _, gate_up_weight, down_weight) = residual.shape, weights[:WEIGHTS]
        widths = hidden, o_weight.shape[1], hidden, len(gate_up_weight), down_weight.shape[1]
        inputs = [residual.new_empty(len(layers), rows, width) for width in widths]
        saved = []
        for index, layer in enumerate(layers):
            own_weights, own_inputs = weights[WEIGHTS * index :][:WEIGHTS], [stack[index] for stack in inputs]
            results = group.forward_layer(layer, residual, y, shape[1], (cos, sin), own_weights, own_inputs)
            residual, y = results[:2]
            saved += results[2:]
        ctx.save_for_backward(cos, sin, *weights, *inputs, *saved)
        return residual.view(shape), y.view(shape)

    @staticmethod
    @llama.first_derivative_only
    def backward(ctx, residual_grad, y_grad):
        cos, sin, *tensors = ctx.saved_tensors
        count, grad = len(ctx.layers), llama.as_rows(residual_grad)
        weights, tensors = tensors[: WEIGHTS * count], tensors[WEIGHTS * count :]
        inputs, saved = tensors[:INPUTS], tensors[INPUTS:]
        rows, hidden = grad.shape
        programs = llama.norm_tile(rows, hidden, True, grad.device.type).programs
        # y_grad, branch_grad and qkv_grad of all layers side by side, and the partial sums of both norms.
        grads = [grad.new_empty(count, rows, width) for width in (hidden, hidden, len(weights[1]))]
        grads += [grad.new_empty(count, programs, hidden, dtype=torch.float32) for _ in range(2)]
        if count == 1:
            grads[0] = llama.as_rows(y_grad)[None]
        else:
            grads[0][-1].copy_(llama.as_rows(y_grad))
        for index in reversed(range(count)):
            grad = ctx.group.backward_layer(
                ctx.layers[index],
                grad,
                grads[0][index - 1] if index else None,
                saved[SAVED * index :][:SAVED],
                (cos, sin),
                weights[WEIGHTS * index :][:WEIGHTS],
                [stack[index] for stack in inputs],
                [stack[index] for stack in grads],
            )
        torch.autograd.graph.increment_version(inputs[3])  # gate_up is overwritten: autograd refuses a second run
        grad = grad.view(y_grad.shape)
        return None, None, grad, grad if ctx.has_branch else None, None, None, *weight_gradients(ctx, inputs, grads)


def weight_gradients(ctx, inputs, grads):
    """Return what backward() returns for the weights, given inputs and grads of all layers: (layers, rows, width)."""
    x1, o, x2, gate_up_grad, hidden = inputs
    y_grad, branch_grad, qkv_grad, partial1, partial2 = grads
    kinds = [  # of weights: how their gradient is computed, and from what
        (llama.write_column_sums, partial1),
        (llama.write_product, qkv_grad, x1),
        (llama.write_product, branch_grad, o),
        (llama.write_column_sums, partial2),
        (llama.write_product, gate_up_grad, x2),
        (llama.write_product, y_grad, hidden),
    ]
    gradients = [None] * len(ctx.weights)
    first = len(ctx.needs_input_grad) - len(ctx.weights)
    are_needed = all(ctx.needs_input_grad[first:])
    for kind, (write, *stacks) in enumerate(kinds):
        weights = ctx.weights[kind::WEIGHTS]
        is_stack = len(weights) > 1 and are_needed and all(map(takes_gradient, weights))
        place = stacked_view([w.main_grad for w in weights]) if is_stack else None
        if place is not None and len({w.grad is None for w in weights}) == 1:
            accumulate = weights[0].grad is not None
            (write_products if write is llama.write_product else write)(place, accumulate, *stacks)
            for weight in weights:
                weight.grad = weight.main_grad
        else:
            for index, weight in enumerate(weights):
                number = WEIGHTS * index + kind
                own = [stack[index] for stack in stacks]
                gradients[number] = llama.give_gradient(ctx, first + number, weight, write, *own)
    return gradients


def takes_gradient(weight):
    """Return whether llama.give_gradient() would write this weight's gradient to its main_grad, or add it there."""
    has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    is_ours = hasattr(weight, "main_grad") and (weight.grad is None or weight.grad is weight.main_grad)
    return is_ours and weight.requires_grad and not has_hooks


def write_products(place, accumulate, y_grads, xs):
    """place (layers, N, K) (+)= y_grads (layers, rows, N)^T @ xs (layers, rows, K)"""
    torch.baddbmm(place, y_grads.mT, xs, beta=int(accumulate), out=place)


def stacked_view(tensors):
    """View equal parts of one tensor, evenly spaced, as one (n, *shape); None if they are anything else."""
    first, *_ = tensors
    steps = {b.storage_offset() - a.storage_offset() for a, b in itertools.pairwise(tensors)} or {0}
    bases = {id(t._base) for t in tensors}
    if len(steps) > 1 or min(steps) < 0 or bases != {id(first._base)} or first._base is None:
        return None
    return first.as_strided((len(tensors), *first.shape), (*steps, *first.stride()))
