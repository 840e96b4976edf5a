"""The doctor finds what it should, with fakes of each tool, device file and package, and never hangs."""

import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from profilers import doctor

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "profilers" / "doctor.sh"


class Machine:
    """Answers as given, instead of asking a second Python."""

    rocm = doctor.Machine.rocm

    def __init__(self, kernel=None, gpus=(), problem=None, **packages):
        known = dict(torch="2.9.0", triton="3.5.0", numpy="2.1.0", hip=None, cuda=None, owners={"triton": "3.5.0"})
        known |= dict(torch_file="/no/torch/__init__.py", requirement=("triton", "3.5.0")) | packages
        known.setdefault("rocm", known["hip"])
        self.packages = (known, None) if known["torch"] != "hangs" else (None, problem)
        self.torch = known if known["torch"] not in (None, "hangs") else {}
        self.gpus = (None, problem) if problem else (list(gpus), None)
        self.kernel = kernel
        self.seconds = 5
        self.asked = []

    def ask(self, program, **variables):
        self.asked.append(variables)
        return (self.kernel, None) if self.kernel else (None, "exit status 1: boom")


ROCM = dict(hip="6.4.43482-0f2d60242", owners={"pytorch-triton-rocm": "3.3.1"}, triton="3.3.1")
ROCM |= dict(requirement=("pytorch-triton-rocm", "3.3.1"), torch="2.7.1+rocm6.4")
GPU = dict(name="AMD Instinct MI300X", arch="gfx942", free=180 * 2**30, total=192 * 2**30)


def diagnose(probe, machine):
    """(level, text, remedy) of the only finding of a probe."""
    (finding,) = getattr(doctor, f"probe_{probe}")(machine)
    assert finding.probe == probe and (finding.remedy or finding.level == "OK")  # what is not in order has a remedy
    return finding[1:]


@pytest.fixture(autouse=True)
def no_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "DEVICES", tmp_path / "dev")
    doctor.answer_of.cache_clear()
    for name in doctor.VISIBILITY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LOADEDMODULES", raising=False)
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    return tmp_path / "dev"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """make(name, script, release, folder): an executable; the PATH holds those of tmp_path/rocm, and the system's."""
    for name, value in dict(PATH=f"{tmp_path}/rocm/bin:/usr/bin:/bin", ROCM_PATH=tmp_path / "rocm").items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ROCM_PARENT", str(tmp_path / "opt"))

    def make(name, script, rocm=None, folder="rocm"):
        path = tmp_path / folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        if rocm:
            (path.parent.parent / ".info").mkdir(exist_ok=True)
            (path.parent.parent / ".info" / "version").write_text(f"{rocm}-47\n")
        return path

    return make


# --- packages


def test_torch_builds():
    assert diagnose("torch", Machine(**ROCM))[:2] == ("OK", "2.7.1+rocm6.4 for ROCm 6.4.43482-0f2d60242")
    assert diagnose("torch", Machine(cuda="13.0"))[:2] == ("OK", "2.9.0 for CUDA 13.0")
    assert diagnose("torch", Machine())[:2] == ("OK", "2.9.0 for CPUs only")


@pytest.mark.parametrize("version, level", [("2.6.0", "WARN"), ("2.7.0", "OK"), ("2.13.1", "OK"), ("2.14.0", "WARN")])
def test_torch_versions(version, level):
    assert diagnose("torch", Machine(torch=version))[0] == level


def test_missing_and_hanging_packages():
    level, text, remedy = diagnose("torch", Machine(torch=None, torch_error="ModuleNotFoundError: No module"))
    assert level == "FAIL" and "No module" in text and "make run" in remedy
    level, text, _ = diagnose("torch", Machine(torch="hangs", problem="no answer in 5 seconds"))
    assert level == "FAIL" and "no answer in 5 seconds" in text
    assert diagnose("numpy", Machine(numpy=None, numpy_error="ModuleNotFoundError: numpy"))[0] == "FAIL"


def test_one_owner_of_triton_and_two():
    assert diagnose("triton", Machine(**ROCM))[0] == "OK"
    assert diagnose("triton", Machine())[1] == "3.5.0, owned by triton 3.5.0 alone"
    owners = {"pytorch-triton-rocm": "3.3.1", "triton": "3.4.0"}
    level, text, remedy = diagnose("triton", Machine(**ROCM | dict(owners=owners)))
    assert level == "FAIL" and "pytorch-triton-rocm 3.3.1, triton 3.4.0" in text
    assert remedy == "pip uninstall triton; then pip install --force-reinstall --no-deps pytorch-triton-rocm"


@pytest.mark.parametrize("owners", [{"triton": "3.3.1"}, {"pytorch-triton-rocm": "3.2.0"}])
def test_triton_that_torch_does_not_ask_for(owners):
    level, text, remedy = diagnose("triton", Machine(**ROCM | dict(owners=owners)))
    assert level == "WARN" and "asks for pytorch-triton-rocm 3.3.1" in text and "pytorch-triton-rocm==3.3.1" in remedy


def test_triton_without_an_owner_and_without_triton():
    assert diagnose("triton", Machine(owners={}))[0] == "WARN"
    level, text, _ = diagnose("triton", Machine(triton=None, triton_error="ImportError: x", owners={}))
    assert level == "WARN" and "ImportError: x" in text


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.0", "3.10.0", None])
@pytest.mark.parametrize("version, level", [("1.25.0", "WARN"), ("1.26.0", "OK"), ("2.3.9", "OK"), ("2.6.0", "WARN")])
def test_numpy_versions(version, level, triton):
    assert diagnose("numpy", Machine(numpy=version, triton=triton))[0] == level


@pytest.mark.parametrize("triton, level", [("3.3.1", "WARN"), ("3.6.0", "WARN"), ("3.7.0", "OK"), (None, "OK")])
def test_numpy_that_old_triton_cannot_interpret_with(triton, level):
    found, text, remedy = diagnose("numpy", Machine(numpy="2.4.6", triton=triton))
    assert found == level and (level == "OK" or (triton in text and "numpy<2.4" in remedy))


# --- GPU


def test_gpu_is_described():
    level, text, _ = diagnose("gpu", Machine(gpus=[GPU], **ROCM))
    assert level == "OK" and "0: AMD Instinct MI300X, gfx942, 180 of 192 GiB free" in text and "none was run" in text
    assert "tested" in diagnose("gpu", Machine(cuda="13.0", gpus=[GPU | dict(arch="sm_90")]))[1]


def test_unknown_occupied_and_hanging_gpu():
    assert diagnose("gpu", Machine(gpus=[GPU | dict(arch="gfx1100")], **ROCM))[0] == "WARN"
    level, text, _ = diagnose("gpu", Machine(gpus=[GPU | dict(free=10 * 2**30)], **ROCM))
    assert level == "WARN" and "someone else" in text
    level, text, _ = diagnose("gpu", Machine(problem="no answer in 5 seconds", **ROCM))
    assert level == "FAIL" and "no answer in 5 seconds" in text


def test_no_gpu(no_devices):
    assert diagnose("gpu", Machine())[:2] == ("WARN", "this PyTorch uses none")
    assert diagnose("gpu", Machine(**ROCM))[0] == "WARN"
    (no_devices / "kfd").touch()
    assert diagnose("gpu", Machine(**ROCM))[0] == "FAIL"


def test_hidden_gpu(monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    level, text, remedy = diagnose("gpu", Machine(**ROCM))
    assert level == "FAIL" and "HIP_VISIBLE_DEVICES" in text and remedy == "unset HIP_VISIBLE_DEVICES"


@pytest.mark.parametrize("packages, built_for", [({}, "CPUs only"), ({"cuda": "12.8"}, "CUDA 12.8")])
def test_gpu_of_another_vendor_than_torch(no_devices, packages, built_for):
    (no_devices / "kfd").touch()
    level, text, remedy = diagnose("torch", Machine(**packages))
    assert level == "FAIL" and f"for {built_for}, but there is {no_devices}/kfd" in text and "TORCH_INDEX" in remedy


def test_graphics_of_the_processor_beside_a_card(no_devices):
    """An AMD processor may have a GPU of its own, which is not meant."""
    for name in ("kfd", "nvidiactl"):
        (no_devices / name).touch()
    machine = Machine(cuda="12.8", gpus=[GPU | {"arch": "sm_90"}])
    assert diagnose("torch", machine)[0] == diagnose("gpu", machine)[0] == "OK"


def test_access(no_devices, monkeypatch):
    assert not list(doctor.probe_access(Machine()))
    level, _, remedy = diagnose("access", Machine(**ROCM))
    assert level == "FAIL" and "--device=/dev/kfd" in remedy
    (no_devices / "kfd").touch()
    assert "renderD" in diagnose("access", Machine(**ROCM))[1]
    (no_devices / "dri" / "renderD128").touch()
    assert diagnose("access", Machine(**ROCM))[0] == "OK"
    monkeypatch.setattr(os, "access", lambda path, mode: "renderD" not in str(path))
    monkeypatch.setattr(doctor, "group_name", lambda gid: "render")
    level, text, remedy = diagnose("access", Machine(**ROCM))
    assert level == "FAIL" and "renderD128 of group render" in text and "usermod -aG render $USER" in remedy


# --- profilers


def found(machine):
    return {finding.text.split(":")[0].split(" is ")[0]: finding for finding in doctor.probe_profilers(machine)}


def test_missing_profilers(tools):
    assert {name: f.level for name, f in found(Machine(**ROCM)).items()} == dict.fromkeys(doctor.AMD_PROFILERS, "WARN")
    assert found(Machine(cuda="13.0")).keys() == doctor.NVIDIA_PROFILERS.keys()
    assert [f.level for f in doctor.probe_profilers(Machine())] == ["OK"]


def test_profilers_say_their_versions(tools):
    tools("rocprofv3", "echo usage: rocprofv3; exit 2", rocm="6.4.1")
    tools("rocprof-compute", "echo 'rocprofiler-compute version: 3.1.0 (release)'")
    tools("rocprof-sys-sample", "echo; echo 'rocprof-sys-sample v1.0.0'")
    findings = found(Machine(**ROCM))
    assert all(finding.level == "OK" for finding in findings.values())
    assert "does not say its version, ROCm 6.4, of the release of this PyTorch" in findings["rocprofv3"].text
    assert "3.1.0" in findings["rocprof-compute"].text and "v1.0.0" in findings["rocprof-sys-sample"].text


@pytest.mark.parametrize("rocm, level", [("6.2.4", "WARN"), ("6.3.0", "OK"), ("10.0.0", "OK")])
def test_profiler_that_is_older_than_the_scripts(tools, rocm, level):
    tools("rocprofv3", "exit 2", rocm=rocm)
    finding = found(Machine(**ROCM))["rocprofv3"]
    assert finding.level == level and ("load ROCm 6.3 or newer" in finding.remedy) == (level == "WARN")


def test_packages_that_rocprof_compute_lacks(tools):
    """Up to 3.5 it takes a package that is missing for one of another version."""
    tools("rocprof-compute", """cat <<'END'
[ERROR] The 'astunparse==1.6.2' package was not found in the current execution environment.
[ERROR] the 'dash>=3.0.0' distribution does not meet version requirements to use rocprofiler-compute.
  --> version installed : 2.18
See: /opt/rocm/libexec/rocprofiler-compute/requirements.txt
END
exit 1""", rocm="7.2.0")  # fmt: skip
    finding = found(Machine(**ROCM))["rocprof-compute"]
    assert finding.level == "WARN" and finding.text.endswith("other versions: astunparse==1.6.2, dash>=3.0.0")
    assert "pip install -r /opt/rocm/libexec/rocprofiler-compute/requirements.txt" in finding.remedy


def test_tools_that_cannot_be_looked_for(tools):
    """The release is asked of a tool that does not answer."""
    tools("rocprofv3", "sleep 600")
    machine = Machine(**ROCM)
    machine.seconds = 0.5
    first, *others = doctor.probe_profilers(machine)
    assert first.level == "WARN" and "cannot be looked for: no answer in 0.5 seconds" in first.text and others == []


def lives(pid):
    """Whether a process runs. A zombie does not: only nobody has asked for its exit status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_profiler_that_hangs_is_killed_with_its_children(tools, tmp_path):
    tools("nsys", f"sleep 600 & echo $! >{tmp_path}/child; wait")
    machine = Machine(cuda="13.0")
    machine.seconds = 1
    assert "no answer in 1 seconds" in found(machine)["nsys"].text
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10  # the signal is sent, its death may follow; not killed, it sleeps for minutes
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(child)


def test_profiler_that_cannot_start(tools, tmp_path):
    tools("ncu", "")
    (tmp_path / "rocm" / "bin" / "ncu").write_text("#!/no/such/interpreter\n")
    assert found(Machine(cuda="13.0"))["ncu"].level == "WARN"


@pytest.mark.parametrize("rocm, level", [("6.4.1", "OK"), ("7.0.0", "WARN"), ("10.0.0", "WARN")])
def test_rocprofv3_belongs_to_the_rocm_of_torch(tools, rocm, level):
    tools("rocprofv3", "echo 1.0.0", rocm=rocm)
    found_level, text, _ = diagnose("rocm", Machine(**ROCM))
    assert found_level == level and f"torch is for ROCm 6.4, rocprofv3 is of ROCm {rocm[:-2]}" in text


@pytest.mark.parametrize("folder, rocm", [
    ("opt/rocm", "10.0.0"), ("opt/rocm/core", "7.13.0"), ("opt/rocm/core-10.0", "10.0.0"), ("opt/rocm-6.4.1", "6.4.1"),
    ("site/_rocm_sdk_core", "10.0.0"),
])  # fmt: skip
def test_every_layout_is_found(tools, tmp_path, monkeypatch, folder, rocm):
    path = tools("rocprofv3", "echo 1.0.0", rocm, folder)
    monkeypatch.delenv("ROCM_PATH")
    wheels = str(tmp_path / "site") if folder.startswith("site") else None
    machine = Machine(**ROCM | dict(hip=f"{rocm}-abc", wheels=wheels))
    level, text, _ = diagnose("rocm", machine)
    assert level == "OK" and f"rocprofv3 is of ROCm {rocm[:-2]}" in text and ("its own" in text) == bool(wheels)
    assert str(path) in found(machine)["rocprofv3"].text


def test_the_other_releases_and_the_module_are_named(tools, monkeypatch):
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:rocm/6.4.1")
    paths = [tools("rocprofv3", "", rocm, folder) for rocm, folder in (
        ("7.0.0", "rocm"), ("6.4.1", "opt/rocm-6.4.1"), ("10.0.0", "opt/rocm/core-10.0"))]  # fmt: skip
    level, text, _ = diagnose("rocm", Machine(**ROCM))
    assert level == "OK" and text.endswith(
        f"6.4; there is also 10.0 ({paths[2]}), 7.0 ({paths[0]}); loaded: rocm/6.4.1"
    )


def test_rocm_path_without_profilers(tools, tmp_path, monkeypatch):
    tools("rocprofv3", "", rocm="6.4.1")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "no"))
    _, finding = doctor.probe_rocm(Machine(**ROCM))
    assert finding.level == "WARN" and f"ROCM_PATH={tmp_path}/no has no rocprofv3" in finding.text and finding.remedy


@pytest.mark.parametrize("rocm, python, fits", [
    ("7.13.0", (3, 14), False), ("7.13.0", (3, 13), True), ("7.2.0", (3, 14), True), ("10.0.0", (3, 14), True),
])  # fmt: skip
def test_python_that_is_too_new_for_the_tools(tools, monkeypatch, rocm, python, fits):
    tools("rocprofv3", "", rocm=rocm)
    monkeypatch.setattr(doctor.sys, "version_info", python)
    _, *others = doctor.probe_rocm(Machine(**ROCM | dict(hip=rocm)))
    assert ["need Python 3.13 or older, this is 3.14" in finding.text for finding in others] == [True] * (not fits)


@pytest.mark.parametrize("arch, rocm, lacking", [
    ("gfx942", "6.4.0", None), ("gfx950", "6.4.0", "all counters"), ("gfx950", "7.0.0", None),
    ("gfx1201", "7.1.0", "WRITE_SIZE"), ("gfx1201", "10.0.0", None), ("gfx908", "10.0.0", "MfmaUtil"),
])  # fmt: skip
def test_counters_that_a_release_lacks(tools, arch, rocm, lacking):
    tools("rocprofv3", "", rocm=rocm)
    findings = list(doctor.probe_counters(Machine(gpus=[GPU | dict(arch=arch)] * 2, **ROCM)))
    assert [(f.level, lacking in f.text, arch in f.text) for f in findings] == [("WARN", True, True)] * bool(lacking)


def test_rocm_is_not_asked_for_without_it(tools):
    assert list(doctor.probe_rocm(Machine(**ROCM))) == list(doctor.probe_counters(Machine(gpus=[GPU], **ROCM))) == []
    doctor.answer_of.cache_clear()
    tools("rocprofv3", "echo 1.0.0", rocm="6.4.1")
    assert not list(doctor.probe_rocm(Machine(cuda="13.0")))


# --- disk and kernel


@pytest.mark.parametrize("gib, level", [(100, "OK"), (3, "WARN"), (0.1, "FAIL")])
def test_free_disk(gib, level, monkeypatch):
    usage = type("Usage", (), {"free": gib * 2**30})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)
    assert {finding.level for finding in doctor.probe_disk(Machine())} == {level}


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made" / "later"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    (bad,) = [finding for finding in doctor.probe_disk(Machine()) if finding.level == "FAIL"]
    assert "Triton's cache" in bad.text and "TRITON_CACHE_DIR" in bad.remedy


def test_kernel_right_wrong_and_broken():
    right, wrong = dict(error=1e-7, seconds=2.0), dict(error=0.1, seconds=2.0)
    machine = Machine(kernel=right, gpus=[GPU], **ROCM)
    level, text, _ = diagnose("kernel", machine)
    assert level == "OK" and "on the GPU" in text and machine.asked == [{"TRITON_INTERPRET": "0"}]
    machine = Machine(kernel=right)
    assert "interpreter" in diagnose("kernel", machine)[1] and machine.asked == [{"TRITON_INTERPRET": "1"}]
    assert "wrong by 1.0e-01" in diagnose("kernel", Machine(kernel=wrong, gpus=[GPU], **ROCM))[1]
    assert diagnose("kernel", Machine(kernel=dict(error=float("nan"), seconds=1.0)))[0] == "FAIL"
    assert "boom" in diagnose("kernel", Machine(gpus=[GPU], **ROCM))[1]
    assert diagnose("kernel", Machine(problem="no answer", **ROCM))[0] == "FAIL"
    assert not list(doctor.probe_kernel(Machine(triton=None)))


# --- the command


def run_doctor(*arguments, python=sys.executable, **variables):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    env["PYTHON"] = str(python)
    return subprocess.run([DOCTOR, *arguments], env=env, capture_output=True, text=True, timeout=300)


def test_here_it_reports_every_probe(python):
    done = run_doctor("--json", python=python)
    result = json.loads(done.stdout)
    failed = [finding for finding in result["findings"] if finding["level"] == "FAIL"]
    assert done.returncode == (1 if failed else 0) and result["counts"]["FAIL"] == len(failed)
    assert {finding["probe"] for finding in result["findings"]} >= {"python", "torch", "numpy", "gpu", "disk"}


@pytest.fixture
def bare(tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


def test_bare_python(bare):
    done = run_doctor(python=bare)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "FAIL  torch      cannot be imported: ModuleNotFoundError" in done.stdout and "make run" in done.stdout


def distribution(folder, name, version, *files):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_owners_are_read_from_the_installation(bare, tmp_path):
    site = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    for name, version in (("triton", "3.4.0"), ("pytorch-triton-rocm", "3.3.1")):
        distribution(site, name, version, "triton/__init__.py")
    distribution(site, "torch", "2.7.1", "torch/__init__.py")
    with next(site.glob("torch-*")).joinpath("METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: pytorch-triton-rocm==3.3.1; platform_system == 'Linux'\n")
    torch = "from types import SimpleNamespace\n__version__ = '2.7.1'\nversion = SimpleNamespace(hip='6.4', cuda=None)"
    for name, source in (("triton", "__version__ = '3.4.0'"), ("torch", torch)):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(source)
    result = json.loads(run_doctor("--json", python=bare).stdout)
    (triton,) = [finding for finding in result["findings"] if finding["probe"] == "triton"]
    assert triton["level"] == "FAIL" and "pytorch-triton-rocm 3.3.1, triton 3.4.0" in triton["text"]
    assert "--no-deps pytorch-triton-rocm" in triton["remedy"]


def test_torch_that_hangs(bare, tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)")
    done = run_doctor("--time-limit", "1", python=bare, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "no answer in 1 seconds" in done.stdout


def test_probe_that_crashes_or_hangs_is_a_finding():
    def probe_crash(machine):
        yield doctor.Finding("crash", "OK", "first")
        raise PermissionError("no")

    def probe_hang(machine):
        doctor.threading.Event().wait(600)
        yield

    first, crashed = doctor.findings_of(probe_crash, Machine())
    assert first.level == "OK" and crashed.level == "FAIL" and "PermissionError: no" in crashed.text
    machine = Machine()
    machine.seconds = 0.05
    (hung,) = doctor.findings_of(probe_hang, machine)
    assert hung.level == "FAIL" and "no end after" in hung.text


def test_no_python_at_all():
    done = run_doctor("--json", python="/no/python")
    assert done.returncode == 1
    assert json.loads(done.stdout)["findings"][0]["level"] == "FAIL"
    assert run_doctor(python="/no/python").stdout.startswith("FAIL  python ")


@pytest.mark.parametrize("arguments", [["--time-limit", "0"], ["--time-limit", "soon"], ["--verbose"]])
def test_bad_usage_is_one_line(arguments):
    done = run_doctor(*arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout
