"""A Triton driver for an emulated AMD GPU: kernels are compiled for it as usual and launched on machine.py."""

import contextlib
import itertools
import math
import struct
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

from offline.emulator import CHIPS, MAX_THREADS
from offline.emulator.code_object import CodeObject
from offline.emulator.machine import Program, TensorMemory

# {Triton's type of an argument: the letter of struct}. The types of pointers begin with "*".
FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
HIDDEN_BYTES = 256  # of implicit arguments, in code objects of version 5
__tracebackhide__ = True  # as in machine.py
bench = Autotuner._bench
HIP = "6.4"  # torch.version.hip: programs that ask PyTorch for the vendor find AMD


@contextlib.contextmanager
def emulating(machine):
    """Run the Triton kernels that are launched on CPU tensors on a Machine, which it yields.

    Kernels must be compiled (not TRITON_INTERPRET=1). PyTorch says that it is built for ROCm.
    """
    triton.runtime.driver.set_active(Driver(machine))  # not reset, as compiled kernels use it when they are freed
    with mock.patch.object(torch.version, "hip", HIP), mock.patch.object(Autotuner, "_bench", first_that_runs):
        yield machine


class Driver:
    """The methods of a driver, and of its utils, that Triton calls."""

    def __init__(self, machine):
        self.machine, self.utils, self.launcher_cls = machine, self, Launcher
        self.target = GPUTarget("hip", machine.arch, CHIPS[machine.arch].lanes)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.machine.arch

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return run_once

    def get_device_properties(self, device):
        chip = CHIPS[self.machine.arch]
        return {
            "max_shared_mem": chip.lds_bytes,
            "multiprocessor_count": chip.units,
            "max_num_regs": 64 * 1024,
            "max_threads_per_sm": 2048,
            "warpSize": chip.lanes,
        }

    def load_binary(self, name, binary, shared_bytes, device):
        """Return (module, function, registers, spills, most threads)"""
        code = CodeObject(binary, name)
        if code.scratch_bytes and self.machine.arch == "gfx90a":  # which reaches it by a buffer of another kind
            raise NotImplementedError(
                f"{name} spills {code.scratch_bytes} bytes a thread, which gfx90a does not emulate"
            )
        return name, Program(code, self.machine.arch), code.n_registers, code.scratch_bytes // 4, MAX_THREADS

    def unload_module(self, module):
        """Does nothing: the program is freed with its kernel."""


def run_once(call, quantiles=None, **options):
    """Take the place of a benchmark, of which nothing can be measured here.

    The call is made once, so that a configuration which cannot be launched is left out as on a GPU.
    """
    call()
    return [1.0] * len(quantiles) if quantiles else 1.0


def first_that_runs(tuner, *arguments, **options):
    """Take the place of Autotuner._bench(): after a configuration that can be launched no other one is tried."""
    if getattr(tuner, "tuned_for", None) is tuner.nargs:  # a new dict in each call
        return [math.inf] * 3
    times = bench(tuner, *arguments, **options)
    if times[0] < math.inf:
        tuner.tuned_for = tuner.nargs
    return times


class Launcher:
    """Pack the arguments as the HIP runtime does, and run them on the driver's machine."""

    def __init__(self, source, metadata):
        # Kernels of Triton 3.6 and 3.7 have no size of the first.
        if getattr(metadata, "global_scratch_size", 0) or metadata.profile_scratch_size:
            raise NotImplementedError(f"{metadata.name} asks for global scratch memory, which is not emulated")
        self.metadata, self.signature = metadata, source.signature

    def __call__(self, x, y, z, stream, program, packed, launch_metadata, enter_hook, exit_hook, *values):
        values = dict(zip(self.signature, values, strict=True))
        named = [(name, *item) for name, type_ in self.signature.items() for item in flatten(type_, values[name])]
        memory = TensorMemory([(name.removesuffix("_ptr"), v) for name, _, v in named if hasattr(v, "untyped_storage")])
        flat = [(type_, value) for _, type_, value in named if type_ != "constexpr"]
        arguments = self.packed(flat, memory, (x, y, z), program.code.argument_bytes)
        machine = triton.runtime.driver.active.machine
        machine.launch(program, (x, y, z), arguments, memory, self.metadata.num_warps, self.metadata.shared)

    def packed(self, arguments, memory, grid, nbytes):
        """Return the kernel's arguments as bytes, each aligned to its size, followed by the implicit arguments."""
        laid = bytearray()
        for type_, value in itertools.chain(arguments, [("*scratch", None)] * 2):
            is_pointer = type_.startswith("*")
            letter = "Q" if is_pointer else FORMATS[type_]
            value = (0 if value is None else memory.address_of(value)) if is_pointer else value
            laid += bytes(-len(laid) % struct.calcsize(letter)) + struct.pack(f"<{letter}", value)
        laid += bytes(-len(laid) % 8)
        if nbytes > len(laid):
            threads = self.metadata.num_warps * self.metadata.warp_size
            hidden = struct.pack("<3I6H16x24xH", *grid, threads, 1, 1, 0, 0, 0, 3)  # blocks, threads, dimensions
            laid += hidden.ljust(HIDDEN_BYTES, b"\0")
        if nbytes > len(laid):
            raise NotImplementedError(
                f"{self.metadata.name} takes {nbytes} bytes of arguments, laid out are {len(laid)}"
            )
        return bytes(laid)


def flatten(type_, value):
    """Yield (type, value) of each element of an argument, with nested tuples flattened."""
    if isinstance(type_, tuple):
        for inner_type, inner_value in zip(type_, value, strict=True):
            yield from flatten(inner_type, inner_value)
    else:
        yield type_, value
