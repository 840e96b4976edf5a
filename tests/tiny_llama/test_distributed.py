"""Several processes, started by torchrun: they train as one does on the batch of all, and end as one does."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY
from tests.tiny_llama import distributed_program
from tests.tiny_llama.distributed_program import CONFIG, GPU_CONFIG, GPU_RUNS, RUNS
from tiny_llama import distributed
from tiny_llama.distributed import ShardedAdamW, Step, World

PROGRAM = Path(distributed_program.__file__)
SIZES = "--hidden-dim 16 --num-layers 2 --num-heads 2 --num-kv-heads 1 --ffn-dim 24 --vocab-size 11 --seq-len 8".split()
ENDLESS = [*SIZES, "--impl", "torch", "--device", "cpu", "--warmup-steps", "1", "--num-steps", "1000000"]
needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


def begin(python, function, *arguments):
    """A function of distributed_program.py in two processes of torchrun; the output of both ends in one pipe."""
    command = [python, "-u", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    return subprocess.Popen(
        [*command, str(PROGRAM), function, *map(str, arguments)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def start(python):
    return functools.partial(begin, python)


def finish(program):
    """(exit code, output)"""
    try:
        out, _ = program.communicate(timeout=300)
    finally:
        program.kill()
    return program.returncode, out


def error_lines(out):
    return [line for line in out.splitlines() if "tiny_llama_v3.py: error:" in line]


# --- the same training


@pytest.fixture(scope="module")
def two_devices():
    """Both processes on the CPU, or each on a GPU of its own."""
    if torch.cuda.device_count() == 1:
        pytest.skip("there is one GPU")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, start, two_devices):
    """The folder of what distributed_program.trainings() has written."""
    folder = tmp_path_factory.mktemp("trainings")
    exit_code, out = finish(start("trainings", folder))
    assert exit_code == 0, out
    return folder


@pytest.fixture(scope="module")
def trained(trainings):
    """{name: results of both ranks} of distributed_program.RUNS."""
    return {name: [torch.load(trainings / f"{name} {rank}.pt") for rank in range(2)] for name in RUNS}


def train_alone(monkeypatch, name, runs=RUNS, config=CONFIG):
    """What one process does with the batch of both."""
    if config.device == "auto" and name != "kernels":
        monkeypatch.setitem(llama.OPERATIONS, "triton", llama.OPERATIONS["torch"])
    config = dataclasses.replace(config, **runs[name])
    config = dataclasses.replace(config, batch_size=2 * config.batch_size)
    return distributed_program.train(config, frozen=name == "frozen")


def assert_same_training(both, alone, rel):
    for results in both:
        assert results["losses"] == pytest.approx(alone["losses"], rel=rel)
        assert results["norms"][-1] == pytest.approx(alone["norms"][-1], rel=100 * rel)
        for weight, expected in zip(results["weights"], alone["weights"], strict=True):
            assert (weight - expected).norm() <= 10 * rel * expected.norm()
    assert both[0]["losses"] == both[1]["losses"]
    assert all(map(torch.equal, both[0]["weights"], both[1]["weights"]))


@needs_triton
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one_does_on_the_batch_of_both(trained, monkeypatch, name):
    monkeypatch.setattr(llama, "INTERPRETED", True)
    alone = train_alone(monkeypatch, name)
    assert_same_training(trained[name], alone, 1e-5)
    if name != "kernels":
        assert alone["losses"][-1] < alone["losses"][0] - 0.1  # it learns


@needs_triton
def test_two_runs_give_the_same_bits(trained):
    for first, second in zip(trained["sharded"], trained["one window"], strict=True):
        assert first["losses"] == second["losses"]
        assert all(map(torch.equal, first["weights"], second["weights"]))


@needs_triton
def test_shared_weights_of_two_parts_are_joined_exactly(trainings):
    assert [(trainings / f"restored {rank}").read_text() for rank in range(2)] == ["True", "True"]


@needs_triton
def test_each_process_has_its_share_of_the_optimizer_s_state(trained):
    for results in trained["sharded"]:
        weights = sum(results["sizes"])
        padding = llama.ADAMW_BLOCK * (len(results["sizes"]) + 2 * CONFIG.num_layers)
        assert weights / 2 <= results["state"] <= (weights + padding) / 2


@pytest.mark.gpu
def test_two_gpus_train_as_one_does(start, monkeypatch, tmp_path):
    """NCCL, bf16 and graphs. In bf16 the error against fp32 may be twice that of one process, and a little."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    exit_code, out = finish(start("gpu_trainings", tmp_path))
    assert exit_code == 0, out
    wrong = []
    for name, changes in GPU_RUNS.items():
        alone = {}
        for use_amp in (False, True):
            config = dataclasses.replace(GPU_CONFIG, use_amp=use_amp)
            alone[use_amp] = train_alone(monkeypatch, name, GPU_RUNS, config)
            for rank in range(2):
                both = torch.load(tmp_path / f"{name} {use_amp} {rank}.pt")
                error, allowed = distance(both, alone[False]), 2 * distance(alone[use_amp], alone[False])
                if not error <= allowed + (2e-2 if use_amp else 1e-3):
                    wrong.append(f"{name}, bf16 {use_amp}, rank {rank}: {error:.1e} off, one process {allowed / 2:.1e}")
                same = torch.load(tmp_path / f"sharded {use_amp} {rank}.pt")
                if "impl" not in changes and both["losses"] != same["losses"]:
                    wrong.append(f"{name}, bf16 {use_amp}, rank {rank}: other bits than eager")
    assert wrong == []


def distance(results, reference):
    """The larger one of the relative distances of all weights and of all losses."""
    pairs = (results["losses"], reference["losses"]), (results["weights"], reference["weights"])
    flat = [[torch.cat([torch.as_tensor(x).flatten() for x in side]) for side in pair] for pair in pairs]
    return max(float((x - y).norm() / y.norm()) for x, y in flat)


# --- the check


def test_check_names_the_ranks_that_fail(start, tmp_path, two_devices):
    exit_code, out = finish(start("checks", tmp_path))
    assert exit_code == 0, out
    outcomes = [json.loads((tmp_path / f"outcomes {rank}.json").read_text()) for rank in range(2)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == {
        "nothing": True, "an operation on rank 1": False, "nothing, sharded": True, "the reduction": False,
    }  # fmt: skip
    lines = [line for line in (tmp_path / "out 0").read_text().splitlines() if line.startswith("Check")]
    assert [line.removeprefix("Check against PyTorch in fp64, ").split(" (")[0] for line in lines] == [
        "rank 0: passed", "the mean of 2 processes: passed", "rank 1: FAILED in 9 of 9", "rank 0: passed",
        "the mean of 2 processes: passed", "rank 0: passed", "the mean of 2 processes: FAILED in 8 of 9",
    ]  # fmt: skip


# --- a whole run


def test_a_run_of_two_processes(start, tmp_path):
    """One process prints and writes, and what it writes has the figures of all."""
    arguments = [*SIZES, "--impl", "sdpa", "--device", "cpu", "--num-steps", "3", "--stage", "7"]
    arguments += ["--output-dir", tmp_path / "results", "--profile", tmp_path / "profile"]
    exit_code, out = finish(start("script", tmp_path, *arguments))
    assert exit_code == 0, out
    assert out.count("Final loss:") == out.count("step    3/3") == 1
    assert "\nProcesses: 2 over gloo" in out and "\nThroughput of all: " in out and "\nPeak memory of the f" in out
    assert "\nTraining: batch 8 x 8 tokens on each of 2 processes, 3 steps" in out
    assert "Mistakes brought back: --no-warmup" in out
    for rank in range(2):
        names = [path.name for path in (tmp_path / "profile" / f"rank_{rank}").iterdir()]
        assert sorted(names) == ["kernel_stats.csv", "trace.json"]

    (path,) = (tmp_path / "results").iterdir()
    result = json.loads(path.read_text())
    world = result["summary"]["world"]
    assert (world["size"], world["backend"]) == (2, "gloo")
    assert [process["rank"] for process in world["processes"]] == [0, 1]
    assert world["tokens_per_second"] == 2 * min(process["tokens_per_second"] for process in world["processes"])
    assert world["peak_memory_mib"] == max(process["peak_memory_mib"] for process in world["processes"]) > 0
    assert len(result["steps"]) == 3


def test_a_process_alone_has_no_world(run):
    done = run("--shard", "full")
    assert "Note: --shard full has no effect on one process: start several with torchrun" in done.out
    assert "Processes:" not in done.out and done.result["summary"]["world"] is None


# --- faults


@pytest.fixture
def endless(tmp_path, python):
    """Starts an endless run and returns when it trains: the program, the processes' numbers, the folder of results."""
    programs, pids, links = [], [], [tmp_path / str(rank) for rank in range(2)]

    def run(*arguments, python=python):
        program = begin(python, "script", tmp_path, *ENDLESS, "--output-dir", tmp_path / "results", *arguments)
        programs.append(program)
        wait_until(lambda: program.poll() is not None or all(map(os.path.islink, links)))
        pids.extend(int(os.readlink(link)) for link in links)
        return program, pids, tmp_path / "results"

    yield run
    for program in programs:
        program.kill()
        program.wait()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition):
    for _ in range(3000):
        if condition():
            return True
        time.sleep(0.1)
    return False


def ended(pid):
    """Whether a process has gone, at the latest in some minutes."""

    def gone():
        with contextlib.suppress(ProcessLookupError):
            return os.kill(pid, 0)  # None: it is there
        return True

    return wait_until(gone)


def test_a_process_that_is_killed_ends_all(endless):
    program, pids, results = endless()
    os.kill(pids[1], signal.SIGKILL)
    exit_code, out = finish(program)
    assert exit_code != 0
    (line,) = error_lines(out)
    assert "rank 0: another process has ended, or does not answer" in line
    assert all(map(ended, pids)) and not results.exists()


def test_a_process_that_is_stopped_ends_all_in_comm_timeout(endless):
    program, pids, results = endless("--comm-timeout", "10")
    os.kill(pids[1], signal.SIGSTOP)
    line = next(line for line in program.stdout if "error:" in line)
    assert "rank 0: another process has ended, or does not answer (" in line and "10000ms" in line
    os.kill(pids[1], signal.SIGKILL)  # torchrun would wait for it, half a minute
    exit_code, out = finish(program)
    assert exit_code != 0 and error_lines(out) == []
    assert all(map(ended, pids)) and not results.exists()


@pytest.mark.parametrize("timing, on_torchrun", [
    ("phases", True), ("step", False),
    pytest.param("step", True, marks=pytest.mark.slow), pytest.param("phases", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_ctrl_c_on_torchrun_or_on_one_process_stops_all_at_the_same_step(endless, timing, on_torchrun):
    options = {"python": sys.executable} if on_torchrun else {}
    program, pids, results = endless("--timing", timing, *(["--num-steps", "20000"] * (timing == "step")), **options)
    os.kill(program.pid if on_torchrun else pids[1], signal.SIGINT)
    _, out = finish(program)
    assert "\nInterrupted after " in out and "Final loss: " in out and error_lines(out) == [], out
    (path,) = results.iterdir()
    steps = json.loads(path.read_text())["steps"]
    assert f"Interrupted after {len(steps)} of " in out and steps
    assert all(map(ended, pids))


@pytest.mark.parametrize("function, arguments, message", [
    ("script", ["--num-steps", "none"], "argument --num-steps: invalid int value: 'none'"),
    ("script_of_another_mind", ENDLESS, "rank 1 was given --seq-len 9 and not 8, --seed 1 and not 42 as rank 0"),
    ("script_out_of_memory", ENDLESS, "error: rank 1: out of memory with --batch-size 8"),
])  # fmt: skip
def test_an_error_ends_all_and_is_told_once(start, tmp_path, function, arguments, message):
    exit_code, out = finish(start(function, tmp_path, *arguments, "--output-dir", tmp_path / "results"))
    (line,) = error_lines(out)
    assert message in line and exit_code != 0 and not (tmp_path / "results").exists()
    assert ("\nstep " in out) is ("memory" in message)


# --- the parts, without processes


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("data", ["random", "markov"])
def test_batches_of_several_processes_are_one_batch(data, size):
    config = dataclasses.replace(CONFIG, batch_size=2, data=data)
    alone = llama.batches(dataclasses.replace(config, batch_size=2 * size))
    ranks = [distributed.own_rows(config, World(rank, size)) for rank in range(size)]
    for _ in range(3):
        for whole, parts in zip(next(alone), zip(*map(next, ranks), strict=True), strict=True):
            assert torch.equal(whole, torch.cat(parts))


def make_optimizers(size, config=TINY, low_precision=False):
    torch.manual_seed(0)
    models = [llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"]) for _ in range(size)]
    return [ShardedAdamW(m, 1e-3, low_precision, world=World(r, size)) for r, m in enumerate(models)]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("low_precision", [False, True])
def test_slices_of_all_processes_are_the_buckets(size, low_precision):
    optimizers = make_optimizers(size, dataclasses.replace(TINY, num_layers=5), low_precision)
    blocks = torch.cat([optimizer.own_blocks for optimizer in optimizers])
    assert sorted(blocks.tolist()) == list(range(len(optimizers[0].param) // llama.ADAMW_BLOCK))
    for rank, optimizer in enumerate(optimizers):
        optimizer.param.copy_(torch.arange(len(optimizer.param)))  # numbers that tell one place from another
        own = optimizer.param.view(-1, llama.ADAMW_BLOCK)[optimizer.own_blocks].flatten()
        assert torch.equal(torch.cat([bucket.own_weights for bucket in optimizer.buckets]), own)
        for bucket in optimizer.buckets:
            length = len(bucket.own_weights)
            assert length * size == len(bucket.all_weights) and length % llama.ADAMW_BLOCK == 0
            assert bucket.own_weights.data_ptr() == bucket.all_weights[rank * length :].data_ptr()
            assert bucket.own_grads.data_ptr() == bucket.all_grads[rank * length :].data_ptr()
            low, high = bucket.all_grads.data_ptr(), bucket.all_grads.data_ptr() + bucket.all_grads.nbytes
            assert all(low <= p.main_grad.data_ptr() < high for p in bucket.parameters)
        if low_precision:
            optimizer.remainder.fill_(1)
            optimizer.parameters[5].detach().fill_(1.0)
            optimizer.follow_model()  # the lower halves of a weight that others write, and of no other, become 0
            kept = optimizer.remainder.view(-1, llama.ADAMW_BLOCK)[:, 0]
            assert kept.tolist() == [optimizer.owners[block] != 5 for block in optimizer.own_blocks]
            remainders = torch.cat([bucket.remainder for bucket in optimizer.buckets])
            assert torch.equal(remainders, optimizer.remainder)
        for state in (optimizer.exp_avg, optimizer.exp_avg_sq, *[optimizer.remainder] * low_precision):
            assert len(state) * size == len(optimizer.param)


def test_buckets_double_until_they_are_large(monkeypatch):
    def layers_of_buckets(num_layers):
        model = llama.TinyLlamaTriton(dataclasses.replace(TINY, num_layers=num_layers), llama.OPERATIONS["torch"])
        buckets = distributed.make_buckets(model)
        order = [p for bucket in buckets for p in bucket.parameters]
        assert all(p is q for p, q in zip(order, model.parameters(), strict=True))
        assert [layer for bucket in buckets for layer in bucket.layers] == list(model.layers)
        for bucket in buckets:
            assert {p for layer in bucket.layers for p in layer.parameters()} <= set(bucket.parameters)
        return [sum(p.dim() == 2 for p in bucket.parameters) // 4 for bucket in buckets]

    assert layers_of_buckets(1) == [1]
    assert layers_of_buckets(8) == [1, 1, 2, 4]
    one_layer = sum(p.numel() for p in llama.TransformerBlock(TINY).parameters())
    monkeypatch.setattr(distributed, "BUCKET_ELEMENTS", 2 * one_layer)
    assert layers_of_buckets(8) == [1, 1, 2, 2, 2]
    monkeypatch.setattr(distributed, "BUCKET_ELEMENTS", one_layer // 2)
    assert layers_of_buckets(4) == [1, 1, 1, 1]


def test_without_hooks_all_weights_are_there_before_the_forward_pass(monkeypatch):
    """As with --compile."""
    monkeypatch.setattr(distributed, "all_gather", lambda *args, **kwargs: Mock())
    for overlaps, under_way in ((False, []), (True, [1])):
        optimizer = make_optimizers(2, dataclasses.replace(TINY, num_layers=8))[0]
        if overlaps:
            optimizer.overlap([bucket.layers[0] for bucket in optimizer.buckets])
        optimizer.begin_forward()
        assert [number for number, bucket in enumerate(optimizer.buckets) if bucket.gathering] == under_way
        optimizer.weights()
        assert not any(bucket.gathering for bucket in optimizer.buckets)


def test_waiting_counts_from_the_first_measured_step(monkeypatch):
    step = Step.__new__(Step)
    monkeypatch.setattr(step, "world", World(), raising=False)
    step.world.waited_ms, step.config, step.initial_weights, step.optimizer = 5.0, CONFIG, [], Mock()
    step.restart()
    assert step.world.waited_ms == 0


def test_the_slowest_process_is_told_from_the_fastest(monkeypatch):
    """By its own time, without what it waited for messages."""
    step, summary = Step.__new__(Step), dict(batch_ms={"p50": 9.0}, tokens_per_second=3.0, peak_memory_mib=1.0, steps=2)
    world = World(1, 3)
    others = [dict(rank=r, own_ms=ms, exposed_communication_ms=9 - ms) for r, ms in ((0, 5.0), (2, 4.0))]
    world.gather = lambda own: [others[0] | dict(tokens_per_second=2.0, peak_memory_mib=7.0), own,
                                others[1] | dict(tokens_per_second=4.0, peak_memory_mib=None)]  # fmt: skip
    monkeypatch.setattr(step, "world", world, raising=False)
    told = step.summarize_processes(summary | {"kernels": {"exposed_communication_ms": 2.0}})
    assert told["slowest"] == {"rank": 1, "behind_ms": 3.0} and told["exposed_communication_ms"] == 5.0
    assert (told["tokens_per_second"], told["peak_memory_mib"]) == (6.0, 7.0)


def test_only_rank_0_prints_on_the_nodes_of_a_job(monkeypatch):
    node = dict(RANK="1", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    for name, value in node.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert (distributed.launched().rank, sys.stdout.name) == (1, os.devnull)


@pytest.mark.parametrize("error, exit_code", [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_an_interruption_and_a_closed_pipe_have_exit_codes(monkeypatch, capsys, error, exit_code):
    monkeypatch.setattr(distributed, "launched", lambda: World(1, 2))
    monkeypatch.setattr(distributed, "exit_now", sys.exit)
    with pytest.raises(SystemExit) as end:
        distributed.run_together(Mock(side_effect=error), "program")
    assert end.value.code == exit_code and capsys.readouterr() == ("", "")


def test_an_error_is_told_where_no_store_says_that_another_was(monkeypatch, capsys):
    world, job = World(1, 2), Mock(side_effect=llama.UsageError("the disk is full"))
    world.store, world.find_store = Mock(add=Mock(side_effect=RuntimeError)), Mock()
    monkeypatch.setattr(distributed, "launched", lambda: world)
    monkeypatch.setattr(distributed, "exit_now", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        distributed.run_together(job, "program")
    assert capsys.readouterr().err == "program: error: rank 1: the disk is full\n"


def test_a_second_backward_pass_is_refused(monkeypatch):
    monkeypatch.setattr(distributed, "reduce_scatter", lambda *args, **kwargs: None)
    optimizer = make_optimizers(2)[0]
    optimizer.reduce_gradients(optimizer.buckets[0])
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) before"):
        optimizer.reduce_gradients(optimizer.buckets[0])
    optimizer.zero_grad()
    optimizer.reduce_gradients(optimizer.buckets[0])


@pytest.mark.parametrize("flags, words", [
    (dict(impl="triton", shard="full"), "--shard full is for --impl torch and sdpa"),
    (dict(impl="sdpa", shard="optimizer"), "--shard optimizer is for --impl triton"),
    (dict(impl="sdpa", graph=True), "--graph with several processes is for --impl triton"),
])  # fmt: skip
def test_what_several_processes_cannot_do(monkeypatch, flags, words):
    world, gpu = World(0, 2), llama.Device("cuda", "a GPU", "sm_90", 132, 32)
    for name, answer in dict(select_device=gpu, join=None, require_same=None).items():
        monkeypatch.setattr(world, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(Step, "world", world)
    monkeypatch.setattr(llama, "triton_obstacle", lambda *args: None)
    monkeypatch.setattr(llama, "INTERPRETED", False)
    with pytest.raises(llama.UsageError, match=words):
        Step.select_device(dataclasses.replace(TINY, warmup_steps=1, **flags))


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(llama.UsageError, match="there are 2 GPUs here, and this is process 3 of this node"):
        World(2, 3, local_rank=2).select_device("auto")


@pytest.mark.parametrize("environment, words", [
    (dict(WORLD_SIZE="2"), "WORLD_SIZE=2 in the environment without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: "),
    (dict(WORLD_SIZE="x", RANK="0"), "WORLD_SIZE=x in the environment is no number: "),
    (dict(WORLD_SIZE="", RANK="0"), "WORLD_SIZE= in the environment is no number: "),
    (dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="-1"), "LOCAL_RANK=-1 in the environment is no number: "),
    (dict(WORLD_SIZE="2", RANK="2"), "RANK=2 in the environment is not below WORLD_SIZE=2: "),
    (dict(WORLD_SIZE="0"), "RANK=0 in the environment is not below WORLD_SIZE=0: "),
    (dict(WORLD_SIZE="10000000000"), "WORLD_SIZE=10000000000 in the environment is too large: "),
    (dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="x"), "do not find each"),
])  # fmt: skip
def test_a_half_set_environment_of_torchrun(monkeypatch, capsys, environment, words):
    for name in distributed.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert llama.main([]) == 2
    error = capsys.readouterr().err
    assert words in error and "start the processes with torchrun, or unset it" in error and error.count("\n") == 1


def test_a_gpu_that_waits_for_a_lost_process(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(distributed, "time", clock)
    world = World(0, 2)
    world.timeout = 20
    world.wait_for(SimpleNamespace(query=lambda: now[0] > 15))  # late, but it comes
    with pytest.raises(llama.UsageError, match="waited 20 s for another process"):
        world.wait_for(SimpleNamespace(query=lambda: False))
    start = world.stop_requested = now[0]
    with pytest.raises(llama.UsageError):
        world.wait_for(SimpleNamespace(query=lambda: False))
    assert now[0] - start <= distributed.STOP_SECONDS + 2


@pytest.mark.parametrize("obstacle", [None, "operation not permitted when stream is capturing"])
def test_what_is_not_captured_is_not_called_so(monkeypatch, capsys, obstacle):
    """One process that cannot capture messages keeps all eager; the JSON file has what ran."""

    def capture(*args, **kwargs):
        if obstacle:
            raise RuntimeError(f"{obstacle}\nmore")
        return contextlib.nullcontext()

    captured, step = [], object.__new__(Step)
    step.config, step.world = dataclasses.replace(TINY, warmup_steps=1, graph=True), World(0, 2)
    monkeypatch.setattr(step.world, "gather", lambda value: [None, value])
    monkeypatch.setattr(distributed, "all_gather", lambda *args, **kwargs: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(llama.TrainStep, "capture", lambda step, one_graph: captured.append(one_graph))
    step.capture(True)
    note = f"Note: --graph is left out: messages cannot be captured here ({obstacle})\n"
    assert capsys.readouterr().out == (note if obstacle else "")
    assert step.config.graph is (not obstacle) and captured == ([] if obstacle else [True])
