"""What a kernel touches: in Triton's interpreter every load and store is compared with the tensors it was given."""

import functools
import sys
from collections import defaultdict

import numpy as np
import torch

from exercises.checks import ON_GPU
from exercises.checks.common import GUARD, Wrong, expect, unchanged
from exercises.probe import Observer, Strict, observed_by, strict_truth


def addresses(tensor):
    """Return the addresses of the elements of a tensor of any strides."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return tensor.data_ptr() + offsets * tensor.element_size()


# ----------------------------------------------------------------------------------------------------------------------
# The watch

EXISTING = (
    "a mask is True where each index is less than the size of its own dimension, and an address adds each index times "
    "its own stride"
)


class Watch(Observer):
    """Leaves out of loads and stores what is not theirs to touch, and remembers the first such access.

    outputs: names of the tensors in which nothing is stored yet. share: what a program of the kernel is to store.
    """

    kept = None  # a list, while watches are kept, each with its accesses

    def __init__(self, kernel, tensors, outputs, share, grid):
        self.file = kernel.fn.__code__.co_filename
        self.tensors, self.outputs, self.share, self.grid = tensors, outputs, share, grid
        self.fault = None  # the first Wrong
        self.undefined = None  # the line of the first load whose mask leaves out what has no `other`
        self.known = np.unique(np.concatenate([addresses(tensor) for tensor in tensors.values()]))
        self.owner = np.full(len(self.known), -1)  # the number of the program that stored an element last
        self.stored_by = np.zeros(len(self.known), dtype=int)  # the line that did
        self.lowest = {}  # the first offset of each tensor that a program touches
        self.traces = {}  # for each verb and tensor, a number that tells apart all accesses until now
        # For each (line, verb, tensor): of each program the offsets that it touches in elements, their lanes, and what
        # its mask leaves out.
        self.accesses = defaultdict(list)
        if self.kept is not None:
            self.kept.append(self)

    def line(self):
        """Return that of the participant's file which is being executed."""
        frame = sys._getframe()
        while frame.f_back and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return frame.f_lineno

    def shown(self, program):
        return ", ".join(map(str, np.unravel_index(program, self.grid)))

    def tell(self, fact, hint):
        self.fault = self.fault or Wrong(f"line {self.line()} {fact}", hint, of=str(self.trace))

    def nearest(self, address):
        """Name the tensor in or behind whose memory an address lies."""
        begins = {name: tensor.untyped_storage().data_ptr() for name, tensor in self.tensors.items()}
        return max(begins, key=lambda name: (begins[name] <= address, begins[name]))

    def inside(self, verb, access):
        """Narrow the mask to what lies in tensors; return its indices in self.known, the tensor's name, the program."""
        wanted, touched = access.mask, access.addresses
        program = int(np.ravel_multi_index(access.program[: len(self.grid)], self.grid))
        if not wanted.any():
            return np.zeros(0, dtype=np.int64), None, program
        indices = np.minimum(np.searchsorted(self.known, touched), len(self.known) - 1)
        # What is not known stays untouched: it may be another tensor's, or nobody's.
        access.mask = wanted & (self.known[indices] == touched)
        indices, outside = indices[access.mask], wanted & ~access.mask
        name = self.nearest(np.median(touched[wanted]))
        tensor = self.tensors[name]
        offsets = (touched - tensor.data_ptr()) // tensor.element_size()
        self.traces[verb, name] = self.trace = hash((self.traces.get((verb, name)), offsets[wanted].tobytes()))
        # The programs of a picture are few, those of a check are many.
        if self.kept is not None:
            touches = program, offsets[wanted], np.flatnonzero(wanted), offsets[~wanted]
            self.accesses[self.line(), verb, name].append(touches)
        lowest = self.lowest[name] = min(self.lowest.get(name, offsets[wanted].min()), offsets[wanted].min())
        if outside.any():
            lanes, first, last = outside.sum(), offsets[outside][0], tensor.numel() - 1
            hint = f"{'no lane is left out' if wanted.all() else 'the mask lets it through'}: {EXISTING}"
            if lanes == 1 and first == last + 1:
                hint = f"one too many; the last element is {last}, so is it < or <=?"
            elif program and lowest > 0:
                hint = f"no program touches offset 0 of {name}: all begin too far behind, as if the first were number 1"
            where = f"in {lanes} of {wanted.sum()} lanes of program {self.shown(program)}"
            self.tell(f"{verb} offset {first} of {name}, where {name} has no element, {where}", hint)
        return indices, name, program

    def load(self, access):
        if access.value is None and not access.mask.all():
            self.undefined = self.undefined or self.line()
        self.loaded(*self.inside("reads", access))

    def store(self, access):
        indices, name, program = self.inside("writes", access)
        numbers = np.broadcast_to(access.value.data, access.mask.shape)[access.mask].tolist()
        if len({*zip(indices.tolist(), numbers, strict=True)}) > len({*indices.tolist()}):
            hint = "which one stays is chance: what lies beyond the end of a row may be the beginning of the next"
            self.tell(f"stores several numbers at one place of {name}", hint)
        self.stored(indices, name, program)

    def atomic(self, access, loads):
        touched = self.inside("writes", access)
        if loads:
            self.loaded(*touched)
        self.stored(*touched)

    def loaded(self, indices, name, program):
        if name in self.outputs and (self.owner[indices] < 0).any():
            self.tell(
                f"loads from {name} before anything is stored there",
                "it is a result, and its memory holds anything. Load an input, and store the result once",
            )

    def stored(self, indices, name, program):
        if name and name not in self.outputs:
            self.tell(f"stores into {name}, which is an input", f"the result is {' and '.join(sorted(self.outputs))}")
        others = (self.owner[indices] >= 0) & (self.owner[indices] != program)
        if others.any():
            first, whose = self.owner[indices][others][0], "what" if others.all() else "part of what"
            line = self.stored_by[indices][others][0]
            # The line that is found may be right, and an earlier one have stored too much.
            where = "there" if line == self.line() else f"there by line {line}"
            self.tell(
                f"stores in {name} for program {self.shown(program)} {whose} program {self.shown(first)} has stored "
                f"{where}, but an element belongs to one program",
                self.share,
            )
        self.owner[indices] = program
        self.stored_by[indices] = self.line()

    def owners(self, name):
        """Return the number of the program that stored each element of a tensor last."""
        tensor = self.tensors[name]
        return self.owner[np.searchsorted(self.known, addresses(tensor))].reshape(tensor.shape)


def apart(tensor):
    """Return a copy of a tensor with GUARD elements behind it: what lies there belongs to no other tensor."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    memory = torch.cat([memory, memory.new_zeros(GUARD)])
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def undefined_in(result, line, interpret):
    """Return the line of the load whose undefined values reach a result, or None.

    interpret: runs the kernel again. What zeros in their place change, they have reached.
    """
    if line is None:
        return None
    found = result.clone()
    interpret(Strict(undefined=0.0))
    reached = not torch.allclose(result, found, rtol=0, atol=0, equal_nan=True)
    result.copy_(found)
    return line if reached else None


BLOCKS = (
    "each program has a block, row or tile of its own, which begins at its tl.program_id times the size of one, and "
    "the mask leaves out what lies beyond its end"
)


def launch(kernel, grid, *args, share=BLOCKS, **constants):
    """Run kernel[grid](*args, **constants), and return its results: the arguments in which nothing is stored yet.

    Wrong if an input has changed. In the interpreter also if the kernel touched what no tensor holds; if it read a
    result, which nobody has set; and if two programs stored the same element, which share tells apart. A GPU does not
    tell.
    """
    names = [name.removesuffix("_ptr") for name in kernel.arg_names]
    args = dict(zip(names, args, strict=False))
    tensors = {name: arg for name, arg in args.items() if isinstance(arg, torch.Tensor)}
    results = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "behind")}
    inputs = {name: tensor for name, tensor in tensors.items() if name not in results}
    if ON_GPU:
        with unchanged(**inputs):
            kernel[grid](*args.values(), **constants)
        for name, result in results.items():
            expect(result.behind.isnan().all(), f"something was stored beyond the end of {name}", "is there a mask?")
            result.stored = ~result.isnan().cpu()
    else:
        tensors |= {name: apart(tensor) for name, tensor in inputs.items()}
        watch = Watch(kernel, tensors, results.keys(), share, grid)

        def interpret(*observers):
            with observed_by(*observers), strict_truth():
                kernel[grid](*(args | tensors).values(), **constants)

        interpret(watch, Strict())
        if watch.fault:
            # Mistakes are alike if the programs also store in the same places.
            watch.fault.of += str([watch.owners(name) for name in results])
            raise watch.fault
        for name, result in results.items():
            result.owner = torch.from_numpy(watch.owners(name))  # the program that stored an element
            result.stored = result.owner >= 0
            result.undefined = functools.partial(undefined_in, result, watch.undefined, interpret)
    empty = [name for name, result in results.items() if not result.stored.any()]
    # If all are, perhaps nothing is written yet: the result tells.
    if 0 < len(empty) < len(results):
        raise Wrong(f"nothing is stored in {empty[0]}", "each result needs a tl.store of its own")
    numbers = {name: arg for name, arg in args.items() if name not in tensors} | constants
    sizes = ", ".join(f"{name}={number}" for name, number in numbers.items())
    for name, result in results.items():
        kind = "" if result.dtype == torch.float32 else f" in {str(result.dtype).removeprefix('torch.')}"
        result.label = f"{name}{kind} for {sizes}"
    found = list(results.values())
    return found if len(found) > 1 else found[0]
