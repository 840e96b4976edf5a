"""Report what prevents the project from running well on this machine, and the remedies.

    profilers/doctor.sh             a line for each finding, OK, WARN or FAIL, with its remedy below
    profilers/doctor.sh --json      the findings as JSON

It needs only Python. Each question is stopped at the time limit. A missing tool is a finding, not an error.

Exit codes: 0 nothing failed, 1 something did, 2 the request cannot be met, 130 interrupted.
"""

# The syntax is that of Python 3.7, as this module also reports a Python that is too old.
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

if not __package__:
    print("run it from the root as python -m profilers.doctor", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, program
from profilers import rocm

ROOT = Path(__file__).resolve().parent.parent
DEVICES = Path("/dev")
DEVICE_FILES = {"rocm": "kfd", "cuda": "nvidiactl"}  # of a vendor's driver, by the build of PyTorch that uses it
VISIBILITY = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
TESTED_TORCH = (2, 7), (2, 13)
COMPILED = "every kernel compiles for it, none was run on it"
TESTED_ARCHITECTURES = dict.fromkeys(("sm_80", "gfx90a", "gfx942", "gfx950"), COMPILED)
TESTED_ARCHITECTURES["sm_90"] = "tested"
PROFILERS = {
    "rocm": {
        "rocprofv3": "traces and counters: part of ROCm 6.3 and newer (package rocprofiler-sdk)",
        "rocprof-compute": "analysis of one kernel: part of ROCm 6.3 and newer (package rocprofiler-compute)",
        "rocprof-sys": "traces with the host: part of ROCm 6.3 and newer (package rocprofiler-systems)",
    },
    "cuda": {
        "nsys": "traces: NVIDIA Nsight Systems",
        "ncu": "analysis of one kernel: NVIDIA Nsight Compute, part of the CUDA toolkit",
    },
}
INSTALL = "make run installs it; on a cluster load its PyTorch module first, and make keeps that one"
OK, WARN, FAIL = "OK", "WARN", "FAIL"


class Finding(NamedTuple):
    probe: str
    level: str
    text: str
    remedy: str = ""


# ----------------------------------------------------------------------------------------------------------------------
# Questions to programs, which may take long or crash


def answer_of(command, seconds, **variables):
    """Return (exit status, output) of a command; (None, reason) if it cannot be started or takes too long."""
    try:
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
        # In a session of its own, so that its child processes can be killed with it.
        process = subprocess.Popen(command, env=dict(os.environ, **variables), start_new_session=True, **pipes)
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output.strip()
    except OSError as error:
        return None, error.strerror or str(error)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, f"no answer in {seconds:g} seconds"


PACKAGES = """
import importlib.metadata as metadata, json, re
found = {"owners": {}, "requirement": None}
for distribution in metadata.distributions():
    if any(str(file) == "triton/__init__.py" for file in distribution.files or ()):
        found["owners"][distribution.metadata["Name"]] = distribution.version
try:
    for line in metadata.requires("torch") or ():
        match = re.match(r"((?:pytorch-)?triton(?:-\\w+)?)\\s*(?:\\(?==\\s*([\\w.+!]+))?", line)
        if match:
            found["requirement"] = match.groups()
except metadata.PackageNotFoundError:
    pass
for name in ("triton", "torch"):
    try:
        found[name] = __import__(name).__version__
    except Exception as error:
        found[name] = None
        found[name + "_error"] = "%s: %s" % (type(error).__name__, error)
print("\\n" + json.dumps(found))
"""

GPUS = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        arch = p.gcnArchName.split(":")[0] if torch.version.hip else "sm_%d%d" % (p.major, p.minor)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append({"name": p.name, "arch": arch, "free": free, "total": total})
print("\\n" + json.dumps(gpus))
"""

KERNEL = """
import json, time, torch, tiny_llama_v3 as llama
device = "cuda" if torch.cuda.is_available() else "cpu"
x, branch = (torch.randn(8, 512, device=device) for _ in range(2))
weight = torch.randn(512, device=device)
start = time.perf_counter()
residual, y, _ = llama.rmsnorm_forward(x, branch, weight, 1e-5)
exact, _ = llama.torch_rmsnorm(x.double(), branch.double(), weight.double(), 1e-5)
error = float((y - exact).abs().max() / exact.abs().max())
print("\\n" + json.dumps({"error": error, "seconds": time.perf_counter() - start}))
"""


class Machine:
    """What is known of this machine: packages and gpus are pairs of an answer and the reason why there is none."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.packages = self.ask(PACKAGES)
        self.torch = (self.packages[0] or {}).get("torch")
        # Such as ("rocm", "6.4"), ("cpu", "") or, without PyTorch, ("", "").
        self.platform, _, self.release = rocm.torch_build().partition(" ") if self.torch else ("", "", "")
        self.gpus = self.ask(GPUS) if self.platform in DEVICE_FILES else ([], None)

    def ask(self, text, **variables):
        """Return (the JSON that a program for a second Python prints, None), or (None, why there is none)."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        status, output = answer_of((sys.executable, "-c", text), self.seconds, PYTHONPATH=path, **variables)
        lines = output.splitlines() or ["no output"]
        if status != 0:
            return None, output if status is None else f"exit status {status}: {lines[-1].strip()[:200]}"
        answers = [line for line in lines if line.startswith(("{", "["))]  # warnings may follow it
        return (json.loads(answers[-1]), None) if answers else (None, lines[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Probes. Each takes the Machine and yields findings. A probe skips what another one reports as missing.


def probe_torch(machine):
    found, problem = machine.packages
    if found is None:
        yield Finding("torch", FAIL, f"Python could not look for it: {problem}", "try: python -c 'import torch'")
        return
    if not machine.torch:
        yield Finding("torch", FAIL, f"cannot be imported: {found['torch_error']}", INSTALL)
        return
    name = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPUs only"}[machine.platform]
    text = f"{machine.torch} for {name} {machine.release}".strip()
    here = drivers()
    lowest, highest = TESTED_TORCH
    if not lowest <= rocm.release_in(machine.torch) <= highest:
        tested = f"{rocm.dotted(lowest)} to {rocm.dotted(highest)}"
        yield Finding("torch", WARN, f"{text}; tested with {tested}", "if something fails, try one of those")
    elif here and machine.platform not in here:
        remedy = "remove .venv, and make run with the PyTorch of the cluster, or TORCH_INDEX of a build for this GPU"
        yield Finding("torch", FAIL, f"{text}, but there is {', '.join(map(str, here.values()))}", remedy)
    else:
        yield Finding("torch", OK, text)


def drivers():
    """Return {build of PyTorch: device file} of the vendors whose GPU driver is loaded."""
    return {build: DEVICES / name for build, name in DEVICE_FILES.items() if (DEVICES / name).exists()}


def probe_triton(machine):
    """Whether the folder triton belongs to one distribution, the one that torch asks for."""
    found = machine.packages[0]
    if found is None:
        return
    owners, version = found["owners"], found["triton"]
    owned = ", ".join(f"{name} {owner}" for name, owner in sorted(owners.items()))
    name, needed = found["requirement"] or (None, None)
    if len(owners) > 1:
        keep = name or "the one that torch needs"
        drop = " ".join(sorted(owner for owner in owners if owner != keep))
        remedy = f"pip uninstall {drop}; then pip install --force-reinstall --no-deps {keep}"
        yield Finding("triton", FAIL, f"{version} belongs to {len(owners)} distributions: {owned}", remedy)
    elif not version and machine.torch:
        remedy = "without it the model runs on plain PyTorch; torch's own index has the one that fits"
        yield Finding("triton", WARN, f"cannot be imported: {found['triton_error']}", remedy)
    elif version and not owners:
        yield Finding("triton", WARN, f"{version} belongs to no distribution", "fine if it was built from source")
    elif version:
        (owner,) = owners
        other = needed and owners[owner].split("+")[0] != needed.split("+")[0]
        if name and (owner != name or other):
            wanted = f"{name}=={needed}" if needed else name
            remedy = f"pip uninstall {owner}; then pip install --no-deps {wanted}"
            yield Finding("triton", WARN, f"{owned}, but torch {machine.torch} asks for {wanted}", remedy)
        else:
            yield Finding("triton", OK, f"{version}, owned by {owned} alone")


def probe_gpu(machine):
    if not machine.torch:
        return
    if machine.platform not in DEVICE_FILES:
        yield Finding("gpu", WARN, "this PyTorch uses none", "exercises and tests run without one; times need a GPU")
        return
    gpus, problem = machine.gpus
    hidden = [name for name in VISIBILITY if os.environ.get(name) == ""]
    if gpus is None:
        remedy = "see the driver's log (dmesg), or ask the site"
        yield Finding("gpu", FAIL, f"PyTorch could not look for it: {problem}", remedy)
    elif not gpus and hidden:
        yield Finding("gpu", FAIL, f"{hidden[0]}='' hides all", f"unset {hidden[0]}")
    elif not gpus and machine.platform in drivers():
        shown = "".join(f" ({name}={os.environ[name]})" for name in VISIBILITY if os.environ.get(name))
        remedy = "see access below; on a cluster ask for a GPU: srun --gpus=1"
        text = f"PyTorch sees none, though there is {drivers()[machine.platform]}{shown}"
        yield Finding("gpu", FAIL, text, remedy)
    elif not gpus:
        remedy = "on a cluster start a job with a GPU; in a container pass the devices"
        yield Finding("gpu", WARN, "PyTorch sees none, and there is no device file of one", remedy)
    for index, gpu in enumerate(gpus or ()):
        yield describe_gpu(index, gpu)


def describe_gpu(index, gpu):
    gib = 2**30
    text = f"{index}: {gpu['name']}, {gpu['arch']}, {gpu['free'] / gib:.0f} of {gpu['total'] / gib:.0f} GiB free"
    known = TESTED_ARCHITECTURES.get(gpu["arch"])
    if not known:
        return Finding("gpu", WARN, f"{text}; nothing is known of it", "run: python tiny_llama_v3.py --check")
    if gpu["free"] < 0.5 * gpu["total"]:
        return Finding("gpu", WARN, f"{text}: someone else uses it", "times will differ; choose another GPU")
    return Finding("gpu", OK, f"{text} ({known})")


def probe_access(machine):
    """Whether the user may open the device files of an AMD GPU."""
    kfd = DEVICES / "kfd"
    if not kfd.exists():
        if machine.platform == "rocm":
            remedy = "load the amdgpu driver; in a container: --device=/dev/kfd --device=/dev/dri; on a cluster: a job"
            yield Finding("access", FAIL, f"PyTorch is for ROCm, and {kfd} is not there", remedy)
        return
    files = [kfd, *sorted((DEVICES / "dri").glob("renderD*"))]
    closed = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        groups = ",".join(sorted({rocm.group_of(file) for file in closed}))
        remedy = f"sudo usermod -aG {groups} $USER, and log in anew; in a container: --group-add"
        text = f"no right to read and write {', '.join(map(str, closed))} of group {groups}"
        yield Finding("access", FAIL, text, remedy)
    elif len(files) == 1:
        remedy = "in a container: --device=/dev/dri"
        yield Finding("access", FAIL, f"{kfd} is there, and no {DEVICES / 'dri'}/renderD*", remedy)
    else:
        yield Finding("access", OK, f"{', '.join(map(str, files))} can be read and written")


def probe_profilers(machine):
    """Those of this PyTorch's vendor, as the profiling scripts would take them."""
    if machine.platform not in PROFILERS:
        yield Finding("profilers", OK, "none is needed without a GPU: --profile DIR uses PyTorch's")
    for name, purpose in PROFILERS.get(machine.platform, {}).items():
        tool = rocm.find(name) if machine.platform == "rocm" else None
        path = tool.path if tool and tool.is_installed else shutil.which(name)
        if path:
            yield describe_profiler(machine, name, path, tool)
        else:
            remedy = f"{purpose}; until then --profile DIR uses PyTorch's profiler"
            yield Finding("profilers", WARN, f"{name} is not installed, or its module not loaded", remedy)


def describe_profiler(machine, name, path, tool):
    status, output = answer_of((path, "--version"), machine.seconds)
    if status is None:
        return Finding("profilers", WARN, f"{name}: {path}: {output}", "try by hand whether it starts at all")
    versions = [line.strip() for line in output.splitlines() if re.search(r"\d+\.\d+", line)]
    # rocprofv3 has no --version before ROCm 7.
    version = versions[0][:80] if status == 0 and versions else "it does not say its version"
    text = f"{name}: {path}, {version}" + (f", ROCm {rocm.dotted(tool.release)}, {tool.why}" if tool else "")
    # Up to 3.5, rocprof-compute also says the second of packages that are missing.
    missing = re.findall(r"'(\S+)' (?:package was not found|distribution does not meet version)", output)
    if missing:
        text = f"{name}: {path} lacks Python packages, or has them in other versions: {', '.join(missing)}"
        needed = (re.findall(r"See: (\S+)", output) or ["its requirements.txt"])[0]
        return Finding("profilers", WARN, text, f"make a venv of its own, pip install -r {needed}, and put it on PATH")
    if tool and tool.release < rocm.OLDEST:
        remedy = f"it lacks options that the profiling scripts use: load ROCm {rocm.dotted(rocm.OLDEST)} or newer"
        return Finding("profilers", WARN, text, remedy)
    return Finding("profilers", OK, text)


def probe_rocm(machine):
    """Whether rocprofv3 belongs to the ROCm of torch: another one records nothing, crashes or hangs."""
    tool, built_for = rocm.find("rocprofv3"), machine.release
    if machine.platform != "rocm" or not tool.is_installed:
        return
    release = rocm.dotted(tool.release)
    text = f"torch is for ROCm {built_for}, rocprofv3 is of ROCm {release}"
    taken = os.path.realpath(tool.path)
    rest = {os.path.realpath(other.path): rocm.dotted(other.release) for other in rocm.installed("rocprofv3")}
    also = sorted(f"{release} ({path})" for path, release in rest.items() if path != taken)
    text += f"; there is also {', '.join(also)}" if also else ""
    if release == built_for:
        yield Finding("rocm", OK, text)
        return
    remedy = f"load ROCm {built_for}, or a PyTorch for ROCm {release}, or use a container, where both fit"
    yield Finding("rocm", WARN, f"{text}: it may record nothing, crash or hang", remedy)


def probe_kernel(machine):
    """Compares a kernel of the project with PyTorch in fp64, without a GPU in Triton's interpreter."""
    if not machine.torch or not machine.packages[0]["triton"]:
        return
    gpus, problem = machine.gpus
    if gpus is None:
        yield Finding("kernel", FAIL, f"RMSNorm was not run: {problem}", "see gpu above")
        return
    result, problem = machine.ask(KERNEL, TRITON_INTERPRET="0" if gpus else "1")
    if result is None:
        remedy = "see the whole message: python tiny_llama_v3.py --check --num-steps 1"
        yield Finding("kernel", FAIL, f"RMSNorm did not run: {problem}", remedy)
    elif not result["error"] < 1e-5:
        remedy = "do not trust this combination of driver, torch and triton; try the one that torch was built for"
        yield Finding("kernel", FAIL, f"RMSNorm is wrong by {result['error']:.1e}, allowed 1.0e-05", remedy)
    else:
        where = "on the GPU" if gpus else "in Triton's interpreter, as there is no GPU"
        text = f"RMSNorm ran {where}: error {result['error']:.1e}, first run {result['seconds']:.1f} s"
        yield Finding("kernel", OK, text)


PROBES = probe_torch, probe_triton, probe_gpu, probe_access, probe_profilers, probe_rocm, probe_kernel


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def findings(seconds):
    """Yield what is found, one after the other. A probe that crashes is a finding too."""
    where = "{}.{}.{}, {}".format(*sys.version_info[:3], sys.executable)
    if sys.version_info < (3, 10):  # noqa: UP036  (whoever asks may have one)
        remedy = "use Python 3.10 or newer: make run PYTHON=/path/to/python"
        yield Finding("python", FAIL, f"{where} is too old", remedy)
        return
    yield Finding("python", OK, where)
    machine = Machine(seconds)
    for probe in PROBES:
        try:
            yield from probe(machine)
        except Exception as error:
            name, text = probe.__name__.replace("probe_", ""), f"{type(error).__name__}: {error}"
            yield Finding(name, FAIL, f"this probe failed: {text}", "report it")


def parse(argv):
    parser = Parser("doctor.sh", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--time-limit", type=float, default=60, metavar="SECONDS", help="of a question (default: 60)")
    options = parser.parse_args(argv)
    if not 0 < options.time_limit < float("inf"):
        parser.error(f"--time-limit {options.time_limit:g} is not a time: give a number of seconds")
    return options


@program("doctor.sh")
def main(argv):
    options = parse(argv)
    found = []
    for finding in findings(options.time_limit):
        found.append(finding)
        if not options.json:
            print(f"{finding.level:5} {finding.probe:10} {finding.text}", flush=True)
            if finding.remedy:
                print(f"{'':17}{finding.remedy}", flush=True)
    counts = {level: sum(finding.level == level for finding in found) for level in (OK, WARN, FAIL)}
    if options.json:
        print(json.dumps({"findings": [finding._asdict() for finding in found], "counts": counts}, indent=1))
    else:
        print(f"\n{counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL")
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    sys.exit(main())
