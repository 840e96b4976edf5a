"""rocprof-sys-sample of ROCm 6.3 (0.1) to 7.2 (1.3), 7.14 (1.7), 10.0 (1.8) and 10.1 (1.9)."""

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
    ("-T", "--trace"): (0, 1), ("-P", "--profile"): (0, 1), ("-F", "--flat-profile"): (0, 1), ("-H", "--host"): (0, 1),
    ("-D", "--device"): (0, 1), ("-o", "--output"): (1, 2), ("-c", "--config"): (0, MANY), ("-f", "--freq"): (1, 1),
    ("-w", "--wait"): (1, 1), ("-d", "--duration"): (1, 1), ("--cputime",): (0, MANY), ("--realtime",): (0, MANY),
    ("-I", "--include"): (0, MANY), ("-E", "--exclude"): (0, MANY), ("-t", "--tids"): (1, MANY),
    ("--cpus",): (0, MANY), ("--gpus",): (0, MANY), ("--process-freq",): (1, 1), ("--trace-file",): (1, 1),
    ("--trace-buffer-size",): (1, 1), ("--trace-fill-policy",): (1, 1), ("-v", "--verbose"): (1, 1),
}  # fmt: skip
if RELEASE >= (7, 14):
    OPTIONS |= {("--output-format",): (1, 4), ("-f", "--sampling-freq", "--freq"): (1, 1)}
    del OPTIONS["-f", "--freq"]
FORMATS = {"proto", "rocpd", "json", "text", "txt"}
BACKENDS = set("all kokkosp mpip ompt rcclp rocm amd-smi rocm-smi rocprofiler-sdk mutex-locks spin-locks".split())
BOOLEANS = ("-T", "-P", "-F", "-H", "-D")


def stop(message):
    print(message, file=sys.stderr)
    sys.exit(1)


def parse(arguments):
    """{short name: values} of the options."""
    given = {}
    while arguments:
        word = arguments.pop(0)
        names, (least, most) = next((item for item in OPTIONS.items() if word in item[0]), (None, (0, 0)))
        if names is None:
            stop(f"Unrecognized command line option '{word}'")
        values = given[names[0]] = []
        while arguments and not arguments[0].startswith("-"):
            values.append(arguments.pop(0))
        if not least <= len(values) <= most:
            stop(f"{word} takes {least} to {most} values, and got {values}")
        if names[0] in ("-I", "-E") and not set(values) <= BACKENDS:
            stop(f"Invalid choice for {word}: {values}")
        if names[0] in BOOLEANS and not set(values) <= {"on", "off", "true", "false", "0", "1"}:
            stop(f"{word} is on or off, not {values}")
    if not set(given.get("--output-format", [])) <= FORMATS:
        stop(f"Invalid choice for --output-format: {given['--output-format']}")
    if "--output-format" in given and given.keys() & {"-T", "-P", "-F"}:
        stop("Error! --output-format cannot be combined with --trace, --profile or --flat-profile")
    if "-P" in given and "-F" in given:
        stop("Error! '--profile' argument conflicts with '--flat-profile' argument")
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
    if arguments == ["--help=all"] and RELEASE >= (7, 13):  # plain --help is a summary
        print(*(name for names in OPTIONS for name in names), sep="\n")
        return
    if "--" not in arguments:
        sys.exit(255)  # the whole line is taken for a command
    cut = arguments.index("--")
    given, program = parse(arguments[:cut]), arguments[cut + 1 :]
    complain()
    status = run(program)
    output, *prefix = given.get("-o", [f"rocprofsys-{Path(program[0]).name}-output"])
    folder = Path(output, time.strftime("%Y-%m-%d_%H.%M"))
    if not os.environ.get("FAKE_NOTHING"):
        write(folder, "".join(prefix), given)
    finish(status)


def write(folder, prefix, given):
    folder.mkdir(parents=True)
    (folder / f"{prefix}metadata-10470.json").write_text("{}")
    formats = given.get("--output-format", [])
    profiled = given.keys() & {"-P", "-F"} or {"text", "txt"} & set(formats)
    if profiled:
        (folder / f"{prefix}wall_clock-10470.txt").write_text("REAL-CLOCK TIMER\n")
        (folder / f"{prefix}sampling_percent-10470.txt").write_text("SAMPLING\n")
    if "-D" in given and profiled:
        (folder / f"{prefix}sampling_gpu_power-10470.txt").write_text("GPU POWER\n")
    database = RELEASE >= (10, 1) and not formats
    if "rocpd" in formats or database:
        (folder / f"{prefix}rocpd-10470.db").write_bytes(b"SQLite")
    if "-T" in given or "proto" in formats or not (profiled or formats or database):
        suffix = "pftrace" if RELEASE >= (10, 1) else "proto"
        (folder / f"{prefix}perfetto-trace-10470.{suffix}").write_bytes(b"a trace for Perfetto")


main()
