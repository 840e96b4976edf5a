"""Groups of layers: what LayerStack.forward computes block by block, with one autograd.Function for several blocks.

Autograd spends 10 to 40 us of the host on each Function and direction, more than most kernels of a small model run. And
the weight gradients of a small model are too small to fill a device: a group computes those of one kind of weight as
one batched product, for which the inputs of all its layers lie side by side. A step captured in a graph takes 0.90 of
the time with the small size, and about as long with the others.
"""

import contextlib
import functools
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

import tiny_llama_v3 as llama

GROUP_BYTES = 2**27  # of gradients in a group: all layers of small, 2 of medium, 1 of large
NORM1, QKV, OUT, NORM2, GATE_UP, DOWN = range(6)  # the weights of a layer, in the order of parameters()
WEIGHTS, SAVED = 6, 8  # tensors of a layer: its weights, and what else backward needs


class LayerGroups(llama.LayerStack):
    """The LayerStack of a model whose weights FlatAdamW owns, computed in groups of successive layers.

    buckets are lists of successive layers, beyond none of which a group goes.
    """

    def __init__(self, layers, buckets, config):
        super().__init__(layers)
        # What backward allocates for a layer: y_grad, branch_grad and qkv_grad.
        width = 2 * config.hidden_dim + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        layer_bytes = config.tokens_per_micro_batch * width * (2 if config.use_amp else 4)
        # Groups are as even as the number of layers allows.
        most = max(1, GROUP_BYTES // layer_bytes)
        size = llama.cdiv(config.num_layers, llama.cdiv(config.num_layers, most))
        parts = (bucket[start : start + size] for bucket in buckets for start in range(0, len(bucket), size))
        self.groups = []  # no nn.ModuleList: the layers are in this model already
        for part in parts:
            first = sum(len(group.layers) for group in self.groups)
            self.groups.append(LayerGroup(part, first, config.bugs, config.recompute))

    def forward(self, residual, branch, cos, sin):
        """See LayerStack.forward()."""
        for group in self.groups:
            residual, branch = group(residual, branch, cos, sin)
        return residual, branch


class LayerGroup(nn.Module):
    """Successive TransformerBlocks, the first of which has the number `first` in the model."""

    named_range = contextlib.nullcontext  # named_range(name): tiny_llama.profiler names layers for profilers

    def __init__(self, layers, first=0, bugs=(), recompute=False):
        super().__init__()
        # In a tuple, the layers are no submodules: the model has them already.
        self.layers, self.first, self.bugs, self.recompute = tuple(layers), first, bugs, recompute
        self.weights = [weight for layer in layers for weight in layer.parameters()]

    def forward(self, residual, branch, cos, sin):
        """Compute TransformerBlock.forward of all layers in turn."""
        return GroupFunction.apply(self, residual, branch, cos, sin, *self.weights)


def by_layer(tensors, count):
    """Split a list with count tensors for each layer into a list for each layer."""
    return [tensors[first : first + count] for first in range(0, len(tensors), count)]


class Stacks(dict):
    """Tensors of all layers of a group side by side, for batched products: {name: (layers, rows, width)}."""

    def __init__(self, count, rows, tensors=()):
        super().__init__(tensors)
        self.count, self.rows = count, rows

    def place(self, name, index, width, rows=None, **options):
        """Return where a layer writes its (rows, width). All layers' are allocated for the first that is computed."""
        if name not in self:
            self[name] = self.rows.new_empty(self.count, rows or len(self.rows), width, **options)
        return self[name][index]


class GroupFunction(torch.autograd.Function):
    """See LayerGroup. Comments name the module of TransformerBlock whose operation the lines below compute.

    place(name, ...) is where what a layer computes lies beside the same of the other layers, for batched products.
    """

    @staticmethod
    def forward(ctx, group, residual, branch, cos, sin, *weights):
        ctx.group, ctx.weights, layers = group, weights, group.layers
        ctx.has_branch, shape = branch is not None, residual.shape
        residual, y = llama.as_rows(residual), llama.as_rows(branch) if ctx.has_branch else None
        stacks, saved, ffn = Stacks(len(layers), residual), [], weights[DOWN].shape[1]
        per_layer = enumerate(zip(layers, by_layer(weights, WEIGHTS), strict=True))
        for index, (layer, (norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight)) in per_layer:
            heads = layer.attention.num_heads, layer.attention.num_kv_heads
            gate_up_weight, down_weight = llama.padded(gate_up_weight), with_columns(down_weight)
            place = functools.partial(stacks.place, index=index)
            stored = no_place if group.recompute else place  # of what backward can compute again
            with group.named_range(f"layers.{index + group.first} forward"):
                # attention_norm, which adds the branch y of the layer before
                out = stored("x1", width=residual.shape[1])
                residual1, x, rstd1 = llama.rmsnorm_forward(residual, y, norm1, layer.attention_norm.eps, out=out)
                # attention
                qkv = torch.mm(x, qkv_weight.t()).view(-1, shape[1], len(qkv_weight))
                o = place("o", width=o_weight.shape[1])
                out = o.view(-1, shape[1], heads[0], o.shape[1] // heads[0])
                q, k, v, _, lse = llama.attend(qkv, (cos, sin), *heads, group.bugs, out)
                y = torch.mm(o, o_weight.t())
                # ffn_norm
                out = stored("x2", width=residual.shape[1])
                residual, x, rstd2 = llama.rmsnorm_forward(residual1, y, norm2, layer.ffn_norm.eps, out=out)
                # feed_forward
                gate_up = place("gate_up", width=len(gate_up_weight))
                out = stored("hidden", width=down_weight.shape[1])
                if "triton_matmul_swiglu" in group.bugs:  # BUG triton_matmul_swiglu
                    products, hidden = llama.swiglu_naive_matmul(x, gate_up_weight[: 2 * ffn])
                    gate_up.copy_(F.pad(products, (0, len(gate_up_weight) - 2 * ffn)))
                    hidden = with_columns(hidden) if out is None else out.copy_(with_columns(hidden))
                else:
                    _, hidden = llama.swiglu_forward(x, gate_up_weight, gate_up, out, ffn, down_weight.shape[1])
                y = torch.mm(hidden, down_weight.t())
            saved += [residual1, rstd1, q, k, v, lse, residual, rstd2]
        ctx.names = list(stacks)
        ctx.save_for_backward(cos, sin, *weights, *stacks.values(), *saved)
        return residual.view(shape), y.view(shape)

    @staticmethod
    @llama.first_derivative_only
    def backward(ctx, residual_grad, y_grad):
        cos, sin, *tensors = ctx.saved_tensors
        shape, count, recompute = y_grad.shape, len(ctx.group.layers), ctx.group.recompute
        grad, y_grad = llama.as_rows(residual_grad), llama.as_rows(y_grad)
        width, ffn = grad.shape[1], ctx.weights[DOWN].shape[1]
        tensors = tensors[len(ctx.weights) :]
        stacks = Stacks(count, grad, zip(ctx.names, tensors, strict=False))
        weights, saved = by_layer(ctx.weights, WEIGHTS), by_layer(tensors[len(stacks) :], SAVED)
        if count == 1:
            stacks["y_grad"] = y_grad[None]
        else:
            stacks.place("y_grad", count - 1, width).copy_(y_grad)
        partials = dict(rows=llama.norm_tile(*grad.shape, True, grad.device.type).programs, dtype=torch.float32)
        give = functools.partial(give_gradients, ctx)
        for index in reversed(range(count)):
            norm1, qkv_weight, o_weight, norm2, gate_up_weight, down_weight = weights[index]
            residual1, rstd1, q, k, v, lse, residual2, rstd2 = saved[index]
            gate_up_weight, down_weight = llama.padded(gate_up_weight), with_columns(down_weight)
            o, gate_up, y_grad = (stacks[name][index] for name in ("o", "gate_up", "y_grad"))
            place = functools.partial(stacks.place, index=index)
            again = place if recompute else no_place
            with ctx.group.named_range(f"layers.{index + ctx.group.first} backward"):
                # feed_forward: gate_up becomes its own gradient. With recompute, the gradient of hidden, here, and
                # those of x, below, become what forward has computed.
                llama.swiglu_backward_(y_grad, down_weight, gate_up, ffn, again("hidden", width=down_weight.shape[1]))
                if index == 0:  # what all layers have computed by now
                    give(DOWN, llama.write_product, stacks.pop("y_grad"), stacks.pop("hidden"))
                x_grad = torch.mm(gate_up, gate_up_weight, out=again("x2", width=width))
                # ffn_norm
                branch_grad = place("branch_grad", width=width)
                partial = place("partial2", width=width, **partials)
                llama.rmsnorm_backward(x_grad, grad, residual2, norm2, rstd2, branch_grad, partial, recompute)
                del x_grad
                if index == 0:
                    give(GATE_UP, llama.write_product, stacks["gate_up"], stacks.pop("x2"))
                # attention
                o_grad = torch.mm(branch_grad, o_weight).view(q.shape)
                qkv_grad = place("qkv_grad", width=len(qkv_weight))
                parts = llama.split_heads(qkv_grad.view(*q.shape[:2], len(qkv_weight)), q.shape[2], k.shape[2])
                llama.flash_attention_backward(o_grad, (q, k, v, o.view(q.shape), lse), parts, (cos, sin))
                del o_grad
                x_grad = torch.mm(qkv_grad, qkv_weight, out=again("x1", width=width))
                # attention_norm: the gradient of what goes into the layer is the y_grad of the layer before
                out = stacks["y_grad"][index - 1] if index else None
                partial = place("partial1", width=width, **partials)
                grad, _ = llama.rmsnorm_backward(x_grad, branch_grad, residual1, norm1, rstd1, out, partial, recompute)
                del x_grad
        give(NORM1, llama.write_column_sums, stacks["partial1"])
        give(QKV, llama.write_product, stacks["qkv_grad"], stacks["x1"])
        give(OUT, llama.write_product, stacks["branch_grad"], stacks["o"])
        give(NORM2, llama.write_column_sums, stacks["partial2"])
        torch.autograd.graph.increment_version(stacks["gate_up"])  # overwritten: autograd refuses a second run
        grad = grad.view(shape)
        return None, grad, grad if ctx.has_branch else None, None, None, *[None] * len(ctx.weights)


def no_place(name, width):
    """Return None, where Stacks.place() would return a part of a stack: a new tensor is allocated."""


def with_columns(matrix):
    """Return a matrix with columns of zeros up to llama.padded_length(), a copy, or itself if it needs none."""
    missing = llama.padded_length(matrix.shape[1]) - matrix.shape[1]
    return F.pad(matrix, (0, missing)) if missing else matrix


def give_gradients(ctx, kind, write, *stacks):
    """Write the gradients of one kind of weight of all layers where FlatAdamW reads them."""
    first = len(ctx.needs_input_grad) - len(ctx.weights) + kind  # the weights are the last arguments of forward()
    weights, needed = ctx.weights[kind::WEIGHTS], ctx.needs_input_grad[first::WEIGHTS]
    place = shared_place(weights) if all(needed) else None
    if place is None:
        for weight, is_needed, *own in zip(weights, needed, *stacks, strict=True):
            llama.give_gradient(weight, is_needed, write, *own)
    else:
        write(place, weights[0].grad is not None, *stacks)
        for weight in weights:
            weight.grad = weight.main_grad


def shared_place(weights):
    """View where llama.give_gradient() would write these gradients as one tensor; None if it must write each."""
    for weight in weights:
        # All are overwritten, or all are added to.
        if weight.grad is not (None if weights[0].grad is None else weight.main_grad):
            return None
    return stacked_view([weight.padded_grad for weight in weights])


def stacked_view(tensors):
    """View equal parts of one tensor, evenly spaced, as one (n, *shape); None if they are anything else."""
    first, *_ = tensors
    steps = {b.storage_offset() - a.storage_offset() for a, b in itertools.pairwise(tensors)}
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(steps) != 1 or min(steps) <= 0 or len(storages) > 1:  # a single tensor; or of several optimizers
        return None
    return first.as_strided((len(tensors), *first.shape), (*steps, *first.stride()))
