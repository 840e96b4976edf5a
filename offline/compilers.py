"""Compile every launch for AMD GPUs with several releases of Triton, and report what each release costs.

    python -m offline.compilers                               write benchmarks/results/compilers.json
    python -m offline.compilers --versions 3.7.1 3.9.0 --architectures gfx942 --cases small --output-dir .

Each release is installed once from PyPI, into .compilers/ and not into this environment, and runs `python -m
offline.pages --check` there. The newest of the releases is what the others are compared with: by the occupancy of each
launch, and by what it spills. No kernel is run. ROCm's own Triton of the same number may differ a little.
`python -m benchmarks.pages.publish` writes the table of docs/rocm.md, and profilers/doctor.sh tells the summary.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:
    print("run it from the root as python -m offline.compilers", file=sys.stderr)
    sys.exit(2)

import torch

import tiny_llama_v3 as llama
from measure.command_line import Parser, UsageError, positive, program
from measure.device import require_triton
from measure.results import RESULTS, ROOT, header
from offline.pages import write_lines
from offline.recorded import CASES

FOLDER, RESULT = ROOT / ".compilers", RESULTS / "compilers.json"
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # those that PyTorch for ROCm 7.2 to 10.1 brings, and the newest
ARCHITECTURES = "gfx90a", "gfx942", "gfx950"  # whose Triton ROCm brings; PyPI's has the same code generator
LAUNCH = ("arch", "kernel", "variant", "precision", "tile")  # the fields that name a launch


def number_of(version):
    """Convert the text of --versions into a tuple that can be compared."""
    return tuple(map(int, version.split(".")))


def install(version):
    """Return the folder of a release of Triton, which is installed once; UsageError if that fails."""
    folder = FOLDER / f"triton-{version}"
    if not folder.exists():
        print(f"Triton {version}: installing it into {folder.relative_to(ROOT)}", flush=True)
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:  # so that an incomplete copy is never used
            copy = Path(scratch, "copy")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}  # .venv's holds triton to its own version
            command = [*pip, "--target", copy, f"triton=={version}"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
                raise UsageError(f"Triton {version} cannot be installed ({reason}): choose others by --versions")
            copy.rename(folder)
    return folder


def compile_with(version, options):
    """Return the rows of offline.pages --check with a release of Triton."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(install(version)), str(ROOT)])}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, "-m", "offline.pages", "--check", "--architectures", *options.architectures]
        command += ["--cases", *options.cases, "--processes", str(options.processes), "--json", str(file)]
        print(f"Triton {version}: compiling", flush=True)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not file.exists():
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise UsageError(f"Triton {version} compiles nothing ({reason}): choose others by --versions")
        result = json.loads(file.read_text())
    if result["triton"] != version:
        raise UsageError(f"{install(version)} holds Triton {result['triton']}: remove this folder")
    print(done.stdout, end="", flush=True)  # what it violates
    return result["rows"]


def figures(row):
    """Return what is compared of a compiled launch; None if it does not compile."""
    if row.get("error"):
        return None
    spilled = row["vector_spills"] + row["scalar_spills"] or row["scratch_bytes"]
    return {"registers": row["registers"], "spilled": spilled, "occupancy": row["occupancy"]["share"]}


def merged(compiled):
    """Return a row for each launch with its figures by version, of {version: rows of the same launches in one order}.

    What several cases launch alike is one row, with the first of them.
    """
    found = {}
    for same in zip(*compiled.values(), strict=True):
        by_version = dict(zip(compiled, map(figures, same), strict=True))
        row = {name: same[0][name] for name in LAUNCH} | {"compiled": by_version}
        found.setdefault(json.dumps(row), row | {"case": same[0]["case"]})
    return list(found.values())


def share_of(row, version, newest):
    """Return the occupancy of a launch as a share of that with the newest release; 0 if it does not compile."""
    ours, theirs = row["compiled"][version], row["compiled"][newest]
    return (ours["occupancy"] if ours else 0) / theirs["occupancy"] if theirs else 1.0


def summarize(rows, versions):
    """Return, for each release and each GPU, how many launches differ from the newest, and which one loses the most."""
    summary = []
    for version in versions:
        for arch in dict.fromkeys(row["arch"] for row in rows):
            own = [row for row in rows if row["arch"] == arch]
            shares = [share_of(row, version, versions[-1]) for row in own]
            summary.append({
                "version": version,
                "newest": versions[-1],
                "arch": arch,
                "launches": len(own),
                "lower": sum(share < 1 for share in shares),
                "higher": sum(share > 1 for share in shares),
                "spilling": sum((row["compiled"][version] or {"spilled": 1})["spilled"] > 0 for row in own),
                "worst": own[shares.index(min(shares))] if min(shares) < 1 else None,
            })  # fmt: skip
    return summary


@program("compilers.py")
def main(argv):
    parser = Parser("compilers.py", __doc__)
    add = parser.add_argument
    add("--versions", nargs="+", default=VERSIONS, metavar="VERSION", help=f"(default: {' '.join(VERSIONS)})")
    add("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, help="(default: all)")
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="(default: all)")
    add("--processes", type=positive, default=min(os.cpu_count(), 8), help="(default: %(default)s)")
    add("--output-dir", default=str(RESULTS), metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    require_triton()
    if wrong := [version for version in options.versions if not re.fullmatch(r"\d+\.\d+\.\d+", version)]:
        raise UsageError(f"--versions {wrong[0]}: give releases such as 3.9.0")
    versions = sorted(set(options.versions), key=number_of)
    if len(versions) < 2:
        raise UsageError(f"--versions {versions[0]}: give two releases or more, which are compared")
    path = llama.writable_folder("--output-dir", options.output_dir) / RESULT.name
    for version in versions:  # all of them before the first one takes minutes
        install(version)
    rows = merged({version: compile_with(version, options) for version in versions})
    result = header("compilers", torch.device("cpu"), argv, "offline")
    summary = summarize(rows, versions)
    write_lines(path, result | {"versions": versions, "summary": summary}, rows)
    for part in summary:
        print("Triton {version} on {arch}: {lower} of {launches} launches have less occupancy".format(**part))
    print(f"Written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
