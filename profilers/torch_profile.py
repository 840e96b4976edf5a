"""Profile a Python program by torch.profiler, from its start to its end.

    python profilers/torch_profile.py FOLDER program.py [ARGUMENTS...]

FOLDER gets trace.json for Perfetto, in which a range "program" is around everything, and kernel_stats.csv with
rocprofv3's columns. The exit code is that of the program.
"""

import argparse
import sys
import traceback
from pathlib import Path

import torch

if __name__ == "__main__":  # the program is not to find the project's folder in PYTHONPATH
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from measure.command_line import Parser, program  # noqa: E402
from profilers.as_main import run_as_main  # noqa: E402
from tiny_llama.kernel_table import is_work, write_kernel_table  # noqa: E402


@program("torch_profile")
def main(argv):
    parser = Parser("torch_profile", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("program", metavar="program.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    # torch.profiler.profile is a class around this one, and would import Triton before the program does. Without Kineto
    # this one times operators, not kernels.
    device = "cuda" if torch.cuda.is_available() else None
    profiler = torch.autograd.profiler.profile(use_device=device, use_kineto=True, acc_events=True)
    try:
        with profiler, torch.profiler.record_function("program"):
            run_as_main(options.program, options.arguments)
    except Exception:  # is the program's, and not an error of this one
        traceback.print_exc()
        return 1
    finally:  # a program may end by SystemExit
        events = profiler.function_events
        profiler.export_chrome_trace(str(options.folder / "trace.json"))
        write_kernel_table(options.folder / "kernel_stats.csv", events, on_gpu=any(map(is_work, events)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
