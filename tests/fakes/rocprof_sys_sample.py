"""rocprof-sys-sample of ROCm 6.4 (1.0) to 7.2 (1.3), 7.14 (1.7), 10.0 (1.8) and 10.1 (1.9)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tool import RELEASE, complain, finish

MANY = 99
# Options and the least and most values they take, which end with the next option or with --.
OPTIONS = {
    "-T": (0, 1), "-P": (0, 1), "-H": (0, 1), "-D": (0, 1), "-o": (1, 1), "-c": (0, MANY), "-f": (1, 1),
    "--realtime": (0, MANY), "-I": (0, MANY), "-E": (0, MANY),
}  # fmt: skip
if RELEASE >= (7, 14):
    OPTIONS["--output-format"] = (1, 4)
FORMATS = {"proto", "rocpd", "json", "text", "txt"}
BACKENDS = {"rocm", "amd-smi", "rcclp"}
BOOLEANS = ("-T", "-P", "-H", "-D")


def stop(message):
    print(message, file=sys.stderr)
    sys.exit(1)


def parse(arguments):
    """{name: values} of the options."""
    given = {}
    while arguments:
        word = arguments.pop(0)
        if word not in OPTIONS:
            stop(f"Unrecognized command line option '{word}'")
        values = given[word] = []
        while arguments and not arguments[0].startswith("-"):
            values.append(arguments.pop(0))
        least, most = OPTIONS[word]
        if not least <= len(values) <= most:
            stop(f"{word} takes {least} to {most} values, and got {values}")
        if word in ("-I", "-E") and not set(values) <= BACKENDS:
            stop(f"Invalid choice for {word}: {values}")
        if word in BOOLEANS and values:
            stop(f"{word} is on or off, not {values}")
    if not set(given.get("--output-format", [])) <= FORMATS:
        stop(f"Invalid choice for --output-format: {given['--output-format']}")
    if "--output-format" in given and given.keys() & {"-T", "-P"}:
        stop("Error! --output-format cannot be combined with --trace or --profile")
    return given


def run(program):
    """The program's status. The handler of signals is in place before Python's own, which then leaves Ctrl-C to it."""
    if os.environ.get("ROCPROFSYS_ENABLE_SIGNAL_HANDLER") == "OFF":
        return subprocess.run(program).returncode
    process = subprocess.Popen(program, start_new_session=True)

    def dump(number, _):
        print(f"### ERROR ### [rocprof-sys][PID={process.pid}] signal={number}", file=sys.stderr)
        print("7f0000000000-7f0000001000 r-xp libtorch_hip.so\n" * 1000, file=sys.stderr)
        process.kill()

    signal.signal(signal.SIGINT, dump)
    return process.wait()


def main():
    arguments = sys.argv[1:]
    if "--" not in arguments:
        sys.exit(255)  # the whole line is taken for a command
    cut = arguments.index("--")
    given, program = parse(arguments[:cut]), arguments[cut + 1 :]
    complain()
    status = run(program)
    (output,) = given["-o"]
    folder = Path(output, time.strftime("%Y-%m-%d_%H.%M"))
    if not os.environ.get("FAKE_NOTHING"):
        write(folder, given)
    finish(status)


def write(folder, given):
    folder.mkdir(parents=True)
    (folder / "metadata-10470.json").write_text("{}")
    formats = given.get("--output-format", [])
    profiled = "-P" in given or {"text", "txt"} & set(formats)
    if profiled:
        (folder / "wall_clock-10470.txt").write_text("REAL-CLOCK TIMER\n")
        (folder / "sampling_percent-10470.txt").write_text("SAMPLING\n")
    if "-D" in given and profiled:
        (folder / "sampling_gpu_power-10470.txt").write_text("GPU POWER\n")
    database = RELEASE >= (10, 1) and not formats
    if "rocpd" in formats or database:
        (folder / "rocpd-10470.db").write_bytes(b"SQLite")
    if "-T" in given or "proto" in formats or not (profiled or formats or database):
        suffix = "pftrace" if RELEASE >= (10, 1) else "proto"
        (folder / f"perfetto-trace-10470.{suffix}").write_bytes(b"a trace for Perfetto")


main()
