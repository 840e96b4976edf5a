"""Groups of layers: what llama.TransformerBlock.forward computes, for several layers in one autograd.Function.

Autograd spends 10 to 40 us of the host on each Function and direction, more than most kernels of a small model run. And
the weight gradients of a small model are too small to fill a device: a group computes those of one kind of weight as
one batched product, for which the inputs of all its layers lie side by side. A step captured in a graph takes 0.90 of
the time with the small size, and about as long with the others.
"""

import contextlib
import itertools

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook

import tiny_llama_v3 as llama

GROUP_BYTES = 2**27  # of gradients in a group: all layers of small, 2 of medium, 1 of large
WEIGHTS, INPUTS, SAVED = 6, 5, 8  # tensors of a layer: parameters, inputs of its products, what else backward needs
PLAIN = (llama.TritonRMSNorm, llama.TritonAttention, llama.TritonRMSNorm, llama.TritonSwiGLU)


def make_groups(layers, stretches, config):
    """Return the LayerGroups of a ModuleList, none of them beyond one of the stretches, lists of successive layers."""
    # What backward allocates for a layer: y_grad, branch_grad and qkv_grad.
    width = 2 * config.hidden_dim + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer_bytes = config.tokens_per_step * width * (2 if config.use_amp else 4)
    # Groups are as even as the number of layers allows.
    most = max(1, GROUP_BYTES // layer_bytes)
    size = llama.cdiv(config.num_layers, llama.cdiv(config.num_layers, most))
    groups, first = [], 0
    for stretch in stretches:
        last = first + len(stretch)
        for start in range(first, last, size):
            groups.append(LayerGroup(layers, slice(start, min(start + size, last)), config.bugs))
        first = last
    groups[-1].place = slice(groups[-1].place.start, None)  # also layers that somebody appends
    return groups


def parts_of(layer):
    """Return the modules of a TransformerBlock in the order in which it calls them."""
    return layer.attention_norm, layer.attention, layer.ffn_norm, layer.feed_forward


def is_plain(layer):
    """Return whether forward() does what is written there: no module has a hook, or another class or forward()."""
    parts = parts_of(layer) if type(layer) is llama.TransformerBlock else ()
    return tuple(map(type, parts)) == PLAIN and not any(map(llama.is_changed, (layer, *parts)))


def weights_of(layer):
    """Return the parameters of a TransformerBlock in the order of parameters()."""
    norm1, attention, norm2, feed_forward = parts_of(layer)
    qkv_weight, o_weight = llama.weight_of(attention.qkv_proj), llama.weight_of(attention.o_proj)
    products = llama.weight_of(feed_forward.gate_up_proj), llama.weight_of(feed_forward.down_proj)
    return [norm1.weight, qkv_weight, o_weight, norm2.weight, *products]


def by_layer(tensors, count):
    """Split a list with count tensors for each layer into a list for each layer."""
    return [tensors[first : first + count] for first in range(0, len(tensors), count)]


class LayerGroup(nn.Module):
    """Successive TransformerBlocks of a model. Layers with a hook, or that were replaced, are called one by one."""

    named_range = contextlib.nullcontext  # named_range(name): tiny_llama.profiler puts a range for profilers there

    def __init__(self, layers, place, bugs=()):
        super().__init__()
        # In a tuple, the layers are no submodule: the model has them already.
        self.model_layers, self.place, self.bugs = (layers,), place, bugs

    def layers(self):
        """Return the layers that the model has in this place now."""
        return list(self.model_layers[0])[self.place]

    @llama.outside_compiler
    def forward(self, residual, branch, cos, sin):
        """Compute TransformerBlock.forward of all layers in turn."""
        layers = self.layers()
        if layers and not has_any_global_hook() and all(map(is_plain, layers)):
            weights = [weight for layer in layers for weight in weights_of(layer)]
            return GroupFunction.apply(self, layers, residual, branch, cos, sin, *weights)
        for layer in layers:
            residual, branch = layer(residual, branch, cos, sin)
        return residual, branch


class GroupFunction(torch.autograd.Function):
    """See LayerGroup."""

    @staticmethod
    def forward(ctx, group, layers, residual, branch, cos, sin, *weights):
        ctx.group, ctx.layers, ctx.weights = group, layers, weights
        ctx.has_branch, shape = branch is not None, residual.shape
        residual, y = llama.as_rows(residual), llama.as_rows(branch) if ctx.has_branch else None
        _, _, o_weight, _, gate_up_weight, down_weight = weights[:WEIGHTS]
        rows, width = residual.shape
        # Of all layers side by side: x1, o, x2, gate_up and hidden.
        widths = width, o_weight.shape[1], width, len(gate_up_weight), down_weight.shape[1]
        inputs = [residual.new_empty(len(layers), rows, width) for width in widths]
        saved, per_layer = [], zip(layers, by_layer(weights, WEIGHTS), *inputs, strict=True)
        for index, (layer, own_weights, x1, o, x2, gate_up, hidden) in enumerate(per_layer, group.place.start):
            norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight = own_weights
            heads = layer.attention.num_heads, layer.attention.num_kv_heads
            with group.named_range(f"layers.{index} forward"):
                # As TransformerBlock.forward: y is the branch that the next norm adds to the residual stream.
                residual1, _, rstd1 = llama.rmsnorm_forward(residual, y, norm1, layer.attention_norm.eps, out=x1)
                qkv = torch.mm(x1, qkv_weight.t()).view(-1, shape[1], len(qkv_weight))
                out = o.view(-1, shape[1], heads[0], o.shape[1] // heads[0])
                q, k, v, _, lse = llama.attend(qkv, (cos, sin), *heads, group.bugs, out)
                y = torch.mm(o, o_weight.t())
                residual, _, rstd2 = llama.rmsnorm_forward(residual1, y, norm2, layer.ffn_norm.eps, out=x2)
                if "triton_matmul_swiglu" in group.bugs:  # BUG triton_matmul_swiglu
                    torch._foreach_copy_([gate_up, hidden], llama.swiglu_naive_matmul(x2, gate_up_weight))
                else:
                    torch.mm(x2, gate_up_weight.t(), out=gate_up)
                    llama.swiglu_activation(gate_up, out=hidden)
                y = torch.mm(hidden, down_weight.t())
            saved += [residual1, rstd1, q, k, v, lse, residual, rstd2]
        ctx.save_for_backward(cos, sin, *weights, *inputs, *saved)
        return residual.view(shape), y.view(shape)

    @staticmethod
    @llama.first_derivative_only
    def backward(ctx, residual_grad, y_grad):
        cos, sin, *tensors = ctx.saved_tensors
        count, shape = len(ctx.layers), y_grad.shape
        grad, y_grad = llama.as_rows(residual_grad), llama.as_rows(y_grad)
        weights, tensors = tensors[: WEIGHTS * count], tensors[WEIGHTS * count :]
        inputs, saved = tensors[:INPUTS], by_layer(tensors[INPUTS:], SAVED)
        rows, hidden = grad.shape
        # Of all layers side by side: y_grad, branch_grad and qkv_grad, and the partial sums of both norms.
        programs = llama.norm_tile(rows, hidden, True, grad.device.type).programs
        grads = [grad.new_empty(count, rows, width) for width in (hidden, hidden, len(weights[1]))]
        grads += [grad.new_empty(count, programs, hidden, dtype=torch.float32) for _ in range(2)]
        if count == 1:
            grads[0] = y_grad[None]
        else:
            grads[0][-1].copy_(y_grad)
        for index in reversed(range(count)):
            norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight = by_layer(weights, WEIGHTS)[index]
            residual1, rstd1, q, k, v, lse, residual2, rstd2 = saved[index]
            _, o, _, gate_up, _ = (stack[index] for stack in inputs)
            y_grad, branch_grad, qkv_grad, partial1, partial2 = (stack[index] for stack in grads)
            with ctx.group.named_range(f"layers.{index + ctx.group.place.start} backward"):
                # gate_up becomes its own gradient.
                llama.swiglu_activation_backward_(torch.mm(y_grad, down_weight), gate_up)
                x_grad = torch.mm(gate_up, gate_up_weight)
                llama.rmsnorm_backward(x_grad, grad, residual2, norm2, rstd2, branch_grad, partial2)
                o_grad = torch.mm(branch_grad, o_weight).view(q.shape)
                gradients = llama.split_heads(qkv_grad.view(*q.shape[:2], len(qkv_weight)), q.shape[2], k.shape[2])
                llama.flash_attention_backward(o_grad, (q, k, v, o.view(q.shape), lse), gradients, (cos, sin))
                x_grad = torch.mm(qkv_grad, qkv_weight)
                # The gradient of the layer's input is the y_grad of the layer before.
                place = grads[0][index - 1] if index else None
                grad, *_ = llama.rmsnorm_backward(x_grad, branch_grad, residual1, norm1, rstd1, place, partial1)
        torch.autograd.graph.increment_version(inputs[3])  # gate_up is overwritten: autograd refuses a second run
        grad = grad.view(shape)
        return None, None, grad, grad if ctx.has_branch else None, None, None, *weight_gradients(ctx, inputs, grads)


def weight_gradients(ctx, inputs, grads):
    """Return what backward() returns for the weights, given inputs and grads of all layers: (layers, rows, width)."""
    x1, o, x2, gate_up_grad, hidden = inputs
    y_grad, branch_grad, qkv_grad, partial1, partial2 = grads
    kinds = [  # of weights: what writes a gradient, and from what
        (llama.write_column_sums, partial1),
        (llama.write_product, qkv_grad, x1),
        (llama.write_product, branch_grad, o),
        (llama.write_column_sums, partial2),
        (llama.write_product, gate_up_grad, x2),
        (llama.write_product, y_grad, hidden),
    ]
    gradients = [None] * len(ctx.weights)
    first = len(ctx.needs_input_grad) - len(ctx.weights)
    # The weights are the last arguments of forward(). A frozen one has no node.
    accumulates_all = all(llama.is_accumulated(node) for node, _ in ctx.next_functions[-len(ctx.weights) :])
    for kind, (write, *stacks) in enumerate(kinds):
        numbers = range(kind, len(ctx.weights), WEIGHTS)
        weights = ctx.weights[kind::WEIGHTS]
        place = shared_place(weights) if accumulates_all else None
        if place is None:
            for number, weight, *own in zip(numbers, weights, *stacks, strict=True):
                gradients[number] = llama.give_gradient(ctx, first + number, weight, write, *own)
        else:
            write_all = write_products if write is llama.write_product else write
            write_all(place, weights[0].grad is not None, *stacks)
            for weight in weights:
                weight.grad = weight.main_grad
    return gradients


def write_products(place, accumulate, y_grads, xs):
    """place (layers, N, K) (+)= y_grads (layers, rows, N)^T @ xs (layers, rows, K)"""
    torch.baddbmm(place, y_grads.mT, xs, beta=int(accumulate), out=place)


def shared_place(weights):
    """View where llama.give_gradient() would write these gradients as one tensor; None if it must write each."""
    for weight in weights:
        has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
        if not (hasattr(weight, "main_grad") and weight.requires_grad) or has_hooks:
            return None
        # All are overwritten, or all are added to.
        expected = None if weights[0].grad is None else weight.main_grad
        if weight.grad is not expected:
            return None
    return stacked_view([weight.main_grad for weight in weights])


def stacked_view(tensors):
    """View equal parts of one tensor, evenly spaced, as one (n, *shape); None if they are anything else."""
    first, *_ = tensors
    steps = {b.storage_offset() - a.storage_offset() for a, b in itertools.pairwise(tensors)}
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(steps) != 1 or min(steps) <= 0 or len(storages) > 1:  # a single tensor; one twice, of a shared layer
        return None
    return first.as_strided((len(tensors), *first.shape), (*steps, *first.stride()))
