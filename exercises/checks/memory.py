"""What a kernel touches: in Triton's interpreter every load and store is compared with the tensors it was given."""

import math
import sys
from collections import Counter
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from exercises.checks import ON_GPU
from exercises.checks.common import Wrong, is_unwritten, unchanged


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
            f"line {self.line} {self.verb} offset {self.element} of {self.tensor}, where {self.tensor} has no element, "
            f"in {count} {'lane' if count == 1 else 'lanes'} of program {program}: {explain(self)}"
        )


class Access(NamedTuple):
    """What one load or store of a program touched."""

    line: int  # of the participant's file
    verb: str  # "reads" or "writes"
    tensor: str
    program: int  # its number, in the order in which the interpreter runs them
    offsets: np.ndarray  # for each lane that the mask lets through: how many elements from the tensor's first it lies
    lanes: np.ndarray
    masked: np.ndarray  # the offsets of the lanes that the mask leaves out


def addresses(tensor):
    """Those of the elements of a tensor of any strides."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return tensor.data_ptr() + offsets * tensor.element_size()


class Watch:
    """Stands in for the interpreter's load and store, leaves out what is not theirs to touch, and keeps the first.

    outputs: names of the tensors in which nothing is stored yet. share: what a program of the kernel is to store.
    """

    kept = None  # a list, while watches are kept, each with its accesses

    def __init__(self, kernel, tensors, outputs, share, explain, grid, builder):
        self.file, self.tensors, self.outputs, self.builder = kernel.fn.__code__.co_filename, tensors, outputs, builder
        self.share, self.explain, self.grid = share, explain, grid
        self.fault = None  # the first one, or the words for it
        self.undefined = None  # the line of the first load whose mask leaves out what has no `other`
        self.elements = {name: addresses(tensor) for name, tensor in tensors.items()}
        self.known = np.unique(np.concatenate(list(self.elements.values())))
        self.owner = np.full(len(self.known), -1)  # the number of the program that stored an element last
        self.single, self.stores = Counter(), {}  # {(line, program): loads of one element}, {tensor: lines that store}
        self.real_load, self.real_store = builder.create_masked_load, builder.create_masked_store
        self.accesses = []
        if self.kept is not None:
            self.kept.append(self)

    def program(self):
        return int(np.ravel_multi_index(self.builder.grid_idx[: len(self.grid)], self.grid))

    def record(self, verb, name, pointers, wanted):
        """Adds an Access; pointers: addresses, wanted: what the mask lets through."""
        tensor, lanes = self.tensors[name], np.flatnonzero(wanted)
        offsets = (pointers.astype(np.int64).ravel() - tensor.data_ptr()) // tensor.element_size()
        masked = np.delete(offsets, lanes)
        self.accesses.append(Access(self.line(), verb, name, self.program(), offsets[lanes], lanes, masked))

    def line(self):
        """That of the participant's file which is being executed."""
        frame = sys._getframe()
        while frame.f_back and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return frame.f_lineno

    def shown(self, program):
        return ", ".join(map(str, np.unravel_index(program, self.grid)))

    def tell(self, words):
        self.fault = self.fault or words

    def meant(self, verb, touched):
        """The name of the tensor that most of what was touched belongs to, else that of the nearest to the first."""
        hits = {name: np.isin(touched, own).sum() for name, own in self.elements.items()}
        if any(hits.values()):
            return max(hits, key=hits.get)
        likely = self.outputs if verb == "writes" and self.outputs else self.elements
        return min(likely, key=lambda name: np.abs(self.elements[name] - touched[0]).min())

    def inside(self, verb, pointers, mask):
        """(the mask without what lies outside, the indices in self.known of what lies inside, the tensor's name)"""
        wanted = np.broadcast_to(mask.data, pointers.data.shape)
        touched = np.where(wanted, pointers.data.astype(np.int64), 0)
        outside = wanted & ~np.isin(touched, self.known)
        if not wanted.any():
            return mask, np.zeros(0, dtype=np.int64), None
        name = self.meant(verb, np.concatenate([touched[outside], touched[wanted]]))
        if self.kept is not None:
            self.record(verb, name, pointers.data, wanted)
        if verb == "writes":
            self.stores.setdefault(name, set()).add(self.line())
            if name not in self.outputs:
                results = " and ".join(sorted(self.outputs))
                self.tell(f"line {self.line()} stores into {name}, which is an input: the result is {results}")
        inside = np.searchsorted(self.known, touched[wanted & ~outside])
        if verb == "reads" and name in self.outputs and (self.owner[inside] < 0).any():
            self.tell(f"line {self.line()} loads from {name} before anything is stored there: it is a result, and "
                      "its memory holds anything. Load an input, and store the result once")  # fmt: skip
        if outside.any() and self.fault is None:
            tensor = self.tensors[name]
            element = int(touched[outside][0] - tensor.data_ptr()) // tensor.element_size()
            fault = Fault(self.line(), self.builder.grid_idx, verb, name, tensor.numel(), element, outside.nonzero())
            self.tell(fault)
        return type(mask)(wanted & ~outside, mask.dtype), inside, name

    def load(self, pointers, mask, other, *rest):
        inside, _, _ = self.inside("reads", pointers, mask)
        if other is None and not np.all(mask.data):
            self.undefined = self.undefined or self.line()
        if pointers.data.size == 1:
            self.single[self.line(), self.builder.grid_idx] += 1
            if self.single[self.line(), self.builder.grid_idx] > 2:
                self.tell(f"line {self.line()} loads one element at a time, in a loop: one tl.load takes a whole block "
                          "of addresses, a pointer + tl.arange(...)")  # fmt: skip
        return self.real_load(pointers, inside, other, *rest)

    def store(self, pointers, value, mask, *rest):
        inside, indices, name = self.inside("writes", pointers, mask)
        program = self.program()
        others = (self.owner[indices] >= 0) & (self.owner[indices] != program)
        if others.any():
            first, whose = self.owner[indices][others][0], "what" if others.all() else "part of what"
            self.tell(f"line {self.line()}: program {self.shown(program)} stores {whose} program {self.shown(first)} "
                      f"has stored in {name}, but an element belongs to one program: {self.share}")  # fmt: skip
        self.owner[indices] = program
        return self.real_store(pointers, value, inside, *rest)

    def owners(self, name):
        """The number of the program that stored each element of a tensor last."""
        return self.owner[np.searchsorted(self.known, self.elements[name])].reshape(self.tensors[name].shape)

    def verdict(self):
        """The words for what is wrong once the kernel is through, or None."""
        stored = np.unique(self.owner[self.owner >= 0])
        if isinstance(self.fault, Fault):
            return self.fault.describe(len(self.grid), self.explain)
        if self.fault or not len(stored):
            return self.fault  # where nothing at all is stored, perhaps nothing is written yet
        for empty in self.outputs - self.stores.keys():
            twice = ((name, sorted(lines)) for name, lines in self.stores.items() if len(lines) > 1)
            told = "".join(f", and lines {' and '.join(map(str, own))} both store into {name}" for name, own in twice)
            return f"nothing is stored in {empty}{told}"
        idle = np.setdiff1d(np.arange(math.prod(self.grid)), stored)
        if len(idle):
            left = any((self.owners(name) < 0).any() for name in self.outputs)
            what = "and elements are left out: is its mask right?" if left else "and others do its work:"
            return f"program {self.shown(idle[0])} stores nothing, {what} {self.share}"
        return None


def launch(kernel, grid, *args, explain=lambda fault: "is there a mask?", share=None, **constants):
    """Runs kernel[grid](*args, **constants), and returns the line of the first load that lacks `other`, or None.

    Wrong if an input has changed. In the interpreter also if the kernel touched what no tensor holds, with the hint
    explain(fault); if it read a result, which nobody has set; and if a program did not store its share, as share puts
    it. A GPU does not tell.
    """
    named = zip((name.removesuffix("_ptr") for name in kernel.arg_names), args, strict=False)
    tensors = {name: arg for name, arg in named if isinstance(arg, torch.Tensor)}
    outputs = {name for name, tensor in tensors.items() if is_unwritten(tensor).all()}
    if ON_GPU:
        with unchanged(**{name: tensor for name, tensor in tensors.items() if name not in outputs}):
            kernel[grid](*args, **constants)
        return None
    from triton.runtime.interpreter import interpreter_builder as builder

    share = share or "a program's block begins at tl.program_id(0) * BLOCK_SIZE, and has BLOCK_SIZE elements"
    watch = Watch(kernel, tensors, outputs, share, explain, grid, builder)
    with mock.patch.multiple(builder, create_masked_load=watch.load, create_masked_store=watch.store):
        kernel[grid](*args, **constants)
    if words := watch.verdict():
        raise Wrong(words)
    return watch.undefined
