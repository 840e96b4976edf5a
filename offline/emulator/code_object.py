"""Load the ELF file with a kernel's machine code, which the compiler for AMD GPUs writes, into memory."""

import bisect
import ctypes
import functools
import io
import mmap
import os
import struct

from elftools.elf.elffile import ELFFile

NO_ADDRESS = 0xFFFFFFFF  # a half of one
LONGEST_INSTRUCTION = 16  # bytes; the decoder may read this far past the last instruction


class CodeObject:
    """A kernel's code in memory, and its descriptor (LLVM's AMDGPU guide, "Kernel Descriptor").

    binary: the bytes of the ELF file; name: of the kernel. NotImplementedError if it needs what is not emulated.
    """

    def __init__(self, binary, name):
        self.name, self.elf = name, ELFFile(io.BytesIO(binary))
        sections = {section.name: section for section in self.elf.iter_sections()}
        if any(s["sh_type"] in ("SHT_REL", "SHT_RELA") and s["sh_size"] for s in sections.values()):
            raise NotImplementedError(f"{name} has relocations, which are not emulated")
        loaded = list(self.elf.iter_segments("PT_LOAD"))
        self.memory = mmap.mmap(-1, max(s["p_vaddr"] + s["p_memsz"] for s in loaded) + LONGEST_INSTRUCTION)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for s in loaded:
            self.memory[s["p_vaddr"] : s["p_vaddr"] + s["p_filesz"]] = s.data()
        symbols = sections[".dynsym"]
        (code,), (described,) = symbols.get_symbol_by_name(name), symbols.get_symbol_by_name(f"{name}.kd")
        descriptor = described["st_value"]
        self.lds_bytes, self.scratch_bytes, self.argument_bytes = struct.unpack_from("<III", self.memory, descriptor)
        rsrc1, self.rsrc2, self.properties, preloaded = struct.unpack_from("<IIHH", self.memory, descriptor + 48)
        self.begin, self.nbytes = self.base + code["st_value"], code["st_size"]
        # Hardware that preloads arguments into registers starts after the code for hardware that does not.
        self.preloaded_words, self.preload_offset = preloaded & 127, preloaded >> 7
        self.entry = self.begin + (256 if self.preloaded_words else 0)
        self.flushes_denormals = rsrc1 >> 16 & 3 != 3
        self.n_registers = 8 * ((rsrc1 & 63) + 1)  # vector and accumulation registers of a lane, allocated by eights
        self.n_user_registers = self.rsrc2 >> 1 & 31
        if self.properties & 0b1100000:  # of flat scratch
            raise NotImplementedError(f"{name} asks for user registers {self.properties:#b}, which are not emulated")

    def user_registers(self, address):
        """Return the first scalar registers of a wave, with the address of the arguments.

        What describes private memory is 0, and what points to the packet of the launch, its queue and its number is no
        address: a kernel that calls a function reserves them, but none reads them.
        """
        held = [0, 0, 0, 0], [NO_ADDRESS] * 2, [NO_ADDRESS] * 2, [address & 0xFFFFFFFF, address >> 32], [NO_ADDRESS] * 2
        return [register for bit, registers in enumerate(held) if self.properties >> bit & 1 for register in registers]

    @functools.cached_property
    def lines(self):
        """The table of lines that the compiler wrote: a sorted list of (address, file, line)."""
        table = []
        debug = self.elf.get_dwarf_info() if self.elf.has_dwarf_info() else None
        for unit in debug.iter_CUs() if debug else ():
            program = debug.line_program_for_CU(unit)
            for state in filter(None, (entry.state for entry in program.get_entries()) if program else ()):
                if not state.end_sequence:
                    file = program["file_entry"][state.file - (program["version"] < 5)].name.decode()
                    table.append((self.base + state.address, file, state.line))
        return sorted(table, key=lambda entry: entry[0])  # of one address the last counts

    def line_of(self, address):
        """Return "file.py:line" of the Python source of the instruction at an address, "" if it is not known."""
        at = bisect.bisect(self.lines, address, key=lambda entry: entry[0]) - 1
        return f"{os.path.basename(self.lines[at][1])}:{self.lines[at][2]}" if at >= 0 and self.lines[at][2] else ""
