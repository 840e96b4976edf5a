"""What a run says about its flags: those that do nothing for it, and --list-stages."""

import dataclasses
import math
import os

import tiny_llama_v3 as llama
from tiny_llama.launchers import this_process


def list_stages():
    """Print the stages of the workshop, the flags that each sets, and how their effect shows."""
    effects = {field.name: field.metadata["help"] for field in dataclasses.fields(llama.Config)}
    for stage, title in llama.STAGES.items():
        print(f"stage {stage}: {title}")
        for field in llama.stage_flags(stage):
            print(f"    {llama.flag_of(field)}")
            if field in llama.BUGS:
                print(f"        {effects[field]}\n        sign: {llama.BUGS[field].sign}")


def lone_process():
    """A line if a launcher has started several processes that do not know of each other, in a list."""
    process = this_process()
    if not process or "RANK" in os.environ:
        return []
    name = process.size or process.rank
    return [
        f"{name}={os.environ[name]}, but RANK is not set: each process that srun, mpirun or another launcher starts "
        "trains alone; start them with torchrun, as site/job.slurm does"
    ]


def inert_flags(step):
    """A line for each flag that has no effect in this run, or only costs time, and for processes that are alone."""
    config, is_triton, on_cpu = step.config, step.implementation == "triton", step.device.type == "cpu"
    gpu = llama.get_gpu(step.device.type)
    lacks_tf32 = config.matmul_precision == "high" and llama.dot_precision(gpu) != "tf32"
    may_have_tf32 = llama.tf32_available(gpu)
    no_tf32 = "PyTorch for ROCm needs HIPBLASLT_ALLOW_TF32=1" if may_have_tf32 else "there is no TF32"
    of_kernels = "noncontiguous_kv triton_matmul_swiglu severed_autograd".split()
    for_kernels = f"has no effect: it concerns the Triton kernels, not {step.implementation}"
    step_of_width = math.lcm(llama.FAST_MULTIPLE, 2 * config.num_heads)
    fast_width = llama.cdiv(config.hidden_dim, step_of_width) * step_of_width
    # Measured on an H100: products of a width of 500 to 510 take 2.1 times as long as those of 504.
    is_slow = config.hidden_dim % llama.FAST_MULTIPLE and config.use_amp and gpu.arch.startswith("sm_")
    # Compiled (docs/generated/compiled_kernels.md); gfx120 has registers enough in bf16.
    is_radeon = gpu.family == "rdna" and not (config.use_amp and gpu.arch.startswith("gfx120"))
    spills = is_triton and is_radeon and config.head_dim > 64
    spilling = f"backward spills registers on {gpu.arch} with heads of {config.head_dim}: compare --impl sdpa"
    is_small = config.tokens_per_micro_batch * config.hidden_dim < 2**21  # between benchmarks.steps's small and medium
    table = [
        ("fp8", is_triton and is_small, "does not pay at this size: rounding takes longer than the products gain"),
        ("hidden_dim", is_slow, f"{config.hidden_dim} takes about twice the time of {fast_width}, a multiple of 8"),
        ("num_heads", spills, f"{config.num_heads}: {spilling}, or heads of 64"),
        ("no_init", config.untied_head, "does not show with --untied-head, which PyTorch initializes by small numbers"),
        ("shard", step.world.size == 1, f"{config.shard} has no effect on one process: start several with torchrun"),
        *((name, not is_triton, for_kernels) for name in of_kernels),
        ("moments", not is_triton and config.moments != "fp32", f"{config.moments} {for_kernels}"),
        (
            "recompute",
            config.recompute and not hasattr(step.model.layers, "groups"),
            "has no effect: only groups of layers (tiny_llama/groups.py) save less",
        ),
        ("unsynced_timing", on_cpu, "has no effect on a CPU, where nothing runs asynchronously"),
        ("unsynced_timing", config.timing == "step", "changes little with --timing step, which does not time phases"),
        ("matmul_precision", lacks_tf32, f"high has no effect on {gpu.arch}: {no_tf32}"),
        ("compile", os.environ.get("TORCH_COMPILE_DISABLE") == "1", "has no effect: TORCH_COMPILE_DISABLE=1 is set"),
        ("compile", is_triton, "finds nothing to fuse: the operations are Triton kernels already"),
    ]
    lines = [f"{llama.flag_of(name)} {text}" for name, is_inert, text in table if getattr(config, name) and is_inert]
    return lone_process() + lines
