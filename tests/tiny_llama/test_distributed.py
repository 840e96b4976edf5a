"""Several processes, started by torchrun: they train as one does on the batch of all, and end as one does."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import tiny_llama_v3 as llama
from measure.command_line import NothingRecorded
from tests.core.tiny import TINY
from tests.tiny_llama import distributed_program
from tests.tiny_llama.distributed_program import CONFIG, ON_GPUS, RUNS
from tiny_llama import checkpoint, distributed, fp8
from tiny_llama.distributed import ShardedAdamW, World, summarize_processes
from tiny_llama.launchers import this_process
from tiny_llama.notes import lone_process

SIZES = "--hidden-dim 16 --num-layers 2 --num-heads 2 --num-kv-heads 1 --ffn-dim 24 --vocab-size 11 --seq-len 8".split()
ENDLESS = [*SIZES, "--impl", "torch", "--device", "cpu", "--warmup-steps", "1", "--num-steps", "1000000"]
needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")


def begin(command, function, *arguments, **environment):
    """Start a function of distributed_program.py, whose output ends in one pipe."""
    return subprocess.Popen(
        [*command, distributed_program.__file__, function, *map(str, arguments)],
        env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1") | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def torchrun(python):
    """The command that starts a program in two processes."""
    return [python, "-u", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def by_hand(python, port, rank, *arguments):
    """Start one of two processes of ENDLESS without torchrun."""
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    return begin([python], *arguments, *ENDLESS, **place)


@pytest.fixture(autouse=True)
def several_messages(monkeypatch):
    """Let small models have several buckets."""
    monkeypatch.setattr(distributed, "FEWEST_ELEMENTS", 0)


@pytest.fixture(scope="module")
def start(python):
    return functools.partial(begin, torchrun(python))


def finish(program):
    """(exit code, output)"""
    try:
        out, _ = program.communicate(timeout=600)
    finally:
        program.kill()
    return program.returncode, out


def error_lines(out):
    return [line for line in out.splitlines() if "tiny_llama_v3.py: error:" in line]


# --- the same training


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, start):
    """The folder of what distributed_program.trainings() has written."""
    if torch.cuda.device_count() == 1:
        pytest.skip("there is one GPU")
    folder = tmp_path_factory.mktemp("trainings")
    exit_code, out = finish(start("trainings", folder))
    assert exit_code == 0, out
    return folder


def results_of(folder, name):
    return [torch.load(folder / f"{name} {rank}.pt") for rank in range(2)]


@needs_triton
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one_does_on_the_batch_of_both(trainings, monkeypatch, name):
    """The norms of the gradients tell a sum from a mean, to which AdamW is blind."""
    monkeypatch.setattr(llama, "INTERPRETED", True)
    config = dataclasses.replace(CONFIG, **RUNS[name])
    config = dataclasses.replace(config, batch_size=2 * config.batch_size)
    with distributed_program.operations_of(name):
        alone = distributed_program.train(config, frozen=name == "frozen")
    both = results_of(trainings, name)
    tolerance = 2e-2 if name == "bf16" else 1e-3 if ON_GPUS else 1e-5
    for results in both:
        assert results["losses"] == pytest.approx(alone["losses"], rel=tolerance)
        assert results["norms"][-1] == pytest.approx(alone["norms"][-1], rel=min(100 * tolerance, 0.2))
        for weight, expected in zip(results["weights"], alone["weights"], strict=True):
            assert (weight - expected).norm() <= 10 * tolerance * expected.norm()
    assert both[0]["losses"] == both[1]["losses"]
    assert all(map(torch.equal, both[0]["weights"], both[1]["weights"]))


@needs_triton
def test_two_runs_give_the_same_bits_and_divide_the_state(trainings):
    first, second = (results_of(trainings, name)[0] for name in ("sharded", "one window"))
    assert first["losses"] == second["losses"]
    assert all(map(torch.equal, first["weights"], second["weights"]))
    sizes = [weight.numel() for weight in first["weights"]]
    padding = llama.ADAMW_BLOCK * (len(sizes) + 2 * CONFIG.num_layers)
    assert sum(sizes) / 2 <= first["state"] <= (sum(sizes) + padding) / 2


@needs_triton
def test_the_check_finds_what_is_wrong_on_one_rank_and_between_ranks(trainings):
    first, second = (json.loads((trainings / f"outcomes {rank}.json").read_text()) for rank in range(2))
    passed = dict.fromkeys(("nothing", "nothing, sharded", "weights come back"), True)
    assert first == second == passed | {"an operation on rank 1": False, "the reduction": False}


# --- a whole run


def test_a_run_of_two_processes(start, tmp_path):
    """One process prints and writes, and what it writes has the figures of all."""
    arguments = [*SIZES, "--impl", "sdpa", "--device", "cpu", "--num-steps", "3", "--stage", "7"]
    arguments += ["--output-dir", tmp_path / "results", "--profile", tmp_path / "profile"]
    exit_code, out = finish(start("script", tmp_path, *arguments))
    assert exit_code == 0, out
    assert out.count("Final loss:") == out.count("step    3/3") == 1
    for label in ("Processes: 2 over gloo", "Throughput of all: ", "Peak memory of the f"):
        assert f"\n{label}" in out
    assert "Slowest process: " not in out  # no communication is measured on a CPU
    assert "on each of 2 processes, 3 steps" in out and "Mistakes brought back: --no-warmup" in out
    profiles = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("profile/*/*"))
    assert profiles == [f"profile/rank_{rank}/{name}" for rank in "01" for name in ("kernel_stats.csv", "trace.json")]
    (path,) = (tmp_path / "results").iterdir()
    result = json.loads(path.read_text())
    world = result["summary"]["world"]
    assert (world["size"], world["backend"], len(result["steps"])) == (2, "gloo", 3)
    assert f" tokens/sec, {world['tokens_per_second'] / 2:,.0f} a process\n" in out
    assert [process["rank"] for process in world["processes"]] == [0, 1]


@pytest.mark.parametrize("flags", [
    pytest.param(["--moments", "bf16", "--accumulate", "2"], marks=needs_triton), ["--impl", "sdpa", "--shard", "full"],
], ids=["sharded", "full"])  # fmt: skip
def test_two_processes_save_and_resume_to_the_bit(start, capsys, tmp_path, flags):
    """What they save together is the whole model, with which one process can go on as well."""
    given = [*SIZES, *flags, "--device", "cpu", "--data", "markov", "--clip", "0.5", "--batch-size", "1"]
    given += ["--warmup-steps", "1", "--seq-len", "4", "--output-dir", tmp_path / "results"]

    def losses(*flags):
        exit_code, out = finish(start("script", tmp_path, *flags))
        assert exit_code == 0, out
        return re.findall(r"(step .*? norm [\d.]+)", out)

    expected = losses(*given, "--num-steps", "4", "--save", tmp_path / "whole")
    first = losses(*given, "--num-steps", "2", "--save", tmp_path / "parts")
    rest = losses("--resume", tmp_path / "parts", "--num-steps", "4")
    assert len(expected) == 4 and [line.replace("/2", "/4") for line in first] + rest == expected
    whole, parts = (checkpoint.read_training(tmp_path / name, "--resume")[1] for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    if "--shard" not in flags:
        assert llama.main(["--resume", str(tmp_path / "whole"), "--num-steps", "5"], "tiny_llama_v3.py") == 0
        assert "\nstep    5/5 | loss 2." in capsys.readouterr().out


def test_a_process_alone_has_no_world(run, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    done = run("--shard", "full")
    assert done.out.count("Note: PMI_SIZE=2, but RANK is not set: each process") == 1
    assert "--shard full has no effect on one process" in done.out and "Processes:" not in done.out
    assert done.result["summary"]["world"] is None


@pytest.mark.parametrize("launcher, environment, named", [
    ("srun", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4", "SLURM_STEP_NUM_TASKS=4"),
    ("srun, without the count", "SLURM_PROCID=1 SLURM_NTASKS=4", "SLURM_PROCID=1"),
    ("srun, one task", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1", None),
    ("a batch script", "SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0", None),
    ("salloc", "SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_NNODES=2", None),
    ("a shell", "SLURM_PTY_PORT=7 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 PMI_SIZE=4 PMI_RANK=0", None),
    ("srun in a shell", "SLURM_PTY_PORT=7 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_NUM_TASKS=4"),
    ("mpirun in a shell", "SLURM_PTY_PORT=7 SLURM_PROCID=0 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
     "OMPI_COMM_WORLD_SIZE=2"),
    ("hydra in a shell", "SLURM_PTY_PORT=7 SLURM_PROCID=0 PMI_RANK=0 PMI_SIZE=4 MPI_LOCALNRANKS=4", "PMI_SIZE=4"),
    ("PMIx of a shell", "SLURM_PTY_PORT=7 SLURM_PROCID=0 PMIX_RANK=0", None),
    ("mpirun in a batch script", "SLURM_NTASKS=8 SLURM_PROCID=0 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=8",
     "OMPI_COMM_WORLD_SIZE=8"),
    ("mpirun, whose daemons srun starts", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 OMPI_COMM_WORLD_RANK=1 "
     "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2"),
    ("mpirun, one process", "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0", None),
    ("MVAPICH", "MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_RANK=0", "MV2_COMM_WORLD_SIZE=2"),
    ("hydra", "PMI_SIZE=4 PMI_RANK=0 MPI_LOCALNRANKS=4 MPI_LOCALRANKID=0", "PMI_SIZE=4"),
    ("hydra, of a node alone", "MPI_LOCALNRANKS=4 MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=4"),
    ("hydra, one process a node", "PMI_SIZE=2 PMI_RANK=0 MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0", "PMI_SIZE=2"),
    ("PMIx", "PMIX_RANK=2 PMIX_NAMESPACE=x", "PMIX_RANK=2"),
    ("PALS", "PALS_RANKID=0 PALS_LOCAL_SIZE=4", "PALS_RANKID=0"),
    ("PALS, one process", "PALS_RANKID=0 PALS_LOCAL_SIZE=1 PMI_RANK=0 PMI_SIZE=1", None),
    ("PALS, one process a node", "PALS_RANKID=1 PALS_LOCAL_SIZE=1", "PALS_RANKID=1"),
    ("Flux", "FLUX_JOB_SIZE=4 FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0", "FLUX_JOB_SIZE=4"),
    ("Flux, one task", "FLUX_JOB_SIZE=1 FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0", None),
    ("jsrun", "JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_RANK=0", "JSM_NAMESPACE_SIZE=4"),
    ("torchrun in srun", "RANK=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4", None),
    ("nonsense", "SLURM_STEP_NUM_TASKS= PMI_SIZE=x SLURM_PROCID=-1", None), ("none", "", None),
])  # fmt: skip
def test_processes_that_do_not_know_of_each_other(monkeypatch, launcher, environment, named):
    foreign = re.compile("SLURM|PMI|OMPI_|MV2_|MPI_|PALS_|FLUX_|JSM_|RANK$")
    for name in filter(foreign.match, list(os.environ)):
        monkeypatch.delenv(name)
    for name, value in (part.split("=") for part in environment.split()):
        monkeypatch.setenv(name, value)
    lines = lone_process()
    assert len(lines) == bool(named), launcher
    assert not named or lines[0].startswith(named) and "trains alone" in lines[0]


TERMINAL = "import pty; pty.spawn(['sh', '-c', 'echo $$; exec sleep 60'])"


@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_task_of_srun_has_no_terminal_and_its_shell_has_one(monkeypatch, has_terminal):
    """Both have the number 0, and SLURM_PTY_PORT, which the task inherits."""
    words = [sys.executable, "-c", TERMINAL] if has_terminal else ["sh", "-c", "echo $$; exec sleep 60"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen(words, **pipes) as process:
        numbers = dict(
            SLURM_PTY_PORT=7, SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=4, SLURM_TASK_PID=process.stdout.readline()
        )
        for name, value in numbers.items():
            monkeypatch.setenv(name, str(value).strip())
        told = this_process()
        process.kill()
    assert (told is None) == has_terminal


# --- faults


@pytest.fixture
def endless(tmp_path, python):
    """Starts an endless run and returns when it trains: the program, the processes' numbers, the folder of results."""
    programs, pids = [], []

    def run(*arguments, python=python):
        program = begin(
            torchrun(python), "script", tmp_path, *ENDLESS, "--output-dir", tmp_path / "results", *arguments
        )
        programs.append(program)
        next(line for line in program.stdout if line.startswith("step    4/"))
        pids.extend(int((tmp_path / rank).read_text()) for rank in "01")
        return program, pids, tmp_path / "results"

    yield run
    for program in programs:
        program.kill()
        program.wait()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_stops_ends_all(endless, number):
    """The output ends when all have ended that write to it."""
    program, pids, results = endless("--comm-timeout", "5")
    os.kill(pids[1], number)
    lines = [next(line for line in program.stdout if "error:" in line)]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[1], signal.SIGKILL)  # torchrun would wait for a stopped one, half a minute
    exit_code, out = finish(program)
    (line,) = lines + error_lines(out)
    assert (
        exit_code != 0
        and "rank 0: another process has ended, or does not answer" in line
        and not list(results.glob("*"))
    )


@pytest.mark.parametrize("on_torchrun", [True, False])
def test_ctrl_c_on_torchrun_or_on_one_process_stops_all_at_the_same_step(endless, on_torchrun):
    program, pids, results = endless(**({"python": sys.executable} if on_torchrun else {}))
    os.kill(program.pid if on_torchrun else pids[1], signal.SIGINT)
    _, out = finish(program)
    assert "Final loss: " in out and error_lines(out) == [], out
    (path,) = results.iterdir()
    steps = json.loads(path.read_text())["steps"]
    assert f"\nInterrupted after {len(steps)} of " in out and steps


@pytest.mark.parametrize("function, arguments, message", [
    ("script", ["--num-steps", "none"], "argument --num-steps: invalid int value: 'none'"),
    ("script_of_another_mind", ENDLESS, "rank 1 was given --seq-len 9 and not 8, --seed 1 and not 42 as rank 0"),
    ("script_out_of_memory", ENDLESS, "error: rank 1: out of memory with --batch-size 8"),
])  # fmt: skip
def test_an_error_ends_all_and_is_told_once(start, tmp_path, function, arguments, message):
    exit_code, out = finish(start(function, tmp_path, *arguments, "--output-dir", tmp_path / "results"))
    (line,) = error_lines(out)
    assert message in line and exit_code != 0 and not list((tmp_path / "results").glob("*"))


def test_torchrun_starts_a_run_again_when_a_process_was_lost(python, tmp_path):
    """The second attempt finds the same store, but not the addresses of the first one's processes."""
    arguments = [*SIZES, "--impl", "torch", "--device", "cpu", "--num-steps", "2", "--output-dir", tmp_path / "results"]
    exit_code, out = finish(begin([*torchrun(python), "--max-restarts=1"], "script_lost_once", tmp_path, *arguments))
    assert exit_code == 0 and out.count("Final loss: ") == 1, out
    (path,) = (tmp_path / "results").iterdir()
    assert len(json.loads(path.read_text())["steps"]) == 2


def test_each_attempt_of_torchrun_tells_why_it_failed(python, tmp_path):
    program = begin([*torchrun(python), "--max-restarts=1"], "script_out_of_memory", tmp_path, *ENDLESS)
    exit_code, out = finish(program)
    lines = error_lines(out)
    assert exit_code != 0 and len(lines) == 2, out
    assert all("error: rank 1: out of memory with --batch-size 8" in line for line in lines)


@pytest.mark.parametrize(
    "function, told", [("script", ["(no answer): start them with torchrun"]), ("script_stopped", [])]
)
def test_another_program_listens_on_the_port(python, tmp_path, function, told):
    """It accepts and never answers. PyTorch's handshake would wait for ever, deaf to signals."""
    with socket.create_server(("localhost", 0)) as silent:
        program = by_hand(python, silent.getsockname()[1], "1", function, tmp_path, "--comm-timeout", "1")
        exit_code, out = finish(program)
    assert exit_code != 0 and out.count("\n") == len(told) and all(words in out for words in told)


def test_processes_started_by_hand_complain_once(python, tmp_path):
    """And PyTorch does not at all, though the store of rank 0 ends with it."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    programs = [by_hand(python, port, rank, "script_of_another_mind", tmp_path) for rank in "01"]
    out = "".join(out for _, out in map(finish, programs))
    assert out.count("\n") == 1 and "rank 1 was given --seq-len 9" in out


# --- the parts, without processes


def make_optimizers(size, num_layers, **options):
    model = llama.TinyLlamaTriton(dataclasses.replace(TINY, num_layers=num_layers), llama.OPERATIONS["torch"])
    optimizers = [ShardedAdamW(1e-3, world=World(rank, size), **options) for rank in range(size)]
    for optimizer in optimizers:
        optimizer.own(copy.deepcopy(model))
    return optimizers


@pytest.mark.parametrize("size", [2, 3, 8])
def test_slices_of_all_processes_are_the_buckets(size):
    optimizers = make_optimizers(size, 5)
    blocks = torch.cat([optimizer.own_blocks for optimizer in optimizers])
    assert sorted(blocks.tolist()) == list(range(len(optimizers[0].param) // llama.ADAMW_BLOCK))
    for rank, optimizer in enumerate(optimizers):
        assert len(optimizer.exp_avg) * size == len(optimizer.param)
        for bucket in optimizer.buckets:
            length = len(bucket.own_weights)
            assert length * size == len(bucket.all_weights) and length % llama.ADAMW_BLOCK == 0
            assert bucket.own_grads.data_ptr() == bucket.all_grads[rank * length :].data_ptr()


ONE_LAYER = llama.count_weights(llama.TransformerBlock(TINY, llama.OPERATIONS["torch"]).parameters())


@pytest.mark.parametrize("num_layers, fewest, most, layers", [
    (1, 1, 99, [1]), (12, 1, 99, [1, 2, 6, 3]), (8, 2.5, 99, [3, 5]), (2, 9, 99, [2]), (9, 1, 3, [1, 2, 3, 3]),
    (4, 0.5, 0.5, [1, 1, 1, 1]),
])  # fmt: skip
def test_buckets_triple_until_they_are_large(monkeypatch, num_layers, fewest, most, layers):
    monkeypatch.setattr(distributed, "FEWEST_ELEMENTS", fewest * ONE_LAYER)
    monkeypatch.setattr(distributed, "MOST_ELEMENTS", most * ONE_LAYER)
    model = llama.TinyLlamaTriton(dataclasses.replace(TINY, num_layers=num_layers), llama.OPERATIONS["torch"])
    buckets = distributed.make_buckets(model)
    assert [len(bucket.layers) for bucket in buckets] == layers
    assert list(map(id, model.parameters())) == [id(p) for bucket in buckets for p in bucket.parameters]


@pytest.mark.parametrize("local, constant, hip, copies", [
    ("4", "NCCL_CTA_POLICY_ZERO", None, True), ("2", "NCCL_CTA_POLICY_ZERO", None, False),
    ("4", "NCCL_CTA_POLICY_EFFICIENCY", None, False), ("4", "NCCL_CTA_POLICY_ZERO", "7.0", False),
])  # fmt: skip
def test_copy_engines_gather_weights_where_nccl_can(monkeypatch, local, constant, hip, copies):
    """On one host, from NCCL 2.28 on, and not on ROCm. The buffer of the weights is then registered."""
    config, registered = SimpleNamespace(cta_policy=None), []
    options = SimpleNamespace(Options=lambda **given: SimpleNamespace(config=config), **{constant: 2})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(distributed.dist, "ProcessGroupNCCL", options, raising=False)
    for name in "init_process_group", "new_group":
        monkeypatch.setattr(distributed.dist, name, Mock())
    backend = Mock(register_mem_pool=lambda pool, symm: registered.append(pool) if symm else None)
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: backend))
    monkeypatch.setattr(distributed.dist, "group", group)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: allocator)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", contextlib.nullcontext)
    world = World(0, 4)
    world.join(torch.device("cuda"), timeout=9)
    assert (world.has_copies, config.cta_policy) == (copies, 2 if copies else None)
    optimizer = ShardedAdamW(1e-3, world=world)
    weights = optimizer.make_weights(8, device=torch.device("cpu"))
    assert weights.tolist() == [0] * 8 and registered == [backend.mem_allocator] * copies


@pytest.mark.parametrize("overlaps, under_way", [(False, []), (True, [1])])
def test_without_hooks_all_weights_are_there_before_the_forward_pass(monkeypatch, overlaps, under_way):
    """As with --compile."""
    monkeypatch.setattr(distributed, "all_gather", lambda *args, **kwargs: Mock())
    optimizer, *_ = make_optimizers(2, 8, overlaps=overlaps)
    optimizer.begin_forward()
    assert [number for number, bucket in enumerate(optimizer.buckets) if bucket.gathering] == under_way


def test_no_gathering_of_weights_is_on_the_default_stream(monkeypatch):
    """Which copy engines refuse. Asynchronous messages have a stream of their own."""
    gathered, waited = [], Mock()

    def gather(everything, own, async_op=False):
        gathered.append((len(everything), async_op))
        return SimpleNamespace(wait=lambda: waited(len(everything)))

    monkeypatch.setattr(distributed, "all_gather", gather)
    optimizer, _ = make_optimizers(2, 8)
    weights = optimizer.weights()
    assert gathered == [(len(bucket.all_weights), True) for bucket in optimizer.buckets]
    assert [call.args for call in waited.call_args_list] == [(length,) for length, _ in gathered]
    assert len(weights) == len(optimizer.parameters) and not any(bucket.gathering for bucket in optimizer.buckets)


def compiled_by(size, monkeypatch):
    """Return what a step of one of so many processes compiles: {(kernel, constants, types of numbers and tensors)}."""
    found = set()

    def launch(kernel, grid, tensors, scalars, constants, **options):
        numbers = [(n, type(n)) for n in scalars]
        found.add((kernel.fn.__name__, *map(str, (constants, numbers, [t.dtype for t in tensors], options))))

    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(distributed, name, lambda *args, **kwargs: Mock())
    monkeypatch.setattr(llama, "launch_by_triton", launch)
    monkeypatch.setattr(llama, "COMPILED", {})
    monkeypatch.setattr(llama, "INTERPRETED", True)
    config = dataclasses.replace(CONFIG, batch_size=1, seq_len=16, num_layers=2)
    world = World(0, size) if size > 1 else llama.OneProcess()
    step = llama.TrainStep(config, torch.device("cpu"), world)
    step.load(*next(llama.batches(config)))
    step.run()
    return found


@needs_triton
def test_processes_of_one_node_compile_what_those_of_several_do(monkeypatch):
    """job.slurm has them fill the cache. A process alone computes in other groups of layers."""
    alone, *together = (compiled_by(size, monkeypatch) for size in (1, 2, 6))
    assert together[0] == together[1] and len(together[0]) > 10
    assert {name for name, *_ in alone - together[0]}


def test_a_second_backward_pass_is_refused(monkeypatch):
    monkeypatch.setattr(distributed, "reduce_scatter", lambda *args, **kwargs: None)
    optimizer, *_ = make_optimizers(2, 1)
    bucket, *_ = optimizer.buckets
    optimizer.reduce_gradients(bucket)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
        optimizer.reduce_gradients(bucket)
    optimizer.zero_grad()
    optimizer.reduce_gradients(bucket)


def test_a_check_of_all_processes_keeps_what_fp8_adds_to_that_of_one(monkeypatch, capsys):
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(World, "parallelize", lambda world, step: step.model)
    config = dataclasses.replace(CONFIG, impl="torch", fp8=True, seq_len=16)
    assert World().check(config, torch.device("cpu"))
    monkeypatch.setattr(fp8, "relative_bias", lambda multiply, device: 0.03)
    assert not World().check(config, torch.device("cpu"))
    assert f"    {fp8.BIAS}: error 3.0e-02" in capsys.readouterr().out


def test_the_slowest_process_is_told_from_the_fastest():
    """By its own time, without what it waited for messages: 5, 9 - 2 and 4 ms."""
    world, energy = World(1, 3), {"step_j": 6.0, "token_j": 0.1, "seconds": 2.0}
    summary = dict(batch_ms={"p50": 9.0}, tokens_per_second=3.0, peak_memory_mib=1.0, energy=energy)
    first = dict(rank=0, own_ms=5.0, exposed_communication_ms=4.0, tokens_per_second=2.0, peak_memory_mib=7.0)
    last = dict(rank=2, own_ms=4.0, exposed_communication_ms=5.0, tokens_per_second=4.0)
    last |= dict(peak_memory_mib=None, energy=None)
    world.gather = lambda own: [own | first, own, own | last]
    told = summarize_processes(world, summary | {"kernels": {"exposed_communication_ms": 2.0}})
    assert told["slowest"] == {"rank": 1, "behind_ms": 3.0} and told["exposed_communication_ms"] == 5.0
    assert (told["tokens_per_second"], told["peak_memory_mib"]) == (6.0, 7.0)
    assert [process["energy"] for process in told["processes"]] == [energy, energy, None]


@pytest.mark.parametrize("error, exit_code, told", [
    (KeyboardInterrupt(), 130, ""), (BrokenPipeError(), 141, ""),
    (llama.UsageError("no NCCL"), 2, "no NCCL"), (OSError("the disk is full"), 2, "the disk is full"),
    (NothingRecorded("the loss is no number"), 1, "the loss is no number"),
    (RuntimeError("Connection closed by peer\nmore"), 2,
     "another process has ended, or does not answer (Connection closed by peer)"),
])  # fmt: skip
@pytest.mark.parametrize("failures", [1, 2, None])
def test_the_first_process_to_fail_tells_why(monkeypatch, capsys, error, exit_code, told, failures):
    """Also where there is no store any more to say that it is the first."""
    add = Mock(return_value=failures, side_effect=None if failures else RuntimeError)
    assert end_of(monkeypatch, error, SimpleNamespace(add=add)) == exit_code
    assert capsys.readouterr().err == f"program: error: rank 1: {told}\n" * bool(told and failures != 2)


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch, capsys):
    assert end_of(monkeypatch, ZeroDivisionError("a fault")) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def end_of(monkeypatch, error, store=None):
    """The exit code of rank 1 of two after this error."""
    monkeypatch.setattr(distributed, "launched", lambda: World(1, 2, store=store))
    monkeypatch.setattr(World, "find", lambda self, seconds: None)
    monkeypatch.setattr(distributed, "exit_now", sys.exit)
    with pytest.raises(SystemExit) as end:
        distributed.run_together(Mock(side_effect=error), "program")
    return end.value.code


@pytest.mark.parametrize("flags", [
    dict(impl="triton", shard="full"), dict(impl="sdpa", shard="optimizer"), dict(impl="sdpa", graph=True),
])  # fmt: skip
def test_what_several_processes_cannot_do(monkeypatch, flags):
    world = World()
    world.select_device = lambda requested: torch.device("cuda")
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu("cuda", "a GPU", "sm_90", 132, 32))
    monkeypatch.setattr(llama, "triton_obstacle", lambda *args: None)
    monkeypatch.setattr(llama, "INTERPRETED", False)
    with pytest.raises(llama.UsageError, match="--shard|--graph"):
        world.find_device(llama.Config(**flags))


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(llama.UsageError, match="there are 2 GPUs here, and this is process 3 of this node"):
        World(2, 3, local_rank=2).select_device("auto")


@pytest.mark.parametrize("environment, named", [
    ("WORLD_SIZE=2", "'RANK'"), ("WORLD_SIZE=x", "WORLD_SIZE=x "),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0", "MASTER_ADDR expected"), ("WORLD_SIZE=0 RANK=0 LOCAL_RANK=0", "not below"),
    ("WORLD_SIZE=2 RANK=2 LOCAL_RANK=0", "RANK is not below"), ("WORLD_SIZE=2 RANK=-1 LOCAL_RANK=0", "not below"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=0", "1/2 clients joined"),
])  # fmt: skip
def test_processes_that_do_not_find_each_other(monkeypatch, capsys, environment, named):
    """They were started by hand, without all that torchrun sets, or one of them is missing."""
    monkeypatch.setattr(distributed, "exit_now", sys.exit)
    given = dict(part.split("=") for part in environment.split())
    for name in distributed.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="^2$"):
        sys.exit(llama.main(["--comm-timeout", "1"]))
    error = capsys.readouterr().err
    assert named in error and "torchrun" in error and error.count("\n") == 1
