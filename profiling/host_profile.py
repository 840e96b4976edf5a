"""Profile the host side of a Python program: which functions its time goes to, and what called them.

    python -m profiling.host_profile FILE.pstats program.py [ARGUMENTS...]

Prints the functions that take the most time themselves, and writes all of them for python -m pstats. The exit code is
the program's.
"""

import argparse
import cProfile
import pstats
import runpy
import sys
from pathlib import Path

from profiling.command_line import Parser

TOP = 20


def parse(argv):
    parser = Parser("host_profile", __doc__)
    parser.add_argument("output", metavar="FILE.pstats", help="where all functions go")
    parser.add_argument("program", metavar="program.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    sys.argv = [options.program, *options.arguments]
    sys.path[0] = str(Path(options.program).resolve().parent)  # where it finds its own modules
    profile = cProfile.Profile()
    try:
        profile.runcall(runpy.run_path, options.program, run_name="__main__")
    finally:  # the program ends by SystemExit
        print(f"\nThe {TOP} functions that took the host the longest, without those they called (tottime):")
        pstats.Stats(profile).sort_stats("tottime").print_stats(TOP)
        profile.dump_stats(options.output)


if __name__ == "__main__":
    main()
