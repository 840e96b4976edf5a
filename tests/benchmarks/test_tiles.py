"""benchmarks.tiles: which tile is taken, by a fake clock and a fake compiler; the results are those of the kernels."""

import ast
import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import tiles
from measure import timing

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted, the clock is not a GPU's"),
]
CPU = torch.device("cpu")
SHAPE = "1,32,2,1,16"
USED = (32, 32, 4, 1)  # the interpreter's
COMPILED = dict(error=None, vector_spills=0, scalar_spills=1, scratch_bytes=0, shared_bytes=0)
TIMES = {USED: 6.0, (16, 16, 4, 1): 5.0, (16, 32, 4, 1): 2.0, (32, 16, 4, 1): 4.0}
JITTER = [1.0, 1.02, 0.98]


class Machine:
    """A card on which a tile takes TIMES us with a little jitter, or the times of a list, one after the other."""

    def __init__(self, name, times):
        self.name, self.times, self.compiled, self.wrong = name, TIMES | dict(times), {}, {}
        self.launched, self.captured, self.timed = [], [], []

    def compile_jobs(self, jobs, processes):
        self.jobs = jobs
        compiled = {job.launch.compiled_as: tile_of(job.launch) for job in jobs}
        return {("cpu", key): COMPILED | self.compiled.get(tile, {}) for key, tile in compiled.items()}

    def launch(self, kernel, grid, tensors, scalars, constants, **options):
        C, name = constants["C"], constants.get("PART", "forward")
        tile = C.BLOCK_M, C.BLOCK_N, options["num_warps"], options["num_stages"]
        if name == self.name:
            self.launched.append(tile)
        fault = self.wrong.get(tile) if name == self.name else None
        if fault == "forgets delta":
            tensors = *tensors[:6], torch.empty_like(tensors[6]), *tensors[7:]
        if fault != "skips":
            USUAL_LAUNCH(kernel, grid, tensors, scalars, constants, **options)
        if fault == "scales":
            output = {"forward": 3, "dq": 7, "dkdv": 8, "fused": 9}[name]  # o, q_grad, k_grad, v_grad
            tensors[output].mul_(1.001)

    def capture(self, calls, number):
        assert number == timing.CALLS
        tile = llama.attention_tile(self.name, 4, 16, "ieee", "cpu")[:4]
        self.captured.append(tile)
        return tile

    def microseconds(self, tile):
        count = self.timed.count(tile)
        self.timed.append(tile)
        time = self.times[tile]
        return time[min(count, len(time) - 1)] if isinstance(time, list) else time * JITTER[count % len(JITTER)]


def tile_of(launch):
    C = launch.named_constants
    return C["BLOCK_M"], C["BLOCK_N"], *(value for _, value in launch.options[:2])


USUAL_LAUNCH = llama.launch


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """tune(name, **changes) runs the program for a pass on a Machine with these changes; returns what came of it."""

    def tune(name, times=(), flags=(), **changes):
        machine, contests_of = Machine(name, times), tiles.contests_of
        for field, value in changes.items():
            setattr(machine, field, value)
        # Fresh memory is not filled, but where the program asks for it.
        torch.use_deterministic_algorithms(False)
        flags = ["--shape", SHAPE, "--output-dir", str(tmp_path), *flags]
        options, config = tiles.parse(flags), llama.Config(**tiles.shape_of(SHAPE))
        with monkeypatch.context() as patch:
            patch.setattr(llama, "FUSED_BACKWARD_SEQ_LEN", 128 if name == "fused" else 8)
            patch.setattr(llama, "launch", machine.launch)
            for field, value in dict(BLOCKS={4: (16, 32)}, WARPS=(4,), STAGES={False: (1,)}).items():
                patch.setattr(tiles, field, value)
            for function in ("compile_jobs", "microseconds"):
                patch.setattr(tiles, function, getattr(machine, function))
            patch.setattr(tiles, "contests_of", lambda case: [each for each in contests_of(case) if each.name == name])
            patch.setattr(tiles.Bench, "capture", machine.capture)
            capsys.readouterr()
            machine.code = tiles.measure(config, flags, options, CPU)
        machine.out = capsys.readouterr().out
        machine.result = json.loads(Path(machine.out.rpartition("Results: ")[2].strip()).read_text())
        machine.outcome = machine.result["passes"][name]
        return machine

    return tune


def rows_of(text):
    """{key: tiles} of the rows of ATTENTION_TILES in a text, in which they are indented; in their order."""
    rows = [line.strip() for line in text.splitlines() if line.startswith("    (")]
    return [next(iter(ast.literal_eval(f"{{{row}}}").items())) for row in rows]


@pytest.mark.parametrize("name, position", [("forward", 0), ("dq", 1), ("dkdv", 2), ("fused", 3)])
def test_the_fastest_right_tile_is_taken(tune, tmp_path, name, position):
    file = tmp_path / "own.json"
    done = tune(name, flags=["--write", str(file)])
    assert done.code == 0 and tuple(done.outcome["chosen"]) == (16, 32, 4, 1)
    assert {tile_of(job.launch) for job in done.jobs} == TIMES.keys() - {USED}
    assert sorted(done.captured) == sorted(TIMES)
    new, old = rows_of(done.out)
    assert new[0] == old[0] == ("cpu", "ieee", 16) and old[1] == (USED,) * 4
    assert new[1] == tuple((16, 32, 4, 1) if n == position else USED for n in range(4))
    assert f"    # Measured on {llama.get_gpu('cpu').name}, {date.today()}.\n    (" in done.out
    assert "(32, 32, 4, 1) is in use, 6.00 us" in done.out and "(16, 32, 4, 1), 2.00 us, 0.333 (" in done.out
    assert json.loads(file.read_text()) == {
        "device": llama.get_gpu("cpu").name, "arch": "cpu", "measured": str(date.today()),
        "attention": {f"ieee 16 {name}": [16, 32, 4, 1]},
    }  # fmt: skip
    assert done.result["shape"] == [1, 32, 2, 1, 16] and done.result["dtype"] == "fp32"


def test_the_times_are_taken_in_turns_and_the_last_ones_decide(tune):
    done = tune("forward")
    first, last = done.timed[: 4 * tiles.ROUNDS], done.timed[4 * tiles.ROUNDS :]
    order = done.captured
    assert first == order + order[::-1] + order
    pair = [(16, 32, 4, 1), USED]
    assert last == (pair + pair[::-1]) * (tiles.WINDOWS // 2) + pair * (tiles.WINDOWS % 2)
    # A tile that was the fastest by chance is not taken.
    lucky = tune("forward", times={(16, 32, 4, 1): [2.0] * tiles.ROUNDS + [7.0] * tiles.WINDOWS})
    assert tuple(lucky.outcome["fastest"]) == (16, 32, 4, 1) and tuple(lucky.outcome["chosen"]) == USED
    assert "1.167 (" in lucky.out and "keep it" in lucky.out


@pytest.mark.parametrize("others", [6.0, 5.9, 7.0])
def test_the_tile_in_use_is_kept_where_none_is_faster_by_more_than_the_spread(tune, tmp_path, others):
    file = tmp_path / "own.json"
    done = tune("dkdv", times=dict.fromkeys(TIMES.keys() - {USED}, others), flags=["--write", str(file)])
    assert done.code == 0 and tuple(done.outcome["chosen"]) == USED
    assert "\nKeep the row in use: no tile was faster by more than the spread.\n" in done.out
    assert rows_of(done.out) == [(("cpu", "ieee", 16), (USED,) * 4)]
    assert json.loads(file.read_text())["attention"] == {} and "would change nothing" in done.out


@pytest.mark.parametrize("name, fault", [
    ("forward", "scales"), ("forward", "skips"), ("dq", "scales"), ("dq", "skips"),
    ("dq", "forgets delta"), ("dkdv", "scales"), ("dkdv", "skips"), ("fused", "scales"), ("fused", "skips"),
])  # fmt: skip
def test_a_wrong_tile_is_not_timed_however_fast_it_is(tune, name, fault):
    done = tune(name, wrong={(16, 32, 4, 1): fault})
    assert done.code == 0 and tuple(done.outcome["chosen"]) == (32, 16, 4, 1)
    assert (16, 32, 4, 1) in done.launched and (16, 32, 4, 1) not in done.captured + done.timed
    (refused,) = done.outcome["refused"]
    assert refused["tile"] == [16, 32, 4, 1] and refused["reason"].startswith("wrong: output ")
    assert "; 1 not timed: wrong\n" in done.out


def test_a_tile_in_use_that_is_wrong_ends_with_1(tune):
    done = tune("dq", wrong={USED: "scales"})
    assert done.code == 1 and done.outcome["error"].startswith("ArithmeticError: output 1 is wrong")
    assert done.timed == []


@pytest.mark.parametrize("compiled, reason", [
    ({"vector_spills": 1}, "spills registers"), ({"scratch_bytes": 8}, "spills registers"),
    ({"scalar_spills": 2}, "spills registers"), ({"error": "PassManager::run failed"}, "PassManager::run failed"),
])  # fmt: skip
def test_a_tile_that_spills_or_does_not_compile_is_not_launched(tune, compiled, reason):
    done = tune("dkdv", compiled={(16, 32, 4, 1): compiled})
    assert tuple(done.outcome["chosen"]) == (32, 16, 4, 1) and (16, 32, 4, 1) not in done.launched
    assert done.outcome["refused"] == [{"tile": [16, 32, 4, 1], "reason": reason}]
    only = tune("dkdv", compiled=dict.fromkeys(TIMES, compiled))  # the one in use is there anyway
    assert tuple(only.outcome["chosen"]) == USED and only.captured == [USED]
    assert f"{USED} is in use, and no other was timed; 3 not timed: {reason.partition(':')[0]}\n" in only.out


def test_figures_of_nvidia_have_no_spills_of_their_own():
    assert tiles.obstacle(COMPILED | {"vector_spills": None, "scalar_spills": None}) is None


def test_a_tile_that_does_not_fit_has_its_reason(tune, monkeypatch):
    def launch(machine, kernel, grid, tensors, scalars, constants, **options):
        if constants["C"].BLOCK_M == 16:
            raise RuntimeError("out of resource: shared memory")
        USUAL_LAUNCH(kernel, grid, tensors, scalars, constants, **options)

    monkeypatch.setattr(Machine, "launch", launch)
    done = tune("forward")
    assert tuple(done.outcome["chosen"]) == (32, 16, 4, 1)
    assert {entry["reason"] for entry in done.outcome["refused"]} == {"RuntimeError: out of resource: shared memory"}


def test_after_the_time_limit_no_tile_is_tried(tune):
    done = tune("forward", flags=["--time-limit", "0"])
    assert done.captured == [USED] and tuple(done.outcome["chosen"]) == USED


def test_what_is_written_has_the_tiles_in_use_of_an_own_file(tune, tmp_path, monkeypatch):
    gpu, file = llama.get_gpu("cpu"), tmp_path / "own.json"
    own = {"ieee 16 forward": list(USED), "half 64 dq": [64, 64, 8, 2]}
    file.write_text(json.dumps({"device": gpu.name, "arch": "cpu", "measured": "2030-01-02", "attention": own}))
    monkeypatch.setenv("TINY_LLAMA_TILES", str(file))
    llama.own_tiles.cache_clear()
    try:
        done = tune("forward", flags=["--write", str(file)])
    finally:
        llama.own_tiles.cache_clear()
        llama.attention_tile.cache_clear()
    assert json.loads(file.read_text())["attention"] == own | {"ieee 16 forward": [16, 32, 4, 1]}
    assert f"\nTiles of {file}: ieee 16 forward" in done.out


def test_the_tile_is_in_place_for_one_pass_only():
    key = 4, 16, "ieee", "cpu"
    before = {name: llama.attention_tile(name, *key) for name in llama.PASSES}
    with tiles.in_place("dq", llama.AttentionTile(16, 64, 8, 2), CPU):
        assert {name: llama.attention_tile(name, *key) for name in llama.PASSES} == before | {
            "dq": llama.AttentionTile(16, 64, 8, 2)
        }
    assert {name: llama.attention_tile(name, *key) for name in llama.PASSES} == before


def test_the_time_is_that_of_one_call_of_a_graph(monkeypatch):
    monkeypatch.setattr(timing, "replay_ms", lambda graph, before: before() or 4.0)
    replays = []
    time = tiles.microseconds(SimpleNamespace(replay=lambda: replays.append(1)))
    assert time == pytest.approx(4e3 / timing.CALLS) and len(replays) == 3 + 5  # 20 ms of them


def test_candidates_of_a_gpu_keep_the_options_of_its_compiler(monkeypatch):
    monkeypatch.setattr(llama, "get_gpu", lambda type: llama.Gpu("cuda", "GPU", "gfx942", 304, 64))
    tensors = [torch.empty(1, 256, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (2, 1, 1)]
    bench = SimpleNamespace(device=SimpleNamespace(type="meta"), dtype=torch.bfloat16)
    case = SimpleNamespace(bench=bench, ours=[lambda: llama.flash_attention_forward(*tensors)])
    try:
        (contest,) = tiles.contests_of(case)
    finally:
        llama.attention_tile.cache_clear()
    assert contest.operands == "half" and contest.lookup == (2, 64, "ieee", "meta")
    assert contest.used[:4] == (128, 64, 4, 1) and len(contest.others) == 4 * 4 * 2 * 2 - 1
    for numbers, launch in contest.others.items():
        options = dict(launch.options)
        assert (*numbers, 16) == (*tile_of(launch), options["matrix_instr_nonkdim"])


@pytest.mark.parametrize("shape, told", [
    ("medium", (16, 512, 16, 8, 64)), ("heads of 96", (8, 1024, 8, 4, 96)), ("2,100,6,3,32", (2, 100, 6, 3, 32)),
])  # fmt: skip
def test_a_shape_is_a_model_or_five_numbers(shape, told):
    config = llama.Config(**tiles.shape_of(shape))
    assert (config.batch_size, config.seq_len, config.num_heads, config.num_kv_heads, config.head_dim) == told


@pytest.mark.parametrize("flags, told", [
    ([], "tiles are timed on a GPU, and there is none here"),
    (["--shape", "huge"], "--shape huge is neither five numbers nor a model: give batch,tokens,heads,kv_heads,"),
    (["--shape", "1,2,3,4"], "--shape 1,2,3,4 is neither"),
    (["--shape", "1,2,4,3,16"], "--shape 1,2,4,3,16: --num-heads 4 is not divisible by --num-kv-heads 3"),
    (["--only", "rmsnorm"], "argument --only"),
])  # fmt: skip
def test_what_cannot_be_tuned_is_refused_in_one_line(tmp_path, capsys, flags, told):
    assert tiles.main([*flags, "--output-dir", str(tmp_path / "new")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and told in err and not (tmp_path / "new").exists()
