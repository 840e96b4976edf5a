#!/usr/bin/env python3
"""Profile the host side of a Python program: which functions its time goes to, and what called them.

    python profiling/host_profile.py FILE.pstats program.py [ARGUMENTS...]

Prints the functions that take the most time themselves, and writes all of them for python -m pstats. The exit code is
the program's.
"""

import cProfile
import pstats
import runpy
import sys

TOP = 20


def main(argv):
    output, *sys.argv = argv
    profile = cProfile.Profile()
    try:
        profile.runcall(runpy.run_path, sys.argv[0], run_name="__main__")
    finally:  # the program ends by SystemExit
        print(f"\nThe {TOP} functions that took the host the longest, without those they called (tottime):")
        pstats.Stats(profile).sort_stats("tottime").print_stats(TOP)
        profile.dump_stats(output)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1:])
