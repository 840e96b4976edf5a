"""Observe what kernels do in Triton's interpreter: their launches, loads, stores and products of tiles.

Only this module patches the interpreter. An event is handed to each observer before the interpreter acts on it, and an
observer may change it: narrow the mask of a load, say, or round the operands of a product.
"""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch


class Access:
    """One load, store or atomic operation of a program."""

    def __init__(self, builder, pointers, mask, value):
        self.program = builder.grid_idx  # its three program ids
        self.element_type = pointers.get_element_ty()
        self.addresses = pointers.data.astype(np.int64)
        self.mask = np.broadcast_to(np.asarray(mask.data), self.addresses.shape)
        self.value = value  # what is stored, or the operand of an atomic; of a load, what `other` gives, or None

    def order(self):
        """Return the order of a tile's lanes in compiled code: rows ("C"), or columns ("F") if these are contiguous."""
        steps = np.diff(np.atleast_2d(self.addresses), axis=0)
        return "F" if (steps * 8 == self.element_type.primitive_bitwidth).any() else "C"


class Observer:
    """Sees nothing; a subclass defines the events that it wants to see."""

    def launch(self, kernel, tensors):
        """See a kernel start: its name, and the tensors among its arguments."""

    def load(self, access):
        """See a program load."""

    def store(self, access):
        """See a program store."""

    def atomic(self, access, loads):
        """See a program store by an atomic operation, which loads what is there unless it is an exchange."""

    def dot(self, product):
        """See a program multiply two tiles, product.sides."""


@contextlib.contextmanager
def observed_by(*observers):
    """Hand what kernels do within this context to the observers, in their order."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder_type, executor_type = interpreter.InterpreterBuilder, interpreter.GridExecutor
    execute, dot = executor_type.__call__, builder_type.create_dot
    load, store = builder_type.create_masked_load, builder_type.create_masked_store
    read_modify_write, compare_and_swap = builder_type.create_atomic_rmw, builder_type.create_atomic_cas
    splat = builder_type.create_splat

    def tell(event, *what):
        for observer in observers:
            getattr(observer, event)(*what)

    def narrowed(mask, access):
        # Of a descriptor, releases before 3.9 have an array. One that is not of True and False is refused later on.
        return interpreter.TensorHandle(access.mask, tl.int1 if isinstance(mask, np.ndarray) else mask.dtype)

    def observed_execute(executor, *args, **kwargs):
        # A tensor descriptor has its tensor as `base`.
        operands = [getattr(arg, "base", arg) for arg in (*args, *kwargs.values())]
        tell("launch", executor.fn.__name__, [arg for arg in operands if isinstance(arg, torch.Tensor)])
        execute(executor, *args, **kwargs)

    # Releases of Triton differ in the arguments behind these, which are passed on as they come.

    def observed_load(builder, pointers, mask, other, *rest, **named):
        access = Access(builder, pointers, mask, other)
        tell("load", access)
        return load(builder, pointers, narrowed(mask, access), access.value, *rest, **named)

    def observed_store(builder, pointers, value, mask, *rest, **named):
        access = Access(builder, pointers, mask, value)
        tell("store", access)
        return store(builder, pointers, value, narrowed(mask, access), *rest, **named)

    def observed_read_modify_write(builder, operation, pointers, value, mask, *rest, **named):
        access = Access(builder, pointers, mask, value)
        tell("atomic", access, operation.name != "XCHG")
        return read_modify_write(builder, operation, pointers, value, narrowed(mask, access), *rest, **named)

    def observed_compare_and_swap(builder, pointers, compared, value, *rest, **named):
        everywhere = SimpleNamespace(data=True)  # it has no mask, and what lies outside cannot be left out
        tell("atomic", Access(builder, pointers, everywhere, value), True)
        return compare_and_swap(builder, pointers, compared, value, *rest, **named)

    def observed_dot(builder, a, b, c, precision, *rest, **named):
        product = SimpleNamespace(sides=[a, b], precision=getattr(precision, "name", ""))
        tell("dot", product)
        return dot(builder, *product.sides, c, precision, *rest, **named)

    def splat_of_truth(builder, *args):
        # The interpreter takes a comparison of numbers for a number, and a block of that is no mask.
        for arg in args:
            if isinstance(arg, interpreter.TensorHandle) and arg.data.dtype == bool:
                arg.dtype = tl.int1
        return splat(builder, *args)

    patch = mock.patch.multiple
    with (
        patch(executor_type, __call__=observed_execute),
        patch(builder_type, create_masked_load=observed_load, create_masked_store=observed_store),
        patch(builder_type, create_atomic_rmw=observed_read_modify_write),
        patch(builder_type, create_atomic_cas=observed_compare_and_swap, create_dot=observed_dot),
        patch(builder_type, create_splat=splat_of_truth),
    ):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Where the interpreter allows what a GPU does not

POISON = float("inf")  # even 0 times it is seen


class Strict(Observer):
    """Refuse what the compiler refuses, leave undefined what a GPU does, and round as one does.

    A masked load without `other` gives `undefined` for what is left out: on a GPU it is what the register held before.
    fp32 is multiplied in TF32 unless input_precision says otherwise. The interpreter would give 0, and use all digits.
    """

    def __init__(self, undefined=POISON):
        from triton.runtime import interpreter

        self.interpreter, self.undefined = interpreter, undefined

    def load(self, access):
        element = access.element_type
        if access.value is None and element.is_floating():
            # the interpreter holds bf16 as its bits
            value = self.undefined
            if element.is_bf16():
                value = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item()
            values = np.full(access.mask.shape, value, self.interpreter._get_np_dtype(element))
            access.value = self.interpreter.TensorHandle(values, element)

    def dot(self, product):
        import triton.language as tl

        kind = product.sides[0].dtype.scalar
        if kind.is_bf16():  # whose bits the interpreter would multiply as integers
            convert = self.interpreter.interpreter_builder.cast_impl
            product.sides = [convert(side, tl.float32) for side in product.sides]
        elif kind.is_fp32() and product.precision == "TF32":
            bits = [(side.data.view(np.int32) + 0x1000) & ~0x1FFF for side in product.sides]
            product.sides = [self.interpreter.TensorHandle(b.view(np.float32), tl.float32) for b in bits]


def truth(block):
    """Give the truth of a block (`and`, `or`, `not`, `if`), which the compiler refuses if it has several elements."""
    data = block.handle.data
    if data.size > 1 and not sys._getframe(1).f_globals.get("__name__", "").startswith("triton."):
        raise ValueError(
            "and, or, not and if take one True or False, not a block: combine masks by & and |, with parentheses "
            "around each comparison"
        )
    return data.size > 1 or bool(data)


@contextlib.contextmanager
def strict_truth():
    """Have kernels refuse the truth of a block."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *rest):
        patch_tensor(tensor, *rest)
        tensor.__bool__ = truth

    with mock.patch.object(interpreter, "_patch_lang_tensor", patch_lang_tensor):
        yield
