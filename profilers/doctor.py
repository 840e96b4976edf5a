"""Report what prevents the project from running well on this machine, and the remedies.

    profilers/doctor.sh        a line for each finding, OK, WARN or FAIL, with its remedy below

It needs only Python. A missing tool is a finding, not an error. What may hang or crash, such as a GPU's driver, is
asked by a second Python, for a minute at most.

Exit codes: 0 nothing failed, 1 something did, 2 the request cannot be met, 130 interrupted.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:
    print("run it from the root as python -m profilers.doctor", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, program
from profilers import rocm, stacks

NVIDIA = Path("/dev/nvidiactl")
WSL_PROGRAMS = "/usr/lib/wsl/lib"  # the folder of what the drivers of Windows bring
# As in offline/architectures.py, which imports torch.
COMPILED = "gfx90a gfx942 gfx950 gfx1250 gfx1100 gfx1151 gfx1201 sm_75 sm_80 sm_86 sm_89 sm_100 sm_120"
KNOWN = dict.fromkeys(COMPILED.split(), "every kernel compiles for it, none was run on it") | {"sm_90": "tested"}
OK, WARN, FAIL = "OK", "WARN", "FAIL"

# What a second Python does. Each answer is a line of JSON, so that those before a crash are known.
QUESTIONS = """
import importlib.metadata, importlib.util, json, os, subprocess, sys, time

def tell(**answers):
    print("\\n" + json.dumps(answers), flush=True)

owners = {}
for distribution in importlib.metadata.distributions():
    if any(str(file) == "triton/__init__.py" for file in distribution.files or ()):
        owners[distribution.metadata["Name"]] = distribution.version
check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True).stdout
tell(owners=owners, conflicts=[line for line in check.splitlines() if line.startswith("torch ") and "triton" in line])

import torch
tell(torch=torch.__version__, nvml=importlib.util.find_spec("pynvml") is not None)

gpus = []
for index in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(index)
    arch = p.gcnArchName.split(":")[0] if torch.version.hip else "sm_%d%d" % (p.major, p.minor)
    free, total = torch.cuda.mem_get_info(index)
    gpus.append(dict(name=p.name, arch=arch, free=free, total=total))
tell(gpus=gpus)

os.environ["TRITON_INTERPRET"] = "0" if gpus else "1"
import triton
tell(triton=triton.__version__)

# A kernel of the project, compared with PyTorch in fp64.
import tiny_llama_v3 as llama
device = "cuda" if gpus else "cpu"
x, branch = (torch.randn(8, 512, device=device) for _ in range(2))
weight = torch.randn(512, device=device)
start = time.perf_counter()
residual, y, _ = llama.rmsnorm_forward(x, branch, weight, 1e-5)
exact, _ = llama.torch_rmsnorm(x.double(), branch.double(), weight.double(), 1e-5)
error = float((y - exact).abs().max() / exact.abs().max())
tell(error=error, seconds=time.perf_counter() - start)
"""


def ask(questions, seconds=60, under=()):
    """Return (the answers of a second Python in one dict, why there are no more of them, or None).

    under: the words of a command that runs it.
    """
    # A file, as what a killed Python has started may hold a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        command, null = [*under, sys.executable, "-c", questions], subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=null, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # but do not wait for it: a driver that hangs may keep it
            status = None
        output.seek(0)
        lines = output.read().split("\n")
    answers = {}
    for line in lines:
        if line.startswith("{"):
            answers |= json.loads(line)
    if status is None:
        return answers, f"no answer in {seconds:g} seconds"
    last = next(filter(None, reversed(lines)), "no output")
    return answers, f"exit status {status}: {last[:200]}" if status else None


# ----------------------------------------------------------------------------------------------------------------------
# Each function yields findings, (level, text, remedy if it is not OK), from the answers and from what PyTorch is built
# for, such as "rocm 6.4". What another one reports as missing is skipped.


def probe_python(answers, problem, build):
    yield OK, f"{sys.version.split()[0]}, {sys.executable}"


def probe_torch(answers, problem, build):
    if "torch" not in answers:
        yield (
            FAIL,
            f"cannot be imported: {problem}",
            "make run installs it; on a cluster load its PyTorch module first, and make keeps that one",
        )
        return
    text = f"{answers['torch']} for {build}"
    # A processor may have a GPU of AMD's beside a card of NVIDIA's: a driver that fits is enough.
    devices = [device for device in (rocm.kfd(), nvidia()) if device.exists()]
    if devices and driver_of(build) not in devices:
        yield (
            FAIL,
            f"{text}, but there is {devices[0]}",
            "remove .venv, and make run with the PyTorch of the cluster, or TORCH_INDEX of a build for this GPU",
        )
    else:
        yield OK, text


def driver_of(build):
    """Return the file of the driver that a PyTorch uses, or None."""
    return {"rocm": rocm.kfd(), "cuda": nvidia()}.get(build.partition(" ")[0])


def nvidia():
    """Return the file of NVIDIA's driver; under WSL the one for GPUs of all makes, if there is nvidia-smi."""
    search = os.pathsep.join((os.environ["PATH"], WSL_PROGRAMS))
    return rocm.wsl() if rocm.wsl().exists() and shutil.which("nvidia-smi", path=search) else NVIDIA


def probe_triton(answers, problem, build):
    """Whether the folder triton belongs to one distribution, the one that torch asks for."""
    # ROCm's triton has another name but the same folder: the last to be installed has overwritten the other's files.
    owners = answers.get("owners", {})
    owned = ", ".join(f"{name} {version}" for name, version in sorted(owners.items()))
    if len(owners) > 1:
        yield (
            FAIL,
            f"{len(owners)} distributions share its folder: {owned}",
            "pip uninstall all of them, and install the one that torch needs again, with --no-deps",
        )
    elif answers.get("conflicts"):
        yield (
            WARN,
            f"{owned}: {'; '.join(answers['conflicts'])}",
            "install what torch asks for, with pip's --no-deps",
        )
    elif "triton" in answers:
        yield OK, f"{answers['triton']}, owned by {owned or 'no distribution'}"
    elif "gpus" in answers:
        yield (
            WARN,
            f"cannot be imported: {problem}",
            "without it the model runs on plain PyTorch; torch's own index has the one that fits",
        )


def probe_gpu(answers, problem, build):
    if "torch" not in answers:
        return
    driver = driver_of(build)
    if not driver:
        yield WARN, "this PyTorch uses none", "exercises and tests run without one; times need a GPU"
    elif "gpus" not in answers:
        yield FAIL, f"PyTorch could not look for it: {problem}", "see dmesg, or ask the site"
    elif not answers["gpus"]:
        level, there = (FAIL, "is there") if driver.exists() else (WARN, "is not there")
        shown = "".join(f" ({name}={value})" for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES"))
        yield (
            level,
            f"PyTorch sees none, and {driver} {there}{shown}",
            "on a cluster start a job with a GPU: srun --gpus=1; in a container pass the devices",
        )
    for index, gpu in enumerate(answers.get("gpus", ())):
        gib = 2**30
        text = f"{index}: {gpu['name']}, {gpu['arch']}, {gpu['free'] / gib:.0f} of {gpu['total'] / gib:.0f} GiB free"
        known = KNOWN.get(gpu["arch"])
        if not known:
            yield WARN, f"{text}; nothing is known of it", "run: python tiny_llama_v3.py --check"
        # PyTorch itself has taken little by now: what is missing is another program's.
        elif gpu["free"] < 0.5 * gpu["total"]:
            yield WARN, f"{text}: someone else uses it", "times will differ; choose another GPU"
        else:
            yield OK, f"{text} ({known})"
    if answers.get("gpus") and build.startswith("cuda") and not answers["nvml"]:
        yield (
            WARN,
            "runs do not tell its power, clock and temperature: nvidia-ml-py is missing",
            "pip install nvidia-ml-py",
        )


def probe_stack(answers, problem, build):
    """What these GPUs meet with this ROCm and this Triton, as others found it or as the compiled kernels tell."""
    architectures = {gpu["arch"] for gpu in answers.get("gpus", ())}
    release, triton = (rocm.release_in(text) for text in (build.removeprefix("rocm "), answers.get("triton", "")))
    for where, stack in stacks.known_bad(architectures, release, triton):
        yield WARN, f"{where}: {stack.what}: {stack.link}", stack.remedy
    for sentence, is_heavy in stacks.costs(architectures, triton):
        remedy = ["a newer Triton has more, where PyTorch takes it; docs/rocm.md lists the launches"]
        yield WARN if is_heavy else OK, sentence, *remedy * is_heavy


def probe_access(answers, problem, build):
    if build.startswith("rocm") and (obstacle := rocm.device_obstacle()):
        yield FAIL, f"ROCm {obstacle}", "on a cluster, a job with a GPU has the rights"


def probe_profilers(answers, problem, build):
    """Those of this PyTorch's vendor, as the profiling scripts would take them."""
    if not build.startswith("rocm"):
        yield OK, f"PyTorch's, by --profile DIR; for counters: {shutil.which('ncu') or 'no ncu'}"
        return
    # Another release than PyTorch's may record nothing, crash or hang, without a word about the reason. Also one of the
    # same may end in the import of triton, by another C++ library of the system's, or where few files may be open.
    os.environ["PATH"] = rocm.search_path()
    for name in rocm.EXECUTABLES:
        tool = rocm.find(name)
        reason = rocm.lack_of(tool) or rocm.mismatch_of(tool, build)
        if not reason and name == "rocprofv3" and "triton" in answers:
            command = [*tool.launch, "--kernel-trace", "-d", tempfile.gettempdir(), "--"]  # it records nothing
            _, trouble = ask("import triton", under=command)
            reason = trouble and f"import triton fails under it, {trouble}. Try again after ulimit -n 65536"
        if reason:
            yield WARN, f"{name}: {reason}", "until then, --profile DIR uses PyTorch's profiler"
        else:
            yield OK, f"{name}: {tool.path}, ROCm {rocm.dotted(tool.release)}, {tool.why}"


def probe_kernel(answers, problem, build):
    if "triton" not in answers:
        return
    # Rounding in fp32 makes an error of about 1e-7 of a row of 512 numbers; a wrong compiler makes one of any size.
    where = "on the GPU" if answers["gpus"] else "in Triton's interpreter, as there is no GPU"
    if "error" not in answers:
        yield (
            FAIL,
            f"RMSNorm did not run: {problem}",
            "see the whole message: python tiny_llama_v3.py --check --num-steps 1",
        )
    elif not answers["error"] < 1e-5:  # NaN included
        yield (
            FAIL,
            f"RMSNorm is wrong by {answers['error']:.1e}, allowed 1.0e-05",
            "do not trust this combination of driver, torch and triton; try the one that torch was built for",
        )
    else:
        text = f"RMSNorm ran {where}: error {answers['error']:.1e}, first run {answers['seconds']:.1f} s"
        yield OK, text


PROBES = (
    probe_python, probe_torch, probe_triton, probe_gpu, probe_stack, probe_access, probe_profilers, probe_kernel,
)  # fmt: skip


@program("doctor.sh")
def main(argv):
    Parser("doctor.sh", __doc__).parse_args(argv)
    counts = {OK: 0, WARN: 0, FAIL: 0}
    facts = *ask(QUESTIONS), rocm.torch_build()
    for probe in PROBES:
        for level, text, *remedy in probe(*facts):
            counts[level] += 1
            print(f"{level:5} {probe.__name__.removeprefix('probe_'):10} {text}", flush=True)
            if remedy:
                print(f"{'':17}{remedy[0]}", flush=True)
    print(f"\n{counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL")
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    sys.exit(main())
