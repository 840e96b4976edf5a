"""Run a Python program in this process as if it had been started by itself.

    python profilers/as_main.py FOLDER program.py [ARGUMENTS...]

The program runs in FOLDER: rocprof-compute starts programs in the folder of its result. This module imports only the
standard library.
"""

import os
import runpy
import sys
from pathlib import Path


def run_as_main(program, arguments):
    """Run a program with its arguments, and with its folder on the path; what it raises is raised."""
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)  # for the modules beside the program
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    folder, program, *arguments = sys.argv[1:]
    os.chdir(folder)
    run_as_main(program, arguments)
