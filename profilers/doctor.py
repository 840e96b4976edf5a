"""Report what prevents the project from running well on this machine, and the remedies.

    profilers/doctor.sh             a line for each finding, OK, WARN or FAIL, with its remedy below
    profilers/doctor.sh --json      the findings as JSON

It needs only Python. Each probe is stopped at the time limit. A missing tool is a finding, not an error.

Exit codes: 0 nothing failed, 1 something did, 2 the request cannot be met, 130 interrupted.
"""

# This module also runs on an old Python, to report that it is too old.
import collections
import functools
import grp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

if not __package__:
    print("run it from the root as python -m profilers.doctor", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, program

ROOT = Path(__file__).resolve().parent.parent
DEVICES = Path("/dev")
VISIBILITY = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
TESTED_TORCH = (2, 7), (2, 13)
TESTED_NUMPY = (1, 26), (2, 5)
COMPILED = "every kernel compiles for it, none was run on it"
TESTED_ARCHITECTURES = dict.fromkeys(("sm_80", "gfx90a", "gfx942", "gfx950"), COMPILED)
TESTED_ARCHITECTURES["sm_90"] = "tested"
OK, WARN, FAIL = "OK", "WARN", "FAIL"


class Finding(NamedTuple):
    probe: str
    level: str
    text: str
    remedy: str = ""


# A profiler of ROCm, its release, (7, 1), and why it is the one that the profiling scripts take.
Tool = collections.namedtuple("Tool", "path release why")


@functools.lru_cache(maxsize=100)
def answer_of(command, seconds, **variables):
    """(exit status, output) of a command; (None, reason) if it cannot be started or takes too long. It runs once."""
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


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1].strip()[:200] if lines else "no output"


def version_tuple(text):
    """Returns the first two numbers of a version: 6.4.43482-0f2d60242 -> (6, 4)."""
    numbers = re.findall(r"\d+", text or "")
    return tuple(int(number) for number in numbers[:2])


def dotted(version):
    """(6, 4) -> 6.4"""
    return ".".join(map(str, version))


# ----------------------------------------------------------------------------------------------------------------------
# Programs for a second Python, which look at the packages and the GPU: importing torch may take long or crash.

PACKAGES = """
import importlib.metadata as metadata, importlib.util, json, os, re
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
for name in ("numpy", "triton", "torch"):
    try:
        module = __import__(name)
        found[name] = module.__version__
    except Exception as error:
        found[name] = None
        found[name + "_error"] = "%s: %s" % (type(error).__name__, error)
wheels = importlib.util.find_spec("_rocm_sdk_core")  # of PyTorch for ROCm 7.13 and newer
found["wheels"] = wheels and os.path.dirname(list(wheels.submodule_search_locations)[0])
if found["torch"]:
    found.update(hip=module.version.hip, cuda=module.version.cuda, torch_file=module.__file__)
    found["rocm"] = getattr(module.version, "rocm", None) or found["hip"]  # HIP 7.15 is that of ROCm 10.0
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


# What the profiling scripts would choose, and where else a release of ROCm has profilers.
ROCM_TOOLS = r"""
source "$1"
row() { printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$(rocm_release "$2")" "$3"; }
for tool in rocprofv3 rocprof-compute rocprof-sys-sample; do
    find_rocm_tool "$tool"
    [[ $FOUND != */* ]] || row "$tool" "$FOUND" "$WHY"
    [[ $tool != rocprofv3 ]] || taken=$FOUND
done
while read -r folder; do
    path=$(readlink -f "$folder")/rocprofv3
    [[ ! -x $path || $path -ef $taken ]] || row other "$path" -
done < <(rocm_folders)
"""


class Machine:
    """The answers about this machine that probes share."""

    def __init__(self, seconds):
        self.seconds = seconds

    def ask(self, program, **variables):
        """(the JSON that the program printed, None), or (None, the reason why there is none)."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        status, output = answer_of((sys.executable, "-c", program), self.seconds, PYTHONPATH=path, **variables)
        if status != 0:
            return None, output if status is None else f"exit status {status}: {last_line(output)}"
        answers = [line for line in output.splitlines() if line.startswith(("{", "["))]  # warnings may follow it
        return (json.loads(answers[-1]), None) if answers else (None, last_line(output))

    packages = property(lambda self: self.ask(PACKAGES))
    gpus = property(lambda self: self.ask(GPUS))

    @property
    def torch(self):
        """The packages if torch is among them, otherwise {}."""
        found = self.packages[0] or {}
        return found if found.get("torch") else {}

    @property
    def rocm(self):
        """({tool: Tool} that the scripts take, [Tool] that they do not, the reason if none could be looked for)."""
        script = "bash", "-c", ROCM_TOOLS, "doctor.sh", str(ROOT / "profilers" / "common.sh")
        build = f"rocm {dotted(version_tuple(self.torch['rocm']))}" if self.torch.get("hip") else ""
        variables = {"TORCH_BUILD": build, "WHEELS": self.torch.get("wheels") or "", "TOOL_PATH": ""}
        status, output = answer_of(script, self.seconds, **variables)
        if status != 0:
            return {}, [], last_line(output)
        rows = [line.split("\t") for line in output.splitlines() if line.count("\t") == 3]
        tools = [(name, Tool(path, divmod(int(release), 100), why)) for name, path, release, why in rows]
        return dict(tools), [tool for name, tool in tools if name == "other"], None


# ----------------------------------------------------------------------------------------------------------------------
# Probes. Each takes the Machine and yields findings. A probe skips what another one reports as missing.


def probe_python(machine):
    version = "{}.{}.{}".format(*sys.version_info)
    where = f"{version}, {sys.executable}"
    if sys.version_info < (3, 10):  # noqa: UP036  (whoever asks may have one)
        remedy = "use Python 3.10 or newer: make run PYTHON=/path/to/python"
        yield Finding("python", FAIL, f"{where} is too old", remedy)
    else:
        yield Finding("python", OK, where)


INSTALL = "make run installs it; on a cluster load its PyTorch module first, and make keeps that one"


DEVICE_FILES = {"hip": "kfd", "cuda": "nvidiactl"}  # {build of PyTorch: device file of the GPUs that it uses}
VENDOR_NAMES = {"hip": "ROCm", "cuda": "CUDA"}


def build_of(torch):
    """The key of DEVICE_FILES for which a PyTorch is built, or None."""
    return next((build for build in DEVICE_FILES if torch.get(build)), None)


def hardware():
    """{build of PyTorch: device file} of the vendors whose GPU driver is loaded."""
    return {build: DEVICES / name for build, name in DEVICE_FILES.items() if (DEVICES / name).exists()}


def probe_torch(machine):
    found, problem = machine.packages
    if found is None:
        yield Finding("torch", FAIL, f"Python could not look for it: {problem}", "try: python -c 'import torch'")
        return
    if not found["torch"]:
        yield Finding("torch", FAIL, f"cannot be imported: {found['torch_error']}", INSTALL)
        return
    build, here = build_of(found), hardware()
    text = f"{found['torch']} for " + (f"{VENDOR_NAMES[build]} {found[build]}" if build else "CPUs only")
    lowest, highest = TESTED_TORCH
    if not lowest <= version_tuple(found["torch"]) <= highest:
        tested = f"{dotted(lowest)} to {dotted(highest)}"
        yield Finding("torch", WARN, f"{text}; tested with {tested}", "if something fails, try one of those")
    elif here and build not in here:
        remedy = "remove .venv, and make run with the PyTorch of the cluster, or TORCH_INDEX of a build for this GPU"
        yield Finding("torch", FAIL, f"{text}, but there is {', '.join(map(str, here.values()))}", remedy)
    else:
        yield Finding("torch", OK, text)


def probe_triton(machine):
    found = machine.packages[0]
    if found is None:
        return
    owners, version = found["owners"], found["triton"]
    owned = ", ".join(f"{name} {owner}" for name, owner in sorted(owners.items()))
    if len(owners) > 1:
        keep = (found["requirement"] or ["the one that torch needs"])[0]
        drop = " ".join(sorted(name for name in owners if name != keep))
        remedy = f"pip uninstall {drop}; then pip install --force-reinstall --no-deps {keep}"
        yield Finding("triton", FAIL, f"{version} belongs to {len(owners)} distributions: {owned}", remedy)
    elif not version and found["torch"]:
        remedy = "without it the model runs on plain PyTorch; torch's own index has the one that fits"
        yield Finding("triton", WARN, f"cannot be imported: {found['triton_error']}", remedy)
    elif version and not owners:
        yield Finding("triton", WARN, f"{version} belongs to no distribution", "fine if it was built from source")
    elif version:
        name, needed = found["requirement"] or (None, None)
        (owner,) = owners
        wrong = name and (owner != name or needed and owners[owner].split("+")[0] != needed.split("+")[0])
        if wrong:
            wanted = f"{name} {needed or ''}".strip()
            remedy = f"pip uninstall {owner}; then pip install --no-deps {name}{'==' + needed if needed else ''}"
            yield Finding("triton", WARN, f"{owned}, but torch {found['torch']} asks for {wanted}", remedy)
        else:
            yield Finding("triton", OK, f"{version}, owned by {owned} alone")


def probe_numpy(machine):
    found = machine.packages[0]
    if found is None:
        return
    lowest, highest = TESTED_NUMPY
    if not found["numpy"]:
        yield Finding("numpy", FAIL, f"cannot be imported: {found['numpy_error']}", INSTALL)
    elif not lowest <= version_tuple(found["numpy"]) <= highest:
        remedy = f"if something fails: pip install 'numpy>={dotted(lowest)},<{highest[0]}.{highest[1] + 1}'"
        yield Finding("numpy", WARN, f"{found['numpy']}; tested with {dotted(lowest)} to {dotted(highest)}", remedy)
    elif found["triton"] and version_tuple(found["triton"]) <= (3, 6) and version_tuple(found["numpy"]) >= (2, 4):
        text = f"{found['numpy']}: the interpreter of Triton {found['triton']} fails with it"
        yield Finding("numpy", WARN, text, "pip install 'numpy<2.4', or Triton 3.7 or newer; a GPU does without it")
    else:
        yield Finding("numpy", OK, found["numpy"])


def probe_gpu(machine):
    hidden = [f"{name}=''" for name in VISIBILITY if os.environ.get(name) == ""]
    shown = ", ".join(f"{name}={os.environ[name]}" for name in VISIBILITY if os.environ.get(name))
    if not machine.torch:
        return
    build = build_of(machine.torch)
    if not build:
        yield Finding("gpu", WARN, "this PyTorch uses none", "exercises and tests run without one; times need a GPU")
        return
    gpus, problem = machine.gpus
    if gpus is None:
        remedy = "see the driver's log (dmesg), or ask the site"
        yield Finding("gpu", FAIL, f"PyTorch could not look for it: {problem}", remedy)
    elif not gpus and hidden:
        yield Finding("gpu", FAIL, f"{', '.join(hidden)} hides all", f"unset {hidden[0].split('=')[0]}")
    elif not gpus and build in hardware():
        remedy = "see access below; on a cluster ask for a GPU: srun --gpus=1"
        text = f"PyTorch sees none, though there is {hardware()[build]}" + (f" ({shown})" if shown else "")
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
        if machine.torch.get("hip"):
            remedy = "load the amdgpu driver; in a container: --device=/dev/kfd --device=/dev/dri; on a cluster: a job"
            yield Finding("access", FAIL, f"PyTorch is for ROCm, and {kfd} is not there", remedy)
        return
    files = [kfd, *sorted((DEVICES / "dri").glob("renderD*"))]
    closed = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        groups = " ".join(sorted({group_name(file.stat().st_gid) for file in closed}))
        mine = " ".join(sorted(group_name(gid) for gid in os.getgroups())) or "none"
        remedy = f"sudo usermod -aG {groups.replace(' ', ',')} $USER, and log in anew; in a container: --group-add"
        text = f"no right to read and write {', '.join(map(str, closed))} of group {groups} (yours: {mine})"
        yield Finding("access", FAIL, text, remedy)
    elif len(files) == 1:
        remedy = "in a container: --device=/dev/dri"
        yield Finding("access", FAIL, f"{kfd} is there, and no {DEVICES / 'dri'}/renderD*", remedy)
    else:
        yield Finding("access", OK, f"{', '.join(map(str, files))} can be read and written")


def group_name(gid):
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:  # a group of the host that the container does not know
        return str(gid)


OLDEST_ROCM = (6, 3)  # the oldest whose profilers have all options that the scripts use
AMD_PROFILERS = {
    "rocprofv3": "traces and counters: part of ROCm 6.3 and newer (package rocprofiler-sdk)",
    "rocprof-compute": "analysis of one kernel: part of ROCm 6.3 and newer (package rocprofiler-compute)",
    "rocprof-sys-sample": "traces with the host: part of ROCm 6.3 and newer (package rocprofiler-systems)",
}
NVIDIA_PROFILERS = {
    "nsys": "traces: NVIDIA Nsight Systems",
    "ncu": "analysis of one kernel: NVIDIA Nsight Compute, part of the CUDA toolkit",
}


def probe_profilers(machine):
    wanted = {"hip": AMD_PROFILERS, "cuda": NVIDIA_PROFILERS}.get(build_of(machine.torch), {})
    tools, _, problem = machine.rocm
    if problem:
        yield Finding("profilers", WARN, f"those of ROCm cannot be looked for: {problem}", "try a longer --time-limit")
    for name in [*AMD_PROFILERS, *NVIDIA_PROFILERS]:
        path = tools[name].path if name in tools else name in NVIDIA_PROFILERS and shutil.which(name)
        if path:
            yield describe_profiler(machine, name, path, tools.get(name))
        elif name in wanted and not problem:
            remedy = f"{wanted[name]}; until then --profile DIR uses PyTorch's profiler"
            yield Finding("profilers", WARN, f"{name} is not installed, or its module not loaded", remedy)
    if not wanted:
        yield Finding("profilers", OK, "none is needed without a GPU: --profile DIR uses PyTorch's")


def describe_profiler(machine, name, path, tool):
    status, output = answer_of((path, "--version"), machine.seconds)
    if status is None:
        return Finding("profilers", WARN, f"{name}: {path}: {output}", "try by hand whether it starts at all")
    versions = [line.strip() for line in output.splitlines() if re.search(r"\d+\.\d+", line)]
    # rocprofv3 has no --version before ROCm 7.
    version = versions[0][:80] if status == 0 and versions else "it does not say its version"
    text = f"{name}: {path}, {version}" + (f", ROCm {dotted(tool.release)}, {tool.why}" if tool else "")
    # Up to 3.5, rocprof-compute also says the second of packages that are missing.
    missing = re.findall(r"'(\S+)' (?:package was not found|distribution does not meet version)", output)
    if missing:
        text = f"{name}: {path} lacks Python packages, or has them in other versions: {', '.join(missing)}"
        needed = (re.findall(r"See: (\S+)", output) or ["its requirements.txt"])[0]
        return Finding("profilers", WARN, text, f"make a venv of its own, pip install -r {needed}, and put it on PATH")
    if tool and tool.release < OLDEST_ROCM:
        remedy = f"it lacks options that the profiling scripts use: load ROCm {dotted(OLDEST_ROCM)} or newer"
        return Finding("profilers", WARN, text, remedy)
    return Finding("profilers", OK, text)


def probe_rocm(machine):
    """Whether rocprofv3 belongs to the ROCm of torch: another one records nothing, crashes or hangs."""
    tools, others, _ = machine.rocm
    tool = tools.get("rocprofv3")
    if not tool or not machine.torch.get("hip"):
        return
    built_for, release = dotted(version_tuple(machine.torch["rocm"])), dotted(tool.release)
    libraries = Path(machine.torch["torch_file"]).parent / "lib"
    own = machine.torch.get("wheels") or any(libraries.glob("libamdhip64.so*"))
    text = f"torch is for ROCm {built_for}{' and brings its own libraries' if own else ''}"
    text += f", rocprofv3 is of ROCm {release}"
    also = {f"{dotted(tool.release)} ({tool.path})" for tool in others}
    text += f"; there is also {', '.join(sorted(also))}" if also else ""
    modules = [name for name in os.environ.get("LOADEDMODULES", "").split(":") if "rocm" in name.lower()]
    text += f"; loaded: {', '.join(modules)}" if modules else ""
    if release != built_for:
        remedy = f"load ROCm {built_for}, or a PyTorch for ROCm {release}, or use a container, where both fit"
        yield Finding("rocm", WARN, f"{text}: it may record nothing, crash or hang", remedy)
    else:
        yield Finding("rocm", OK, text)
    root = os.environ.get("ROCM_PATH")
    if root and not os.path.exists(os.path.join(root, "bin", "rocprofv3")):
        yield Finding("rocm", WARN, f"ROCM_PATH={root} has no rocprofv3", "load a module of ROCm, or unset ROCM_PATH")
    if tool.release == (7, 13) and sys.version_info >= (3, 14):
        text = "the trace tools of ROCm 7.13 need Python 3.13 or older, this is {}.{}".format(*sys.version_info)
        yield Finding("rocm", WARN, text, "make run PYTHON=python3.13, or another release of ROCm")


LACKING = (  # (architectures, the last release that lacks them or None, counters that get_counters.sh asks for)
    (("gfx950",), (6, 4), "all counters"),
    (("gfx1151",), (7, 1), "all counters"),
    (("gfx1200", "gfx1201"), (7, 1), "WRITE_SIZE and OccupancyPercent"),
    (("gfx908",), None, "MeanOccupancyPerCU, MfmaUtil and MfmaFlops"),
)


def probe_counters(machine):
    tool = machine.rocm[0].get("rocprofv3")
    present = {gpu["arch"] for gpu in machine.gpus[0] or ()}
    for archs, last, counters in LACKING if tool else ():
        for arch in sorted(present.intersection(archs)):
            if last is None or tool.release <= last:
                remedy = f"load a ROCm newer than {dotted(last)}" if last else "no release has them; others are counted"
                yield Finding("counters", WARN, f"ROCm {dotted(tool.release)} lacks {counters} of {arch}", remedy)


def probe_disk(machine):
    cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    places = (
        ("the project", ROOT, "make room there, or clone it elsewhere"),
        ("Triton's cache", cache, "set TRITON_CACHE_DIR to a folder elsewhere"),
        ("temporary files", tempfile.gettempdir(), "set TMPDIR to a folder elsewhere"),
    )
    for name, place, remedy in places:
        place = Path(place)
        while not place.exists():  # it would be created
            place = place.parent
        free = shutil.disk_usage(str(place)).free / 2**30
        text = f"{name}: {free:.1f} GiB free in {place}"
        if not os.access(str(place), os.W_OK):
            yield Finding("disk", FAIL, f"{name}: {place} cannot be written", remedy)
        elif free < 0.5:
            yield Finding("disk", FAIL, text, remedy)
        elif free < 5:
            yield Finding("disk", WARN, f"{text}; installing PyTorch takes about 5", remedy)
        else:
            yield Finding("disk", OK, text)


def probe_kernel(machine):
    """Compares a kernel of the project with PyTorch in fp64, without a GPU in Triton's interpreter."""
    if not machine.torch or not machine.torch["triton"]:
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


PROBES = (
    probe_python,
    probe_torch,
    probe_triton,
    probe_numpy,
    probe_gpu,
    probe_access,
    probe_profilers,
    probe_rocm,
    probe_counters,
    probe_disk,
    probe_kernel,
)

# ----------------------------------------------------------------------------------------------------------------------
# Command line


MOST_QUESTIONS = 6  # of one probe, which asks for the versions of the profilers


def findings_of(probe, machine):
    """Returns the findings of a probe. A crash and a timeout are findings too."""
    name, findings = probe.__name__.replace("probe_", ""), []

    def look():
        try:
            findings.extend(probe(machine))
        except Exception as error:
            findings.append(Finding(name, FAIL, f"this probe failed: {type(error).__name__}: {error}", "report it"))

    thread = threading.Thread(target=look, daemon=True)  # a thread, as a file system may hang
    thread.start()
    limit = MOST_QUESTIONS * machine.seconds
    thread.join(limit)
    if thread.is_alive():
        remedy = "a file system or a driver does not answer; ask the site"
        return [*findings, Finding(name, FAIL, f"no end after {limit:g} seconds", remedy)]
    return findings


def show(finding):
    print(f"{finding.level:5} {finding.probe:10} {finding.text}")
    if finding.remedy:
        print(f"{'':17}{finding.remedy}")


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
    machine = Machine(options.time_limit)
    findings = []
    for probe in PROBES:
        for finding in findings_of(probe, machine):
            findings.append(finding)
            if not options.json:
                show(finding)
                sys.stdout.flush()
    counts = {level: sum(finding.level == level for finding in findings) for level in (OK, WARN, FAIL)}
    if options.json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings], "counts": counts}, indent=1))
    else:
        print(f"\n{counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL")
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    sys.exit(main())
