"""What a kernel touches: in Triton's interpreter every load and store is compared with the tensors it was given."""

import sys
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from exercises.checks import ON_GPU
from exercises.checks.common import Wrong


class Fault(NamedTuple):
    """What one load or store of a program touched beside the elements of the tensors."""

    line: int  # of the participant's file
    program: tuple  # its three program ids
    verb: str  # "reads" or "writes"
    tensor: str  # the one that was meant, by the name of its argument
    size: int  # of that tensor, in elements
    element: int  # the first that was touched, counted along memory from the tensor's first
    lanes: tuple  # the index of each such element in the block, an array for each dimension

    def describe(self, grid_dimensions, explain):
        count, program = len(self.lanes[0]), ", ".join(map(str, self.program[:grid_dimensions]))
        return (
            f"line {self.line} {self.verb} element {self.element} of {self.tensor}, which is none of its {self.size}, "
            f"in {count} {'lane' if count == 1 else 'lanes'} of program {program}: {explain(self)}"
        )


def addresses(tensor):
    """Those of the elements of a tensor of any strides."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return tensor.data_ptr() + offsets * tensor.element_size()


class Watch:
    """Stands in for the interpreter's load and store, leaves out what is not theirs to touch, and keeps the first."""

    def __init__(self, kernel, tensors, builder):
        self.file, self.tensors, self.builder = kernel.fn.__code__.co_filename, tensors, builder
        self.fault = None
        self.elements = {name: addresses(tensor) for name, tensor in tensors.items()}
        self.real_load, self.real_store = builder.create_masked_load, builder.create_masked_store

    def line(self):
        """That of the participant's file which is being executed."""
        frame = sys._getframe()
        while frame.f_back and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return frame.f_lineno

    def meant(self, touched, outside):
        """The name of the tensor that most of what was touched belongs to, else that of the nearest to the first."""
        hits = {name: np.isin(touched, own).sum() for name, own in self.elements.items()}
        if any(hits.values()):
            return max(hits, key=hits.get)
        first = touched[outside][0]
        return min(self.elements, key=lambda name: np.abs(self.elements[name] - first).min())

    def inside(self, verb, pointers, mask):
        """The mask without what lies outside."""
        wanted = np.broadcast_to(mask.data, pointers.data.shape)
        touched = np.where(wanted, pointers.data.astype(np.int64), 0)
        outside = wanted & ~np.isin(touched, np.concatenate(list(self.elements.values())))
        if outside.any() and self.fault is None:
            name = self.meant(touched, outside)
            tensor = self.tensors[name]
            element = int(touched[outside][0] - tensor.data_ptr()) // tensor.element_size()
            self.fault = Fault(self.line(), self.builder.grid_idx, verb, name.removesuffix("_ptr"), tensor.numel(),
                               element, outside.nonzero())  # fmt: skip
        return type(mask)(wanted & ~outside, mask.dtype)

    def load(self, pointers, mask, other, *rest):
        return self.real_load(pointers, self.inside("reads", pointers, mask), other, *rest)

    def store(self, pointers, value, mask, *rest):
        return self.real_store(pointers, value, self.inside("writes", pointers, mask), *rest)


def launch(kernel, grid, *args, explain=lambda fault: "is there a mask?", **constants):
    """Runs kernel[grid](*args, **constants).

    In the interpreter, Wrong if it touched what no tensor holds, with the hint explain(fault). A GPU does not tell.
    """
    if ON_GPU:
        kernel[grid](*args, **constants)
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    tensors = {name: arg for name, arg in zip(kernel.arg_names, args, strict=False) if isinstance(arg, torch.Tensor)}
    watch = Watch(kernel, tensors, builder)
    with mock.patch.multiple(builder, create_masked_load=watch.load, create_masked_store=watch.store):
        kernel[grid](*args, **constants)
    if watch.fault:
        raise Wrong(watch.fault.describe(len(grid), explain))
