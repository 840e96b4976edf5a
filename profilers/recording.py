"""One recording: its options, its tool, the folder of its result, running and logging, and what becomes of failures."""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from measure.command_line import NothingRecorded, Parser, UsageError
from profilers import rocm
from tiny_llama.files import open_input
from tiny_llama.launchers import this_process

ROOT = Path(__file__).resolve().parent.parent
AFTER = """\
What follows -- are options of tiny_llama_v3.py, after --batch-size 8 --seq-len 128 --num-steps {steps}, or with
--program the arguments of that program; what follows a second -- are options of the profiler itself.

PYTHON chooses the interpreter. ROCm's profiler is the one that comes with PyTorch, else one of the same release, else
the first on PATH or in ROCM_PATH, else the newest below /opt. Exit codes: 0 done, 1 nothing was recorded or a part is
missing, 2 the request cannot be met, 130 interrupted; otherwise that of the program or the profiler."""

# What a log says, and what it means; the first that is found counts.
EXPLANATIONS = {
    r"^[a-z_0-9]+\.py: error: ": "the program cannot do what its options ask for: see its message above",
    r"Cannot find a supported arch|not supported.*gfx|Unsupported.*gfx": "rocprof-compute does not support this GPU: "
    "it wants an MI200, MI300 or newer; get_counters.sh --pmc may do",
    # ROCm 7.12 to 7.14 stop there, 10.0 only warns.
    r"ROCTX (bindings )?not found": "this ROCm has no roctx for this Python, which --operators needs: give PYTHON, one "
    "of those with a roctx in ROCM_PATH/lib/pythonX.Y/site-packages, or leave --operators out",
    r"Request exceeds the capabilities of the hardware": "too many counters for one pass: name fewer, or several --pmc",
    r"No HIP GPUs are available": "PyTorch sees no GPU. If it does without the profiler, two ROCm installations meet: "
    "load the one PyTorch was built for",
    r"ERR_NVGPUCTRPERM": "the driver lets only an administrator read GPU counters: run as root, or set "
    "NVreg_RestrictProfilingToAdminUsers=0",
    r"package was not found|does not meet version requirements": "rocprof-compute lacks a Python package (see the "
    "log): pip install -r its requirements.txt in a venv of its own",
    r"ModuleNotFoundError: No module named '(\w+)": "Python has no module {0}: if the program needs it, {python} -m "
    "pip install {0}; if rocprof-compute does, pip install -r its requirements.txt in a venv of its own",
    r"unrecognized arguments|Unrecognized command line option": "{tool} of this release has no such option: its own "
    "--help lists those that it has",
    r"Unable to find all counters": "this GPU, or this release, does not know them (rocprofv3 -L lists those that it "
    "does)",
    # The last two are said where the profiler has loaded its library, and PyTorch's own profiler another one.
    r"registered more than once|ROCPROFILER_REGISTER_LIBRARY is already set|ERROR_CONFIGURATION_LOCKED|"
    r"outside of valid rocprofiler configuration period": "two ROCm installations meet in one process, the profiler's "
    "and PyTorch's: use the profiler that comes with this PyTorch (pip install 'rocm[profiler]'), or load the module "
    "of its ROCm",
}
# Options of a profiler that the scripts give, or on which what they look for depends.
OURS = {
    "rocprofv3": "-d --output-directory -o --output-file -f --output-format --pmc -i --input --stats --kernel-trace "
    "--marker-trace --runtime-trace --rocm-root --minimum-output-data --mpi-world-rank-variable "
    "--mpi-world-size-variable",
    # -d is --dispatch, and from ROCm 10.2 on --output-directory.
    "rocprof-compute": "-n --name -p --path -d --output-directory --subpath",
    "rocprof-sys": "-o --output -T --trace -P --profile",
    "ncu": "-o --export --metrics",
}


def parser_of(script, description, tools, steps):
    """Return the Parser of a script with the options that all have."""
    parser = Parser(f"./{script}", description)
    parser.usage, parser.epilog = "%(prog)s [options] [-- OPTIONS [-- OPTIONS]]", AFTER.format(steps=steps)
    add, choices = parser.add_argument, [*tools, "auto"]
    add("--output", metavar="DIR", help="where the result goes; must be new or empty")
    program = "record this program of Python, not tiny_llama_v3.py; its ranges named step are the steps of the reports"
    add("--program", metavar="FILE", help=program)
    add("--stage", type=int, choices=range(1, 9), metavar="N", help="of the workshop: tiny_llama_v3.py --list-stages")
    tool = f"{'|'.join(choices)}; auto, the default, takes the first that works here"
    add("--tool", choices=choices, default="auto", metavar="NAME", help=tool)
    add("--tool-path", metavar="P", help="this profiler of ROCm: its file, or a folder that has it in it or in its bin")
    add("--dry-run", action="store_true", help="print the command lines and do nothing")
    return parser


def parse(parser, tools, argv):
    """Return the options of a script, with what follows -- and a second --; UsageError if they cannot be met."""
    own, rest = split(argv)
    options, unknown = parser.parse_known_args(own)
    options.arguments, options.tool_arguments = split(rest)
    if unknown:
        parser.error(f"unknown option {unknown[0]}: options of {name_of(options.program)} go after --")
    if options.program:
        options.program = readable_program(options.program)
        if options.stage:
            raise UsageError("--stage is of tiny_llama_v3.py, and --program names another program: leave one out")
    if options.tool_path:
        options.tool = tools[0] if options.tool == "auto" else options.tool
        options.tool_path = resolve(options.tool, options.tool_path)
    return options


def name_of(program):
    """Return what messages call the program that is recorded: a --program, or None for the training script."""
    return os.path.basename(program or "tiny_llama_v3.py")


def readable_program(path):
    """Return the absolute path of a --program; UsageError if it is no file that can be read."""
    try:
        open_input(path, math.inf).close()
    except OSError as error:
        raise UsageError(f"--program {path} cannot be read ({error.strerror}): give a file of Python") from error
    return os.path.abspath(path)


def split(words):
    """Return the words before the first --, and those after it."""
    cut = [*words, "--"].index("--")
    return words[:cut], words[cut + 1 :]


def resolve(tool, path):
    """Return the executable of a tool of ROCm that --tool-path P leads to."""
    if tool not in rocm.EXECUTABLES:
        raise UsageError(f"--tool-path names a profiler of ROCm, and --tool {tool} is none: leave one out")
    name = rocm.EXECUTABLES[tool]
    if found := shutil.which(name, path=f"{path}:{path}/bin:{os.path.dirname(path)}"):
        return os.path.abspath(found)
    raise UsageError(
        f"--tool-path {path}: there is no {name}: give its file, or the folder of one installation of ROCm"
    )


def module_command(name, *arguments):
    """Return the words that run a program of profilers/ from any folder."""
    path = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return ["env", f"PYTHONPATH={path}", rocm.python(), "-m", f"profilers.{name}", *map(str, arguments)]


def suggestion(text, name, *arguments):
    return f"{text}: {shlex.join(module_command(name, *arguments))}"


def own_fault(who, status, output):
    """Return why a program failed that no profiler runs: its last error, if its output has one."""
    (*_, error) = "", *re.findall(r"^(?:[\w.]+: error: .*|[\w.]*(?:Error|Exception)\b.*)", output, re.MULTILINE)
    lacking = re.search("No module named '(\\w+)", error)
    remedy = f"; install it: {rocm.python()} -m pip install {lacking[1]}" if lacking else ""
    return f"{who} ended with status {status}{': ' * bool(error)}{error}{remedy}"


def ncu_obstacle(build):
    """Return why ncu cannot be used, as the rest of a sentence with the remedy, or None."""
    if not shutil.which("ncu"):
        return "is not installed or not on PATH (install Nsight Compute, or add CUDA's bin folder)"
    return None if build.startswith("cuda") else rocm.built_for(build)


class Recording:
    """A script's run, from the choice of its tool to the last line that it prints.

    The result is a folder with a file INCOMPLETE until all is recorded, and is renamed if a step fails before that.
    Nothing that exists already is written over or deleted.
    """

    def __init__(self, tools, options, steps):
        self.options, self.steps = options, steps
        self.arguments, self.tool_arguments = options.arguments, options.tool_arguments
        self.name = name_of(options.program)
        self.named = ["--program", self.name] if options.program else []  # for reports, which say what marks no steps
        # The names of the profiler's own options; a value follows after a newline or =, or directly as in -fcsv.
        self.own = "\n".join(self.tool_arguments)
        self.asked = set(re.findall(r"^(--[^=\n]+|-\w)", self.own, re.MULTILINE))
        self.dry = options.dry_run
        self.log = self.recorded = self.left_out = None
        self.missing = []
        os.environ["PATH"] = rocm.search_path()
        self.choose_tool(tools)

    def note(self, text):
        """Print a line, to the log as well if there is one."""
        print(text, flush=True)
        if self.log:
            with open(self.log, "a", encoding="utf-8", errors="surrogateescape") as log:
                print(text, file=log)

    # ------------------------------------------------------------------------------------------------------------------
    # The tool

    def choose_tool(self, tools):
        """Set tool, its name, and rocm, the Tool if it is one of ROCm's; print them as the first line."""
        build, reasons, asked = rocm.torch_build(), [], self.options.tool
        for self.tool in tools if asked == "auto" else [asked]:
            self.rocm = rocm.find(self.tool, self.options.tool_path) if self.tool in rocm.EXECUTABLES else None
            if self.rocm:
                obstacle = rocm.obstacle_of(self.rocm, build)
            else:
                obstacle = ncu_obstacle(build) if self.tool == "ncu" else None
            if not obstacle:
                break
            reasons.append(f"{self.tool} {obstacle}")
        # A tool that was asked for is not replaced: what two tools record is not the same.
        if asked != "auto" and obstacle and not self.dry:
            raise UsageError(f"--tool {asked} cannot be used: it {obstacle}")
        reason = f" ({'; '.join(reasons)})" if reasons and asked == "auto" else ""
        if self.tool == "torch" and self.tool_arguments:
            left_out = " ".join(self.tool_arguments)
            raise UsageError(f'torch.profiler takes no options of its own: leave out "{left_out}"{reason}')
        if ours := [name for name in OURS.get(self.tool, "").split() if name in self.asked]:
            raise UsageError(
                f"leave out {ours[0]} of {self.tool}: this script sets it, and the result depends on it. For another, "
                "change the line that --dry-run shows"
            )
        if tool := self.rocm:
            # Only here, as modules set the variable as well, and nothing depends on it where there is a profiler.
            if not tool.is_installed and tool.release < rocm.OLDEST:
                oldest = rocm.dotted(rocm.OLDEST)
                version = f"ROCM_VERSION={os.environ['ROCM_VERSION']}"
                raise UsageError(f"{version} is no release from {oldest} on: give one such as {rocm.ASSUMED}")
            self.launch = tool.launch
            self.note(f"Tool: {tool.name} of ROCm {rocm.dotted(tool.release)}: {tool.path}, {tool.why}")
            if warning := rocm.mismatch_of(tool, build):
                self.note(f"Note: {warning}")
            if tool.is_installed:
                os.environ["PATH"] += f":{os.path.dirname(tool.path)}"  # for rocminfo and its like
        else:
            through = f"around {self.name}" if self.options.program else "through tiny_llama_v3.py --profile"
            names = {"ncu": "ncu, NVIDIA Nsight Compute", "torch": f"torch.profiler, {through}"}
            self.note(f"Tool: {names[self.tool]}{reason}")

    # ------------------------------------------------------------------------------------------------------------------
    # The result

    def start(self, name):
        """Make the folder of the result, such as traces/trace_<time>, and set program, the run to be profiled."""
        process, output, self.together = this_process(), self.options.output, []
        if process and not output:
            started = f"{process.rank}={os.environ[process.rank]}: this is one of several processes"
            raise UsageError(f"{started}, which need one folder for all: name it by --output")
        # Resolved, as rocprof-compute refuses a path with "..".
        self.result = Path(output or f"{name}_{datetime.now():%Y%m%d_%H%M%S_%f}").resolve()
        if process:
            self.together = [suggestion("All processes in one table", "hotspots", self.result, *self.named)]
            self.result /= f"rank_{process.number}"
            # rocprofv3 does not know torchrun's variables, and says nothing of a process that it leaves out.
            chosen = re.search(r"^--profile-mpi-ranks[=\n]([\d,-]+)", self.own, re.MULTILINE)
            if chosen and self.rocm and self.rocm.knows("--mpi-world-rank-variable", (10, 0)):
                self.tool_arguments += ["--mpi-world-rank-variable", process.rank]
                self.tool_arguments += ["--mpi-world-size-variable", process.size] if process.size else []
            ranges = re.findall(r"(\d+)-?(\d*)", chosen[1] if chosen else "")
            self.left_out = ranges and all(not int(a) <= process.number <= int(b or a) for a, b in ranges)
        if self.result.is_dir() and any(self.result.iterdir()):
            raise UsageError(f"--output {self.result} exists and is not an empty folder: give a new one")
        program = [self.options.program]
        if not self.options.program:
            stage = ["--stage", str(self.options.stage)] if self.options.stage else []
            sizes = f"--batch-size 8 --seq-len 128 --num-steps {self.steps}".split()
            program = [str(ROOT / "tiny_llama_v3.py"), *sizes, *stage, "--output-dir", str(self.result / "run")]
        self.program = [rocm.python(), *program, *self.arguments]
        if self.dry:
            return
        try:
            self.result.mkdir(parents=True, exist_ok=True)
            (self.result / "INCOMPLETE").open("x").close()  # of two runs that want this folder, one gets it
        except OSError as error:
            reason = "cannot be written to, or another run has just begun there: give another folder"
            raise UsageError(f"--output {self.result} {reason}") from error
        self.log = self.result / "log.txt"
        self.log.touch()

    def complete(self):
        """Declare that all is recorded: whatever happens from now on, the result stays."""
        (self.result / "INCOMPLETE").unlink(missing_ok=True)

    def is_complete(self):
        return not (self.result / "INCOMPLETE").exists()

    def set_aside(self):
        """Rename a result that is not complete, for the reports to skip it. If it cannot be, it stays INCOMPLETE."""
        if not self.log or self.is_complete():
            return
        self.log, failed = None, Path(f"{self.result}.failed")
        with contextlib.suppress(OSError):
            self.result.rename(failed)
            (failed / "INCOMPLETE").unlink()
            self.result = failed

    def fail(self, status, reason):
        self.set_aside()
        failure = UsageError(f"{reason}; the log: {self.result}/log.txt")
        failure.exit_code = status
        raise failure

    def miss(self, part):
        """Note that a part of the result is missing. The rest is kept and reported."""
        self.missing.append(part)
        self.note(f"Missing: {part}")

    def finish(self, *lines):
        """Print where the result is, and what to open it with."""
        if self.dry:
            return
        self.complete()
        log, self.log = self.log, None
        self.note("\n".join(["", f"Results: {self.result}", *lines]))
        if self.missing:
            raise NothingRecorded(f"the result lacks a part: {'; '.join(self.missing)}; the log: {log}")

    # ------------------------------------------------------------------------------------------------------------------
    # Running

    def run(self, command, folder=None):
        """Print a command line, run it in a folder, log both, and return its exit status."""
        line = (f"cd {shlex.quote(str(folder))} && " if folder else "") + shlex.join(command)
        if self.dry:
            self.note(line)
            return 0
        self.log_end = self.log.stat().st_size
        self.note(f"+ {line}")
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with (
            open(self.log, "ab", buffering=0) as log,
            # In a process group of its own, which signals reach as a whole.
            subprocess.Popen(command, cwd=folder, start_new_session=True, bufsize=0, **pipes) as process,
            forwarding(process.pid) as taken,
            guarded(process.pid),
        ):
            # A signal does not end this loop: Python reads again, and the program's last words are recorded.
            while data := process.stdout.read(2**16):
                log.write(data)
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            status = process.wait()
        if taken:
            kept = f"; the recording is whole, and its report is made by {line}" if self.is_complete() else ""
            self.fail(128 + taken[0], f"interrupted{kept}")
        return status if status >= 0 else 128 - status

    def run_or_fail(self, command, folder=None, who=None):
        if status := self.run(command, folder):
            self.fail(status, self.explain(status, who))

    def attempt(self, part, command, who=None):
        """Run a command without which only a part of the result is missing. Return its exit status."""
        if self.left_out and not self.recorded:
            return 0
        if status := self.run(command):
            self.miss(f"{part} ({self.explain(status, who)}); try again: {shlex.join(command)}")
        return status

    def report(self, part, name, *arguments):
        """Run a program of profilers/ on what is recorded, which is all. Return its exit status."""
        self.complete()
        return self.attempt(part, module_command(name, *arguments), f"profilers.{name}")

    def explain(self, status, who=None):
        """Return what the log of the last command says about its failure. who: what ran, if not under the profiler."""
        if who:
            return own_fault(who, status, self.last_output())
        return self.complaint() or f"{self.tool} or the program ended with status {status}"

    def last_output(self):
        """Return what the log has of the last command."""
        return self.log.read_bytes()[self.log_end :].decode(errors="replace")

    def complaint(self):
        """Return what the profiler or the program complained of in the last command, with the remedy, or None."""
        output = self.last_output()
        for words, meaning in EXPLANATIONS.items():
            if match := re.search(words, output, re.MULTILINE):
                return meaning.format(*match.groups(), tool=self.tool, python=rocm.python())
        return None

    def why_nothing(self):
        """Yield the likely reasons for a recording without kernels after a status of 0, each with its remedy."""
        if complaint := self.complaint():
            yield complaint
        if re.search(r"--device[= ]cpu\b", " ".join(self.arguments)):
            yield f"{self.name} was told to use the CPU: leave out --device"
        elif re.search(r"^Device: .*\(cpu\)", self.last_output(), re.MULTILINE):
            yield "PyTorch sees no GPU, and used the CPU: profilers/doctor.sh says why"
        if "--profile" in self.arguments:
            yield f"{self.name} has a profiler of its own: leave out --profile"
        for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            if os.environ.get(name) in ("", "-1"):
                yield f"{name}={os.environ[name]} hides every GPU: unset it"
        # A program that has used PyTorch on a GPU passes this on to those that it starts.
        if library := os.environ.get("ROCPROFILER_REGISTER_LIBRARY"):
            yield f"ROCPROFILER_REGISTER_LIBRARY={library} is loaded before the profiler: unset it"
        for option in sorted(self.asked & {"--selected-regions", "--collection-period"}):
            yield f"{option} may leave out the whole run: try without it"
        if self.rocm and (mismatch := rocm.mismatch_of(self.rocm, rocm.torch_build())):
            yield mismatch

    def require(self, *patterns):
        """Set recorded, the first file of these names, or end: a profiler's status 0 says little."""
        files = [path for pattern in patterns for path in self.result.rglob(pattern) if path.stat().st_size]
        self.recorded = min(files, default=None)
        if self.recorded:
            self.note(f"Recorded: {self.recorded}")
        elif self.left_out:
            self.note("Not recorded: --profile-mpi-ranks leaves this process out")
        elif not self.dry:
            other = f"{self.name} may have used no GPU (profilers/doctor.sh tries one), or ended by os._exit()"
            why = "; ".join(self.why_nothing()) or other
            self.fail(1, f"{self.tool} recorded nothing, it left no {' '.join(patterns)}: {why}")

    # ------------------------------------------------------------------------------------------------------------------
    # What several scripts record

    def rocprofv3(self, name, *options):
        """Return the command line that records the program into files of a name. A person's options count last."""
        prefix = self.result / name
        place = ["-d", str(prefix.parent), "-o", prefix.name]
        return [*self.launch, *options, *place, *self.tool_arguments, "--", *self.program]

    def by_torch(self):
        """Return the command line that records the program by torch.profiler."""
        python, *words = self.program
        if self.options.program:
            return [python, str(ROOT / "profilers" / "torch_profile.py"), str(self.result), *words]
        return [*self.program, "--profile", str(self.result)]

    def profile_by_torch(self, file="kernel_stats.csv"):
        self.run_or_fail(self.by_torch())
        self.require(file)

    def record_timeline(self, name):
        """Record a trace for Perfetto and the tables for the reports in one run."""
        if not self.rocm:
            self.profile_by_torch("trace.json")
            return
        formats = ["csv", "pftrace", *["rocpd"] * self.rocm.knows("rocpd", (7, 0))]
        self.run_or_fail(self.rocprofv3(name, "--runtime-trace", "--stats", "--output-format", *formats))
        self.require("*_results.pftrace")
        self.require("*_kernel_stats.csv")

    def report_kernels(self, *arguments):
        return self.report("the table of the kernels", "hotspots", self.result, *self.named, *arguments)


@contextlib.contextmanager
def forwarding(group):
    """Pass signals on to a process group, and yield the list of those that came."""
    taken = []

    def forward(number, frame):
        taken.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)

    # Slurm and torchrun end a job by SIGTERM, a terminal that closes by SIGHUP.
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def guarded(group):
    """Have a shell kill a process group as soon as this process is gone, which can pass no SIGKILL on.

    The shell waits for the end of its input, which only this process holds open. It has a session of its own, as what
    kills this process may kill its whole group.
    """
    null = subprocess.DEVNULL
    pipes = dict(stdin=subprocess.PIPE, stdout=null, stderr=null)
    words = ["sh", "-c", f"read -r _; kill -s KILL -- -{group}"]
    with subprocess.Popen(words, start_new_session=True, **pipes) as guard:
        try:
            yield
        finally:
            guard.kill()  # before its input ends
