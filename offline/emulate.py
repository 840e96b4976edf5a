"""Run tests of Triton kernels on emulated AMD GPUs.

    python -m offline.emulate                                 this project's, on every architecture, some minutes each
    python -m offline.emulate --architectures gfx942 -- -k attention
    python -m offline.emulate --architectures gfx942 -- path/to/your/tests

The compiled kernels are executed instruction by instruction on this CPU. This shows whether they are correct, not how
fast they are; docs/emulator.md has more. Architectures are gfx90a, gfx942 and gfx950 of CDNA (Instinct), and gfx1100
and gfx1201 of RDNA (Radeon). The emulator is part of tinygrad, which is taken from --tinygrad or fetched by git once.

Exit codes: 0 done, 1 a test failed or none ran, 2 the request cannot be met, 130 interrupted.
"""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

if not __package__:
    print("run it from the root as python -m offline.emulate", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, UsageError, program
from measure.device import require_triton
from measure.results import ROOT
from offline.emulator import CHIPS, source

TESTS = (
    "tests/core/test_kernels.py",
    "tests/core/test_padding.py",
    "tests/nanogpt/test_nanogpt_kernels.py",
    "tests/tiny_llama/test_fp8.py",
    "tests/offline/emulated",
)
ARCHITECTURES = list(CHIPS)


def environment():
    """Return the environment of a process that can import the plugins, compiles kernels and sees no GPU."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }


def named_files(arguments):
    """Return the files and folders that arguments of pytest name. UsageError if one that looks so is not there."""
    values = {"-k", "-m", "-p", "-n", "-o", "-c", "-W", "-r"}  # of these options the next argument is one
    arguments = [argument for before, argument in itertools.pairwise(["", *arguments]) if before not in values]
    paths = [argument.partition("::")[0] for argument in arguments if not argument.startswith("-")]
    for path in paths:
        if not os.path.exists(path) and ("/" in path or path.endswith(".py")):
            raise UsageError(f"{path} is not there: after --, name files or folders of tests")
    return [Path(path).resolve() for path in paths if os.path.exists(path)]


def run_tests(arch, options):
    """Run the tests on one GPU, and return the exit code of pytest."""
    print(f"{arch}: waves in the order of seed {options.seed}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "offline.pytest_plugin",
        f"--emulate={arch}",
        f"--emulate-seed={options.seed}",
    ]
    command += [f"--tinygrad={options.tinygrad}"] if options.tinygrad else []
    files = named_files(options.arguments)
    if all(file.is_relative_to(ROOT / "tests") for file in files):  # this project's, which know how often they launch
        command += ["-p", "tests.offline.plugin", "--emulate-once", "-n", "auto", "--maxprocesses", "4"]
        command += [] if files else [str(ROOT / test) for test in TESTS]
    return subprocess.run([*command, *options.arguments], env=environment()).returncode


@program("emulate.py")
def main(argv):
    parser = Parser("emulate.py", __doc__)
    add = parser.add_argument
    add("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, help="(default: all)")
    add("--tinygrad", metavar="DIR", help=f"a copy at {source.COMMIT[:12]} (default: fetched by git)")
    add("--seed", type=int, default=random.randrange(10**6), help="of the order of waves (default: random)")
    add("arguments", nargs="*", help="after --: of pytest; your own tests, if it names files")
    options = parser.parse_args(argv)
    require_triton()
    named_files(options.arguments)
    options.tinygrad = options.tinygrad and str(Path(options.tinygrad).resolve())
    try:
        source.prepare(options.tinygrad)  # once, before several processes would
    except source.NoSource as error:
        raise UsageError(str(error)) from None
    # Each architecture is tested, also after a failure.
    codes = [run_tests(arch, options) for arch in options.architectures]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
