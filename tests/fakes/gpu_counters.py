"""Which counters a GPU has, and how many fit into one pass: a derived one costs its ingredients, shared ones once."""

# Of a pass, for each block of the hardware.
SLOTS = {"SQ": 8, "TCC": 4, "TCP": 4, "GRBM": 2, "TA": 2, "TD": 2, "GL2C": 4}

CDNA = ("gfx908", "gfx90a", "gfx942", "gfx950")
RDNA = ("gfx1100", "gfx1201")
SQ = "SQ_WAVES SQ_BUSY_CYCLES SQ_WAVE_CYCLES SQ_INSTS_VALU SQ_INSTS_LDS SQ_INSTS_SALU SQ_INSTS_SMEM SQ_INSTS_FLAT"
CDNA_SQ = "SQ_INSTS_VMEM_RD SQ_INSTS_VMEM_WR SQ_INSTS_MFMA SQ_VALU_MFMA_BUSY_CYCLES SQ_BUSY_CU_CYCLES"
OCCUPANCY = ("SQ_LEVEL_WAVES", "SQ_ACCUM_PREV", "GRBM_GUI_ACTIVE")

# {name: {architecture: what it is made of}}
COUNTERS = {
    **{name: dict.fromkeys((*CDNA, *RDNA), (name,)) for name in (*SQ.split(), "GRBM_COUNT", "GRBM_GUI_ACTIVE")},
    **{name: dict.fromkeys(CDNA, (name,)) for name in CDNA_SQ.split()},
    "TCC_HIT_sum": dict.fromkeys(CDNA, ("TCC_HIT",)),
    "TCC_MISS_sum": dict.fromkeys(CDNA, ("TCC_MISS",)),
    "TCC_REQ_sum": dict.fromkeys(CDNA, ("TCC_REQ",)),
    "TCP_TOTAL_CACHE_ACCESSES_sum": dict.fromkeys(CDNA, ("TCP_TOTAL_CACHE_ACCESSES",)),
    "L2CacheHit": dict.fromkeys(("gfx908", "gfx90a"), ("TCC_HIT", "TCC_MISS")),
    "FETCH_SIZE": {
        **dict.fromkeys(("gfx908", "gfx90a"), ("TCC_EA_RDREQ", "TCC_EA_RDREQ_32B")),
        **dict.fromkeys(("gfx942", "gfx950"), ("TCC_EA0_RDREQ", "TCC_EA0_RDREQ_32B", "TCC_BUBBLE")),
        **dict.fromkeys(RDNA, ("GL2C_EA_RDREQ", "GL2C_EA_RDREQ_32B", "GL2C_EA_RDREQ_64B", "GL2C_EA_RDREQ_128B")),
    },
    "WRITE_SIZE": {
        **dict.fromkeys(("gfx908", "gfx90a"), ("TCC_EA_WRREQ", "TCC_EA_WRREQ_64B")),
        **dict.fromkeys(("gfx942", "gfx950"), ("TCC_EA0_WRREQ", "TCC_EA0_WRREQ_64B")),
        **dict.fromkeys(RDNA, ("GL2C_EA_WRREQ", "GL2C_EA_WRREQ_64B")),
    },
    "VALUUtilization": dict.fromkeys(CDNA, ("SQ_THREAD_CYCLES_VALU", "SQ_ACTIVE_INST_VALU")),
    "VALUBusy": dict.fromkeys(CDNA, ("SQ_ACTIVE_INST_VALU", "GRBM_GUI_ACTIVE")),
    "MfmaUtil": dict.fromkeys(CDNA[1:], ("SQ_VALU_MFMA_BUSY_CYCLES", "GRBM_GUI_ACTIVE")),
    "MfmaFlops": dict.fromkeys(CDNA[1:], tuple(f"SQ_INSTS_VALU_MFMA_MOPS_{kind}" for kind in ("F16", "BF16", "F32"))),
    "MeanOccupancyPerCU": dict.fromkeys((*CDNA[1:], *RDNA), OCCUPANCY),
    "OccupancyPercent": dict.fromkeys((*CDNA[1:], "gfx1100"), OCCUPANCY),
}


def available(names, arch):
    """Those that the architecture has, in the order given."""
    return [name for name in names if arch in COUNTERS.get(name, {})]


def fits(names, arch):
    """Whether one pass can count all of them."""
    parts = {part for name in names for part in COUNTERS[name][arch]}
    return all(sum(part.startswith(f"{block}_") for part in parts) <= slots for block, slots in SLOTS.items())
