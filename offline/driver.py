"""A Triton driver for an emulated AMD GPU: kernels are compiled for it as usual and launched on machine.py."""

import contextlib
import itertools
import struct
from unittest import mock

import triton

import tiny_llama_v3 as llama
from offline import compiler
from offline.architectures import CHIPS, MAX_THREADS, wave_size
from offline.code_object import CodeObject
from offline.machine import Program, TensorMemory
from offline.recorded import gpu_found

# {Triton's type of an argument: the letter of struct}. The types of pointers begin with "*".
FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
HIDDEN_BYTES = 256  # of implicit arguments, in code objects of version 5


def launch(kernel, grid, tensors, scalars, constants, num_warps=4, num_stages=2, **options):
    """Launch as llama.launch() does, but by Triton: given addresses, the driver would not know the tensors' sizes."""
    options |= dict(num_warps=num_warps, num_stages=num_stages)
    return llama.launch_by_triton(kernel, grid, tensors, scalars, constants, **options)


@contextlib.contextmanager
def emulating(machine, units=None):
    """Run launches of the project's kernels on CPU tensors on the Machine, which it yields.

    The launchers make the choices of its GPU. units: the number of compute units, by default that of the chip. Kernels
    must be compiled (not TRITON_INTERPRET=1). Triton's kernel[grid] works as well.
    """
    arch, chip = machine.arch, CHIPS[machine.arch]
    gpu = llama.Gpu("cpu", chip.name, arch, units or chip.units, wave_size(arch))
    triton.runtime.driver.set_active(Driver(arch, machine))  # not reset, as compiled kernels use it when they are freed
    with (
        gpu_found(gpu, launch=launch),
        mock.patch.object(llama, "triton_obstacle", lambda device, use_amp=False: None),
    ):
        yield machine


class Driver(compiler.Driver):
    """The methods of a driver, and of its utils, that Triton calls for a launch."""

    def __init__(self, arch, machine):
        super().__init__(arch)
        self.machine, self.utils, self.launcher_cls = machine, self, Launcher

    def get_device_properties(self, device):
        return {"max_shared_mem": CHIPS[self.arch].shared_limit}

    def load_binary(self, name, binary, shared_bytes, device):
        """Return (module, function, registers, spills, most threads)"""
        return name, Program(CodeObject(binary, name), self.arch), 0, 0, MAX_THREADS

    def unload_module(self, module):
        """Does nothing: the program is freed with its kernel."""


class Launcher:
    """Pack the arguments as the HIP runtime does, and runs them on the driver's machine."""

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
