"""Replace what tinygrad's emulator does otherwise than the chips of CDNA and RDNA; its files stay as they are.

Whole instructions that it lacks, or executes wrongly or slowly, are in cdna.c, rdna.c and in machine.IN_PYTHON. Here
are functions and tables of `test.mockgpu.amd.emu`, each with the reason.
"""

import re

from test.mockgpu.amd import emu
from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.renderer import amd
from tinygrad.renderer.amd.dsl import EXEC_LO, VCC_LO
from tinygrad.runtime.autogen.amd.cdna import ins as cdna
from tinygrad.runtime.autogen.amd.rdna3 import ins as rdna3
from tinygrad.runtime.autogen.amd.rdna4 import ins as rdna4
from tinygrad.uop.ops import UOp

LDS_WORDS = 160 * 1024 // 4  # of gfx950; tinygrad has 64 KiB
LDS = UOp.param(3, dtypes.uint32, (LDS_WORDS,))


def number(value):
    return UOp.const(value, dtypes.int)


class ActiveLds:
    """LDS as the lane sees it for which an instruction is being compiled: not at all while EXEC switches it off.

    Such a lane may have any address. tinygrad reads there, and writes back what it read.
    """

    dtype = LDS.dtype

    def __init__(self, context):
        self.context = context

    def index(self, place):
        return LDS.index(place.valid(emu._lane_active(self.context.rexec(), self.context.lane)))


class Context(emu._Ctx):
    """What tinygrad knows while it compiles an instruction, and in addition the lane at hand and which lanes write.

    written: a bool of the lane, which DPP sets; None: all that are active write. literal: what an operand is whose
    number is that of a literal, where tinygrad does not say it. moved: an instruction of 64 bits whose first operand
    comes from another lane, or None.
    """

    __slots__ = ("lane", "literal", "moved", "written")

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.literal = self.moved = self.written = None

    @property
    def lds(self):
        return ActiveLds(self)

    def range(self, n=None):
        self.lane = super().range(n)
        return self.lane

    def wvgpr_dyn(self, reg, lane, val, exec_mask, after=None):
        if self.written is not None:
            # EXEC without the lanes that do not write: only the bit of this lane is looked at.
            exec_mask = self.written.where(exec_mask, UOp.const(0, exec_mask.dtype))
        return super().wvgpr_dyn(reg, lane, val, exec_mask, after)

    def rsrc_dyn(self, off, lane, bits=32, literal=None, is_f64=False, do_cast=True):
        if self.moved is not None and off is self.inst_field(type(self.moved).src0):
            return load_dpp(self, self.moved, lane, UOp.const(0, dtypes.uint32))
        return super().rsrc_dyn(off, lane, bits, self.literal if literal is None else literal, is_f64, do_cast)

    def compile_lane_pcode(self, op, inst):
        """v_permlane16, v_permlanex16 and others: on RDNA the lanes to read may be a literal."""
        self.literal = self.optional_field(inst, "literal")
        return super().compile_lane_pcode(op, inst)


def dpp_source(lane, dpp, row_mask, bank_mask, wave_size):
    """Return (the lane read from, whether the masks enable the lane, whether that source exists).

    row_bcast:15 and :31 copy the last lane of the rows before, row_newbcast lane n of each row; RDNA calls the latter
    row_share, and has in addition row_xmask, lane l ^ n. tinygrad copies lane 0 of the row for the first, does not know
    the second, and takes the third for row_share.
    """
    operation, argument = emu.decode_dpp16(dpp)
    if wave_size == 32 and dpp & 0x1F0 == 0x160:
        operation = "row_xmask"
    if operation not in ("row_bcast", "row_newbcast", "row_xmask"):
        return tinygrad_dpp_source(lane, dpp, row_mask, bank_mask, wave_size)
    row_mirror = 0x140  # any other: the masks do not depend on it
    _, enabled, _ = tinygrad_dpp_source(lane, row_mirror, row_mask, bank_mask, wave_size)
    lane = lane.cast(dtypes.int)
    row = lane & number(~15)
    if operation == "row_xmask":
        return lane ^ number(argument), enabled, UOp.const(True)
    if operation == "row_newbcast":
        return row + number(argument), enabled, UOp.const(True)
    return (row - number(1) if argument == 15 else number(31)), enabled, number(argument) < lane


def load_dpp(context, inst, lane, fallback):
    """Return the operand that DPP reads from another lane.

    The destination may be the source, so all lanes are read before one is written. A lane that a mask disables, or
    whose source does not exist, is not written unless bound_ctrl gives it 0. On RDNA a source that EXEC switches off
    does not exist unless `fi` is set. tinygrad writes every lane at once.
    """
    has_zeros = emu._iattr(inst, "bc")
    masks = emu._iattr(inst, "row_mask", 15), emu._iattr(inst, "bank_mask", 15)
    source, enabled, exists = emu._dpp16_ctrl(lane, emu._iattr(inst, "dpp"), *masks, context.wave_size)
    if context.wave_size == 32 and not emu._iattr(inst, "fi"):
        exists &= emu._lane_active(context.rexec(), exists.where(source, number(0)))
    before = UOp.placeholder((context.wave_size,), dtypes.uint32, slot=0, addrspace=AddrSpace.LOCAL)
    every = UOp.range(context.wave_size, 0, dtype=dtypes.int)
    held = context.rvgpr_dyn(context.inst_field(type(inst).vsrc0), every)
    reading = UOp.group(before.index(every).store(held)).end(every)
    read = before.after(reading).index((enabled & exists).where(source, number(0)))
    context.written = enabled if has_zeros else enabled & exists
    missing = UOp.const(0, fallback.dtype) if has_zeros else fallback
    return enabled.where(exists.where(read, missing), fallback)


def compile_vop3_dpp(inst, context):
    """RDNA has DPP in instructions of 64 bits as well, of which tinygrad takes the mark of DPP for a register."""
    context.moved = inst
    return (emu._compile_vop3sd if isinstance(inst, rdna3.VOP3SD | rdna4.VOP3SD) else emu._compile_vop3)(inst, context)


def compile_vop12(inst, context):
    """VOP1 and VOP2. On CDNA v128 and above are registers; with 16 bits tinygrad takes RDNA 3's high halves instead."""
    kind, bits = type(inst), inst.canonical_op_bits
    if isinstance(inst, CDNA_VOP) and 16 in (bits.get("d"), bits.get("s0")):
        return compile_halves(inst, context, kind, bits)
    return tinygrad_vop12(inst, context)


def compile_halves(inst, context, kind, bits):
    name = emu._op_name(inst)
    is_float = bool(re.search("F16|F32|F64", name))
    lane, exec_mask, literal = context.range(), context.rexec(), context.optional_field(inst, "literal")
    result = context.inst_field(kind.vdst)
    operands, offset = {"D0": context.rvgpr_dyn(result, lane)}, None
    if hasattr(kind, "dpp"):
        first, _ = emu._load_vsrc0(context, inst, lane, bits, literal, False, is_float, operands["D0"])
    else:
        offset = context.inst_field(kind.src0)
        first = context.rsrc_dyn(offset, lane, bits["s0"], literal, False)
    operands["S0"] = first
    if hasattr(kind, "vsrc1"):
        operands["S1"] = context.rvgpr_dyn(context.inst_field(kind.vsrc1), lane)
        if hasattr(kind, "dpp") and is_float:
            signs = emu._iattr(inst, "src1_abs"), emu._iattr(inst, "src1_neg")
            operands["S1"] = emu._apply_src_mods(operands["S1"], 0, *signs, bits["s1"])
    if "FMAA" in name or "FMAM" in name or "MADA" in name or "MADM" in name:
        operands["SIMM32"] = literal
    return context.compile_vop_pcode(inst.op, operands, lane, result, exec_mask, opsel_dst_hi=False, src0_off=offset)


def compile_vopc(inst, context, **modifiers):
    """Comparisons: as in compile_vop12, the second operand of 16 bits may be v128 or above."""
    bits = inst.canonical_op_bits
    if not isinstance(inst, cdna.VOPC) or bits["s0"] != 16:
        return tinygrad_vopc(inst, context, **modifiers)
    first, second = (
        context.inst_field(type(inst).src0),
        context.inst_field(type(inst).vsrc1) + UOp.const(256, dtypes.uint32),
    )
    literal, exec_mask = context.optional_field(inst, "literal"), context.rexec()

    def result(lane):
        lane = lane.cast(dtypes.int)
        operands = {"S0": context.rsrc_dyn(first, lane, 16, literal), "S1": context.rsrc_dyn(second, lane, 16, literal)}
        operands |= {"laneId": lane, "D0": UOp.const(0, dtypes.uint64)}
        assigned = emu.parse_pcode(emu.get_pcode(inst.op), operands)[1]
        return next(value for target, value in assigned if "[laneId]" in target).cast(dtypes.uint32)

    mask = context.unroll_lanes(result, exec_mask, apply_exec=False) & exec_mask
    targets = [VCC_LO] + ([EXEC_LO] if "CMPX" in emu._op_name(inst) else [])
    stores = [store for target in targets for store in context.wmask(UOp.const(target.offset, dtypes.uint32), mask)]
    return UOp.sink(*stores, *context.inc_pc())


def compile_vop3p(inst, context):
    """Packed instructions. The sum or difference of whole halves may be clamped to their range; tinygrad wraps it."""
    match = re.fullmatch("V_PK_(ADD|SUB)_([IU])16", emu._op_name(inst))
    if not match or not emu._iattr(inst, "clmp"):
        return tinygrad_vop3p(inst, context)
    kind, lane, literal = type(inst), context.range(), context.optional_field(inst, "literal")
    operation, is_signed = match[1], match[2] == "I"
    selected = [(emu._iattr(inst, "opsel"), emu._iattr(inst, "opsel_hi")), (0, 16)]
    offsets = [context.inst_field(field) for field in (kind.src0, kind.src1)]
    operands = [context.rsrc_dyn(offset, lane, 16, literal, do_cast=False) for offset in offsets]
    result = UOp.const(0, dtypes.uint32)
    for bits, shift in zip(*selected, strict=True):
        first, second = (half_of(x, bits >> i & 1, is_signed) for i, x in enumerate(operands))
        exact = first - second if operation == "SUB" else first + second
        least, most = (-(2**15), 2**15 - 1) if is_signed else (0, 2**16 - 1)
        half = exact.maximum(number(least)).minimum(number(most)) & number(0xFFFF)
        result |= half.cast(dtypes.uint32) << UOp.const(shift, dtypes.uint32)
    store = context.wvgpr_dyn(context.inst_field(kind.vdst), lane, result, context.rexec())
    return UOp.sink(store.end(lane), *context.inc_pc())


def half_of(word, is_high, is_signed):
    """Return half of a word as an int."""
    half = (word >> UOp.const(16 * is_high, dtypes.uint32)).cast(dtypes.uint16)
    return (half.bitcast(dtypes.int16) if is_signed else half).cast(dtypes.int)


CDNA_VOP = cdna.VOP1, cdna.VOP2, cdna.VOP1_DPP16, cdna.VOP2_DPP16
tinygrad_dpp_source, tinygrad_vop12, tinygrad_vopc = emu._dpp16_ctrl, emu._compile_vop12, emu._compile_vopc
tinygrad_vop3p = emu._compile_vop3p
REPLACED = {
    "_Ctx": Context,
    "_dpp16_ctrl": dpp_source,
    "_load_dpp16_src0": load_dpp,
    "_compile_vop12": compile_vop12,
    "_compile_vopc": compile_vopc,
    "_compile_vop3p": compile_vop3p,
}
HANDLERS = {tinygrad_vop12: compile_vop12, tinygrad_vopc: compile_vopc, tinygrad_vop3p: compile_vop3p}
DPP_OF_64_BITS = rdna3.VOP3_DPP16, rdna3.VOP3SD_DPP16, rdna4.VOP3_DPP16, rdna4.VOP3SD_DPP16
FORMATS = {"rdna3": rdna3.MUBUF, "rdna4": rdna4.VBUFFER}  # buffers, which tinygrad decodes on CDNA alone


def apply():
    """Replace them, in the module and in its table of handlers."""
    for name, function in REPLACED.items():
        setattr(emu, name, function)
    for kind, handler in emu._INST_HANDLERS.items():
        emu._INST_HANDLERS[kind] = HANDLERS.get(handler, handler)
    emu._INST_HANDLERS |= dict.fromkeys(DPP_OF_64_BITS, compile_vop3_dpp)
    for isa, kind in FORMATS.items():
        amd._load_formats()[isa].insert(0, kind)
