"""Load the ELF file with a kernel's machine code, which the compiler for AMD GPUs writes, into memory."""

import ctypes
import mmap
import struct
from typing import NamedTuple

LOADED_SEGMENT, SYMBOL_TABLES, RELOCATIONS = 1, (2, 11), (4, 9)  # p_type and sh_type
LONGEST_INSTRUCTION = 16  # bytes; the decoder may read this far past the last instruction


class Segment(NamedTuple):
    """What is used of Elf64_Phdr."""

    type: int
    offset: int  # in the file
    address: int  # in memory
    file_bytes: int
    memory_bytes: int


class Section(NamedTuple):
    """What is used of Elf64_Shdr."""

    type: int
    offset: int
    nbytes: int
    link: int  # of a symbol table: the section of its names


class CodeObject:
    """A kernel's code in memory, and its descriptor (LLVM's AMDGPU guide, "Kernel Descriptor").

    elf: the bytes of the file; name: of the kernel. NotImplementedError if the kernel needs what is not emulated.
    """

    def __init__(self, elf, name):
        self.name = name
        segments_at, sections_at = struct.unpack_from("<QQ", elf, 0x20)
        segment_bytes, n_segments, section_bytes, n_sections = struct.unpack_from("<4H", elf, 0x36)
        segments = [
            Segment(*struct.unpack_from("<I4xQQ8xQQ", elf, segments_at + i * segment_bytes)) for i in range(n_segments)
        ]
        sections = [
            Section(*struct.unpack_from("<4xI16xQQI", elf, sections_at + i * section_bytes)) for i in range(n_sections)
        ]
        if any(section.type in RELOCATIONS and section.nbytes for section in sections):
            raise NotImplementedError(f"{name} has relocations, which are not emulated")
        loaded = [segment for segment in segments if segment.type == LOADED_SEGMENT]
        self.memory = mmap.mmap(-1, max(s.address + s.memory_bytes for s in loaded) + LONGEST_INSTRUCTION)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for s in loaded:
            self.memory[s.address : s.address + s.file_bytes] = elf[s.offset : s.offset + s.file_bytes]
        symbols = dict(symbols_of(elf, sections))
        descriptor = symbols[f"{name}.kd"][0]
        self.lds_bytes, self.scratch_bytes, self.argument_bytes = struct.unpack_from("<III", self.memory, descriptor)
        (code,) = struct.unpack_from("<q", self.memory, descriptor + 16)
        rsrc1, self.rsrc2, self.properties, preloaded = struct.unpack_from("<IIHH", self.memory, descriptor + 48)
        self.begin, self.nbytes = base + descriptor + code, symbols[name][1]
        # Hardware that preloads arguments into registers starts after the code for hardware that does not.
        self.preloaded_words, self.preload_offset = preloaded & 127, preloaded >> 7
        self.entry = self.begin + (256 if self.preloaded_words else 0)
        self.flushes_denormals = rsrc1 >> 16 & 3 != 3
        self.n_user_registers = self.rsrc2 >> 1 & 31
        if self.scratch_bytes:
            raise NotImplementedError(f"{name} spills {self.scratch_bytes} bytes a thread, which is not emulated")
        if self.properties & 0b1110110:
            raise NotImplementedError(f"{name} asks for user registers {self.properties:#b}, which are not emulated")

    @property
    def takes_scratch_buffer(self):
        """Tell whether the first four user registers describe private memory."""
        return bool(self.properties & 1)


def symbols_of(elf, sections):
    """Yield (name, (address, bytes)) of an ELF file's symbols."""
    for section in sections:
        if section.type in SYMBOL_TABLES:
            names = sections[section.link].offset
            for at in range(section.offset, section.offset + section.nbytes, 24):
                name, _, _, _, address, nbytes = struct.unpack_from("<IBBHQQ", elf, at)
                yield elf[names + name : elf.index(b"\0", names + name)].decode(), (address, nbytes)
