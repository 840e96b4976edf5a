"""Replace what tinygrad's emulator does otherwise than the chips of CDNA; its files stay as they are.

Whole instructions that it lacks, or executes wrongly or slowly, are in instructions.c and in machine.IN_PYTHON. Here
are functions and tables of `test.mockgpu.amd.emu`, each with the reason.
"""

import re

from test.mockgpu.amd import emu
from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.renderer.amd.dsl import EXEC_LO, VCC_LO
from tinygrad.runtime.autogen.amd.cdna import ins as cdna
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

    written: a bool of the lane, which DPP sets; None: all that are active write.
    """

    __slots__ = ("lane", "written")

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.written = None

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


def dpp_source(lane, dpp, row_mask, bank_mask, wave_size):
    """Return (the lane read from, whether the masks enable the lane, whether that source exists).

    row_bcast:15 and :31 copy the last lane of the rows before, row_newbcast lane n of each row. tinygrad copies lane 0
    of the row for the former and does not know the latter.
    """
    operation, argument = emu.decode_dpp16(dpp)
    if operation not in ("row_bcast", "row_newbcast"):
        return tinygrad_dpp_source(lane, dpp, row_mask, bank_mask, wave_size)
    row_mirror = 0x140  # any other: the masks do not depend on it
    _, enabled, _ = tinygrad_dpp_source(lane, row_mirror, row_mask, bank_mask, wave_size)
    lane = lane.cast(dtypes.int)
    row = lane & number(~15)
    if operation == "row_newbcast":
        return row + number(argument), enabled, UOp.const(True)
    return (row - number(1) if argument == 15 else number(31)), enabled, number(argument) < lane


def load_dpp(context, inst, lane, fallback):
    """Return the operand that DPP reads from another lane.

    The destination may be the source, so all lanes are read before one is written. A lane that a mask disables, or
    whose source does not exist, is not written unless bound_ctrl gives it 0. tinygrad writes every lane at once.
    """
    has_zeros = emu._iattr(inst, "bc")
    masks = emu._iattr(inst, "row_mask", 15), emu._iattr(inst, "bank_mask", 15)
    source, enabled, exists = emu._dpp16_ctrl(lane, emu._iattr(inst, "dpp"), *masks, context.wave_size)
    before = UOp.placeholder((context.wave_size,), dtypes.uint32, slot=0, addrspace=AddrSpace.LOCAL)
    every = UOp.range(context.wave_size, 0, dtype=dtypes.int)
    held = context.rvgpr_dyn(context.inst_field(type(inst).vsrc0), every)
    reading = UOp.group(before.index(every).store(held)).end(every)
    read = before.after(reading).index((enabled & exists).where(source, number(0)))
    context.written = enabled if has_zeros else enabled & exists
    missing = UOp.const(0, fallback.dtype) if has_zeros else fallback
    return enabled.where(exists.where(read, missing), fallback)


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


CDNA_VOP = cdna.VOP1, cdna.VOP2, cdna.VOP1_DPP16, cdna.VOP2_DPP16
tinygrad_dpp_source, tinygrad_vop12, tinygrad_vopc = emu._dpp16_ctrl, emu._compile_vop12, emu._compile_vopc
REPLACED = {
    "_Ctx": Context,
    "_dpp16_ctrl": dpp_source,
    "_load_dpp16_src0": load_dpp,
    "_compile_vop12": compile_vop12,
    "_compile_vopc": compile_vopc,
}
HANDLERS = {tinygrad_vop12: compile_vop12, tinygrad_vopc: compile_vopc}


def apply():
    """Replace them, in the module and in its table of handlers."""
    for name, function in REPLACED.items():
        setattr(emu, name, function)
    for kind, handler in emu._INST_HANDLERS.items():
        emu._INST_HANDLERS[kind] = HANDLERS.get(handler, handler)
