"""Run the tests of the kernels on emulated AMD GPUs.

    python -m offline.emulate                                 gfx90a, gfx942 and gfx950, some minutes
    python -m offline.emulate --architectures gfx942 -- -k attention

The compiled kernels are executed instruction by instruction on this CPU. This shows whether they are correct, not how
fast they are. The emulator is part of tinygrad, which is taken from --tinygrad or fetched by git once.

Exit codes: 0 done, 1 a test failed, 2 the request cannot be met, 130 interrupted.
"""

import os
import random
import subprocess
import sys

if not __package__:
    print("run it from the root as python -m offline.emulate", file=sys.stderr)
    sys.exit(2)

from measure.command_line import Parser, program
from measure.device import require_triton
from measure.results import ROOT
from offline import tinygrad_source
from offline.architectures import CHIPS, is_amd

TESTS = (
    "tests/core/test_kernels.py",
    "tests/core/test_padding.py",
    "tests/nanogpt/test_nanogpt_kernels.py",
    "tests/tiny_llama/test_fp8.py",
    "tests/offline/emulated",
)
ARCHITECTURES = [arch for arch in CHIPS if is_amd(arch)]


def environment(patched):
    """Return the environment of a process that can import the emulator, compiles kernels and sees no GPU."""
    path = [str(patched), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "CACHEDB": str(tinygrad_source.FOLDER / f"{patched.name}.db"),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }


def run_tests(arch, seed, arguments, variables):
    """Run the tests on one GPU, and return the exit code of pytest."""
    print(f"{arch}: waves in the order of seed {seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.offline.plugin", "-n", "auto", "--maxprocesses", "4"]
    variables = variables | {"EMULATE": arch, "EMULATE_SEED": str(seed)}
    return subprocess.run([*command, *TESTS, *arguments], cwd=ROOT, env=variables).returncode


@program("emulate.py")
def main(argv):
    parser = Parser("emulate.py", __doc__)
    add = parser.add_argument
    add("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, help="(default: all)")
    commit = tinygrad_source.COMMIT[:12]
    add("--tinygrad", metavar="DIR", help=f"a copy at {commit} (default: fetched by git)")
    add("--seed", type=int, default=random.randrange(10**6), help="of the order of waves (default: random)")
    add("arguments", nargs="*", help="after --: of pytest")
    options = parser.parse_args(argv)
    require_triton()
    variables = environment(tinygrad_source.prepare(options.tinygrad))
    # Each architecture is tested, also after a failure.
    codes = [run_tests(arch, options.seed, options.arguments, variables) for arch in options.architectures]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
