"""Instructions that one emulated wave executes."""

import ctypes
import importlib

import numpy as np
import pytest

from offline.emulator import CHIPS
from tests.offline.selection import EMULATED

if EMULATED:
    from offline.emulator.code_object import CodeObject
    from offline.emulator.machine import (
        POISON,
        GuardedMemory,
        Machine,
        Program,
        Wave,
        Workgroup,
        first_registers,
        hold_to,
    )

    LANES = CHIPS[EMULATED].lanes
    ins = importlib.import_module(f"tinygrad.runtime.autogen.amd.{CHIPS[EMULATED].isa}.ins")


class Code:
    """Machine code in memory, as CodeObject has it: a kernel with its arguments in s[0:1] and its workgroup in s2."""

    name = "instructions"
    lds_bytes = scratch_bytes = preloaded_words = preload_offset = flushes_denormals = 0
    properties, user_registers = 8, CodeObject.user_registers if EMULATED else None
    n_user_registers, rsrc2 = 2, 1 << 7

    def __init__(self, instructions):
        text = b"".join(inst.to_bytes() for inst in [*instructions, ins.s_endpgm()])
        self.held = ctypes.create_string_buffer(text + bytes(16))
        self.begin = self.entry = ctypes.addressof(self.held)
        self.nbytes = len(text)

    def line_of(self, address):
        return ""


@pytest.fixture
def wave():
    wave = Wave(EMULATED)
    wave.take_scratch(0)
    workgroup_of(wave, Program(Code([]), EMULATED)).start()
    return wave


def workgroup_of(wave, program, lds=None):
    scalar = first_registers(program.chip, [], program.code.begin, 0, POISON)
    return Workgroup(program, [wave], lds or GuardedMemory(0), scalar, 1, POISON)


def run(wave, *instructions, lds=None):
    """Run instructions on the registers that the wave has."""
    machine = Machine(EMULATED, 0)
    machine.program, machine.waves = Program(Code(instructions), EMULATED), [wave]
    machine.group = workgroup_of(wave, machine.program, lds)
    machine.group.running, machine.group.left = 1, 1000
    wave.program_counter = machine.program.code.begin
    wave.buffers[3] = machine.group.lds.contents.address
    hold_to(EMULATED, [lds] if lds else [])
    machine.run_workgroup((0, 0, 0))


class Words(tuple):
    """An instruction as its 32-bit words."""

    def __new__(cls, *words):
        return super().__new__(cls, words)

    def to_bytes(self):
        return np.array(self, np.uint32).tobytes()


def words_of(array):
    return np.ascontiguousarray(array).view(np.uint32)
