"""Replay the stages of the workshop: run, profile and compare them.

    ./run_all_stages.sh                            stages 1 to 5 at 8 x 128 tokens, 20 steps each
    ./run_all_stages.sh --beyond                   stages 6 to 8 too
    ./run_all_stages.sh --isolate                  each mistake alone too, beside stage 5
    ./run_all_stages.sh --laptop                   no GPU: measured, counted, recorded; minutes
    ./run_all_stages.sh --stages 2,4 --no-profile
    ./run_all_stages.sh --dry-run                  print the commands only
    ./run_all_stages.sh --stages 5,8 -- --use-amp  what follows -- goes to tiny_llama_v3.py

Each stage runs in a process of its own and is profiled afterwards; plain PyTorch (--impl torch)
runs first, as the baseline. The profiler is rocprofv3 if it is on the PATH and there is an AMD GPU,
otherwise the script's --profile. Its table has the kernels of the steps, without the warm-up.
--laptop runs on the CPU what a CPU can show: the loss, the weights that receive a gradient, and the
memory accesses of kernels, with a tiny model in Triton's interpreter. For the rest it shows replays
that were recorded on a GPU, and marks them. The output folder then contains

    report.html, summary.md, stages.png    the comparison, to read
    summary.json                           the comparison, to compute with
    stageN.json, baseline.json             the result of tiny_llama_v3.py
    stageN_profile.csv                     the kernels, with rocprofv3's columns
    stageN_output.log                      the output of the runs
    stageN_alone*                          the same of stage N's own mistake alone
    ceilings.json                          the bandwidth and the arithmetic that this device reaches
    kernel_timeline.json                   when each kernel of one step of stages 5 and 8 ran
    attention_layouts.json                 the attention kernel over the sequence, in both layouts
    counted.json                           the memory accesses of kernels
    previous_DATE/                         the results of an earlier replay

Exit codes: 0 done, 1 a stage failed (the others are compared), 2 the request cannot be met, 130
interrupted (the finished runs are kept and compared).
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

if not __package__:
    print("run it from the root as python -m exercises.performance_debugging.replay", file=sys.stderr)
    sys.exit(2)
import torch

import tiny_llama_v3 as llama
from benchmarks.pages.replays import OPTIMIZED, newest_replays, observations, own_mistake, short_title
from exercises.performance_debugging import report
from exercises.performance_debugging.summary import compare, console, without_option, wrapped
from measure.command_line import Parser, program, replacing
from measure.heartbeat import Heartbeat
from measure.results import RESULTS
from profilers.readers import Unreadable, read_step_stats

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PROGRAM = "run_all_stages.sh"
HISTORY = [1, 2, 3, 4, 5]
SIZES = {"batch_size": 8, "seq_len": 128, "num_steps": 20}
# On a CPU, stage 1 runs at the full width of the model in plain PyTorch, stages 5 and 6 in the interpreter.
LAPTOP_PLAIN = "--device cpu --impl torch --batch-size 1 --seq-len 32 --num-steps 4"
LAPTOP_TINY = (
    "--device cpu --batch-size 1 --seq-len 16 --num-steps 4 --warmup-steps 1 --hidden-dim 64 --num-layers 2 "
    "--num-heads 4 --ffn-dim 256 --vocab-size 128"
)
LAPTOP_RUNS = {1: LAPTOP_PLAIN, 5: LAPTOP_TINY, 6: LAPTOP_TINY}
COUNTED_STAGES = {2, 4}  # each with the next stage
PROFILED_STEPS = ["--num-steps", "3", "--warmup-steps", "1"]  # as many as the script's own --profile records
LOG_TAIL = 8  # lines of a failed run's log that are shown
WRITTEN = (  # by a replay into its output folder
    "stage*", "baseline*", "ceilings*", "attention_layouts*", "kernel_timeline*", "counted*", "summary.*",
    "report.html",
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# What to run


@dataclass
class Part:
    """A process of the replay and its results."""

    what: str  # "measured", "profiled" or "counted"
    command: list
    pattern: str | None = None  # the file that the process writes into the folder FOLDER of its command
    target: str | None = None  # the name of that file in the output folder
    environment: dict = field(default_factory=dict)
    profile: str | None = None  # the name for the kernels that are recorded into FOLDER


FOLDER = "{temporary folder}"  # a placeholder in a Part until the folder exists


@dataclass
class Run:
    """The baseline, the ceilings, a stage, a mistake alone or the counts: its parts and its outcome."""

    name: str  # the prefix of its files
    title: str
    parts: list  # empty for a mistake alone that is a stage, and for a stage that --laptop does not run
    stage: int | None = None
    mistake: str | None = None  # of BUGS, the only one
    obstacle: str | None = None  # why it cannot run here
    error: str | None = None
    done: bool = False


def on_gpu(config):
    """Does not query a GPU, which would occupy it for the stages."""
    return config.device != "cpu" and torch.cuda.is_available()


def profiler_of(config):
    with_rocprofv3 = on_gpu(config) and torch.version.hip is not None and shutil.which("rocprofv3")
    return "rocprofv3" if with_rocprofv3 else "torch.profiler"


def rocprofv3_command(command):
    """A short run, as recording slows the steps down."""
    tracing = ["--kernel-trace", "--marker-trace", "--output-format", "csv", "-d", FOLDER, "-o", "profile"]
    return ["rocprofv3", *tracing, "--", *command, *PROFILED_STEPS]


def training_run(name, title, script, arguments, config, stage=None, with_profile=False):
    command = [sys.executable, str(script), *arguments, "--output-dir", FOLDER]
    # Stage 7 shows compilation, which a cache would hide.
    environment = {"TRITON_CACHE_DIR": f"{FOLDER}/triton"} if stage == 7 else {}
    measured = Part("measured", command, "tiny_llama_v3_*.json", f"{name}.json", environment)
    parts, kernels = [measured], f"{name}_profile.csv"
    if with_profile and profiler_of(config) == "rocprofv3":
        parts.append(Part("profiled", rocprofv3_command(command), profile=kernels))
    elif with_profile:
        measured.command, measured.profile = [*command, "--profile", FOLDER], kernels
    return Run(name, title, parts, stage)


class Measurement(NamedTuple):
    """A module of this folder that measures data for the pictures of a report."""

    module: str
    title: str
    stages: set  # that need the data
    needs_gpu: bool


MEASUREMENTS = {  # by the name of the file that they write
    "ceilings": Measurement("measured_ceilings", "what the device can do", set(llama.STAGES), False),
    "attention_layouts": Measurement("attention_layouts", "the attention kernel over the sequence", {2}, True),
    "kernel_timeline": Measurement("kernel_timeline", "when the kernels of a step run", {8}, True),
}


def measurement_runs(stages, arguments, config):
    """Yields the Runs of the MEASUREMENTS that these stages need and this machine can make."""
    for name, measurement in MEASUREMENTS.items():
        if measurement.stages & set(stages) and (on_gpu(config) or not measurement.needs_gpu):
            module = ["-m", f"exercises.performance_debugging.{measurement.module}"]
            command = [sys.executable, *module, *arguments, "--output-dir", FOLDER]
            yield Run(name, measurement.title, [Part("measured", command, f"{name}.json", f"{name}.json")])


def isolated_runs(stages, arguments, config, with_profile):
    """Yields a Run for the own mistake of each stage by itself."""
    script = ROOT / "tiny_llama_v3.py"
    for stage in stages:
        mistake = own_mistake(stage)
        if mistake is None:
            continue
        title = f"{llama.flag_of(mistake)} alone"
        if set(llama.stage_flags(stage)) == {mistake}:
            run = Run(f"stage{stage}", title, [])
        else:
            own = [llama.flag_of(mistake), *arguments]
            run = training_run(f"stage{stage}_alone", title, script, own, config, with_profile=with_profile)
        run.stage, run.mistake = stage, mistake
        yield run


def obstacle_of(config):
    """The reason why a stage cannot run on this machine, or None."""
    if on_gpu(config):
        return None
    try:
        llama.validate_on_device(config, llama.get_device("cpu"))
    except llama.UsageError as error:
        return str(error)


def plan(options):
    """(the profiler, the Runs of a replay): the ceilings, the baseline, the stages, the mistakes alone."""
    sizes = [text for name in SIZES for text in (llama.flag_of(name), str(getattr(options, name)))]
    arguments = [*sizes, *options.script_options]
    script = ROOT / "tiny_llama_v3.py"
    config = llama.parse_config(arguments, script.name)
    runs = [training_run("baseline", "baseline, plain PyTorch", script, ["--impl", "torch", *arguments], config)]
    with_profile = not options.no_profile
    if with_profile:
        runs[:0] = measurement_runs(options.stages, arguments, config)
    for stage in options.stages:
        (link,) = HERE.glob(f"v3_stage{stage}_*.py")
        title = f"stage {stage}, {short_title(stage)}"
        run = training_run(f"stage{stage}", title, link, arguments, config, stage, with_profile)
        run.obstacle = obstacle_of(llama.parse_config(arguments, link.name))
        runs.append(run)
    if options.isolate:
        runs += isolated_runs(options.stages, arguments, config, with_profile)
    return profiler_of(config) if with_profile else None, runs


def plan_laptop(options):
    """The Runs of --laptop: some stages on the CPU, the others without parts, and the memory accesses of kernels."""
    no_triton = None if llama.triton else "Triton is not installed"
    runs = []
    for stage in options.stages:
        (link,) = HERE.glob(f"v3_stage{stage}_*.py")
        run = Run(f"stage{stage}", f"stage {stage}, {short_title(stage)}", [], stage)
        if stage in LAPTOP_RUNS:
            arguments = [*LAPTOP_RUNS[stage].split(), *options.script_options]
            config = llama.parse_config(arguments, link.name)
            llama.validate_on_device(config, llama.get_device("cpu"))
            run = training_run(run.name, run.title, link, arguments, config, stage)
            run.parts[0].environment["TRITON_INTERPRET"] = "1"
        runs.append(run)
    if COUNTED_STAGES & set(options.stages):
        stages = ",".join(map(str, options.stages))
        command = [sys.executable, "-m", "exercises.performance_debugging.memory_counts", "--stages", stages]
        parts = [Part("counted", [*command, "--output-dir", FOLDER], "counted.json", "counted.json")]
        runs.append(Run("counted", "what kernels ask memory for", parts, obstacle=no_triton))
    return runs


def recorded_replays(stages):
    """Yields the recorded summaries of replays on a GPU with any of these stages, each with its file."""
    for name, summary in newest_replays(RESULTS):
        if any(stage["stage"] in stages and "batch_ms" in stage for stage in summary["stages"]):
            yield {"file": str((RESULTS / name).relative_to(ROOT)), **summary}


# ----------------------------------------------------------------------------------------------------------------------
# Running


@dataclass
class Progress:
    """The progress of the replay, which estimates the remaining time from the finished parts."""

    parts: list  # "measured" or "profiled", in order
    seconds: list = field(default_factory=list)

    def remaining(self):
        """The remaining seconds, or None before a part is finished."""
        if not self.seconds:
            return None
        taken = {}
        for what, seconds in zip(self.parts, self.seconds, strict=False):
            taken.setdefault(what, []).append(seconds)
        mean = {what: sum(seconds) / len(seconds) for what, seconds in taken.items()}
        overall = sum(self.seconds) / len(self.seconds)
        return sum(mean.get(what, overall) for what in self.parts[len(self.seconds) :])

    @contextlib.contextmanager
    def part(self, title):
        left = self.remaining()
        words = (
            f", about {left:.0f} s left" if left and left < 90 else f", about {left / 60:.0f} min left" if left else ""
        )
        print(f"[{len(self.seconds) + 1}/{len(self.parts)}] {title}{words}", flush=True)
        start = time.monotonic()
        yield
        self.seconds.append(time.monotonic() - start)


def execute(command, environment, log):
    """Runs a command. Its output goes to the log and, on a terminal, to the last line. Returns the exit status."""
    width = shutil.get_terminal_size().columns - 1
    process = subprocess.Popen(
        command, env=os.environ | environment, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        with Heartbeat("nothing printed yet") as heartbeat:
            for line in process.stdout:
                log.write(line)
                heartbeat.said = line.strip() or heartbeat.said
                if sys.stdout.isatty():
                    print(f"\r\033[K{line.rstrip()[:width]}", end="", flush=True)
            return process.wait()
    finally:
        if process.poll() is None:  # interrupted
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)


def write_kernels_of_steps(recording, path):
    """Writes the kernels of the measured steps of a recording, a folder, as CSV with rocprofv3's columns."""
    table, steps = read_step_stats(recording)
    if not steps or table.empty:
        raise RuntimeError("the profiler recorded no kernels within a range named step: see its messages in the log")
    with replacing(path) as file:
        table.to_csv(file, index=False)


def execute_part(part, log_path, output):
    """Runs a part and moves its results into output. RuntimeError or Unreadable if it fails."""
    with tempfile.TemporaryDirectory(prefix=".work-", dir=output) as work, open(log_path, "a") as log:
        command = [argument.replace(FOLDER, work) for argument in part.command]
        environment = {name: value.replace(FOLDER, work) for name, value in part.environment.items()}
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        status = execute(command, environment, log)
        log.flush()
        written = next(Path(work).rglob(part.pattern), None) if part.pattern else work
        if part.pattern and written:  # also if the process failed while profiling
            os.replace(written, output / part.target)
        if status != 0 or written is None:
            tail = "".join(f"    {line}\n" for line in log_path.read_text().splitlines()[-LOG_TAIL:])
            what = f"exit status {status}" if status else f"no {part.pattern} was written"
            raise RuntimeError(f"{what}; {log_path.name} ends\n{tail}")
        if part.profile:
            write_kernels_of_steps(work, output / part.profile)


def execute_run(run, output, progress):
    """Runs the parts of a run. If one fails, run.error is set and the rest is skipped."""
    for part in run.parts:
        with progress.part(f"{run.title}, {part.what}"):
            if run.error:
                continue  # a failed run cannot be profiled
            try:
                execute_part(part, output / f"{run.name}_output.log", output)
            except (RuntimeError, OSError, Unreadable) as error:
                run.error = f"{part.what} run: {error}".rstrip()
                print(f"{PROGRAM}: {run.title} failed, {run.error}", file=sys.stderr, flush=True)
    run.done = True


def execute_all(runs, output):
    """Executes all runs. Returns False if it was interrupted."""
    able = [run for run in runs if run.parts and not run.obstacle]
    progress = Progress([part.what for run in able for part in run.parts])
    for run in runs:
        if run.obstacle:
            print(wrapped(f"{run.title}: left out, {run.obstacle}"))
    try:
        for run in able:
            execute_run(run, output, progress)
        return True
    except KeyboardInterrupt:
        current = next(run for run in able if not run.done)
        print(f"Interrupted in {current.title}.", flush=True)
        return False


# ----------------------------------------------------------------------------------------------------------------------
# The output folder


@contextlib.contextmanager
def locked(output):
    """Makes and locks the output folder."""
    llama.writable_folder("--output", output).mkdir(parents=True, exist_ok=True)
    with open(output / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise llama.UsageError(f"--output {output} is in use by another replay: give another folder") from None
        yield


def put_aside(output):
    """Moves the results of an earlier replay into previous_<its date>/."""
    old = [path for pattern in WRITTEN for path in output.glob(pattern)]
    if old:
        date = datetime.fromtimestamp(max(path.stat().st_mtime for path in old))
        folder = output / f"previous_{date:%Y%m%d_%H%M%S}"
        while folder.exists():
            folder = folder.with_name(f"{folder.name}_1")
        folder.mkdir()
        for path in old:
            os.replace(path, folder / path.name)
        print(f"The results of an earlier replay are now in {folder}")


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def stage_numbers(text):
    try:
        stages = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise llama.UsageError(f"--stages {text} is no list of numbers: give one such as 2,4") from None
    for stage in stages:
        if stage not in llama.STAGES:
            raise llama.UsageError(f"--stages {text}: there is no stage {stage}: choose from 1 to {max(llama.STAGES)}")
    return stages


def refuse_beside_laptop(options):
    """UsageError for options that contradict --laptop."""
    if options.beyond:
        raise llama.UsageError("--laptop shows all stages: leave --beyond out")
    if options.isolate:
        raise llama.UsageError("--laptop and --isolate contradict each other: a CPU cannot tell what a mistake costs")
    for name in SIZES:
        if getattr(options, name) is not None:
            raise llama.UsageError(f"--laptop has sizes of its own: leave {llama.flag_of(name)} out")
    for option in options.script_options:
        if option.split("=")[0] in ("--device", "--use-amp"):
            raise llama.UsageError(f"--laptop interprets the kernels on the CPU, in fp32: leave {option} out")


RESERVED = ("--impl", "--stage", "--list-stages", "--output-dir", "--profile", "--help", "-h")


def parse(argv):
    """Parses the options; script_options are those after --."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(PROGRAM, __doc__)
    parser.add_argument("--stages", type=stage_numbers, metavar="2,4", help="which stages (default: 1,2,3,4,5)")
    parser.add_argument("--beyond", action="store_true", help="stages 6 to 8 as well")
    parser.add_argument("--isolate", action="store_true", help="each mistake alone as well, beside stage 5")
    parser.add_argument("--laptop", action="store_true", help="no GPU: measure and count on the CPU, show a recording")
    parser.add_argument("--batch-size", type=int, help="sequences a step (default: 8)")
    parser.add_argument("--seq-len", type=int, help="tokens a sequence (default: 128)")
    parser.add_argument("--num-steps", type=int, help="steps of a full run (default: 20)")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR", help="(default: results/ here)")
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiled runs")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args(argv[:end])
    options.script_options = argv[end + 1 :]
    if options.stages and options.beyond:
        raise llama.UsageError("--stages and --beyond contradict each other: name all of the stages in --stages")
    if options.laptop:
        refuse_beside_laptop(options)
    for name, default in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    options.stages = options.stages or (list(llama.STAGES) if options.beyond or options.laptop else HISTORY)
    if options.isolate:
        if not any(map(own_mistake, options.stages)):
            raise llama.UsageError(f"--isolate: stages {options.stages} have no mistake: name one of 1 to 4, 6, 7")
        options.stages = sorted({*options.stages, OPTIMIZED})
    for option in options.script_options:
        if option.split("=")[0] in RESERVED:
            raise llama.UsageError(f"{option} after -- is set by the replay itself: leave it out")
    return options


def print_commands(runs):
    for run in runs:
        if run.parts:
            print(f"# {run.title}" + (f": left out, {run.obstacle}" if run.obstacle else ""))
        for part in run.parts if not run.obstacle else []:
            variables = [f"{name}={shlex.quote(value)}" for name, value in part.environment.items()]
            print(" ".join([*variables, shlex.join(part.command)]))


def single_command(run):
    """The command of the measured part of a run, for this folder."""
    _, script, *arguments = run.parts[0].command
    variables = [f"{name}={value}" for name, value in run.parts[0].environment.items() if FOLDER not in value]
    command = ["python", os.path.relpath(script, HERE), *arguments[: arguments.index("--output-dir")]]
    return " ".join([*variables, shlex.join(command)])


@program(PROGRAM)
def main(argv):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the time limit of a batch system interrupts too
    options = parse(argv)
    profiler, runs = (None, plan_laptop(options)) if options.laptop else plan(options)
    if options.dry_run:
        print_commands(runs)
        return 0
    with locked(options.output):
        put_aside(options.output)
        trained = [run for run in runs if run.parts and run.name not in (*MEASUREMENTS, "counted")]
        header = {
            "benchmark": "stages",
            "command": shlex.join([f"./{PROGRAM}", *without_option(argv, "--output")]),
            "date": datetime.now().isoformat(timespec="seconds"),
            "commands": [single_command(run) for run in trained],
            "profiler": profiler,
            "laptop": options.laptop,
            "recorded": list(recorded_replays(options.stages)) if options.laptop else [],
        }
        completed = execute_all(runs, options.output)
        summary = header | {"interrupted": not completed} | compare(options.output, runs)
        summary["observations"] = observations(summary) if summary["environment"] else []
        report.write(summary, options.output)
    if summary["environment"]:
        print(f"\n{console(summary)}\n\nReport: {options.output / 'report.html'}")
    if not completed:
        return 130
    return int(any(run.error for run in runs))


if __name__ == "__main__":
    sys.exit(main())
