"""Measure again what the pages show, where the code has changed since it was measured.

    python -m benchmarks.record                             list the parts that no result of today's code has
    python -m benchmarks.record --all                       measure all of PARTS, but what is current on this GPU
    python -m benchmarks.record --all --time-limit 540      as many parts as fit; the same command goes on later
    python -m benchmarks.record --rare                      measure RARE, which takes 40 minutes

A part is a command whose results are kept if it succeeds. It is current if this kind of GPU has a result of the same
command, and the code is that of the commit of that result, comments apart. Without a GPU, any GPU's counts. Afterwards
`make publish` writes the pages; older results of the same commands can be removed. benchmarks.training is no part: it
needs a text, and takes eleven minutes.

Exit codes: 0 done, 1 a part failed (the others are measured), 2 the request cannot be met, 130 interrupted.
"""

import ast
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

if not __package__:
    print("run it from the root as python -m benchmarks.record", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.harness import processor
from measure.command_line import Parser, program, time_limit
from measure.results import RESULTS, ROOT, ResultFile, read_result
from measure.work import SWEEPS
from tiny_llama import hardware

# Kernels, steps and what they are compared with. What reports and stores results may change.
MEASURED_CODE = """
    tiny_llama_v3.py tiny_llama/groups.py tiny_llama/*hopper.py tiny_llama/fp8.py
    nanogpt_triton/kernels/*.py nanogpt_triton/model.py nanogpt_triton/flat_adamw.py nanogpt_triton/train.py
    benchmarks/steps.py benchmarks/kernels.py benchmarks/fp8_layer.py benchmarks/gpt.py measure/timing.py
    measure/work.py
""".split()
UNTIMED = "state_dict", "load_state_dict"  # functions in them that no measured step calls
REPLAY = "exercises/performance_debugging/run_all_stages.sh"
LEARNING = "python tiny_llama_v3.py --batch-size 8 --seq-len 128 --data markov --num-steps 400"


class Part(NamedTuple):
    command: str  # as its result has it
    seconds: int  # that it takes on an H100 or H200, about
    name: str | None = None  # of its result, if the command leaves that to us: name_<device>_<date>.json


STEPS = "python -m benchmarks.steps --windows 5"
SHAPES = [*SWEEPS["shapes"]]  # in two parts, of which each fits into ten minutes


def steps_of(rows, **sizes):
    """Return a Part for each {size of model: seconds}, with rows or groups of them of benchmarks.steps."""
    return [Part(f"{STEPS} --rows {rows} --sizes {size}", seconds) for size, seconds in sizes.items()]


# What changes with our kernels, and then what only changes with a version of a peer. Each run of benchmarks.steps has
# an anchor, the row "sdpa compile graph".
PARTS = [
    *steps_of("ours eager 'triton fp8 graph'", small=107),
    *steps_of("ours", medium=107, large=137),
    *(Part(f"{STEPS} --sweep shapes --sizes {shlex.join(half)}", 280) for half in (SHAPES[:4], SHAPES[4:])),
    Part(f"{STEPS} --sweep micro-batches", 295),
    Part("python -m benchmarks.kernels", 115),
    Part("python -m benchmarks.kernels --only layer-norm", 40),
    Part("python -m benchmarks.kernels --only fp8-layer", 45),
    Part(f"{REPLAY} --beyond", 135, "stages"),
    Part(f"{REPLAY} --stages 2,3 --seq-len 2048 --num-steps 5 -- --use-amp", 70, "stages"),
    Part(f"{REPLAY} --stages 5,8 -- --use-amp", 40, "stages"),
    Part(LEARNING, 16, "learning_correct"),
    Part(f"{LEARNING} --severed-autograd", 14, "learning_severed"),
    Part("python -m benchmarks.pages.traces", 45),
    *steps_of("peers fp8", medium=380),
    *steps_of("peers", large=255),
    *steps_of("fp8", large=280),
    Part(f"{STEPS} --rows 'triton graph' 'sdpa compile graph' 'sdpa fa4 compile graph' --sizes large-128", 141),
    Part("python -m benchmarks.gpt", 151),
]
# What takes long, or only explains how the cost grows. The pages keep the recorded results.
RARE = [
    *steps_of("peers", small=125),
    Part(f"{STEPS} --sweep length --rows sweep 'sdpa fa4 compile graph'", 161),
    Part(f"{STEPS} --sweep width", 161),
    Part(f"{STEPS} --sweep vocab", 124),
    Part(f"{REPLAY} --stages 2,3 --seq-len 2048 --num-steps 5", 70, "stages"),
    Part(f"python -m benchmarks.kernels --only {'heads-128 ' * 7}".strip(), 180),
    # Whose search takes minutes. Medium and large are estimated.
    *steps_of("autotuned", small=318, medium=400, **{"large": 370, "large-128": 450}),
]


class TimedCode(ast.NodeTransformer):
    """Leaves what can change a time: no docstrings and nothing UNTIMED. A tree has no comments."""

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node

    def visit_FunctionDef(self, node):
        return None if node.name in UNTIMED else self.generic_visit(node)


def has_changed(result):
    """Return whether the code differs from that of the commit which a result was measured at, or this is not known."""
    commit = str(result["environment"].get("commit")).removesuffix("-dirty")

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True, text=True).stdout

    def differs(name):
        texts = git("show", f"{commit}:{name}"), (ROOT / name).read_text()
        before, now = (ast.dump(TimedCode().visit(ast.parse(text))) for text in texts)
        return before != now

    try:
        names = git("diff", "--name-only", commit, "--", *MEASURED_CODE).splitlines()
        return any(map(differs, names))
    except (subprocess.CalledProcessError, OSError, SyntaxError):
        return True  # without this commit, as in a shallow clone, or where a file came or went


def is_current(part, results, device):
    """Return whether one of the results is of this part, this kind of GPU and today's code."""
    alike = (result for result in results if result.get("command") == part.command)
    alike = (r for r in alike if device.type == "cpu" or r["environment"]["device"] == llama.get_gpu(device.type).name)
    return any(not has_changed(result) for result in alike)


def measure(part, device):
    """Run the command of a part, and keep its results if it succeeds. Return whether it did."""
    program, *arguments = shlex.split(part.command)
    command = [sys.executable, *arguments] if program == "python" else [str(ROOT / program), *arguments]
    # It writes elsewhere, so that what a failed command has left is never taken for a result.
    with tempfile.TemporaryDirectory() as scratch:
        option = ["--output-dir", scratch] if program == "python" else ["--output", scratch]
        place = command.index("--") if "--" in command else len(command)
        if subprocess.run([*command[:place], *option, *command[place:]], cwd=ROOT).returncode:
            return False
        for path in Path(scratch).glob("summary.json" if part.name == "stages" else "*.json"):
            result = json.loads(path.read_text())
            # What has no command in it, such as a run of the script, gets the fields of a benchmark.
            if part.name:
                result |= {"benchmark": part.name, "command": part.command, "host": processor()}
                result.setdefault("date", time.strftime("%Y-%m-%dT%H:%M:%S"))
                result.setdefault("environment", hardware.environment(device))
            ResultFile(RESULTS, result).save(result)
    return True


@program("record.py")
def main(argv):
    start = time.monotonic()
    parser = Parser("record.py", __doc__)
    parser.add_argument("--all", action="store_true", help="measure what is not current, on this GPU")
    parser.add_argument("--rare", action="store_true", help="measure what takes long")
    help = "no part starts that would end later (default: 36000)"
    parser.add_argument("--time-limit", type=time_limit, default=36000, metavar="SECONDS", help=help)
    options = parser.parse_args(argv)
    device = llama.select_device("auto")
    wanted = PARTS * options.all + RARE * options.rare
    results = [read_result(path) for path in sorted(RESULTS.glob("*.json"))]
    parts = [part for part in wanted or PARTS + RARE if not is_current(part, results, device)]
    if not wanted:
        for part in parts:
            print(f"{part.command}  # {'--rare' if part in RARE else '--all'}, {part.seconds} s")
        if not parts:
            print("every part is current")
        return 0
    if device.type == "cpu":
        raise llama.UsageError("measuring needs a GPU, and there is none: give no option, to list")
    if has_changed({"environment": {"commit": "HEAD"}}):
        print("note: git has no commit of this code, so its results will not count as current: commit it first")
    failed = False
    for part in parts:
        begin = time.monotonic()
        is_late = begin - start + part.seconds > options.time_limit
        print(f"\n{'Left for the next time: ' * is_late}{part.command}", flush=True)
        if not is_late:
            is_done = measure(part, device)
            failed |= not is_done
            print(f"{'Done' if is_done else 'Failed'} in {time.monotonic() - begin:.0f} s: {part.command}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
