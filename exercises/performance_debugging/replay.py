"""Replay the stages of the workshop: run each, profile each, compare them all.

    ./run_all_stages.sh                            stages 1 to 5 at 8 x 128 tokens, 20 steps each
    ./run_all_stages.sh --beyond                   stages 6 to 8 too
    ./run_all_stages.sh --isolate                  each mistake alone too, beside stage 5
    ./run_all_stages.sh --laptop                   no GPU: measured, counted, recorded; minutes
    ./run_all_stages.sh --stages 2,4 --no-profile
    ./run_all_stages.sh --dry-run                  print the commands only
    ./run_all_stages.sh --stages 5,8 -- --use-amp  what follows -- goes to tiny_llama_v3.py

Each stage is a run in a process of its own, profiled when it is done; plain PyTorch (--impl torch)
runs first, as the baseline. With rocprofv3 on the PATH and an AMD GPU, rocprofv3 profiles;
everywhere else the script's own --profile does. The kernels of the steps, without those of the
warm-up, become a table. --laptop runs on the CPU what a CPU can show: the loss, the weights that
receive a gradient, and what kernels ask memory for, with a tiny model in Triton's interpreter; of
the rest it shows replays recorded on a GPU, and says so. The output folder then holds

    report.html, summary.md, stages.png    the comparison, to read
    summary.json                           the comparison, to compute with
    stageN.json, baseline.json             all that tiny_llama_v3.py says of a run
    stageN_profile.csv                     the kernels, with rocprofv3's columns
    stageN_output.log                      what the runs printed
    stageN_alone*                          the same of stage N's own mistake alone
    ceilings.json                          the bandwidth and the arithmetic that this device reaches
    kernel_timeline.json                   when each kernel of one step of stages 5 and 8 ran
    attention_layouts.json                 the attention kernel over the sequence, in both layouts
    counted.json                           what kernels ask memory for
    previous_DATE/                         what an earlier replay had left there

Exit codes: 0 done, 1 a stage failed (the others are compared), 2 the request cannot be met, 130
interrupted (what was done is kept and compared).
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

import torch

import tiny_llama_v3 as llama
from benchmarks.stages import OPTIMIZED, newest_replays, observations, own_mistake, short_title
from exercises.performance_debugging import comparison, report
from measure.heartbeat import Heartbeat
from measure.results import RESULTS
from profiling.readers import Unreadable, read_step_stats
from tiny_llama_v3 import exit_code_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PROGRAM = "run_all_stages.sh"
HISTORY = [1, 2, 3, 4, 5]
SIZES = {"batch_size": 8, "seq_len": 128, "num_steps": 20}
# A CPU shows stage 1 at the full width of the model, in plain PyTorch; autograd without its kernels in the interpreter.
LAPTOP_PLAIN = "--device cpu --impl torch --batch-size 1 --seq-len 32 --num-steps 4"
LAPTOP_TINY = (
    "--device cpu --batch-size 1 --seq-len 16 --num-steps 4 --warmup-steps 1 --hidden-dim 64 --num-layers 2 "
    "--num-heads 4 --ffn-dim 256 --vocab-size 128"
)
LAPTOP_RUNS = {1: LAPTOP_PLAIN, 5: LAPTOP_TINY, 6: LAPTOP_TINY}
COUNTED_STAGES = {2, 4}  # each with the one after it
PROFILED_STEPS = ["--num-steps", "3", "--warmup-steps", "1"]  # as many as the script's own --profile records
LOG_TAIL = 8  # lines of a failed run's log that are shown
WRITTEN = (
    "stage*",
    "baseline*",
    "ceilings*",
    "attention_layouts*",
    "kernel_timeline*",
    "counted*",
    "summary.*",
    "report.html",
)  # by a replay into its output folder


# ----------------------------------------------------------------------------------------------------------------------
# What to run


@dataclass
class Part:
    """One process of the replay: what it is asked to write, and where that goes."""

    what: str  # "measured", "profiled" or "counted"
    command: list
    pattern: str | None = None  # the file that the process writes into the folder FOLDER of its command
    target: str | None = None  # where that goes
    environment: dict = field(default_factory=dict)
    profile: str | None = None  # where the kernels go that are recorded into FOLDER


FOLDER = "{temporary folder}"  # stands for it in a Part until it exists


@dataclass
class Run:
    """The baseline, the ceilings, a stage, a mistake alone or the counts: its parts, and what became of it."""

    name: str  # its files begin with it
    title: str
    parts: list  # none of a mistake alone that is a stage, and of a stage that --laptop does not run
    stage: int | None = None
    mistake: str | None = None  # of BUGS, the only one
    obstacle: str | None = None  # why it cannot run here
    error: str | None = None
    done: bool = False


def on_gpu(config):
    """Asks for no GPU's properties: that would occupy a GPU which the stages may need to themselves."""
    return config.device != "cpu" and torch.cuda.is_available()


def profiler_of(config):
    with_rocprofv3 = on_gpu(config) and torch.version.hip is not None and shutil.which("rocprofv3")
    return "rocprofv3" if with_rocprofv3 else "torch.profiler"


def rocprofv3_command(command):
    """A short run: it records the measured steps, and slows them down."""
    tracing = ["--kernel-trace", "--marker-trace", "--output-format", "csv", "-d", FOLDER, "-o", "profile"]
    return ["rocprofv3", *tracing, "--", *command, *PROFILED_STEPS]


def training_run(name, title, script, arguments, config, stage=None, with_profile=False):
    command = [sys.executable, str(script), *arguments, "--output-dir", FOLDER]
    # Stage 7 shows compilation, which a filled cache would hide.
    environment = {"TRITON_CACHE_DIR": f"{FOLDER}/triton"} if stage == 7 else {}
    measured = Part("measured", command, "tiny_llama_v3_*.json", f"{name}.json", environment)
    parts, kernels = [measured], f"{name}_profile.csv"
    if with_profile and profiler_of(config) == "rocprofv3":
        parts.append(Part("profiled", rocprofv3_command(command), profile=kernels))
    elif with_profile:
        measured.command, measured.profile = [*command, "--profile", FOLDER], kernels
    return Run(name, title, parts, stage)


class Measurement(NamedTuple):
    """A module beside this one, which measures what the pictures of a report need besides."""

    title: str
    stages: set  # for whose sake
    needs_gpu: bool


MEASUREMENTS = {
    "ceilings": Measurement("what the device can do", set(llama.STAGES), needs_gpu=False),
    "attention_layouts": Measurement("the attention kernel over the sequence", {2}, needs_gpu=True),
    "kernel_timeline": Measurement("when the kernels of a step run", {8}, needs_gpu=True),
}


def measurement_runs(stages, arguments, config):
    """The Runs of the MEASUREMENTS that this machine can make for these stages."""
    for name, measurement in MEASUREMENTS.items():
        if measurement.stages & set(stages) and (on_gpu(config) or not measurement.needs_gpu):
            module = ["-m", f"exercises.performance_debugging.{name}"]
            command = [sys.executable, *module, *arguments, "--output-dir", FOLDER]
            yield Run(name, measurement.title, [Part("measured", command, f"{name}.json", f"{name}.json")])


def isolated_runs(stages, arguments, config, with_profile):
    """A Run for each mistake that is a stage's own, without those that a stage has beside it."""
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
    """Why a stage cannot run on this machine, or None."""
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
    """The Runs of --laptop: a few stages on the CPU, the others without parts, and what kernels ask memory for."""
    no_triton = None if llama.triton else "Triton is not installed"
    runs = []
    for stage in options.stages:
        (link,) = HERE.glob(f"v3_stage{stage}_*.py")
        run = Run(f"stage{stage}", f"stage {stage}, {short_title(stage)}", [], stage)
        if stage in LAPTOP_RUNS:
            arguments = [*LAPTOP_RUNS[stage].split(), *options.script_options]
            config = llama.parse_config(arguments, link.name)
            run = training_run(run.name, run.title, link, arguments, config, stage)
            run.parts[0].environment["TRITON_INTERPRET"] = "1"
        runs.append(run)
    if COUNTED_STAGES & set(options.stages):
        stages = ",".join(map(str, options.stages))
        command = [sys.executable, "-m", "exercises.performance_debugging.counted", "--stages", stages]
        parts = [Part("counted", [*command, "--output-dir", FOLDER], "counted.json", "counted.json")]
        runs.append(Run("counted", "what kernels ask memory for", parts, obstacle=no_triton))
    return runs


def recorded_replays(stages):
    """Summaries of replays on a GPU, as they were measured then, each with its file, that have one of these stages."""
    for name, summary in newest_replays(RESULTS):
        if any(stage["stage"] in stages and "batch_ms" in stage for stage in summary["stages"]):
            yield {"file": str((RESULTS / name).relative_to(ROOT)), **summary}


# ----------------------------------------------------------------------------------------------------------------------
# Running


@dataclass
class Progress:
    """How far the replay is, and how long the rest will take by what its parts took so far."""

    parts: list  # "measured" or "profiled", in order
    seconds: list = field(default_factory=list)

    def remaining(self):
        """Seconds, or None before there is anything to judge by."""
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
        left = (
            "" if left is None else f", about {left:.0f} s left" if left < 90 else f", about {left / 60:.0f} min left"
        )
        print(f"[{len(self.seconds) + 1}/{len(self.parts)}] {title}{left}", flush=True)
        start = time.monotonic()
        yield
        self.seconds.append(time.monotonic() - start)


def execute(command, environment, log):
    """The exit status of a command. Its output goes to the log and, on a terminal, live to the last line."""
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
    """The kernels of the measured steps in a recording, a folder, as CSV with rocprofv3's columns."""
    table, steps = read_step_stats(recording)
    if not steps or table.empty:
        raise RuntimeError("the profiler recorded no kernels within a range named step: see its messages in the log")
    table.to_csv(path, index=False)


def execute_part(part, log_path, output):
    """Runs a part and moves what it wrote into output. A RuntimeError or Unreadable says what went wrong."""
    with tempfile.TemporaryDirectory(prefix=".work-", dir=output) as work, open(log_path, "a") as log:
        command = [argument.replace(FOLDER, work) for argument in part.command]
        environment = {name: value.replace(FOLDER, work) for name, value in part.environment.items()}
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        status = execute(command, environment, log)
        log.flush()
        written = next(Path(work).rglob(part.pattern), None) if part.pattern else work
        if part.pattern and written:  # also of a process that failed in its profile
            os.replace(written, output / part.target)
        if status != 0 or written is None:
            tail = "".join(f"    {line}\n" for line in log_path.read_text().splitlines()[-LOG_TAIL:])
            what = f"exit status {status}" if status else f"no {part.pattern} was written"
            raise RuntimeError(f"{what}; {log_path.name} ends\n{tail}")
        if part.profile:
            write_kernels_of_steps(work, output / part.profile)


def execute_run(run, output, progress):
    """All parts of a run until one fails, which run.error then says."""
    for part in run.parts:
        with progress.part(f"{run.title}, {part.what}"):
            if run.error:
                continue  # a run that does not work cannot be profiled
            try:
                execute_part(part, output / f"{run.name}_output.log", output)
            except (RuntimeError, OSError, Unreadable) as error:
                run.error = f"{part.what} run: {error}".rstrip()
                print(f"{PROGRAM}: {run.title} failed, {run.error}", file=sys.stderr, flush=True)
    run.done = True


def execute_all(runs, output):
    """True if it came to its end, False if it was interrupted."""
    able = [run for run in runs if run.parts and not run.obstacle]
    progress = Progress([part.what for run in able for part in run.parts])
    for run in runs:
        if run.obstacle:
            print(comparison.wrapped(f"{run.title}: left out, {run.obstacle}"))
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
    """The output folder for this replay alone."""
    llama.writable_folder("--output", output).mkdir(parents=True, exist_ok=True)
    with open(output / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise llama.UsageError(f"--output {output} is in use by another replay: give another folder") from None
        yield


def put_aside(output):
    """Moves what an earlier replay left into previous_<its date>/, so that no folder mixes two replays."""
    old = [path for pattern in WRITTEN for path in output.glob(pattern)]
    if old:
        date = datetime.fromtimestamp(max(path.stat().st_mtime for path in old))
        folder = output / f"previous_{date:%Y%m%d_%H%M%S}"
        folder.mkdir(exist_ok=True)
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
    """UsageError for what contradicts --laptop."""
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
    """The options; script_options are those after --."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = llama.Parser(PROGRAM, __doc__)
    parser.add_argument("--stages", type=stage_numbers, metavar="2,4", help="which stages (default: 1,2,3,4,5)")
    parser.add_argument("--beyond", action="store_true", help="stages 6 to 8 as well")
    parser.add_argument("--isolate", action="store_true", help="each mistake alone as well, beside stage 5")
    parser.add_argument("--laptop", action="store_true", help="no GPU: measure and count on the CPU, show a recording")
    parser.add_argument("--batch-size", type=int, help="sequences a step (default: 8)")
    parser.add_argument("--seq-len", type=int, help="tokens a sequence (default: 128)")
    parser.add_argument("--num-steps", type=int, help="steps of a full run (default: 20)")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR", help="(default: results/ here)")
    parser.add_argument("--no-profile", action="store_true", help="leave the profiled runs out")
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
    """The measured part of a run as one types it in this folder."""
    _, script, *arguments = run.parts[0].command
    variables = [f"{name}={value}" for name, value in run.parts[0].environment.items() if FOLDER not in value]
    command = ["python", os.path.relpath(script, HERE), *arguments[: arguments.index("--output-dir")]]
    return " ".join([*variables, shlex.join(command)])


def run(argv):
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
            "command": shlex.join([f"./{PROGRAM}", *comparison.without_option(argv, "--output")]),
            "date": datetime.now().isoformat(timespec="seconds"),
            "commands": [single_command(run) for run in trained],
            "profiler": profiler,
            "laptop": options.laptop,
            "recorded": list(recorded_replays(options.stages)) if options.laptop else [],
        }
        completed = execute_all(runs, options.output)
        summary = header | {"interrupted": not completed} | comparison.compare(options.output, runs)
        summary["observations"] = observations(summary) if summary["environment"] else []
        report.write(summary, options.output)
    if summary["environment"]:
        print(f"\n{comparison.console(summary)}\n\nReport: {options.output / 'report.html'}")
    if not completed:
        return 130
    return int(any(run.error for run in runs))


def main(argv=None):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's time limit is an interruption too
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
