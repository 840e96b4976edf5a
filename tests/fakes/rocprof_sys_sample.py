"""rocprof-sys-sample of ROCm 6.4 (1.0) to 7.2 (1.3), 7.14 (1.7), 10.0 (1.8) and 10.1 (1.9)."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tool import RELEASE, complain, finish


def stop(message):
    print(message, file=sys.stderr)
    sys.exit(1)


def parse(arguments):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = stop
    parser.add_argument("--help", action="help")
    for option in ("-T", "-P", "-H", "-D"):
        parser.add_argument(option, action="store_true")
    for option in ("-o", "-f"):
        parser.add_argument(option)
    for option in ("-c", "--realtime", "-I", "-E"):  # their values end with the next option or with --
        parser.add_argument(option, nargs="*")
    parser.set_defaults(output_format=[])
    if RELEASE >= (7, 14):
        parser.add_argument("--output-format", nargs="+", choices=("proto", "rocpd", "json", "text", "txt"))
    options = parser.parse_args(arguments)
    if options.output_format and (options.T or options.P):
        stop("Error! --output-format cannot be combined with --trace or --profile")
    return options


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
    if arguments == ["--help"]:
        parse(arguments)
    if "--" not in arguments:
        sys.exit(255)  # the whole line is taken for a command
    cut = arguments.index("--")
    options, program = parse(arguments[:cut]), arguments[cut + 1 :]
    complain()
    status = run(program)
    if not os.environ.get("FAKE_NOTHING"):
        write(Path(options.o, time.strftime("%Y-%m-%d_%H.%M")), options)
    finish(status)


def write(folder, options):
    formats = options.output_format
    profiled = options.P or {"text", "txt"} & set(formats)
    database = RELEASE >= (10, 1) and not formats
    files = ["metadata-10470.json", *["wall_clock-10470.txt", "sampling_percent-10470.txt"] * bool(profiled)]
    if options.D and profiled:
        files.append("sampling_gpu_power-10470.txt")
    if "rocpd" in formats or database:
        files.append("rocpd-10470.db")
    if options.T or "proto" in formats or not (profiled or formats or database):
        files.append(f"perfetto-trace-10470.{'pftrace' if RELEASE >= (10, 1) else 'proto'}")
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("recorded\n")


main()
