"""Find ROCm: its release, its profilers, and the platform that PyTorch is built for.

A release is a tuple of numbers, (7, 2) for ROCm 7.2.4. The module imports only the standard library, as setup_env.sh
asks it for the release before anything is installed.
"""

import functools
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

OLDEST = 6, 4  # that is supported, and the only one whose rocprofv3 does not tell its release
ASSUMED = "10.0"  # in a dry run without ROCm
EXECUTABLES = {"rocprofv3": "rocprofv3", "rocprof-compute": "rocprof-compute", "rocprof-sys": "rocprof-sys-sample"}
HELP = {"rocprofv3": ["--help"], "rocprof-compute": "profile --experimental --help".split(), "rocprof-sys": ["--help"]}


def dotted(release):
    return ".".join(map(str, release))


def release_in(text):
    """Return the first two numbers of a version, (6, 4) for 6.4.43482-0f2d60242, or None."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return match and tuple(map(int, match.groups()))


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
# Installations of ROCm


def rocm_path():
    return os.environ.get("ROCM_PATH") or "/opt/rocm"


def version_in(folder):
    """Return the release that ROCm's file of its version tells, or None if the folder has none."""
    file = Path(folder, ".info", "version")
    return release_in(file.read_text()) if file.is_file() else None


def installations():
    """Return the folders of ROCm below /opt, the newest first: rocm-X.Y.Z up to 7.2, rocm/core-X.Y later."""
    parent = Path(os.environ.get("ROCM_PARENT") or "/opt")
    found = [path for name in ("rocm", "rocm-*", "rocm/core", "rocm/core-*") for path in parent.glob(name)]
    return sorted(found, key=lambda path: version_in(path) or (), reverse=True)


def release_here():
    """Return the release of this machine's ROCm as text, such as 7.2: that of ROCM_PATH first; "" without ROCm."""
    return dotted(next(filter(None, map(version_in, [rocm_path(), *installations()])), ()))


def root_of(path):
    """Return the ROCm that a tool belongs to: a folder with its version above the tool or the rocprofv3 beside it.

    A link may lead from bin into libexec, or into a folder of the tool's own. None if there is no such folder.
    """
    above = (folder for file in filter(None, (path, rocprofv3_beside(path))) for folder in Path(file).resolve().parents)
    return next(filter(version_in, above), None)


def rocprofv3_beside(path):
    return shutil.which("rocprofv3", path=":".join([os.path.dirname(path), *folders()]))


def release_of(path):
    """Return the release of the ROCm that the tool of this path belongs to."""
    if root := root_of(path):
        return version_in(root)
    command = [rocprofv3_beside(path) or "false", "--version"]
    answer = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True).stdout
    told = re.search(r"^ *rocm_version: *(.*)", answer, re.MULTILINE)
    return release_in(told[1]) if told else OLDEST


def architectures():
    """Return the architectures of the GPUs that AMD's driver lists, such as gfx942."""
    folder = os.environ.get("KFD_TOPOLOGY") or "/sys/class/kfd/kfd/topology"
    command = ["grep", "-rhs", "^gfx_target_version [1-9]", folder]  # -s, as a GPU may be another job's
    lines = subprocess.run(command, capture_output=True, text=True).stdout
    return [f"gfx{v // 10000}{v // 100 % 100:x}{v % 100:x}" for v in sorted(set(map(int, lines.split()[1::2])))]


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
    def launch(self):
        """The words that start it. A profiler that comes with PyTorch works only with the libraries beside it."""
        if core := core_of(self.path):
            own = os.path.dirname(os.path.dirname(self.path))
            libraries = dict.fromkeys([f"{own}/lib", f"{core}/lib", os.environ.get("LD_LIBRARY_PATH")])
            start = ["env", "LD_LIBRARY_PATH=" + ":".join(filter(None, libraries)), self.path]
            return [*start, "--rocm-root", core] if self.name == "rocprofv3" else start
        executable = EXECUTABLES[self.name]
        return [executable if shutil.which(executable, path=search_path()) == self.path else self.path]

    def knows(self, word, since, until=(99,)):
        """Tell whether its help has a word, such as an option: releases do not say what their builds can do.

        Where there is no help, as in a dry run without the tool, those from since on, and before until, know it.
        """
        text = help_of(self)
        return word in text if text else since <= self.release < until


@functools.cache
def help_of(tool):
    """Return the help of a Tool, or "" if it has none to tell."""
    if not tool.is_installed:
        return ""
    command, pipes = [*tool.launch, *HELP[tool.name]], dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=30, text=True, errors="replace", **pipes)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if "usage" in done.stdout.lower() else ""  # and not the error of a tool that lacks a package


def core_of(path):
    """Return the package with the libraries of a tool that comes with PyTorch, or None."""
    site = re.match(r"(.*)/_rocm_\w+/bin/", path)
    return site and f"{site[1]}/_rocm_sdk_core"


def search_path():
    return f"{os.environ['PATH']}:{rocm_path()}/bin"


def folders():
    """Yield the folders that may hold profilers of ROCm, the best first."""
    if wheels_folder():
        yield from (f"{wheels_folder()}/{name}/bin" for name in ("_rocm_sdk_core", "_rocm_profiler"))
    yield from search_path().split(":")
    yield from (f"{folder}/bin" for folder in installations())


def find(name, given=None):
    """Return the Tool with this name that the scripts use; given: the path that a person chose."""
    if given:
        return Tool(name, given, release_of(given), "named by --tool-path")
    build, first = torch_build(), None
    for path in filter(None, (shutil.which(EXECUTABLES[name], path=folder) for folder in folders())):
        tool = Tool(name, path, release_of(path), "the first that was found")
        if core_of(path):
            return tool._replace(why="which comes with this PyTorch")
        if build == f"rocm {dotted(tool.release)}":
            return tool._replace(why="of the release of this PyTorch")
        first = first or tool
    release = release_in(os.environ.get("ROCM_VERSION") or ASSUMED) or ()  # older than all, if it is none
    return first or Tool(name, EXECUTABLES[name], release, "which is not installed here")


# ----------------------------------------------------------------------------------------------------------------------
# Why a profiler cannot be used: the rest of a sentence with the remedy, or None


def obstacle_of(tool, build):
    return lack_of(tool) or device_obstacle() or (None if build.startswith("rocm") else built_for(build))


def lack_of(tool):
    if not tool.is_installed:
        return "is not installed or not on PATH (module load rocm, or add the bin folder of ROCm 6.4 or newer)"
    if tool.release < OLDEST:
        return f"is of ROCm {dotted(tool.release)}, and lacks options that are used here: load ROCm 6.4 or newer"
    return None


def kfd():
    """Return the file of AMD's driver, through which programs reach a GPU."""
    return Path(os.environ.get("KFD_DEVICE") or "/dev/kfd")


def wsl():
    """Return the file through which programs reach GPUs of all makes under WSL, by the drivers of Windows."""
    return Path(os.environ.get("WSL_DEVICE") or "/dev/dxg")


def device_obstacle():
    device = kfd()
    if not device.exists() and wsl().exists():  # then ROCm needs no other, and everybody may use it
        return None
    if not device.exists():
        return f"finds no AMD GPU: {device} does not exist (a container needs --device=/dev/kfd --device=/dev/dri)"
    if os.access(device, os.R_OK | os.W_OK):
        return None
    number = device.stat().st_gid
    try:
        group = device.group()
    except KeyError:  # a group of the host that the container does not know
        group = number
    return (
        f"has no permission on {device}: join its group with sudo usermod -aG {group} $USER and log in "
        f"again (a container needs --group-add {number})"
    )


def python():
    return os.environ.get("PYTHON") or sys.executable


def built_for(build):
    return (
        f"would record nothing: the PyTorch of {python()} is built for {build or 'nothing, it is missing'} "
        "(docs/rocm.md, Install, names the three ways to one for ROCm)"
    )


def mismatch_of(tool, build):
    """Return a warning if a profiler is of another ROCm than PyTorch, or None."""
    release, other = dotted(tool.release), build.removeprefix("rocm ")
    if core_of(tool.path) or not build.startswith("rocm") or other == release:
        return None
    install = "pip install 'rocm[profiler]', " if wheels_folder() else ""
    return (
        f"two ROCm installations. PyTorch brings ROCm {other}, {tool.name} is of {release}: it may record nothing, or "
        f"crash. If so, {install}load the ROCm {other} module, or use AMD's PyTorch container."
    )
