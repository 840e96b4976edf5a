"""Check compiled kernels: whatever makes a kernel slow or impossible to launch is a violation."""

from measure import work
from offline.architectures import CHIPS, MAX_THREADS, bound, gpu_of, occupancy, wave_size
from offline.compiler import compile_jobs
from offline.recorded import CASES, find_kernels, kernel_modules

# ----------------------------------------------------------------------------------------------------------------------
# Work of a launch, from the arguments of its kernel


def added(a):
    return (a.branch, a.residual) if a.HAS_BRANCH else ()


def residual_grad(a):
    return a.residual_grad if a.HAS_RESIDUAL_GRAD else None


def tables(a):
    return (a.cos, a.sin) if a.ROTARY else ()


WORK = {  # kernel: its arguments -> Work
    "rmsnorm_kernel": lambda a: work.rmsnorm(a.x, a.weight, a.y, a.rstd, *added(a)),
    "rmsnorm_backward_kernel": lambda a: work.rmsnorm_backward(
        a.y_grad, a.x, a.weight, a.rstd, a.x_grad, residual_grad(a), a.partial
    ),
    "column_sum_kernel": lambda a: work.column_sum(a.partial, a.sum),
    "flash_attention_kernel": lambda a: work.attention(a.q, a.k, a.v, a.o, a.lse),
    "flash_attention_backward_dq_kernel": lambda a: work.attention_backward_dq(
        a.q, a.k, a.v, a.o, a.o_grad, a.lse, a.delta, a.q_grad, *tables(a)
    ),
    "flash_attention_backward_dkdv_kernel": lambda a: work.attention_backward_dkdv(
        a.q, a.k, a.v, a.o_grad, a.lse, a.delta, a.k_grad, a.v_grad, *tables(a)
    ),
    "flash_attention_backward_kernel": lambda a: work.attention_backward_fused(
        a.q, a.k, a.v, a.o, a.o_grad, a.lse, a.q_grad, a.k_grad, a.v_grad, *tables(a)
    ),
    "rope_kernel": lambda a: work.rope(a.n_tokens * a.grid[1] * a.HEAD_DIM, a.x.dtype.itemsize, a.cos, a.sin),
    "swiglu_activation_kernel": lambda a: work.swiglu_activation(a.gate_up, a.hidden),
    "swiglu_activation_backward_kernel": lambda a: work.swiglu_activation_backward(a.hidden_grad, a.gate_up),
    "swiglu_kernel": lambda a: work.swiglu_matmul(a.x, a.weight, a.gate_up, a.hidden),
    "cross_entropy_kernel": lambda a: work.cross_entropy(a.logits, a.targets, a.loss),
    "scale_kernel": lambda a: work.scale(a.factor),
    "token_order_kernel": lambda a: work.token_order(a.tokens, a.order),
    "embedding_backward_kernel": lambda a: work.embedding_backward(a.tokens, a.order, a.out_grad, a.weight_grad),
    "adamw_kernel": lambda a: work.adamw(
        a.param, a.remainder if a.SPLIT else None, a.grad, a.exp_avg, a.exp_avg_sq
    ),
    "layer_norm_kernel": lambda a: work.layer_norm(
        a.x, a.weight, a.y, a.mean, a.rstd, a.bias if a.HAS_BIAS else None, *added(a)
    ),
    "layer_norm_backward_kernel": lambda a: work.layer_norm_backward(
        a.y_grad, a.x, a.weight, a.mean, a.rstd, a.x_grad, residual_grad(a),
        a.branch_grad if a.HAS_BRANCH_GRAD else None, a.partial, bias=a.HAS_BIAS, twice=a.READ_TWICE,
    ),
    "gelu_kernel": lambda a: work.gelu(a.x, a.y),
    "gelu_backward_kernel": lambda a: work.gelu_backward(a.y_grad, a.x, a.x_grad),
    # Of the second launch, if it has to round again.
    "fp8_quantize_kernel": lambda a: work.Work(
        work.moved(a.x, a.hidden_grad if a.SOURCE == 2 else None, a.data, a.transposed), 4 * a.data.numel()
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Rows: a compiled launch with its bound and its occupancy


def tile_of(launch):
    """Return the tile sizes and the number of warps of a launch, in a few words."""
    constants, options = launch.named_constants, dict(launch.options)
    sizes = {"BLOCK_M": "m", "BLOCK_N": "n", "BLOCK_ROWS": "rows", "BLOCK_TOKENS": "tokens", "BLOCK_COLS": "cols"}
    words = [f"{constants[name]} {word}" for name, word in sizes.items() if name in constants]
    blocks = [constants[name] for name in ("BLOCK_SIZE", "REST_SIZE") if name in constants]
    words += [f"{max(blocks)} elements"] if blocks else []
    words += [f"head {constants['HEAD_DIM']}"] if "HEAD_DIM" in constants else []
    return ", ".join([*words, f"{options['num_warps']} warps"])


def variant_of(launch):
    """Return the variant of the kernel: its boolean constants that are true."""
    return " ".join(
        name.removeprefix("HAS_").lower() for name, value in launch.named_constants.items() if value is True
    )


def make_row(job, compiled, kernels):
    launch = job.launch
    # Otherwise the compiler cannot assume that addresses are aligned.
    aligned = all(s % 16 == 0 for s in launch.scalars if isinstance(s, int) and s > 256)
    row = {
        "kernel": launch.kernel,
        "variant": variant_of(launch),
        "arch": job.arch,
        "case": job.case,
        "precision": job.precision,
        "calls": job.calls,
        "tile": tile_of(launch),
        "head": launch.named_constants.get("HEAD_DIM"),
        "warps": launch.warps,
        "options": {name: value for name, value in launch.options if name != "num_warps"},
        "wide_loads_expected": CASES[job.case].wide_loads and aligned and launch.kernel not in NARROW,
        **compiled,
    }
    if launch.kernel in WORK and not row.get("error"):
        row["bytes"], row["operations"] = WORK[launch.kernel](launch.arguments(kernels[launch.function]))
        row["bound_us"], row["bound_by"] = bound(
            job.arch, job.precision, row["has_dot"], row["bytes"], row["operations"]
        )
        used = row["registers"], row["shared_bytes"], row["warps"], row["scalar_registers"] or 0
        row["occupancy"] = occupancy(job.arch, *used, row["options"].get("waves_per_eu"))
    return row


# ----------------------------------------------------------------------------------------------------------------------
# The check

# Scratch bytes a thread that are allowed. These may shrink but not grow. Hopper's tiles were chosen by their time on an
# H200, not by their spills; without TF32 an fp32 product has no matrix instruction there and is unrolled.
SCRATCH = {
    ("sm_75", "flash_attention_backward_dkdv_kernel"): {"fp32": 16},
    ("sm_80", "rmsnorm_backward_kernel"): {"fp32": 16, "tf32": 16},
    ("sm_86", "flash_attention_kernel"): {"tf32": 8},
    ("sm_89", "flash_attention_kernel"): {"tf32": 8},
    ("sm_90", "rmsnorm_backward_kernel"): {"bf16": 40, "fp32": 96, "tf32": 96},
    ("sm_90", "flash_attention_backward_kernel"): {"bf16": 264, "fp32": 448},
    ("sm_90", "flash_attention_kernel"): {"fp32": 8},
    ("sm_90", "flash_attention_backward_dq_kernel"): {"fp32": 224},
    ("sm_90", "flash_attention_backward_dkdv_kernel"): {"bf16": 40, "fp32": 816},
}
# As many for heads of more than 64 on Radeons: the tiles that spill least still do.
GFX11 = {
    "flash_attention_backward_dq_kernel": {"bf16": 420, "fp32": 736},
    "flash_attention_backward_dkdv_kernel": {"bf16": 388, "fp32": 1120},
    "flash_attention_backward_kernel": {"bf16": 620, "fp32": 1148},
}
SCRATCH_OF_WIDE_HEADS = {
    "gfx1100": GFX11,
    "gfx1151": GFX11,
    "gfx1201": {
        "flash_attention_backward_dq_kernel": {"fp32": 592},
        "flash_attention_backward_dkdv_kernel": {"fp32": 1096},
        "flash_attention_backward_kernel": {"fp32": 1212},
    },
}
MISTAKES_SCRATCH = {"gfx1100": 20, "gfx1151": 20}  # of attention with strided keys and values, slow on purpose
SCALAR_SPILLS = 1  # of AMD's scalar registers, into lanes of a vector register and not into memory
SCALAR_SPILLS_OF = {("gfx1201", "fp8_quantize_kernel"): 15}  # which rounds to FP8 in software
WIDE_SHARE = 0.5
NARROW = {"token_order_kernel"}  # Triton 3.3 loads just the lower halves of its 64-bit tokens, from the cache


def scratch_limit(row):
    """Return the bytes of scratch a thread that a row may have."""
    if row["case"] == "mistakes" and row["kernel"] == "flash_attention_kernel":
        return MISTAKES_SCRATCH.get(row["arch"], 0)
    if (row["head"] or 0) > 64 and row["arch"] in SCRATCH_OF_WIDE_HEADS:
        limits = SCRATCH_OF_WIDE_HEADS[row["arch"]].get(row["kernel"], {})
    else:
        limits = SCRATCH.get((row["arch"], row["kernel"]), {})
    return limits.get(row["precision"], 0)


def violations(row):
    """Return the violations of a row. Each is a line that names the figure and its limit."""
    arch, launch = row["arch"], f"{row['kernel']} for {row['arch']} ({row['case']}, {row['precision']}, {row['tile']})"
    if row.get("error"):
        return [f"{launch}: does not compile: {row['error']}"]
    chip, threads = CHIPS[arch], row["warps"] * wave_size(arch)
    scratch, scalars = scratch_limit(row), SCALAR_SPILLS_OF.get((arch, row["kernel"]), SCALAR_SPILLS)
    # Instinct alone multiplies matrices of fp32; on NVIDIA they must be rounded to TF32.
    needs_matrix = row["has_dot"] and (row["precision"] != "fp32" or gpu_of(arch).family == "cdna")
    limits = [
        (
            threads > MAX_THREADS,
            f"{row['warps']} warps are {threads} threads, limit {MAX_THREADS}",
        ),
        (
            row["shared_bytes"] > chip.program_kib * 1024,
            f"{row['shared_bytes']} bytes of shared memory, limit {chip.program_kib * 1024}",
        ),
        ((row["vector_spills"] or 0) > 0 and not scratch, f"{row['vector_spills']} vector registers spilled, limit 0"),
        (
            (row["scalar_spills"] or 0) > scalars,
            f"{row['scalar_spills']} scalar registers spilled, limit {scalars}",
        ),
        (row["scratch_bytes"] > scratch, f"{row['scratch_bytes']} bytes of scratch a thread, limit {scratch}"),
        (
            arch.startswith("gfx9") and not row["has_dot"] and row["registers"] > 256,
            f"{row['registers']} registers, limit 256: the rest are accumulation registers, reached by copies",
        ),
        (needs_matrix and not row["matrix_instructions"], "no matrix instruction for its products, at least 1 needed"),
        (
            row["wide_loads_expected"] and row["wide_share"] is not None and row["wide_share"] < WIDE_SHARE,
            f"{row['wide_share'] or 0:.0%} of its bytes in loads of 8 bytes or more, at least {WIDE_SHARE:.0%} needed",
        ),
    ]
    return [f"{launch}: {message}" for broken, message in limits if broken]


def missing_kernels(kernels, launches):
    """Yield a line for each kernel that no case launches, or whose work is unknown."""
    names = {(launch.function, launch.kernel) for launch in launches}
    for function in set(kernels) - {function for function, _ in names}:
        yield f"{function}: no case launches it; add one to CASES in offline/recorded.py"
    for name in {*kernels, *(name for _, name in names)} - set(WORK):
        yield f"{name}: its bytes and operations are not known; add them to WORK in offline/gate.py"


def analyse(jobs, processes):
    """Return (rows, the lines of their violations)"""
    kernels = find_kernels(kernel_modules())
    compiled = compile_jobs(jobs, processes)
    rows = [make_row(job, compiled[job.arch, job.launch.compiled_as], kernels) for job in jobs]
    return rows, [line for row in rows for line in violations(row)]
