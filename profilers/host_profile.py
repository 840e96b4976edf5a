"""Profile the host side of a Python program: the time of each function, and its callers.

    python -m profilers.host_profile FILE.pstats program.py [ARGUMENTS...]

The functions that take the most time themselves are printed, and all of them are written for python -m pstats. The
exit code is that of the program.
"""

import argparse
import cProfile
import pstats
import sys
import traceback

from measure.command_line import Parser, program
from profilers.as_main import run_as_main


@program("host_profile")
def main(argv):
    parser = Parser("host_profile", __doc__)
    parser.add_argument("output", metavar="FILE.pstats")
    parser.add_argument("program", metavar="program.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    profile = cProfile.Profile()
    try:
        profile.runcall(run_as_main, options.program, options.arguments)
    except Exception:  # is the program's, and not an error of this one
        traceback.print_exc()
        return 1
    finally:  # a program may end by SystemExit
        print("\nThe 20 functions that took the host the longest, without those they called (tottime):")
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        profile.dump_stats(options.output)


if __name__ == "__main__":
    sys.exit(main())
