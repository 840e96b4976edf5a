"""Replay the stages of the workshop: run, profile and compare them.

    ./run_all_stages.sh                            stages 1 to 5 at 8 x 128 tokens, 20 steps each
    ./run_all_stages.sh --beyond                   stages 6 to 8 too
    ./run_all_stages.sh --laptop                   no GPU: measured and recorded; minutes
    ./run_all_stages.sh --stages 2,4 --no-profile
    ./run_all_stages.sh --dry-run                  print the commands only
    ./run_all_stages.sh --stages 2,3 --seq-len 2048 -- --use-amp

Options that are not listed below, and all that follows --, go to tiny_llama_v3.py.

Each stage runs in a process of its own and is profiled afterwards by the script's --profile, whose
table has the kernels of the steps, without the warm-up; plain PyTorch (--impl torch) runs first, as
the baseline.
--laptop runs on the CPU what a CPU can show: the loss, and the weights that receive a gradient, with
a tiny model in Triton's interpreter. For the rest it shows replays that were recorded on a GPU, and
marks them. The output folder then contains

    report.html, summary.md                the comparison, to read
    summary.json                           the comparison, to compute with
    stageN.json, baseline.json             the result of tiny_llama_v3.py
    stageN_profile.csv                     the kernels, with rocprofv3's columns
    stageN_output.log                      the commands and their output
    previous_DATE/                         the results of an earlier replay

Exit codes: 0 done, 1 a stage failed (the others are compared), 2 the request cannot be met, 130
interrupted (the finished runs are kept and compared).
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.replay", file=sys.stderr)
    sys.exit(2)
import torch

import tiny_llama_v3 as llama
from benchmarks.pages.replays import newest_replays
from exercises.performance_debugging import report
from exercises.performance_debugging.evidence import observations
from exercises.performance_debugging.results import short_title, summarize
from measure.command_line import Parser, program, replacing
from measure.results import RESULTS, ROOT
from profilers.readers import Unreadable, read_step_stats

HERE = Path(__file__).resolve().parent
SCRIPT = ROOT / "tiny_llama_v3.py"
PROGRAM = "run_all_stages.sh"
HISTORY = range(1, 6)
SIZES = "--batch-size 8 --seq-len 128 --num-steps 20"
# One step: a CPU shows the first loss and the gradients, and no times.
LAPTOP_SIZES = (
    "--device cpu --batch-size 1 --seq-len 16 --num-steps 1 --warmup-steps 0 --hidden-dim 64 --num-layers 2 "
    "--num-heads 4 --ffn-dim 256 --vocab-size 128"
)
LAPTOP_STAGES = 1, 5, 6  # whose signs a CPU can show
LOG_TAIL = 8  # lines of a failed run's log that are shown
PROGRESS_SECONDS = 10  # between two lines about a run
WRITTEN = "stage*", "baseline*", "summary.*", "report.html"


# ----------------------------------------------------------------------------------------------------------------------
# What to run

FOLDER = "{temporary folder}"  # a placeholder in commands until the folder exists
PROFILE = f"{FOLDER}/profile"


@dataclass
class Run:
    """The baseline or a stage: its command and its outcome."""

    name: str  # the prefix of its files
    title: str
    command: list  # writes the result, and perhaps a profile, into FOLDER
    stage: int | None = None
    obstacle: str | None = None  # why it cannot run here
    error: str | None = None


def command_of(script, arguments):
    return [sys.executable, str(script), *arguments, "--output-dir", FOLDER]


def stage_run(stage, arguments, laptop):
    """Return the Run of a stage, with an obstacle if this machine cannot run it."""
    (link,) = HERE.glob(f"v3_stage{stage}_*.py")
    variables = ["TRITON_INTERPRET=1"] * laptop
    # Stage 7 shows compilation, which a cache would hide.
    if stage == 7:
        variables.append(f"TRITON_CACHE_DIR={FOLDER}/triton")
    # As a part of the command, variables are printed with it.
    prefix = ["env", *variables] if variables else []
    run = Run(f"stage{stage}", f"stage {stage}, {short_title(stage)}", [*prefix, *command_of(link, arguments)], stage)
    config = llama.parse_config(arguments, link.name)
    if laptop and stage not in LAPTOP_STAGES:
        run.obstacle = "its sign needs a GPU"
    elif config.graph and (config.device == "cpu" or not torch.cuda.is_available()):
        run.obstacle = "a graph needs a GPU"
    return run


def plan(options):
    """Return the Runs of a replay: the baseline, which a laptop leaves out, and the stages."""
    sizes = LAPTOP_SIZES if options.laptop else SIZES
    runs, arguments = [], [*sizes.split(), *options.given]
    if not options.laptop:
        runs.append(Run("baseline", "baseline, plain PyTorch", command_of(SCRIPT, ["--impl", "torch", *arguments])))
        if not options.no_profile:
            arguments += ["--profile", PROFILE]
    return runs + [stage_run(stage, arguments, options.laptop) for stage in options.stages]


# ----------------------------------------------------------------------------------------------------------------------
# Running


def write_kernels(recording, path):
    """Write the kernels of the measured steps of a recording, a folder, as CSV with rocprofv3's columns."""
    table, steps = read_step_stats(recording)
    if not steps or table.empty:
        raise RuntimeError("the profiler recorded no kernels within a range named step: see its messages in the log")
    with replacing(path) as file:
        table.to_csv(file, index=False)


def wait_for(process, log_path):
    """Return the exit status of a process; now and then, print how long it has run and the last line of its log."""
    start = time.monotonic()
    while True:
        try:
            return process.wait(PROGRESS_SECONDS)
        except subprocess.TimeoutExpired:
            *_, last = log_path.read_text(errors="replace").strip().splitlines()  # the first is the command
            print("     ", textwrap.shorten(f"{time.monotonic() - start:.0f} s: {last}", 90), flush=True)


def execute(run, output):
    """Run a command, and move its results into the folder output. RuntimeError if it fails."""
    log_path = output / f"{run.name}_output.log"
    with tempfile.TemporaryDirectory(prefix=".work-", dir=output) as work, open(log_path, "w") as log:
        words = [word.replace(FOLDER, work) for word in run.command]
        print(f"$ {shlex.join(words)}", file=log, flush=True)
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                status = wait_for(process, log_path)
            except KeyboardInterrupt:
                process.kill()
                raise
        # The result is kept also if the process failed afterwards, in its profile.
        written = next(Path(work).glob("*.json"), None)
        if written:
            os.replace(written, output / f"{run.name}.json")
        if status or not written:
            tail = textwrap.indent("\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_TAIL:]), "    ")
            ended = f"exit status {status}{', and no result was written' * (not written)}"
            raise RuntimeError(f"{ended}; {log_path.name} ends\n{tail}")
        if PROFILE in run.command:
            write_kernels(Path(work, "profile"), output / f"{run.name}_profile.csv")


def heading(run):
    return f"{run.title}: left out, {run.obstacle}" if run.obstacle else run.title


def execute_all(runs, output):
    """Execute all runs, the others too if one fails. Return False if it was interrupted."""
    for number, run in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {heading(run)}", flush=True)
        if run.obstacle:
            continue
        try:
            execute(run, output)
        except (RuntimeError, OSError, Unreadable) as error:
            run.error = str(error)
            print(f"{PROGRAM}: {run.title} failed, {run.error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print(f"Interrupted in {run.title}.", flush=True)
            return False
    return True


def put_aside(output):
    """Move the results of an earlier replay into previous_<date>/."""
    old = [path for pattern in WRITTEN for path in output.glob(pattern)]
    if old:
        folder = output / f"previous_{datetime.now():%Y%m%d_%H%M%S_%f}"
        folder.mkdir()
        for path in old:
            os.replace(path, folder / path.name)
        print(f"The results of an earlier replay are now in {folder}")


# ----------------------------------------------------------------------------------------------------------------------
# Command line

RESERVED = "--impl --stage --list-stages --output-dir --profile --help -h".split()


def stage_numbers(text):
    """Return the numbers of an option such as 2,4."""
    if not re.fullmatch("[1-8](,[1-8])*", text):
        raise llama.UsageError(f"--stages {text} are no stages: give some of 1 to 8, such as 2,4")
    return sorted({*map(int, text.split(","))})


def parse(argv):
    """Parse the options; `given` are those of the script."""
    # Its parser checks them when the runs are planned. Everything after -- belongs to it.
    end = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(PROGRAM, __doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stages", type=stage_numbers, metavar="2,4", help="which stages (default: 1,2,3,4,5)")
    which.add_argument("--beyond", action="store_true", help="stages 6 to 8 as well")
    parser.add_argument("--laptop", action="store_true", help="no GPU: measure on the CPU, show a recording")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR", help="(default: results/ here)")
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiled runs")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    options, given = parser.parse_known_args(argv[:end])
    options.given = [*given, *argv[end + 1 :]]
    options.stages = options.stages or (list(llama.STAGES) if options.beyond or options.laptop else HISTORY)
    reserved = RESERVED + ["--device", "--use-amp", "--graph"] * options.laptop
    for option in options.given:
        name = option.split("=")[0]
        if name in reserved:
            remedy = "choose by --stages" if name == "--stage" else "leave it out"
            raise llama.UsageError(f"{option} is set by the replay itself: {remedy}")
    return options


def without_output(argv):
    """Return a command line without --output, which names a folder of this machine."""
    places = itertools.pairwise(["", *argv])
    return [word for before, word in places if before != "--output" and word.split("=")[0] != "--output"]


@program(PROGRAM)
def main(argv):
    # The time limit of a batch system interrupts as Ctrl-C does: what is done is kept and compared.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parse(argv)
    runs = plan(options)
    if options.dry_run:
        for run in runs:
            print("#", heading(run))
            if not run.obstacle:
                print(shlex.join(run.command))
        return 0
    output = llama.writable_folder("--output", options.output)
    if not (options.laptop or torch.cuda.is_available()):
        print("There is no GPU: --laptop shows what was recorded on one.")
    put_aside(output)
    header = {
        "benchmark": "stages",
        "command": shlex.join([f"./{PROGRAM}", *without_output(argv)]),
        "date": datetime.now().isoformat(timespec="seconds"),
        "laptop": options.laptop,
        "recorded": newest_replays(RESULTS) if options.laptop else [],
    }
    completed = execute_all(runs, output)
    if measured := summarize(output, runs):
        summary = header | {"interrupted": not completed} | measured
        summary["observations"] = observations(summary)
        print(f"\n{report.write(summary, output)}\nReport: {output / 'report.html'}")
    if not completed:
        return 130
    return int(any(run.error for run in runs))


if __name__ == "__main__":
    sys.exit(main())
