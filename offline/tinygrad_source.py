"""Fetch the commit of tinygrad whose emulator machine.py uses, check it and patch it."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from measure.command_line import UsageError
from measure.results import ROOT

REPOSITORY = "https://github.com/tinygrad/tinygrad"
COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
PATCH = Path(__file__).with_name("tinygrad.patch")
PARTS = ("tinygrad", "test")  # the folders that are used
EMULATOR = ("test/mockgpu/amd", "test/amd/helpers.py", "tinygrad/renderer/amd", "tinygrad/runtime/autogen/amd/cdna")
DIGEST = "1dcfa9e7583c252472b41a5b15bd05acaaea3a99f490c6e0da1472f756df4747"  # of the emulator's files at this commit
FOLDER = ROOT / ".emulator"


def prepare(tinygrad=None):
    """Return the folder of a patched copy of tinygrad, which belongs first in PYTHONPATH. It is made if there is none.

    tinygrad: a folder with the commit, which is not changed; by default the commit is fetched. UsageError if the folder
    has another text, if fetching fails, or if clang, which compiles the instructions, is missing.
    """
    compiler = os.environ.get("CC", "clang")
    if not shutil.which(compiler):
        raise UsageError(f"the emulator needs {compiler}, which is not here: apt-get install clang")
    patched = FOLDER / f"tinygrad-{COMMIT[:12]}-{hashlib.sha256(PATCH.read_bytes()).hexdigest()[:12]}"
    if tinygrad is not None:
        verify(Path(tinygrad))
    if not patched.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:  # so that an incomplete copy is never used
            source = fetch(Path(scratch, "fetched")) if tinygrad is None else Path(tinygrad)
            verify(source)
            copy = Path(scratch, "copy")
            for part in PARTS:
                shutil.copytree(source / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            apply_patch(copy)
            copy.rename(patched)
    return patched


def fetch(folder):
    """Fetch the commit from its repository into a new folder, and return the folder."""
    folder.mkdir()
    try:
        for command in ("init -q", f"fetch -q --depth 1 {REPOSITORY} {COMMIT}", f"checkout -q {COMMIT}"):
            run = ["git", *command.split()]
            subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        remedy = "give a folder with it, make emulate TINYGRAD=path"
        raise UsageError(f"tinygrad {COMMIT[:12]} cannot be fetched ({reason}): {remedy}") from error
    return folder


def verify(folder):
    """Raise UsageError if the emulator's files are not those of the commit."""
    if digest_of(folder) != DIGEST:
        remedy = f"check out {COMMIT} of {REPOSITORY} there, or leave TINYGRAD away"
        raise UsageError(f"TINYGRAD={folder} is not the tinygrad that the patch is for: {remedy}")


def digest_of(folder):
    """Return the SHA-256 of the emulator's files."""
    digest = hashlib.sha256()
    for part in EMULATOR:
        files = [folder / part] if (folder / part).is_file() else (folder / part).rglob("*.py")
        for file in sorted(files):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def apply_patch(folder):
    """Apply tinygrad.patch, which gives the reason for each change; its context must match exactly."""
    # Inside a git checkout, git would take the paths to be relative to the checkout.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    subprocess.run(["git", "apply", str(PATCH)], cwd=folder, env=environment, check=True)
