"""rocprof-sys-sample of ROCm 6.4 (1.0), 7.0 (1.1) and 7.1 (1.2)."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tool import complain, finish

# Options and how many values they take; "+": one and, if no other option follows, a second.
OPTIONS = {
    "-T": 0, "--trace": 0, "-P": 0, "--profile": 0, "-F": 0, "--flat-profile": 0, "-H": 0, "--host": 0, "-D": 0,
    "--device": 0, "-o": "+", "--output": "+", "-c": 1, "--config": 1, "-f": 1, "--freq": 1, "-w": 1, "--wait": 1,
    "-d": 1, "--duration": 1, "--cputime": 0, "--realtime": 0, "-I": 1, "--include": 1, "-E": 1, "--exclude": 1,
    "--trace-file": 1, "--trace-buffer-size": 1, "--trace-fill-policy": 1, "-v": 1, "--verbose": 1,
}  # fmt: skip


def main():
    arguments, program, output, given = sys.argv[1:], [], None, set()
    if "--" not in arguments:
        sys.exit(255)  # the whole line is taken for a command
    cut = arguments.index("--")
    arguments, program = arguments[:cut], arguments[cut + 1 :]
    while arguments:
        option = arguments.pop(0)
        if option not in OPTIONS:
            print(f"Unrecognized command line option '{option}'", file=sys.stderr)
            sys.exit(1)
        given.add(option)
        count = OPTIONS[option]
        values = [arguments.pop(0) for _ in range(1 if count == "+" else count)]
        if count == "+":
            output = values[0]
            if arguments and not arguments[0].startswith("-"):
                arguments.pop(0)
    complain()
    status = subprocess.run(program).returncode
    folder = Path(output or f"rocprofsys-{Path(program[0]).name}-output", time.strftime("%Y-%m-%d_%H.%M"))
    if not os.environ.get("STAND_IN_NOTHING"):
        folder.mkdir(parents=True)
        (folder / "metadata-10470.json").write_text("{}")
        profiled = given & {"-P", "--profile", "-F", "--flat-profile"}
        if profiled:
            (folder / "wall_clock-10470.txt").write_text("REAL-CLOCK TIMER\n")
            (folder / "sampling_percent-10470.txt").write_text("SAMPLING\n")
        if given & {"-T", "--trace"} or not profiled:
            (folder / "perfetto-trace-10470.proto").write_bytes(b"a trace for Perfetto")
    finish(status)


main()
