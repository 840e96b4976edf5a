"""Run the tests of the kernels on emulated AMD GPUs.

    python -m emulated                                      gfx90a, gfx942 and gfx950, some minutes
    python -m emulated --architectures gfx942 -- -k attention
    python -m emulated --count                              count instead: writes docs/emulated_counts.md
    python -m emulated --count -- --stage 2 --seq-len 64    count a step of the script with these flags

The compiled kernels are executed instruction by instruction on this CPU. This shows whether they are correct, not how
fast they are. The emulator is part of tinygrad, which is taken from --tinygrad or fetched by git once.

Exit codes: 0 done, 1 a test failed, 2 the request cannot be met, 130 interrupted.
"""

import os
import random
import subprocess
import sys

from compiled.architectures import CHIPS, is_amd
from emulated import source
from measure.command_line import Parser, program
from measure.device import require_triton
from measure.results import ROOT

TESTS = (
    "tests/core/test_kernels.py", "tests/nanogpt/test_nanogpt_kernels.py", "tests/tiny_llama/test_fp8.py",
    "tests/emulated/inside",
)  # fmt: skip
ARCHITECTURES = [arch for arch in CHIPS if is_amd(arch)]


def environment(patched):
    """The environment of a process that can import the emulator, compiles kernels and sees no GPU."""
    path = os.pathsep.join([str(patched), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "PYTHONPATH": path, "CACHEDB": str(source.FOLDER / f"{patched.name}.db"), "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "",
    }  # fmt: skip


def run_tests(arch, seed, arguments, variables):
    """Returns the exit code of pytest."""
    print(f"{arch}: waves in the order of seed {seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.emulated.plugin", "-n", "auto", "--maxprocesses", "4"]
    variables = variables | {"EMULATE": arch, "EMULATE_SEED": str(seed)}
    return subprocess.run([*command, *TESTS, *arguments], cwd=ROOT, env=variables).returncode


def count(architectures, flags, variables):
    """Returns the exit code of emulated.report."""
    command = [sys.executable, "-m", "emulated.report", "--architectures", *architectures, "--", *flags]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


@program("emulated")
def main(argv):
    parser = Parser("emulated", __doc__)
    parser.add_argument(
        "--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, help="(default: all)"
    )
    parser.add_argument("--tinygrad", metavar="DIR", help=f"a copy at {source.COMMIT[:12]} (default: fetched by git)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the order of waves (default: random)"
    )
    parser.add_argument("--count", action="store_true", help="count instructions and cache lines instead of testing")
    parser.add_argument("arguments", nargs="*", help="after --: of pytest, or with --count of tiny_llama_v3.py")
    options = parser.parse_args(argv)
    require_triton()
    variables = environment(source.prepare(options.tinygrad))
    if options.count:
        return count(options.architectures, options.arguments, variables)
    codes = [run_tests(arch, options.seed, options.arguments, variables) for arch in options.architectures]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
