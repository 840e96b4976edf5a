"""Fetch the commit of tinygrad whose emulator machine.py uses, check it and import it."""

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

REPOSITORY = "https://github.com/tinygrad/tinygrad"
COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
PARTS = ("tinygrad", "test")  # the folders that are used
EMULATOR = ("test/mockgpu/amd", "test/amd/helpers.py", "tinygrad/renderer/amd", "tinygrad/runtime/autogen/amd")
DIGEST = "e28650014931f2407e82ba12ddf46043f63249f1824ed1648fc4854501192ce2"  # of the emulator's files at this commit
FOLDER = Path(__file__).parents[2] / ".emulator"


class NoSource(Exception):
    """tinygrad, or the compiler that it needs, is not there; the message has the remedy."""


def activate(tinygrad=None):
    """Import machine.py, with tinygrad from where prepare() finds it, whose errors it raises.

    Its folder does not stay in sys.path: it has a package `test`, which others have as well.
    """
    folder = str(prepare(tinygrad))
    os.environ["CACHEDB"] = f"{folder}-{processor()}.db"  # where tinygrad keeps compiled instructions
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "test"}
    try:
        with mock.patch.object(sys, "path", [folder, *sys.path]):
            importlib.import_module("offline.emulator.machine")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "test"]:
            del sys.modules[name]
        sys.modules.update(others)


def processor(file=Path("/proc/cpuinfo")):
    """Return a name of the instructions that this CPU has: machines of a cluster share folders, but not always them."""
    flags = re.search(r"^(flags|Features)\s*:.*", file.read_text(), flags=re.M) if file.exists() else None
    return hashlib.sha256(flags[0].encode()).hexdigest()[:12] if flags else "any"


def prepare(tinygrad=None):
    """Return the folder of tinygrad, which is fetched once.

    tinygrad: a folder with the commit, of which a copy is made; by default the commit is fetched. NoSource if the
    folder has another text, if fetching fails, or if clang, which compiles the instructions, is missing.
    """
    if not shutil.which("clang"):  # which tinygrad calls, whatever CC says
        raise NoSource("the emulator needs clang, which is not here: apt-get install clang")
    kept = FOLDER / f"tinygrad-{COMMIT[:12]}"
    if tinygrad is not None:
        verify(Path(tinygrad))
    if not kept.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:  # so that an incomplete copy is never used
            source = fetch(Path(scratch, "fetched")) if tinygrad is None else Path(tinygrad)
            verify(source)
            copy = Path(scratch, "copy")
            for part in PARTS:
                shutil.copytree(source / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            copy.rename(kept)
    return kept


def fetch(folder):
    """Fetch the commit from its repository into a new folder, and return the folder."""
    folder.mkdir()
    try:
        for command in ("init -q", f"fetch -q --depth 1 {REPOSITORY} {COMMIT}", f"checkout -q {COMMIT}"):
            run = ["git", *command.split()]
            subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        remedy = "give a folder with it, --tinygrad PATH or make emulate TINYGRAD=PATH"
        raise NoSource(f"tinygrad {COMMIT[:12]} cannot be fetched ({reason}): {remedy}") from error
    return folder


def verify(folder):
    """Raise NoSource if the emulator's files are not there, or not those of the commit."""
    if digest_of(folder) != DIGEST:
        remedy = f"check out {COMMIT} of {REPOSITORY} there, or leave --tinygrad away"
        found = "is not the tinygrad that the emulator is made for" if folder.is_dir() else "is no folder"
        raise NoSource(f"--tinygrad: {folder} {found}: {remedy}")


def digest_of(folder):
    """Return the SHA-256 of the emulator's files."""
    digest = hashlib.sha256()
    for part in EMULATOR:
        files = [folder / part] if (folder / part).is_file() else (folder / part).rglob("*.py")
        for file in sorted(files):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
