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
CPU = dict(torch="2.9.0", triton="3.5.0", owners={"triton": "3.5.0"}, requirement=("triton", "3.5.0"))
ROCM = dict(
    torch="2.7.1+rocm6.4", triton="3.3.1", owners={"pytorch-triton-rocm": "3.3.1"},
    requirement=("pytorch-triton-rocm", "3.3.1"),
)  # fmt: skip
GPU = dict(name="AMD Instinct MI300X", arch="gfx942", free=180 * 2**30, total=192 * 2**30)


@pytest.fixture(autouse=True)
def no_devices(tmp_path, monkeypatch):
    """No device files, no profilers but those that a test makes, and nothing is hidden."""
    monkeypatch.setattr(doctor, "DEVICES", tmp_path / "dev")
    for name in doctor.VISIBILITY:
        monkeypatch.delenv(name, raising=False)
    for name, value in dict(PATH=f"{tmp_path}/rocm/bin:/usr/bin:/bin", ROCM_PATH=tmp_path / "rocm").items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ROCM_PARENT", str(tmp_path / "opt"))
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    return tmp_path / "dev"


@pytest.fixture
def machine(monkeypatch):
    """machine(build, kernel, gpus, problem, **packages): one that answers so, instead of asking a second Python."""

    def make(build="cpu", kernel=None, gpus=(), problem=None, **packages):
        monkeypatch.setattr(doctor.rocm, "torch_build", lambda: build)
        found = (ROCM if build.startswith("rocm") else CPU) | packages
        answers = {doctor.PACKAGES: found, doctor.GPUS: None if problem else list(gpus), doctor.KERNEL: kernel}
        monkeypatch.setattr(
            doctor.Machine, "ask", lambda self, text, **_: (answers[text], problem or "exit status 1: boom")
        )
        return doctor.Machine(5)

    return make


@pytest.fixture
def tool(tmp_path):
    """tool(name, script, release, folder): an executable, by default on the PATH."""

    def make(name, script="", release=None, folder="rocm"):
        path = tmp_path / folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        if release:
            (path.parent.parent / ".info").mkdir(exist_ok=True)
            (path.parent.parent / ".info" / "version").write_text(f"{release}-47\n")
        return path

    return make


def diagnose(probe, machine):
    """(level, text, remedy) of the only finding of a probe."""
    (finding,) = getattr(doctor, f"probe_{probe}")(machine)
    assert finding.probe == probe and (finding.remedy or finding.level == "OK")  # what is not in order has a remedy
    return finding[1:]


# --- packages


@pytest.mark.parametrize("build, text", [
    ("rocm 6.4", "2.7.1+rocm6.4 for ROCm 6.4"), ("cuda 13.0", "2.9.0 for CUDA 13.0"), ("cpu", "2.9.0 for CPUs only"),
])  # fmt: skip
def test_torch_builds(machine, build, text):
    assert diagnose("torch", machine(build)) == ("OK", text, "")


@pytest.mark.parametrize("version, level", [("2.6.0", "WARN"), ("2.7.0", "OK"), ("2.13.1", "OK"), ("2.14.0", "WARN")])
def test_torch_versions(machine, version, level):
    assert diagnose("torch", machine(torch=version))[0] == level


def test_torch_that_is_missing(machine):
    level, text, remedy = diagnose("torch", machine("", torch=None, torch_error="ModuleNotFoundError: No module"))
    assert level == "FAIL" and "No module" in text and "make run" in remedy


@pytest.mark.parametrize("owners, level, told, remedy", [
    ({"pytorch-triton-rocm": "3.3.1"}, "OK", "owned by pytorch-triton-rocm 3.3.1 alone", ""),
    ({"pytorch-triton-rocm": "3.3.1", "triton": "3.4.0"}, "FAIL", "pytorch-triton-rocm 3.3.1, triton 3.4.0",
     "pip uninstall triton; then pip install --force-reinstall --no-deps pytorch-triton-rocm"),
    ({"triton": "3.3.1"}, "WARN", "asks for pytorch-triton-rocm==3.3.1",
     "pip uninstall triton; then pip install --no-deps pytorch-triton-rocm==3.3.1"),
    ({"pytorch-triton-rocm": "3.2.0"}, "WARN", "asks for pytorch-triton-rocm==3.3.1",
     "pip uninstall pytorch-triton-rocm; then pip install --no-deps pytorch-triton-rocm==3.3.1"),
    ({}, "WARN", "belongs to no distribution", "fine if it was built from source"),
])  # fmt: skip
def test_owners_of_triton(machine, owners, level, told, remedy):
    found, text, do = diagnose("triton", machine("rocm 6.4", owners=owners))
    assert found == level and told in text and do == remedy


def test_without_triton(machine):
    level, text, _ = diagnose("triton", machine(triton=None, triton_error="ImportError: x", owners={}))
    assert level == "WARN" and "ImportError: x" in text


# --- GPU


@pytest.mark.parametrize("build, changes, level, told", [
    ("rocm 6.4", {}, "OK", "0: AMD Instinct MI300X, gfx942, 180 of 192 GiB free (every kernel compiles for it, none"),
    ("cuda 13.0", {"arch": "sm_90"}, "OK", "(tested)"), ("rocm 6.4", {"arch": "gfx1100"}, "WARN", "nothing is known"),
    ("rocm 6.4", {"free": 95 * 2**30}, "WARN", "someone else"), ("rocm 6.4", {"free": 96 * 2**30}, "OK", "96 of 192"),
])  # fmt: skip
def test_gpu_is_described(machine, build, changes, level, told):
    found, text, _ = diagnose("gpu", machine(build, gpus=[GPU | changes]))
    assert found == level and told in text


def test_no_gpu(machine, no_devices, monkeypatch):
    assert diagnose("gpu", machine())[:2] == ("WARN", "this PyTorch uses none")
    assert diagnose("gpu", machine("rocm 6.4"))[0] == "WARN"
    level, text, _ = diagnose("gpu", machine("rocm 6.4", problem="no answer in 5 seconds"))
    assert level == "FAIL" and "no answer in 5 seconds" in text
    (no_devices / "kfd").touch()
    assert diagnose("gpu", machine("rocm 6.4"))[0] == "FAIL"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert diagnose("gpu", machine("rocm 6.4")) == ("FAIL", "HIP_VISIBLE_DEVICES='' hides all",
                                                    "unset HIP_VISIBLE_DEVICES")  # fmt: skip


@pytest.mark.parametrize("build, built_for", [("cpu", "CPUs only"), ("cuda 12.8", "CUDA 12.8")])
def test_gpu_of_another_vendor_than_torch(machine, no_devices, build, built_for):
    (no_devices / "kfd").touch()
    level, text, remedy = diagnose("torch", machine(build))
    assert level == "FAIL" and f"for {built_for}, but there is {no_devices}/kfd" in text and "TORCH_INDEX" in remedy
    (no_devices / "nvidiactl").touch()  # an AMD processor may have a GPU of its own, which is not meant
    assert diagnose("torch", machine("cuda 12.8"))[0] == "OK"


def test_access(machine, no_devices, monkeypatch):
    assert not list(doctor.probe_access(machine()))
    level, _, remedy = diagnose("access", machine("rocm 6.4"))
    assert level == "FAIL" and "--device=/dev/kfd" in remedy
    (no_devices / "kfd").touch()
    assert "renderD" in diagnose("access", machine("rocm 6.4"))[1]
    (no_devices / "dri" / "renderD128").touch()
    assert diagnose("access", machine("rocm 6.4"))[0] == "OK"
    monkeypatch.setattr(os, "access", lambda path, mode: "renderD" not in str(path))
    monkeypatch.setattr(doctor.rocm, "group_of", lambda path: "render")
    level, text, remedy = diagnose("access", machine("rocm 6.4"))
    assert level == "FAIL" and "renderD128 of group render" in text and "usermod -aG render $USER" in remedy


# --- profilers


def profilers(machine):
    return {finding.text.split(":")[0].split(" is ")[0]: finding for finding in doctor.probe_profilers(machine)}


@pytest.mark.parametrize("build", ["rocm", "cuda"])
def test_missing_profilers(machine, build):
    found = profilers(machine(f"{build} 6.4"))
    assert {name: finding.level for name, finding in found.items()} == dict.fromkeys(doctor.PROFILERS[build], "WARN")
    assert [finding.level for finding in doctor.probe_profilers(machine())] == ["OK"]


def test_profilers_say_their_versions(machine, tool):
    tool("rocprofv3", "echo usage: rocprofv3; exit 2", "6.4.1")
    tool("rocprof-compute", "echo 'rocprofiler-compute version: 3.1.0 (release)'")
    tool("rocprof-sys-sample", "echo; echo 'rocprof-sys-sample v1.0.0'")
    found = profilers(machine("rocm 6.4"))
    assert all(finding.level == "OK" for finding in found.values())
    assert "does not say its version, ROCm 6.4, of the release of this PyTorch" in found["rocprofv3"].text
    assert "3.1.0" in found["rocprof-compute"].text and "v1.0.0" in found["rocprof-sys"].text


@pytest.mark.parametrize("release, level", [("6.2.4", "WARN"), ("6.3.0", "OK"), ("10.0.0", "OK")])
def test_profiler_that_is_older_than_the_scripts(machine, tool, release, level):
    tool("rocprofv3", "exit 2", release)
    finding = profilers(machine("rocm 6.4"))["rocprofv3"]
    assert finding.level == level and ("load ROCm 6.3 or newer" in finding.remedy) == (level == "WARN")


def test_packages_that_rocprof_compute_lacks(machine, tool):
    tool("rocprof-compute", """cat <<'END'
[ERROR] The 'astunparse==1.6.2' package was not found in the current execution environment.
[ERROR] the 'dash>=3.0.0' distribution does not meet version requirements to use rocprofiler-compute.
See: /opt/rocm/libexec/rocprofiler-compute/requirements.txt
END
exit 1""", "7.2.0")  # fmt: skip
    finding = profilers(machine("rocm 7.2"))["rocprof-compute"]
    assert finding.level == "WARN" and finding.text.endswith("other versions: astunparse==1.6.2, dash>=3.0.0")
    assert "pip install -r /opt/rocm/libexec/rocprofiler-compute/requirements.txt" in finding.remedy


def lives(pid):
    """Whether a process runs. A zombie does not: only nobody has asked for its exit status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_profiler_that_hangs_is_killed_with_its_children(machine, tool, tmp_path):
    tool("nsys", f"sleep 600 & echo $! >{tmp_path}/child; wait")
    tool("ncu").write_text("#!/no/such/interpreter\n")
    here = machine("cuda 13.0")
    here.seconds = 1
    found = profilers(here)
    assert "no answer in 1 seconds" in found["nsys"].text and found["ncu"].level == "WARN"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10  # the signal is sent, its death may follow; not killed, it sleeps for minutes
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(child)


@pytest.mark.parametrize("release, level", [("6.4.1", "OK"), ("7.0.0", "WARN"), ("10.0.0", "WARN")])
def test_rocprofv3_belongs_to_the_rocm_of_torch(machine, tool, release, level):
    assert not list(doctor.probe_rocm(machine("rocm 6.4")))
    tool("rocprofv3", release=release)
    found, text, _ = diagnose("rocm", machine("rocm 6.4"))
    assert found == level and f"torch is for ROCm 6.4, rocprofv3 is of ROCm {release[:-2]}" in text
    assert not list(doctor.probe_rocm(machine("cuda 13.0")))


def test_the_other_releases_are_named(machine, tool):
    places = {"7.0": "rocm", "6.4": "opt/rocm-6.4.1", "10.0": "opt/rocm/core-10.0"}
    paths = {release: tool("rocprofv3", "", f"{release}.0", folder) for release, folder in places.items()}
    level, text, _ = diagnose("rocm", machine("rocm 6.4"))
    assert level == "OK" and text.endswith(f"6.4; there is also 10.0 ({paths['10.0']}), 7.0 ({paths['7.0']})")


# --- kernel


@pytest.mark.parametrize("kernel, build, level, told", [
    ({"error": 0.9e-5, "seconds": 2.0}, "rocm 6.4", "OK", "on the GPU"),
    ({"error": 0.9e-5, "seconds": 2.0}, "cpu", "OK", "in Triton's interpreter"),
    ({"error": 1.1e-5, "seconds": 2.0}, "rocm 6.4", "FAIL", "wrong by 1.1e-05"),
    ({"error": float("nan"), "seconds": 2.0}, "cpu", "FAIL", "wrong"), (None, "cpu", "FAIL", "boom"),
])  # fmt: skip
def test_kernel_right_wrong_and_broken(machine, kernel, build, level, told):
    found, text, _ = diagnose("kernel", machine(build, kernel, [GPU] if build != "cpu" else ()))
    assert found == level and told in text
    assert not list(doctor.probe_kernel(machine(triton=None)))


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
    assert {finding["probe"] for finding in result["findings"]} >= {"python", "torch", "gpu", "kernel"}


@pytest.fixture
def bare(tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


def test_bare_python(bare, tmp_path):
    done = run_doctor(python=bare)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "FAIL  torch      cannot be imported: ModuleNotFoundError" in done.stdout and "make run" in done.stdout
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)")
    done = run_doctor("--time-limit", "1", python=bare, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "no answer in 1 seconds" in done.stdout


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
    (site / "torch" / "version.py").write_text("hip = '6.4.43482'\n")
    result = json.loads(run_doctor("--json", python=bare).stdout)
    (triton,) = [finding for finding in result["findings"] if finding["probe"] == "triton"]
    assert triton["level"] == "FAIL" and "pytorch-triton-rocm 3.3.1, triton 3.4.0" in triton["text"]
    assert "--no-deps pytorch-triton-rocm" in triton["remedy"]


def test_probe_that_crashes_is_a_finding(machine, monkeypatch):
    def probe_crash(machine):
        yield doctor.Finding("crash", "OK", "first")
        raise PermissionError("no")

    machine()
    monkeypatch.setattr(doctor, "PROBES", (probe_crash,))
    _, first, crashed = doctor.findings(5)
    assert first.level == "OK" and crashed.level == "FAIL" and "PermissionError: no" in crashed.text


@pytest.mark.parametrize("arguments", [["--time-limit", "0"], ["--time-limit", "soon"], ["--verbose"]])
def test_bad_usage_is_one_line(arguments):
    done = run_doctor(*arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout
