"""A Triton driver for an AMD GPU that is not there: kernels are compiled for it as ever and launched on machine.py."""

import contextlib
import itertools
import struct
from unittest import mock

import triton

import tiny_llama_v3 as llama
from profiling import kernel_report as report
from profiling.emulator.code_object import CodeObject
from profiling.emulator.machine import Program, TensorMemory

# Triton's types of arguments: struct's letters. Pointers begin with "*".
FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
HIDDEN_BYTES = 256  # of implicit arguments, in code objects of version 5


@contextlib.contextmanager
def emulating(machine, units=None):
    """Launches of the project's kernels on tensors of the CPU run on a Machine, which it yields.

    The launchers choose what they would choose on its GPU. units: compute units, those of the chip by default. Kernels
    must be compiled (not TRITON_INTERPRET=1), and may be called by Triton's own kernel[grid].
    """
    arch, chip = machine.arch, report.CHIPS[machine.arch]
    device = llama.Device("cpu", chip.name, arch, units or chip.units, report.wave_size(arch))
    triton.runtime.driver.set_active(Driver(arch, machine))  # and it stays: compiled kernels ask it when they are freed
    with (
        report.device_found(device),
        mock.patch.object(llama, "triton_obstacle", lambda device, use_amp=False: None),
        # A direct launch passes addresses instead of tensors, whose ends would not be known.
        mock.patch.object(llama.DIRECT_LAUNCH, "works", False),
        mock.patch.dict(llama.COMPILED, clear=True),
    ):
        yield machine


class Driver(report.Driver):
    """What Triton asks a driver, and its utils, for a launch."""

    def __init__(self, arch, machine):
        super().__init__(arch)
        self.machine, self.utils, self.launcher_cls = machine, self, Launcher

    def get_device_properties(self, device):
        return {"max_shared_mem": report.CHIPS[self.arch].shared_limit}

    def load_binary(self, name, binary, shared_bytes, device):
        """(module, function, registers, spills, most threads)"""
        return name, Program(CodeObject(binary, name), self.arch), 0, 0, report.MAX_THREADS

    def unload_module(self, module):
        """The program goes with its kernel."""


class Launcher:
    """Lays the arguments into memory as the HIP runtime does, and runs the driver's machine."""

    def __init__(self, source, metadata):
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotImplementedError(f"{metadata.name} asks for global scratch memory, which is not emulated")
        self.metadata, self.signature = metadata, source.signature

    def __call__(self, x, y, z, stream, program, packed, launch_metadata, enter_hook, exit_hook, *values):
        values = dict(zip(self.signature, values, strict=True))
        tensors = {name.removesuffix("_ptr"): v for name, v in values.items() if hasattr(v, "untyped_storage")}
        memory = TensorMemory(tensors)
        flat = [
            (type_, value)
            for name, type_ in self.signature.items()
            for type_, value in flatten(type_, values[name])
            if type_ != "constexpr"
        ]
        arguments = self.packed(flat, memory, (x, y, z), program.code.argument_bytes)
        machine = triton.runtime.driver.active.machine
        machine.run(program, (x, y, z), arguments, memory, self.metadata.num_warps, self.metadata.shared)

    def packed(self, arguments, memory, grid, nbytes):
        """The kernel's arguments as bytes, each aligned to its size, and the runtime's behind them."""
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
    """Yields (type, value) of an argument, tuples within each other taken apart."""
    if isinstance(type_, tuple):
        for inner_type, inner_value in zip(type_, value, strict=True):
            yield from flatten(inner_type, inner_value)
    else:
        yield type_, value
