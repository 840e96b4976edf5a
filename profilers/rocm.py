"""Find the profilers of ROCm and their release, and the platform that PyTorch is built for.

A release is a tuple of numbers, such as (7, 2) for ROCm 7.2.4. The syntax is that of Python 3.7, as for the doctor.
"""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

OLDEST = 6, 3  # the profilers of older releases lack options that are used here
ASSUMED = "10.0"  # in a dry run without ROCm
SILENT = 6, 4  # the newest release whose rocprofv3 does not tell its own
PATIENCE = 60  # seconds that a tool may take to tell its release
EXECUTABLES = {"rocprof-sys": "rocprof-sys-sample"}  # where it is not the name of the tool


def dotted(release):
    return ".".join(map(str, release))


def release_in(text):
    """Return the first two numbers of a version, (6, 4) for 6.4.43482-0f2d60242, or None."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return match and tuple(map(int, match.groups()))


def is_executable(path):
    return os.path.isfile(path) and os.access(path, os.X_OK)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch, without importing it, which takes seconds


def torch_build():
    """Return "rocm 6.4" for a PyTorch of ROCm 6.4.43482, "cuda" and its release, "cpu", or "" without PyTorch.

    HIP has releases of its own, such as 7.15 for ROCm 10.0; then PyTorch tells ROCm's as well.
    """
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).parent / "version.py" if found and found.origin else None
    if not file or not file.exists():
        return ""
    versions = runpy.run_path(str(file))
    builds = {"rocm": versions.get("rocm") or versions.get("hip"), "cuda": versions.get("cuda")}
    return next((f"{name} {dotted(release_in(text))}" for name, text in builds.items() if text), "cpu")


def wheels_folder():
    """Return the folder of the packages with which a PyTorch for ROCm 7.13 or newer brings its own ROCm, or None."""
    found = importlib.util.find_spec("_rocm_sdk_core")
    return Path(found.submodule_search_locations[0]).parent if found else None


# ----------------------------------------------------------------------------------------------------------------------
# Profilers


class Tool(NamedTuple):
    name: str
    path: str  # without a folder if it is not installed
    release: tuple
    why: str  # it is this one and no other

    @property
    def is_installed(self):
        return "/" in self.path

    @property
    def wheel(self):
        """The package of PyTorch's that it comes with, or None."""
        return self.path.rpartition("/bin/")[0] if re.search(r"/_rocm_\w+/bin/", self.path) else None

    @property
    def core(self):
        """The package with the libraries that a tool of a wheel needs."""
        return self.path.rpartition("/_rocm_")[0] + "/_rocm_sdk_core"

    @property
    def launch(self):
        """The words that start it. A profiler that comes with PyTorch works only with the libraries beside it."""
        if self.wheel:
            libraries = dict.fromkeys([f"{self.wheel}/lib", f"{self.core}/lib", os.environ.get("LD_LIBRARY_PATH")])
            start = ["env", "LD_LIBRARY_PATH=" + ":".join(filter(None, libraries)), self.path]
            return [*start, "--rocm-root", self.core] if self.name == "rocprofv3" else start
        executable = EXECUTABLES.get(self.name, self.name)
        return [executable if shutil.which(executable, path=search_path()) == self.path else self.path]

    def has_option(self, option, since, *arguments):
        """Whether its help, which the arguments print, names an option; if it is not installed, whether it should."""
        if not self.is_installed:
            return self.release >= since
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
        return option in subprocess.run([*self.launch, *arguments], **pipes).stdout


def rocm_path():
    return os.environ.get("ROCM_PATH") or "/opt/rocm"


def search_path():
    return f"{os.environ['PATH']}:{rocm_path()}/bin"


def folders():
    """Yield the folders that may hold profilers of ROCm, the best first.

    Up to 7.2 a release is in /opt/rocm-X.Y.Z, later ones are in /opt/rocm/core-X.Y.
    """
    if wheels_folder():
        yield from (f"{wheels_folder()}/{name}/bin" for name in ("_rocm_sdk_core", "_rocm_profiler"))
    yield from search_path().split(":")
    parent = Path(os.environ.get("ROCM_PARENT") or "/opt")
    found = [path for name in ("rocm", "rocm-*", "rocm/core", "rocm/core-*") for path in parent.glob(f"{name}/bin")]

    def by_number(path):  # 10.0 is newer than 7.14
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]

    yield from sorted(map(str, found), key=by_number, reverse=True)


def installed(name):
    """Yield the Tools with this name that there are, the best first."""
    executable = EXECUTABLES.get(name, name)
    for path in filter(is_executable, (f"{folder}/{executable}" for folder in folders())):
        yield Tool(name, path, release_of(path), "the first that was found")


def find(name, given=None):
    """Return the Tool with this name that the scripts use; given: the path that a person chose."""
    if given:
        return Tool(name, given, release_of(given), "named by --tool-path")
    build, first = torch_build(), None
    for tool in installed(name):
        if tool.wheel:
            return tool._replace(why="which comes with this PyTorch")
        if build == f"rocm {dotted(tool.release)}":
            return tool._replace(why="of the release of this PyTorch")
        first = first or tool
    release = release_in(os.environ.get("ROCM_VERSION") or ASSUMED) or SILENT
    return first or Tool(name, EXECUTABLES.get(name, name), release, "which is not installed here")


def release_of(path):
    """Return the release of the installation that the tool of this path belongs to."""
    return release_in(next(filter(None, versions_beside(path)), "")) or SILENT


def versions_beside(path):
    """Yield what tells the release: files above the tool or above the rocprofv3 beside it, and that rocprofv3 itself.

    A link may lead from bin into libexec, or into a folder of the tool's own.
    """
    beside = [f"{os.path.dirname(path)}/rocprofv3", path.rpartition("/_rocm_")[0] + "/_rocm_sdk_core/bin/rocprofv3"]
    launcher = next(filter(is_executable, beside), None) or shutil.which("rocprofv3", path=search_path())
    for tool in filter(None, (path, launcher)):
        yield from (read_version(folder) for folder in Path(tool).resolve().parents)
    if launcher:
        try:
            pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            answer = subprocess.run([launcher, "--version"], timeout=PATIENCE, errors="replace", **pipes).stdout
            yield from re.findall(r"^ *rocm_version: *(.*)", answer, re.M)
        except (OSError, subprocess.TimeoutExpired):
            pass
    yield read_version(Path(rocm_path()))


def read_version(folder):
    """Return the first line of ROCm's file of its version, or "" if the folder has none."""
    try:
        return (folder / ".info" / "version").read_text().partition("\n")[0]
    except OSError:
        return ""


def obstacle_of(tool, build):
    """Return why a profiler of ROCm cannot be used, as the rest of a sentence with the remedy, or None."""
    device = Path(os.environ.get("KFD_DEVICE") or "/dev/kfd")
    if not tool.is_installed:
        return "is not installed or not on PATH (module load rocm, or add the bin folder of ROCm 6.3 or newer)"
    if tool.release < OLDEST:
        return f"is of ROCm {dotted(tool.release)}, and lacks options that are used here: load ROCm 6.3 or newer"
    if not device.exists():
        return f"finds no AMD GPU: {device} does not exist (a container needs --device=/dev/kfd --device=/dev/dri)"
    if not os.access(device, os.R_OK | os.W_OK):
        return (
            f"has no permission on {device}: join its group with sudo usermod -aG {group_of(device)} $USER and log in "
            f"again (a container needs --group-add {device.stat().st_gid})"
        )
    if not build.startswith("rocm"):
        return f"{built_for(build)} (docs/rocm.md, Install, names the three ways to one for ROCm)"
    return None


def built_for(build):
    python = os.environ.get("PYTHON") or sys.executable
    return f"would record nothing: the PyTorch of {python} is built for {build or 'nothing, it is missing'}"


def group_of(path):
    try:
        return path.group()
    except KeyError:  # a group of the host that the container does not know
        return str(path.stat().st_gid)
