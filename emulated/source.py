"""Finds or fetches the commit of tinygrad whose emulator machine.py uses, checks it and patches it."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from measure.results import ROOT
from tiny_llama_v3 import UsageError

REPOSITORY = "https://github.com/tinygrad/tinygrad"
COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
PATCH = Path(__file__).with_name("tinygrad.patch")
PARTS = ("tinygrad", "test")  # the folders that are used
EMULATOR = ("test/mockgpu/amd", "test/amd/helpers.py", "tinygrad/renderer/amd", "tinygrad/runtime/autogen/amd/cdna")
DIGEST = "1dcfa9e7583c252472b41a5b15bd05acaaea3a99f490c6e0da1472f756df4747"
FOLDER = ROOT / ".emulator"


def prepare(tinygrad=None):
    """Returns the folder of a patched copy of tinygrad, made if there is none, which belongs first in PYTHONPATH.

    tinygrad: a folder with the commit, which is not changed; by default the commit is fetched. UsageError if the folder
    has another commit or other files, if fetching fails, or if clang, which compiles the instructions, is missing.
    """
    compiler = os.environ.get("CC", "clang")
    if not shutil.which(compiler):
        raise UsageError(
            f"the emulator compiles instructions with {compiler}, which is not here: apt-get install clang"
        )
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
    """Fetches the commit from its repository into a new folder."""
    folder.mkdir()
    try:
        for command in (
            ["init", "-q"],
            ["fetch", "-q", "--depth", "1", REPOSITORY, COMMIT],
            ["checkout", "-q", COMMIT],
        ):
            subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise UsageError(
            f"tinygrad {COMMIT[:12]} cannot be fetched ({reason}): give a folder with it, make emulate TINYGRAD=path"
        ) from error
    return folder


def verify(folder):
    """UsageError if the folder does not hold the commit: by its hash in a git checkout, and by the files."""
    remedy = f"check out {COMMIT[:12]} there, or leave TINYGRAD away"
    if not all((folder / part).exists() for part in EMULATOR):
        raise UsageError(f"TINYGRAD={folder} is no tinygrad with an emulator of CDNA: {remedy}")
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if commit != COMMIT:
            raise UsageError(f"TINYGRAD={folder} is at {commit[:12]}, the patch is for another commit: {remedy}")
    if digest_of(folder) != DIGEST:
        raise UsageError(f"TINYGRAD={folder} has another text than the patch is for: {remedy}")


def digest_of(folder):
    """The SHA-256 of the emulator's files."""
    digest = hashlib.sha256()
    for part in EMULATOR:
        files = [folder / part] if (folder / part).is_file() else (folder / part).rglob("*.py")
        for file in sorted(files):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def apply_patch(folder):
    """Applies tinygrad.patch, which gives the reason for each change; its context must match exactly."""
    # Inside a git checkout, git would take the paths to be relative to the checkout.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", str(PATCH)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{PATCH.name} does not fit {folder}: {done.stderr.strip().splitlines()[-1]}")
