"""Find the tiles with which attention is fastest on this card, for the shape of a model.

    python -m benchmarks.tiles --only attention --shape medium --use-amp
    python -m benchmarks.tiles --shape 8,1024,12,4,64 --use-amp           batch, tokens, heads, heads of K and V, head
    python -m benchmarks.tiles --shape medium --use-amp --write tiles.json
    TINY_LLAMA_TILES=tiles.json python tiny_llama_v3.py --use-amp         a run with them, without an edit

For each pass that has a tile for this shape, other tiles are compiled. Those that spill no registers and fit into
shared memory are compared with plain PyTorch, by the rule of tiny_llama_v3.py --check, and those that are right are
timed in turns. The fastest is then timed again beside the one in use, and taken if the 95 % intervals of the two
medians do not overlap. Of the gradients' passes the whole backward pass is timed, in which one tile changes. At the end
stands a row for ATTENTION_TILES in tiny_llama_v3.py.

--write also writes what was found as a file for TINY_LLAMA_TILES, beside the tiles of the file that is in use now.

Exit codes: 0 done, 1 a tile in use gives a wrong result, 2 the request cannot be met, 130 interrupted.
"""

import functools
import itertools
import os
import statistics
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

if not __package__:
    print("run it from the root as python -m benchmarks.tiles", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from benchmarks.harness import Run, make_parser
from benchmarks.kernels import Case, attention_cases, named
from measure.accuracy import require
from measure.command_line import program
from measure.device import require_triton
from measure.results import describe, write_json
from measure.timing import CALLS, Bench, in_turns, median_replay_ms, ratio_of_medians, release
from measure.work import SHAPES, SIZES
from offline.architectures import is_amd
from offline.compiler import compile_jobs
from offline.gate import SCALAR_SPILLS
from offline.recorded import Job, gpu_found, recording
from tiny_llama import hardware

MODELS = SIZES | SHAPES
BLOCKS = {2: (16, 32, 64, 128), 4: (16, 32, 64)}  # rows of a tile, by the bytes of an element
WARPS = 4, 8
STAGES = {True: (1, 2), False: (1, 2, 3)}  # by whether the card is AMD's, whose shared memory is a third of a Hopper's
ROUNDS = 3  # in which all tiles are timed, to find the fastest
WINDOWS = 9  # in which the fastest is timed beside the one in use
WINDOW_SECONDS = 0.02
MOST_PROCESSES = 16  # that compile


class Contest(NamedTuple):
    """A pass of attention, and the tiles that are tried for it."""

    name: str  # one of PASSES
    case: Case  # the direction that it is part of
    lookup: tuple  # what attention_tile() takes beside the name
    used: llama.AttentionTile
    others: dict  # {(BLOCK_M, BLOCK_N, warps, stages): the Launch with them}

    @property
    def operands(self):
        """Return what ATTENTION_TILES calls the operands of the products."""
        itemsize, _, precision, _ = self.lookup
        return "half" if itemsize == 2 else precision

    @property
    def options(self):
        """Return the compiler's options of the others: those of a tile of TINY_LLAMA_TILES."""
        return {name: value for name, value in self.used.options.items() if name != "waves_per_eu"}


def in_place(name, tile, device):
    """Return a context in which one of PASSES has this tile."""
    usual = llama.attention_tile

    def attention_tile(asked, *key):
        return tile if asked == name else usual(asked, *key)

    return gpu_found(llama.get_gpu(device.type), attention_tile=attention_tile)


def launches(case):
    """Return {pass: Launch} of what a case launches with a tile; nothing runs."""
    with recording(llama.get_gpu(case.bench.device.type)) as recorded:
        case.ours[0]()
    return {dict(launch.constants).get("PART", "forward"): launch for launch in recorded}


def contests_of(case):
    """Yield the Contest of each pass that has a tile. On a Hopper, some have kernels without: attention_hopper.py."""
    device, itemsize = case.bench.device, case.bench.dtype.itemsize
    sizes, stages = BLOCKS[itemsize], STAGES[is_amd(llama.get_gpu(device.type).arch)]
    for name, launch in launches(case).items():
        C = launch.named_constants
        lookup = itemsize, C["BLOCK_D"], C["PRECISION"], device.type
        contest = Contest(name, case, lookup, llama.attention_tile(name, *lookup), {})
        for numbers in itertools.product(sizes, sizes, WARPS, stages):
            if numbers != contest.used[:4]:
                with in_place(name, llama.AttentionTile(*numbers, contest.options), device):
                    contest.others[numbers] = launches(case)[name]
        yield contest


def compile_all(contests, arch, dtype):
    """Compile the launches of all contests. Return {Launch.compiled_as: what compile_launch() returns}."""
    launches = [launch for contest in contests for launch in contest.others.values()]
    jobs = [Job(arch, "tiles", dtype, launch, 1) for launch in launches]
    found = compile_jobs(jobs, min(os.cpu_count(), MOST_PROCESSES))
    return {compiled_as: result for (_, compiled_as), result in found.items()}


def obstacle(compiled):
    """Return why a compiled launch is not tried, or None. What exceeds shared memory is found when it is launched."""
    if compiled.get("error"):
        return compiled["error"]
    spills = (compiled["vector_spills"] or 0) + compiled["scratch_bytes"]
    return "spills registers" if spills or (compiled["scalar_spills"] or 0) > SCALAR_SPILLS else None


def outputs_of(case):
    """Return the results of a case, from memory that was filled with NaN: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated
    try:
        for tensor in named(case.ours[0]()).values():
            tensor.fill_(torch.nan)  # the gradients are allocated once
        return case.ours[0]()
    finally:
        torch.use_deterministic_algorithms(False)


def judged_graph(contest, tile, references):
    """Return calls with a tile as a graph; ArithmeticError if their results are wrong."""
    case = contest.case
    with in_place(contest.name, tile, case.bench.device):
        require(named(outputs_of(case)), *references)
        return case.bench.capture(case.ours, CALLS)


def microseconds(graph):
    """Return the time of a call in a graph, the median of some replays."""
    return median_replay_ms(graph, WINDOW_SECONDS, at_least=3, at_most=50, before=graph.replay) * 1e3 / CALLS


def hold(run, contest, compiled):
    """Time the tiles of a contest. Return what the result has of it; the tile to take is "chosen"."""
    used = contest.used[:4]
    _, *references = contest.case.evidence(())
    graphs, refused = {used: judged_graph(contest, contest.used, references)}, {}
    for numbers, launch in contest.others.items():
        reason = "not started within --time-limit" if run.is_late() else obstacle(compiled[launch.compiled_as])
        if not reason:
            try:
                tile = llama.AttentionTile(*numbers, contest.options)
                graphs[numbers] = judged_graph(contest, tile, references)
            except ArithmeticError as error:
                reason = f"wrong: {error}"
            except Exception as error:  # of this tile alone, even if it is a compiler's
                reason = describe(error)
        if reason:
            refused[numbers] = reason
    windows = {numbers: functools.partial(microseconds, graph) for numbers, graph in graphs.items()}
    medians = dict(zip(windows, map(statistics.median, in_turns(windows.values(), ROUNDS)), strict=True))
    fields = {
        "in_use": used,
        "chosen": used,
        "timed": [{"tile": numbers, "us": time} for numbers, time in medians.items()],
        "refused": [{"tile": numbers, "reason": reason} for numbers, reason in refused.items()],
    }
    others = [numbers for numbers in windows if numbers != used]
    if others:
        fastest = min(others, key=medians.get)
        times, used_times = in_turns([windows[fastest], windows[used]], WINDOWS)
        ratio = ratio_of_medians(times, used_times)
        fields |= {"fastest": fastest, "ratio": ratio._asdict(), "windows": {"us": times}, "in_use_windows": used_times}
        fields["chosen"] = fastest if ratio.high < 1 else used
    return fields


def report(contest, fields):
    """Print the line of a contest."""
    reasons = Counter(entry["reason"].partition(":")[0] for entry in fields["refused"])
    not_timed = "".join(f"; {count} not timed: {reason}" for reason, count in reasons.items())
    if "fastest" not in fields:
        print(f"{contest.name}: {fields['in_use']} is in use, and no other was timed{not_timed}", flush=True)
        return
    time, used_time = (statistics.median(times) for times in (fields["windows"]["us"], fields["in_use_windows"]))
    bounds = "{value:.3f} ({low:.3f} to {high:.3f})".format(**fields["ratio"])
    verdict = "keep it" if fields["chosen"] == fields["in_use"] else "take the fastest"
    print(
        f"{contest.name}, in {contest.case.name}: {fields['in_use']} is in use, {used_time:.2f} us; the fastest of "
        f"{len(fields['timed']) - 1} others {fields['fastest']}, {time:.2f} us, {bounds} of it: {verdict}{not_timed}",
        flush=True,
    )


def row(contest, chosen):
    """Return a row of ATTENTION_TILES with the chosen tiles, {pass: tile}, and those in use for the other passes."""
    _, head, _, device_type = contest.lookup
    used = {name: tuple(llama.attention_tile(name, *contest.lookup)[:4]) for name in llama.PASSES}
    tiles = ", ".join(str(tile) for tile in (used | chosen).values())
    return f'    ("{llama.get_gpu(device_type).arch}", "{contest.operands}", {head}): ({tiles}),'


def shape_of(text):
    """Return the sizes of Config that --shape names; UsageError if it names none."""
    if text in MODELS:
        return MODELS[text]
    try:
        batch, seq_len, heads, kv_heads, head_dim = map(int, text.split(","))
    except ValueError:
        remedy = f"give batch,tokens,heads,kv_heads,head_dim, or one of {', '.join(map(repr, MODELS))}"
        raise llama.UsageError(f"--shape {text} is neither five numbers nor a model: {remedy}") from None
    sizes = dict(batch_size=batch, seq_len=seq_len, num_heads=heads, num_kv_heads=kv_heads)
    return sizes | {"hidden_dim": heads * head_dim}


def parse(argv):
    parser = make_parser("tiles", __doc__, seconds=600)
    parser.add_argument("--only", choices=["attention"], default="attention", help="the kernel (default: attention)")
    help = "a model of benchmarks.steps, or batch,tokens,heads,kv_heads,head_dim (default: medium)"
    parser.add_argument("--shape", default="medium", help=help)
    parser.add_argument("--use-amp", action="store_true", help="in bf16 (default: fp32)")
    help = "fp32 products in full fp32 or in TF32 (default: highest)"
    parser.add_argument("--matmul-precision", choices=("highest", "high"), default="highest", help=help)
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tiles for TINY_LLAMA_TILES")
    return parser.parse_args(argv)


@program("tiles.py")
def main(argv):
    options = parse(argv)
    require_triton()
    device, sizes = llama.select_device("auto"), shape_of(options.shape)
    try:
        config = llama.Config(**sizes, use_amp=options.use_amp, matmul_precision=options.matmul_precision)
    except llama.UsageError as error:
        raise llama.UsageError(f"--shape {options.shape}: {error}") from error
    if device.type == "cpu":
        raise llama.UsageError("tiles are timed on a GPU, and there is none here: run it where there is one")
    llama.validate_on_device(config, device)
    return hardware.remedied(config, measure, argv, options, device)


def measure(config, argv, options, device):
    """Hold the contests of a shape, print and write what came of them. Return the exit code."""
    llama.set_precision(config)
    torch.manual_seed(0)
    bench, gpu, today = Bench(device), llama.get_gpu(device.type), date.today().isoformat()
    bench.dtype = torch.bfloat16 if config.use_amp else torch.float32
    shape = config.batch_size, config.seq_len, config.num_heads, config.num_kv_heads, config.head_dim
    dtype = "bf16" if config.use_amp else "fp32"
    run = Run("tiles", argv, options, device, shape=shape, dtype=dtype, passes={})
    contests = [contest for case in attention_cases(bench, *shape) for contest in contests_of(case)]
    if not contests:
        raise llama.UsageError(f"--shape {options.shape}: no pass has a tile, tiny_llama/attention_hopper.py has all")
    names = ", ".join(contest.name for contest in contests)
    print(f"compiling {sum(len(contest.others) for contest in contests)} launches: {names}", flush=True)
    compiled = compile_all(contests, gpu.arch, dtype)
    chosen, found = {}, {}
    for contest in contests:
        outcome = run.attempt(functools.partial(hold, run, contest, compiled))
        run.result["passes"][contest.name] = outcome
        if outcome["error"]:
            print(f"{contest.name}: {outcome['error']}", flush=True)
        else:
            report(contest, outcome)
            if outcome["chosen"] != outcome["in_use"]:
                chosen[contest.name] = outcome["chosen"]
                found[f"{contest.operands} {contest.lookup[1]} {contest.name}"] = outcome["chosen"]
        run.save()
        release(device)
    if chosen:
        print("\nFor ATTENTION_TILES in tiny_llama_v3.py, above the row that fits now:")
        print(f"    # Measured on {gpu.name}, {today}.\n{row(contests[0], chosen)}\nIn use now:")
    else:
        print("\nKeep the row in use: no tile was faster by more than the spread.")
    print(row(contests[0], {}))
    if options.write:
        attention = {**llama.own_tiles(device.type), **found}
        content = {"device": gpu.name, "arch": gpu.arch, "measured": today, "attention": attention}
        write_json(options.write, content, follow=True)
        print(f"\nTiles: TINY_LLAMA_TILES={options.write} {'has them' if attention else 'would change nothing'}")
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
