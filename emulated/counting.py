"""A machine that counts what kernels do."""

import collections
import ctypes

import numpy as np

import tiny_llama_v3 as llama
from compiled.compiler import memory_access
from emulated.counts import Counts, class_of, local_access
from emulated.driver import emulating
from emulated.machine import REGISTERS, Machine
from emulated.memory_system import LANES, LDS_BANKS, LINE_BYTES, bank_conflicts, lines_touched

NO_REGISTER = 124  # and above: no pair of scalar registers with an address

# ----------------------------------------------------------------------------------------------------------------------
# Instructions as tinygrad decodes them: which lanes take part, and the address of each


def vector_register(wave, field, of_64_bits=False):
    """The value of each lane, in 64 bits."""
    index = field.offset % REGISTERS
    value = wave.vector[index].astype(np.int64)
    return value | wave.vector[index + 1].astype(np.int64) << 32 if of_64_bits else value


def scalar_pair(wave, index):
    return int(wave.scalar[index]) | int(wave.scalar[index + 1]) << 32


def global_addresses(inst, wave):
    """(addresses, lanes that take part) of a GLOBAL or FLAT instruction."""
    offset = (inst.offset ^ 0x1000) - 0x1000 if type(inst).__name__ == "GLOBAL" else inst.offset
    if inst.saddr.offset < NO_REGISTER:  # the base is in scalar registers, and the offsets of the lanes have 32 bits
        return scalar_pair(wave, inst.saddr.offset) + vector_register(wave, inst.addr) + offset, wave.active
    return vector_register(wave, inst.addr, of_64_bits=True) + offset, wave.active


def buffer_addresses(inst, wave):
    """(addresses, active lanes) of a MUBUF instruction; lanes out of range access no memory."""
    if inst.idxen:
        raise NotImplementedError("buffer instructions with an index are not counted")
    descriptor = inst.srsrc.offset
    base, in_range = scalar_pair(wave, descriptor) & 0xFFFFFFFFFFFF, int(wave.scalar[descriptor + 2])
    code = inst.soffset.offset
    scalar_offset = int(wave.scalar[code]) if code < 128 else code - 128
    offsets = inst.offset + (vector_register(wave, inst.vaddr) if inst.offen else np.zeros(LANES, np.int64))
    return base + scalar_offset + offsets, wave.active & (offsets < in_range)


# ----------------------------------------------------------------------------------------------------------------------
# Counting


class CountingMachine(Machine):
    """A Machine that counts; counts is {kernel: Counts}, in the order of launches.

    watched: the names of the kernels whose memory accesses are counted, None for all.
    """

    def __init__(self, arch, watched=None):
        super().__init__(arch, seed=0)
        self.watched = watched
        self.counts = collections.defaultdict(Counts)
        self.functions = {}  # {address: function} of the memory accesses of a launch, which stop at meet() every time

    def run(self, program, *arguments):
        # The program may have run before, on this machine or another one.
        ctypes.memset(program.instructions, 0, ctypes.sizeof(program.instructions))
        self.functions.clear()
        super().run(program, *arguments)
        counts = self.counts[program.code.name]
        counts.launches += 1
        for inst, executed in program.executed():
            counts.instructions[class_of(inst.op.name)] += executed

    def meet(self, wave, workgroup):
        """Like Machine.meet(), but counts an access to memory and then executes it by itself."""
        address, program = wave.program_counter, self.program
        is_access = program.holds(address) and self.look_at(program.decode(address), wave)
        if address not in self.functions:
            super().meet(wave, workgroup)
        if is_access and wave.program_counter == address:
            entry = program.instruction_at(address)
            entry.function = self.functions.setdefault(address, entry.function)
            self.run_wave(wave, 1, workgroup)
            entry.function = None

    def look_at(self, inst, wave):
        """Counts an access to memory. Returns False for other instructions and for kernels that are not watched."""
        kernel, name = self.program.code.name, inst.op.name
        if self.watched is not None and kernel not in self.watched:
            return False
        counts, access = self.counts[kernel], memory_access(name.lower())
        if access:
            kind, width = access
            addresses, lanes = (buffer_addresses if name.startswith("BUFFER") else global_addresses)(inst, wave)
            lines, fewest = lines_touched(addresses[lanes], width, LINE_BYTES[self.arch])
            counts.accesses[kind] += lines > 0
            counts.bytes[kind] += width * int(lanes.sum())
            counts.lines[kind] += lines
            counts.fewest_lines[kind] += fewest
            return True
        local = local_access(name, inst.offset0, inst.offset1) if name.startswith("DS_") else None
        if local:
            counts.local_accesses += 1
            for offset in local.offsets:
                counts.local_conflicts += bank_conflicts(
                    vector_register(wave, inst.addr) + offset, wave.active, local.width, local.kind,
                    LDS_BANKS[self.arch],
                )  # fmt: skip
        return local is not None


def count_step(arch, config, watched=None):
    """{kernel: Counts} of one training step: forward, backward and AdamW. watched: as CountingMachine's."""
    with emulating(CountingMachine(arch, watched)) as machine:
        step = llama.TrainStep(config, llama.get_device("cpu"))
        step.load(*next(llama.batches(config)))
        step.run()
    return machine.counts
