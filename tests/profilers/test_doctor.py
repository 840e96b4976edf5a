"""The doctor finds what it should in the answers of a second Python, with device files and profilers of all kinds."""

import json
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from offline.architectures import CHIPS
from profilers import doctor, stacks
from tests.fakes.machine import executable

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "profilers" / "doctor.sh"
GPU = dict(name="AMD Instinct MI300X", arch="gfx942", free=180 * 2**30, total=192 * 2**30)
ANSWERS = dict(
    owners={"pytorch-triton-rocm": "3.3.1"}, conflicts=[], torch="2.7.1+rocm6.4", nvml=True, gpus=[GPU], triton="3.3.1",
    error=0.9e-5, seconds=2.0,
)  # fmt: skip
QUESTIONS_OF = ["owners", "torch", "gpus", "triton", "error"]  # the order of the answers


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A machine without device files and profilers, but with those that a test makes."""
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "nvidiactl")
    for name, path in dict(KFD_DEVICE="kfd", WSL_DEVICE="dxg", ROCM_PATH="rocm", ROCM_PARENT="opt").items():
        monkeypatch.setenv(name, str(tmp_path / path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in filter(lambda name: name.endswith("_VISIBLE_DEVICES"), os.environ):
        monkeypatch.delenv(name)
    return tmp_path


def diagnose(probe, build="rocm 6.4", until=None, **changes):
    """(level, text, remedy) of the findings of a probe. until: the second Python crashed before this answer."""
    lost = QUESTIONS_OF[QUESTIONS_OF.index(until) :] if until else ()
    answers = {name: value for name, value in (ANSWERS | changes).items() if name not in lost}
    found = list(getattr(doctor, f"probe_{probe}")(answers, "exit status 1: boom" if until else None, build))
    assert all((level == "OK") != bool(remedy) for level, _, *remedy in found)  # what is not in order has a remedy
    return [(level, f"{probe}: {text}", remedy) for level, text, *remedy in found]


def install(folder, release, status):
    executable(folder / "bin" / "rocprofv3", f"#!/bin/sh\nexit {status}\n")
    (folder / ".info").mkdir(exist_ok=True)
    (folder / ".info" / "version").write_text(f"{release}-47\n")


@pytest.mark.parametrize("devices, build, level, told", [
    ([], "rocm 6.4", "OK", "torch: 2.7.1+rocm6.4 for rocm 6.4"), (["kfd"], "rocm 6.4", "OK", "for rocm 6.4"),
    ([], "cpu", "OK", "for cpu"), (["kfd"], "cpu", "FAIL", "for cpu, but there is /"),
    (["kfd"], "cuda 12.8", "FAIL", "but there is /"), (["nvidiactl"], "rocm 6.4", "FAIL", "but there is /"),
    (["kfd", "nvidiactl"], "cuda 12.8", "OK", "for cuda 12.8"),  # an AMD processor may have a GPU of its own
])  # fmt: skip
def test_torch_is_built_for_this_machine(here, devices, build, level, told):
    for name in devices:
        (here / name).touch()
    ((found, text, _),) = diagnose("torch", build)
    assert found == level and told in text


@pytest.mark.parametrize("probe, changes, level, told", [
    ("torch", {"until": "torch"}, "FAIL", "cannot be imported: exit status 1: boom"),
    ("triton", {}, "OK", "3.3.1, owned by pytorch-triton-rocm 3.3.1"),
    ("triton", {"owners": {}}, "OK", "3.3.1, owned by no distribution"),
    ("triton", {"owners": {"triton": "3.4.0", "pytorch-triton-rocm": "3.3.1"}}, "FAIL",
     "2 distributions share its folder: pytorch-triton-rocm 3.3.1, triton 3.4.0"),
    ("triton", {"owners": {"triton": "3.3.1"}, "conflicts": ["torch 2.7 requires x"]}, "WARN", "torch 2.7 requires x"),
    ("triton", {"until": "triton"}, "WARN", "cannot be imported: exit status 1: boom"),
    ("gpu", {}, "OK", "0: AMD Instinct MI300X, gfx942, 180 of 192 GiB free (every kernel compiles for it, none"),
    ("gpu", {"build": "cuda 13.0", "gpus": [GPU | {"arch": "sm_90"}]}, "OK", "(tested)"),
    ("gpu", {"gpus": [GPU | {"arch": "gfx1030"}]}, "WARN", "nothing is known of it"),
    ("gpu", {"gpus": [GPU | {"free": 95 * 2**30}]}, "WARN", "95 of 192 GiB free: someone else uses it"),
    ("gpu", {"gpus": [GPU | {"free": 96 * 2**30}]}, "OK", "96 of 192"),
    ("gpu", {"build": "cpu", "gpus": []}, "WARN", "this PyTorch uses none"),
    ("gpu", {"gpus": []}, "WARN", "PyTorch sees none, and /"),
    ("gpu", {"until": "gpus"}, "FAIL", "PyTorch could not look for it: exit status 1: boom"),
    ("kernel", {}, "OK", "RMSNorm ran on the GPU: error 9.0e-06, first run 2.0 s"),
    ("kernel", {"build": "cpu", "gpus": []}, "OK", "in Triton's interpreter"),
    ("kernel", {"error": 1.1e-5}, "FAIL", "wrong by 1.1e-05"), ("kernel", {"error": float("nan")}, "FAIL", "wrong"),
    ("kernel", {"until": "error"}, "FAIL", "did not run: exit status 1: boom"),
    ("profilers", {"build": "cuda 13.0"}, "OK", "for counters: no ncu"),
])  # fmt: skip
def test_a_finding(probe, changes, level, told):
    ((found, text, _),) = diagnose(probe, **changes)
    assert found == level and told in text


@pytest.mark.parametrize("build, gpus, nvml, missing", [
    ("cuda 13.0", [GPU | {"arch": "sm_90"}], False, True), ("cuda 13.0", [GPU | {"arch": "sm_90"}], True, False),
    ("rocm 6.4", [GPU], False, False), ("cuda 13.0", [], False, False),
])  # fmt: skip
def test_what_tells_the_state_of_a_gpu_is_named_where_it_is_missing(build, gpus, nvml, missing):
    found = diagnose("gpu", build=build, gpus=gpus, nvml=nvml)
    assert [level for level, text, _ in found if "nvidia-ml-py is missing" in text] == ["WARN"] * missing
    assert len(found) == 1 + missing


@pytest.mark.parametrize("probe, until", [("triton", "torch"), ("gpu", "torch"), ("kernel", "triton")])
def test_what_another_probe_reports_is_not_said_twice(probe, until):
    assert diagnose(probe, until=until) == []


def test_a_gpu_that_pytorch_does_not_see(here, monkeypatch):
    (here / "kfd").touch()
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    ((level, text, _),) = diagnose("gpu", gpus=[])
    assert level == "FAIL" and text.endswith(f"{here}/kfd is there (HIP_VISIBLE_DEVICES=)")


@pytest.mark.parametrize("build, has_smi, level, told", [
    ("cuda 12.8", True, "OK", "for cuda 12.8"), ("cpu", True, "FAIL", "for cpu, but there is /"),
    ("cpu", False, "OK", "for cpu"), ("rocm 7.2", False, "OK", "for rocm 7.2"),
])  # fmt: skip
def test_wsl_has_one_file_for_gpus_of_all_makes(here, monkeypatch, build, has_smi, level, told):
    """With nvidia-smi it is one of NVIDIA, which is expected to be seen; without, it may be that of a processor."""
    (here / "dxg").touch()
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setattr(doctor, "WSL_PROGRAMS", str(here / "wsl"))
    if has_smi:
        (here / "wsl").mkdir()
        (here / "wsl" / "nvidia-smi").touch(0o755)
    ((found, text, _),) = diagnose("torch", build)
    assert found == level and told in text
    assert diagnose("access", build) == []
    if build != "cpu":
        ((found, text, _),) = diagnose("gpu", build, gpus=[])
        assert found == ("FAIL" if has_smi else "WARN") and (f"{here / 'dxg'} is there" in text) == has_smi


@pytest.mark.parametrize("arch, build, triton, told, link", [
    ("gfx942", "rocm 10.0", "3.8.0", "Triton 3.8 on gfx942: products of other", "triton-lang/triton/issues/11696"),
    ("gfx942", "rocm 7.2", "3.6.0+git6213a0e8", "Triton 3.6 on gfx942: ", "triton-lang/triton/issues/11696"),
    ("gfx950", "rocm 7.2", "3.7.0+amd.rocm7.0.0.git8900", "Triton 3.7 on gfx950: AMD's", "ROCm/aiter/pull/4163"),
    ("gfx950", "rocm 10.1", "3.8.0", "Triton 3.8 on gfx950: split-K products", "ROCm/aiter/pull/5428"),
    ("gfx950", "rocm 10.0", "3.9.0", "ROCm 10.0 on gfx950: PyTorch's own attention", "ROCm/TheRock/issues/7696"),
    ("gfx942", "rocm 10.0", "3.9.0", None, None), ("gfx90a", "rocm 10.0", "3.8.0", None, None),
    ("sm_90", "cuda 13.0", "3.8.0", None, None), ("gfx942", "rocm 7.2", None, None, None),
])  # fmt: skip
def test_a_stack_that_is_known_to_be_bad(monkeypatch, arch, build, triton, told, link):
    monkeypatch.setattr(stacks, "costs", lambda *_: [])
    until = None if triton else "triton"
    found = diagnose("stack", build, gpus=[GPU | {"arch": arch}], triton=triton, until=until)
    assert len(found) == bool(told)
    for level, text, _ in found:
        assert level == "WARN" and text.startswith(f"stack: {told}") and text.endswith(f": https://github.com/{link}")


def test_several_gpus_and_releases_are_told_once():
    found = [where for where, _ in stacks.known_bad(["gfx950", "gfx950", "gfx942"], (10, 0), (3, 8))]
    assert found == ["Triton 3.8 on gfx942", "Triton 3.8 on gfx950", "ROCm 10.0 on gfx950"]


def test_what_is_known_to_be_bad_does_not_hit_the_kernels_here():
    """It says that they have one stage."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "compiled_kernels.json").read_text())["rows"]
    stages = {row["options"]["num_stages"] for row in rows if row["has_dot"] and row["arch"].startswith("gfx")}
    assert stages == {1}


@pytest.mark.parametrize("triton, arch, lower, there", [
    ("3.6.0", "gfx942", 5, "12.5 %"), ("3.7.1+git", "gfx942", 1, "0 %"), ("3.8.0", "gfx942", 2, "15 %"),
    ("3.6.0", "gfx950", 0, None), ("3.5.0", "gfx942", 0, None), ("3.9.0", "gfx942", 0, None),
])  # fmt: skip
def test_what_a_triton_costs(tmp_path, monkeypatch, triton, arch, lower, there):
    def part(version, lower, figures):
        by_version = {version: figures, "3.9.0": {"occupancy": 0.25}}
        worst = dict(kernel="some_kernel", precision="bf16", tile="8 m", compiled=by_version) if lower else None
        return dict(version=version, newest="3.9.0", arch="gfx942", launches=9, lower=lower, worst=worst)

    file = tmp_path / "compilers.json"
    parts = [
        ("3.6.0", 5, {"occupancy": 0.125}),
        ("3.7.1", 1, None),
        ("3.8.0", 2, {"occupancy": 0.15}),
        ("3.9.0", 0, {}),
    ]
    file.write_text(json.dumps({"summary": [part(*each) for each in parts]}))
    monkeypatch.setattr(stacks, "COMPILERS", file)
    monkeypatch.setattr(stacks, "KNOWN_BAD", ())
    told = f"stack: Triton {triton[:5]} on gfx942: {lower} of 9 launches have less occupancy than with 3.9.0, "
    told += f"the most some_kernel (bf16; 8 m), {there} instead of 25 %"
    found = diagnose("stack", gpus=[GPU | {"arch": arch}], triton=triton)
    assert [text for _, text, _ in found] == [told] * bool(lower)
    assert [level for level, _, _ in found] == ["OK" if there == "15 %" else "WARN"] * bool(lower)


def test_the_recorded_costs_are_told():
    found = [*stacks.costs(["gfx942"], (3, 6)), *stacks.costs(["gfx942"], (3, 9))]
    assert len(found) == 1 and found[0][0].startswith("Triton 3.6.0 on gfx942: ")


def test_access(here, monkeypatch):
    assert "ROCm finds no AMD GPU" in diagnose("access")[0][1]
    (here / "kfd").touch()
    assert diagnose("access") == []
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    level, text, _ = diagnose("access")[0]
    assert level == "FAIL" and f"usermod -aG {(here / 'kfd').group()} $USER" in text


@pytest.mark.parametrize("release, level, told", [
    ("6.4.1", "OK", "rocprofv3, ROCm 6.4, of the release of this PyTorch"),
    ("6.4.139", "WARN", "rocprofv3: import triton fails under it, exit status 139: no output. Try"),
    ("6.3.4", "WARN", "is of ROCm 6.3, and lacks options that are used here: load ROCm 6.4"),
    ("7.0.0", "WARN", "rocprofv3 is of 7.0: it may record nothing"),
    ("10.0.0", "WARN", "two ROCm installations. PyTorch brings ROCm 6.4, rocprofv3 is of 10.0"),
])  # fmt: skip
def test_profilers(here, monkeypatch, release, level, told):
    (here / "kfd").touch()
    monkeypatch.setattr(doctor.rocm, "torch_build", lambda: "rocm 6.4")
    install(here / "rocm", release, 139 if "139" in release else 0)
    (found, text, _), *others = diagnose("profilers")
    assert found == level and told in text
    assert [found for found, _, _ in others] == ["WARN"] * 2 and all(
        "is not installed" in text for _, text, _ in others
    )


# --- the second Python


@pytest.mark.parametrize("code, answers, problem", [
    ("print('{\"a\": 1}\\nwarning\\n{\"b\": 2}')", {"a": 1, "b": 2}, None),
    ("print('{\"a\": 1}'); raise ValueError('no')", {"a": 1}, "exit status 1: ValueError: no"),
    ("import os; os.abort()", {}, "exit status -6: no output"),
])  # fmt: skip
def test_answers_before_a_crash_count(code, answers, problem):
    assert doctor.ask(code) == (answers, problem)


def test_a_driver_that_hangs():
    begin = time.monotonic()
    code = "import os; print('{\"pid\":', os.getpid(), '}', flush=True); os.fork(); import time; time.sleep(20)"
    answers, problem = doctor.ask(code, 1)
    assert problem == "no answer in 1 seconds" and time.monotonic() - begin < 15
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(answers["pid"])], capture_output=True, text=True).stdout
    assert state[:1] in ("", "Z")  # it was killed


# --- the command


def run_doctor(python, **variables):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run([DOCTOR], env=env | {"PYTHON": str(python)}, capture_output=True, text=True, timeout=300)


def test_here_it_reports_every_probe(python):
    done = run_doctor(python)
    levels = re.findall(r"^(OK|WARN|FAIL) ", done.stdout, re.M)
    counts = [levels.count(level) for level in ("OK", "WARN", "FAIL")]
    assert done.stdout.endswith("\n{} OK, {} WARN, {} FAIL\n".format(*counts)) and done.returncode == bool(counts[2])
    assert set(re.findall(r"^\w+ +(\w+)", done.stdout, re.M)) >= {"python", "torch", "triton", "gpu", "kernel"}


def distribution(folder, name, version, *files):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_a_bare_python(tmp_path):
    """What is missing is one line each; whom the folder triton belongs to needs no torch."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    site = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    for name in ("triton", "pytorch-triton-rocm"):
        distribution(site, name, "3.3.1", "triton/__init__.py")
    done = run_doctor(python)
    assert done.returncode == 1 and done.stderr == ""
    assert "FAIL  torch      cannot be imported: exit status 1: ModuleNotFoundError: No module" in done.stdout
    assert "share its folder: pytorch-triton-rocm 3.3.1, triton 3.3.1" in done.stdout


def test_a_python_that_is_too_old(tmp_path):
    text = f"#!/bin/sh\nexec {sys.executable} -c \"import sys; sys.version_info = (3, 9); exec('$2')\"\n"
    old = executable(tmp_path / "old", text)
    done = run_doctor(old)
    assert done.returncode == 2 and done.stderr.startswith(f"doctor.sh: error: {old} is not Python 3.10 or newer")


def test_what_is_compiled_is_known():
    assert doctor.KNOWN.keys() == CHIPS.keys()
