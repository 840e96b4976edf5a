"""A computer with chosen profilers, all of them fakes, on which the shell scripts run."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import pytest

from profilers import record
from profilers.rocm import release_in

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "fakes"
FOLDERS = {
    "get_trace.sh": "traces/trace", "get_counters.sh": "counters/counter", "get_hotspots.sh": "hotspots/hotspot",
    "get_rocprof_compute.sh": "rocprof_compute/profile", "get_rocprof_sys.sh": "rocprof_sys/profile",
    "run_rocprof_triton.sh": "rocprof_results/session",
}  # fmt: skip
ALONE = {  # what run_triton_profiling.py measures
    "date": "2030-01-02T03:04:05",
    "environment": {"device": "AMD Instinct MI300X", "arch": "gfx942", "torch": "2.7.1", "triton": "3.3.0"},
    "ceilings": {"GB/s": 4000.0, "TFLOP/s": 600.0},
    "kernels": [
        {"name": "RMSNorm", "bytes": 8_000_000, "flop": 16_000_000, "triton": {"ms": 0.004}},
        {"name": "attention", "bytes": 1_000_000, "flop": 10**9, "triton": {"ms": 0.01}},
    ],
}


def first_fast(first, *others):
    """Cases of a test, such as releases of ROCm; all but the first are slow. A tuple has several parameters."""
    others = (case if isinstance(case, tuple) else (case,) for case in others)
    return first, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)


def executable(path, text):
    """Write a program, in a folder that is made, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


PYTHON = """#!/bin/sh
# The programs that a GPU would run, of a file or after -m, have a fake; all others run as they are.
for word in "$1" "$2"; do
    case ${{word##*/}} in
    tiny_llama_v3.py | run_triton_profiling.py | torch_profile.py | profilers.host_profile) exec {fake} "$@" ;;
    esac
done
exec {python} "$@"
"""


class Machine:
    """A computer with chosen tools; run() does what a script does in an empty folder of it.

    python: what runs the fakes and the reports. A fork server's starts at once, but gets no signals.
    """

    def __init__(self, folder, python=sys.executable, capsys=None):
        self.folder, self.python, self.capsys = folder, python, capsys
        self.work = folder / "work"
        self.work.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.env = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
        self.env |= {"PROGRAM_JSON": json.dumps(ALONE), "MPLCONFIGDIR": str(folder)}
        places = dict(
            ROCM_PATH="rocm",
            ROCM_PARENT="opt",
            KFD_DEVICE="kfd",
            WSL_DEVICE="dxg",
            KFD_TOPOLOGY="topology",
            PYTHON="bin/python",
            PYTHONPATH="site",
        )
        self.env |= {name: str(folder / place) for name, place in places.items()}
        program = self.install(self.bin / "program", "program.py")
        executable(self.bin / "python", PYTHON.format(fake=program, python=self.python))
        self.with_torch()

    def with_torch_of(self, release):
        """A PyTorch for a release of ROCm; from 10.0 on that of HIP is another one."""
        hip = "7.15.26333" if release_in(release) >= (10, 0) else f"{release}.43482-0f2d60242"
        return self.with_torch(hip=hip, rocm=f"{release}.0")

    def with_torch(self, hip=None, cuda=None, rocm=None):
        """A PyTorch that was built for these releases, and must not be imported."""
        torch = self.folder / "site" / "torch"
        torch.mkdir(parents=True, exist_ok=True)
        (torch / "__init__.py").write_text("raise SystemExit('importing torch takes seconds')")
        (torch / "version.py").write_text(f"hip = {hip!r}\ncuda = {cuda!r}\nrocm = {rocm!r}\n")
        return self

    def install(self, path, fake, **variables):
        settings = {"PYTHONDONTWRITEBYTECODE": "1"} | variables
        words = [*(f"{name}={value}" for name, value in settings.items()), self.python, str(FAKES / fake)]
        return executable(path, f'#!/bin/sh\nexec env {shlex.join(words)} "$@"\n')

    def with_tools(self, release, folder, names, **variables):
        """The profilers with these names, of a release that says which it is."""
        (folder / ".info").mkdir(parents=True)
        (folder / ".info" / "version").write_text(f"{release}.1-43\n")
        for name in names:
            self.install(folder / "bin" / name, f"{name.replace('-', '_')}.py", FAKE_ROCM=release, **variables)

    def with_rocm(self, release, at="rocm"):
        """ROCm with its profilers, in a folder of this machine: by default where ROCM_PATH points to."""
        rocm = self.folder / at
        self.with_tools(release, rocm, ["rocprofv3", "rocprof-compute", "rocprof-sys-sample"])
        own = rocm / "libexec" / "rocprofiler-compute"
        own.mkdir(parents=True)
        (rocm / "bin" / "rocprof-compute").rename(own / "rocprof-compute")
        (rocm / "bin" / "rocprof-compute").symlink_to("../libexec/rocprofiler-compute/rocprof-compute")
        (rocm / "bin" / "rocprofv3_avail_module").mkdir()
        (self.folder / "kfd").touch()
        return self.with_torch_of(release)

    def with_wheel(self, release):
        """A PyTorch that brings ROCm, and the packages beside it with its profilers."""
        self.with_torch_of(release)
        core, profiler = (self.folder / "site" / name for name in ("_rocm_sdk_core", "_rocm_profiler"))
        self.with_tools(release, core, ["rocprofv3"], FAKE_LIBRARIES=f"{core}/lib", FAKE_ROOT=str(core))
        tools = ["rocprof-compute", "rocprof-sys-sample"]
        self.with_tools(release, profiler, tools, FAKE_LIBRARIES=f"{profiler}/lib")
        shutil.rmtree(profiler / ".info")
        (core / "__init__.py").touch()
        (core / "bin" / "rocprofv3_avail_module").mkdir()
        (self.folder / "kfd").touch()
        return self

    def with_gpu(self, version):
        """A GPU of AMD's, whose architecture the driver calls by a number."""
        (node := self.folder / "topology" / "nodes" / "1").mkdir(parents=True)
        (node / "properties").write_text(f"gfx_target_version {version}\n")
        return self

    def with_nvidia(self):
        self.install(self.bin / "ncu", "ncu.py")
        return self.with_torch(cuda="12.8")

    def run(self, script, *arguments, **env):
        """The exit code, what was printed, and the command lines in it, of profilers.record in this process."""
        self.capsys.readouterr()
        with unittest.mock.patch.dict(os.environ, self.env | env, clear=True), pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.work)
            patch.syspath_prepend(self.folder / "site")
            patch.delitem(sys.modules, "torch", raising=False)  # so that the one of this machine is found
            importlib.invalidate_caches()
            try:
                code = record.main([script, *map(str, arguments)])
            except SystemExit as end:
                code = end.code or 0
        return outcome(code, *self.capsys.readouterr())

    def start(self, script, *arguments, **env):
        """As run(), of the script itself, in a process of its own."""
        pipes = dict(capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        done = subprocess.run([ROOT / script, *arguments], cwd=self.work, env=self.env | env, timeout=60, **pipes)
        return outcome(done.returncode, done.stdout, done.stderr)

    def interrupt(self, script, *numbers, until="tiny llama:", **env):
        """(exit code, output, errors) of a script whose group is sent signals when its log has a text."""
        process = subprocess.Popen(
            [ROOT / script, "--output", "out"], cwd=self.work, env=self.env | {"PROGRAM_SLEEP": "60"} | env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        log = self.work / "out" / "log.txt"
        deadline = time.monotonic() + 30
        while not (log.exists() and until in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for number in numbers:
            os.killpg(process.pid, number)
        out, err = process.communicate(timeout=20)
        return process.returncode, out, err

    def results(self):
        """The folders of results, relative: good, failed or unfinished."""
        patterns = [*(f"{folder}_*" for folder in FOLDERS.values()), "out*"]
        found = [path for pattern in patterns for path in self.work.glob(pattern)]
        return sorted(str(path.relative_to(self.work)) for path in found)


def outcome(code, out, err):
    print(out, err)
    return SimpleNamespace(code=code, out=out, err=err, commands=commands_of(out))


def commands_of(out):
    """The words of the command lines that were printed."""
    lines = [line.removeprefix("+ ") for line in out.splitlines() if re.match(r"(\+ )?(/|env |rocp|ncu |cd )", line)]
    return [shlex.split(line) for line in lines]
