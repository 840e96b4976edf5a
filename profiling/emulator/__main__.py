"""Run the tests of the kernels on emulated AMD GPUs: the compiled kernels, instruction by instruction, on this CPU.

    python -m profiling.emulator                                      gfx90a, gfx942 and gfx950, some minutes
    python -m profiling.emulator --architectures gfx942 -- -k attention
    python -m profiling.emulator --count                              count instead: writes docs/emulated_counts.md
    python -m profiling.emulator --count -- --stage 2 --seq-len 64    count a step of the script with these flags

It shows that code and layout are right, not how fast they are. tinygrad, whose emulator executes the instructions, is
taken from --tinygrad or fetched by git, once.

Exit codes: 0 done, 1 a test failed, 2 the request cannot be met, 130 interrupted.
"""

import os
import random
import subprocess
import sys

import tiny_llama_v3 as llama
from measure.results import ROOT
from profiling.emulator import source
from profiling.kernel_report import CHIPS, is_amd

TESTS = ("tests/core/test_kernels.py", "tests/nanogpt/test_nanogpt_kernels.py", "tests/emulated")
ARCHITECTURES = [arch for arch in CHIPS if is_amd(arch)]


def environment(patched):
    """Variables of a process that can import the emulator, where kernels are compiled and no GPU is in sight."""
    path = os.pathsep.join([str(patched), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "PYTHONPATH": path, "CACHEDB": str(source.FOLDER / f"{patched.name}.db"), "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "",
    }  # fmt: skip


def run_tests(arch, seed, arguments, variables):
    """pytest's exit code."""
    print(f"{arch}: waves in the order of seed {seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.emulated.plugin", "-n", "auto", "--maxprocesses", "4"]
    variables = variables | {"EMULATE": arch, "EMULATE_SEED": str(seed)}
    return subprocess.run([*command, *TESTS, *arguments], cwd=ROOT, env=variables).returncode


def count(architectures, flags, variables):
    """The exit code of profiling.emulator.counts."""
    command = [sys.executable, "-m", "profiling.emulator.counts", "--architectures", *architectures, "--", *flags]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


def run(argv):
    parser = llama.Parser("profiling.emulator", __doc__)
    parser.add_argument(
        "--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, help="(default: all)"
    )
    parser.add_argument("--tinygrad", metavar="DIR", help=f"a copy at {source.COMMIT[:12]} (default: fetched by git)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the order of waves (default: any)"
    )
    parser.add_argument("--count", action="store_true", help="count instructions and cache lines instead of testing")
    parser.add_argument("arguments", nargs="*", help="for pytest, or flags of tiny_llama_v3.py, after --")
    options = parser.parse_args(argv)
    if llama.triton is None:
        raise llama.UsageError("Triton is not installed: pip install triton, on Linux")
    variables = environment(source.prepare(options.tinygrad))
    if options.count:
        return count(options.architectures, options.arguments, variables)
    codes = [run_tests(arch, options.seed, options.arguments, variables) for arch in options.architectures]
    return int(any(codes))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return llama.exit_code_of(lambda: run(argv), "profiling.emulator")


if __name__ == "__main__":
    sys.exit(main())
