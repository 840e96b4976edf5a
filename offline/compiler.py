"""Compile recorded launches in worker processes and reads the compiled code."""

import collections
import concurrent.futures
import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import tiny_llama_v3 as llama
from offline.architectures import is_amd, wave_size
from offline.recorded import kernel_modules


class Driver:
    """Replace Triton's driver of the GPU in this machine, and names another GPU."""

    def __init__(self, arch):
        from triton.backends.compiler import GPUTarget

        name = ("hip", arch) if is_amd(arch) else ("cuda", int(arch.removeprefix("sm_")))
        self.arch, self.target = arch, GPUTarget(*name, wave_size(arch))

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0


def compile_launch(arch, launch):
    """Compile a launch. Return a dict of what its code has, or {"error": one line}."""
    import triton

    kernel = next(vars(module)[launch.function] for module in kernel_modules() if hasattr(module, launch.function))
    warnings.simplefilter("ignore")  # those of Triton about its defaults
    triton.runtime.driver.set_active(Driver(arch))
    try:
        constants = llama.as_constants(dict(launch.constants))
        compiled = kernel.warmup(
            *launch.tensors, *launch.scalars, **constants, **dict(launch.options), grid=launch.grid
        )
    except Exception as error:  # of this launch alone
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"}
    read = read_amdgcn if is_amd(arch) else read_cubin
    return {
        **read(compiled.asm),
        "shared_bytes": compiled.metadata.shared,
        "has_dot": bool(re.search(r"\btt\.dot(_scaled)?\b", compiled.asm["ttir"])),
    }


AMD_WIDTHS = {
    "byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12,
    "dwordx4": 16, "u8": 1, "i8": 1, "b8": 1, "u16": 2, "i16": 2, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
}  # fmt: skip
AMD_ACCESS = re.compile(rf"(?:global|buffer|flat)_(load|store)_(?:d16_)?(?:hi_)?({'|'.join(AMD_WIDTHS)})(?:_d16.*)?")
AMD_MATRIX, NVIDIA_MATRIX = ("v_mfma", "v_wmma"), ("wgmma", "mma", "tcgen05.mma")


def is_matrix(name):
    """Return whether an instruction, as it is counted here, multiplies matrices."""
    return name.startswith((*AMD_MATRIX, *NVIDIA_MATRIX))


def memory_access(name):
    """Return ("load" or "store", bytes a lane) of an AMD instruction that accesses global memory, None for others."""
    moved = AMD_ACCESS.fullmatch(name)
    return moved and (moved[1], AMD_WIDTHS[moved[2]])


def read_amdgcn(asm):
    text = asm["amdgcn"]

    def field(name):
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    loads, instructions = collections.Counter(), collections.Counter()
    for name in re.findall(r"^\s+([a-z]\w+)", text, flags=re.M):
        access = memory_access(name)
        if access:
            kind, width = access
            instructions[f"{kind} {8 * width}"] += 1
            if kind == "load":
                loads[width] += 1
        elif name.startswith(AMD_MATRIX):
            instructions[name] += 1
    return {
        "registers": field("vgpr_count"),  # of a thread, accumulation registers included
        "scalar_registers": field("sgpr_count"),
        "vector_spills": field("vgpr_spill_count"),
        "scalar_spills": field("sgpr_spill_count"),
        "scratch_bytes": field("private_segment_fixed_size"),
        "wide_share": wide_share(loads),
        "matrix_instructions": sum(count for name, count in instructions.items() if is_matrix(name)),
        "instructions": dict(instructions),
        "compiler_occupancy": int(re.search(r"; Occupancy: (\d+)", text)[1]),
    }


def read_cubin(asm):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(importlib.import_module("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    loads, instructions = collections.Counter(), collections.Counter()
    for line in asm["ptx"].splitlines():
        words = line.split()
        name = next((word for word in words if not word.startswith(("@", "{"))), "")
        moved = re.fullmatch(r"(ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)", name)
        if moved:
            width = int(moved[2] or 1) * int(moved[3])
            instructions[f"{'load' if moved[1] == 'ld' else 'store'} {width}"] += 1
            if moved[1] == "ld":
                loads[width // 8] += 1
        elif name.startswith("cp.async.c") and ".shared.global" in name:
            width = int(re.search(r"\], (0x\w+|\d+)", line)[1], 0)
            instructions[f"async load {8 * width}"] += 1
            loads[width] += 1
        elif name.startswith(("wgmma.mma_async", "mma.sync", "tcgen05.mma")):
            instructions[re.sub(r"\.(sync|aligned|row|col)\b", "", name).replace("mma_async.", "")] += 1
    return {
        "registers": registers,
        "scalar_registers": None,
        "vector_spills": None,  # ptxas counts them as scratch bytes
        "scalar_spills": None,
        "scratch_bytes": stack + local,
        "wide_share": wide_share(loads),
        "matrix_instructions": sum(count for name, count in instructions.items() if is_matrix(name)),
        "instructions": dict(instructions),
        "compiler_occupancy": None,
    }


def wide_share(loads):
    """Return the share of the bytes of {bytes a thread: instructions} in loads of 8 or more; None without loads."""
    total = sum(width * count for width, count in loads.items())
    return sum(width * count for width, count in loads.items() if width >= 8) / total if total else None


def compile_order(job):
    """Sort the longest compilations first: matrix products without matrix instructions."""
    return is_amd(job.arch), job.precision != "fp32", "attention" not in job.launch.kernel


def compile_jobs(jobs, processes):
    """Compile each distinct launch once: {(arch, compiled_as of the launch): see compile_launch}."""
    distinct = {(job.arch, job.launch.compiled_as): job for job in jobs}
    distinct = dict(sorted(distinct.items(), key=lambda item: compile_order(item[1])))
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ), concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        os.environ.pop("TRITON_INTERPRET", None)  # the workers compile instead of interpreting
        futures = {key: pool.submit(compile_launch, job.arch, job.launch) for key, job in distinct.items()}
        return {key: future.result() for key, future in futures.items()}
