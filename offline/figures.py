"""Print what the machine code of Triton's kernels needs of an AMD GPU, which need not be in this machine.

    python -m offline.figures ~/.triton/cache/*/*.amdgcn
    python -m offline.figures kernel.amdgcn --shared 65536

A FILE is what Triton's cache keeps of a kernel, whoever wrote it. The .json beside it has the bytes of LDS that a
program takes; without it, give them by --shared. Nothing is run: docs/rocm.md says what the figures tell of speed.

Exit codes: 0 done, 2 the request cannot be met, 130 interrupted.
"""

import json
import re
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m offline.figures", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, UsageError, positive, program
from measure.tables import text_table
from offline.architectures import CHIPS, is_amd, occupancy, wave_size
from offline.compiler import read_amdgcn
from offline.pages import at_least, instruction_cell
from tiny_llama.files import open_input

COLUMNS = ["file", "GPU", "waves", "registers", "spilled", "scratch, bytes", "shared, KiB", "occupancy", "instructions"]
AMD = [arch for arch in CHIPS if is_amd(arch)]


def read(path):
    with open_input(path) as file:
        return file.read().decode(errors="replace")


def lds_of(path):
    """Return the bytes of LDS that Triton's cache has beside a kernel; UsageError if it does not."""
    try:
        return int(json.loads(read(path.with_suffix(".json")))["shared"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no .json of Triton beside it, with its LDS: give --shared BYTES") from error


def figures(path, shared):
    """Return the cells of a file. shared: bytes of LDS, None for what is beside it."""
    text = read(path)
    try:  # LLVM has written the target in two ways
        (arch,) = re.findall(r'\.amdgcn_target ".*-(gfx\w+)', text)
        (threads,) = re.findall(r"\.max_flat_workgroup_size: +(\d+)", text)
        row = read_amdgcn({"amdgcn": text})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is no machine code of one kernel for AMD GPUs: give an .amdgcn of Triton") from error
    if arch not in AMD:
        raise UsageError(f"{path} is for {arch}, whose occupancy is not known here: give one for {', '.join(AMD)}")
    waves, shared = int(threads) // wave_size(arch), lds_of(path) if shared is None else shared
    fits = occupancy(arch, row["registers"], shared, waves, row["scalar_registers"])
    counts = waves, row["registers"], row["vector_spills"], row["scratch_bytes"]
    limit = f", {fits['limit']}" if fits["limit"] else ""
    return [
        *map(str, (path, arch, *counts)), at_least(shared / 1024), f"{fits['share']:.0%}{limit}", instruction_cell(row)
    ]  # fmt: skip


@program("figures.py")
def main(argv):
    parser = Parser("figures.py", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--shared", type=positive, metavar="BYTES", help="LDS of a program (default: of the .json)")
    options = parser.parse_args(argv)
    print(*text_table(COLUMNS, [figures(path, options.shared) for path in options.files]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
