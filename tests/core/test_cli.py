"""The command line: what a run prints and leaves behind, and what it says when it cannot do what was asked."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.test_model import IMPLEMENTATIONS
from tiny_llama import hardware, profiler

SCRIPT = Path(llama.__file__).resolve()

TINY = (
    "--hidden-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --ffn-dim 48 --vocab-size 37 --batch-size 2 "
    "--seq-len 17 --num-steps 3 --warmup-steps 1 --impl torch --device cpu"
).split()
TINIER = (  # a quarter of the time in Triton's interpreter
    "--hidden-dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --ffn-dim 16 --vocab-size 11 --batch-size 1 "
    "--seq-len 5"
).split()
LABELS = r"""
Final loss: [\d.]+ \(first
Average training speed: [\d.]+ samples/sec$
Throughput: [\d,]+ tokens/sec$
Average batch time: [\d.]+ ms \(p20 [\d.]+, p50 [\d.]+, p80 [\d.]+\)$
Average forward time: [\d.]+ ms$
Average backward time: [\d.]+ ms$
Average optimizer time: [\d.]+ ms$
Peak memory usage: [\d.]+ MiB
Parameters with a gradient: [\d,]+ of [\d,]+ \([\d.]+ %\)$
Model arithmetic: [\d.]+ TFLOP/s
Compilation and warm-up: [\d.]+ s
Results: .+\.json$
"""


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    """Runs start in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def cli(capsys):
    """Runs the tiny model; later flags win."""

    def run(*flags):
        capsys.readouterr()
        code = llama.main([*TINY, *map(str, flags)], "tiny_llama_v3.py")
        out, err = capsys.readouterr()
        path = re.search(r"^Results: (.*)$", out, re.M)
        losses = [float(loss) for loss in re.findall(r"^step .*? loss ([\d.]+)", out, re.M)]
        result = strict_json(path[1]) if path else None
        return SimpleNamespace(code=code, out=out, err=err, losses=losses, result=result)

    return run


@pytest.fixture
def after_call(monkeypatch):
    """after_call(number, name, act): act(step) follows that call of a method of TrainStep, warm-up included."""

    def arm(number, name, act):
        calls, method = itertools.count(1), getattr(llama.TrainStep, name)

        def replacement(step):
            method(step)
            if next(calls) == number:
                act(step)

        monkeypatch.setattr(llama.TrainStep, name, replacement)

    return arm


def strict_json(path):
    """A file's content; NaN and Infinity are no JSON."""
    return json.loads(Path(path).read_text(), parse_constant=pytest.fail)


def printed(out, label):
    (value,) = re.findall(rf"^{label}: ([\d.,]+)", out, re.M)
    return float(value.replace(",", ""))


def files(folder):
    """The names of all that is below a folder but folders."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


# --- a run


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_run_prints_and_writes_the_same(cli, tmp_path, device, impl):
    run = cli("--impl", impl, "--device", device, "--data", "markov", "--seed", 5, "--num-layers", 1)
    assert run.code == 0 and run.err == ""
    for line in LABELS.strip().splitlines():
        assert len(re.findall(f"^{line}", run.out, re.M)) == 1, line
    assert run.out.count("warm-up 1/1") == 1 and len(run.losses) == 3
    assert f"Implementation: {impl}\n" in run.out
    (path,) = (tmp_path / "triton_profiles").iterdir()
    assert re.fullmatch(rf"tiny_llama_v3_{impl}_\d{{8}}_\d{{6}}\.json", path.name)

    # What was asked for, and where it ran.
    result, summary = run.result, run.result["summary"]
    config = llama.Config(**result["config"])
    assert dataclasses.asdict(config) == result["config"]
    asked = dict(impl=impl, device=device, data="markov", seed=5, num_steps=3, batch_size=2, seq_len=17, ffn_dim=48)
    assert asked.items() <= result["config"].items()
    assert result["environment"]["torch"] == torch.__version__
    facts = "device arch python torch triton cuda hip driver numpy tiles commit"
    assert set(result["environment"]) == set(facts.split())
    for name, operation in result["operations"].items():
        assert re.search(rf"^ +{name} +{re.escape(operation)}$", run.out, re.M)

    # The steps, and the figures that follow from them; the mean of each phase is printed.
    steps = result["steps"]
    assert [round(step["loss"], 4) for step in steps] == run.losses
    assert all(step["host_ms"] > 0 for step in steps)
    assert re.findall(r"norm ([\d.]+) \| ([\d.]+) ms \| ([\d,]+) tok/s$", run.out, re.M) == [
        (f"{step['grad_norm']:.3f}", f"{step['batch_ms']:.2f}", f"{34e3 / step['batch_ms']:,.0f}") for step in steps
    ]
    batch = [step["batch_ms"] for step in steps]
    assert batch == pytest.approx([sum(step["phase_ms"].values()) for step in steps])
    phases = {name: statistics.fmean(step["phase_ms"][name] for step in steps) for name in summary["phase_ms"]}
    assert summary["phase_ms"] == pytest.approx(phases)
    mean, (p20, p50, p80) = statistics.fmean(batch), numpy.percentile(batch, [20, 50, 80])
    assert summary["batch_ms"] == pytest.approx(dict(mean=mean, p20=p20, p50=p50, p80=p80))
    expected = dict(
        first_loss=steps[0]["loss"],
        final_loss=steps[-1]["loss"],
        entropy=1.75 * math.log(2),
        host_ms=statistics.median(step["host_ms"] for step in steps),
        tflops_per_second=hardware.model_tflops(config) / (p50 / 1e3),
        samples_per_second=2e3 / mean,
        tokens_per_second=2 * 17e3 / mean,
        parameters_with_gradient=summary["parameters"],
    )
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    for label, value, rounding in [
        ("Average training speed", summary["samples_per_second"], 0.051),
        ("Throughput", summary["tokens_per_second"], 0.51),
        ("Average batch time", mean, 0.00051),
        *((f"Average {name} time", phases[name], 0.00051) for name in ("forward", "backward", "optimizer")),
        ("Final loss", run.losses[-1], 0),
        ("Peak memory usage", summary["peak_memory_mib"], 0.051),
        ("Parameters with a gradient", summary["parameters"], 0),
    ]:
        assert printed(run.out, label) == pytest.approx(value, abs=rounding), label


def test_timing_of_whole_steps(cli):
    run, phases = cli("--timing", "step"), cli("--timing", "phases")
    assert run.out.count("not measured (--timing step)") == 3
    steps = run.result["steps"]
    assert [step["phase_ms"] for step in steps] == [{}] * 3
    assert run.losses == phases.losses and len(run.losses) == 3
    last_norm = phases.result["steps"][-1]["grad_norm"]
    assert [step["grad_norm"] for step in steps] == [None, None, last_norm]
    for each in (run, phases):
        assert each.result["summary"]["diverged"] is None and "diverged" not in each.out
        assert re.search(rf"^Final loss: .*floor {math.log(37):.4f}, ln\(vocab\)", each.out, re.M)


def test_profile(cli, tmp_path):
    folder = tmp_path / "a" / "profile"
    assert cli("--profile", folder).code == 0
    assert files(folder) == ["kernel_stats.csv", "trace.json"]
    names = [event.get("name") for event in strict_json(folder / "trace.json")["traceEvents"]]
    assert [names.count(name) for name in ("step", "forward", "backward", "optimizer")] == [3, 3, 3, 3]

    header, *rows = (folder / "kernel_stats.csv").read_text().splitlines()
    assert header == '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"'
    assert len(rows) > 5  # whose figures test_profiler.py has by hand


def test_one_seed_one_result(cli):
    losses = cli().losses
    assert len(set(losses)) == 3 and losses == cli().losses
    largest = cli("--seed", 2**32 - 1)  # whose warm-up takes other data, of no larger seed
    assert largest.code == 0 and losses != largest.losses
    torch.use_deterministic_algorithms(False)
    assert losses == cli("--deterministic").losses
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_warm_up_leaves_no_trace(cli, impl):
    """Neither in the weights nor in the optimizer."""

    def run(*flags):
        steps = cli(*TINIER, "--impl", impl, "--learning-rate", 0.01, "--num-steps", 2, *flags).result["steps"]
        return [(step["loss"], step["grad_norm"]) for step in steps]

    assert run("--warmup-steps", 2) == run("--warmup-steps", 0)


def test_the_result_has_the_configuration_of_the_run(cli):
    """Not that of the check, whose batch is smaller."""
    run = cli("--check", "--batch-size", llama.CHECK_BATCH + 1, "--num-steps", 1)
    assert run.result["config"]["batch_size"] == llama.CHECK_BATCH + 1


@pytest.mark.parametrize("platform, unit", [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_is_in_mib(monkeypatch, platform, unit):
    """The system tells KiB, and a Mac's tells bytes, as PyTorch does of a GPU."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", platform)
    usage = {resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=int(5.5 * 2**20) // unit)}
    monkeypatch.setattr(resource, "getrusage", usage.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(2.25 * 2**20))
    assert [llama.peak_memory_mib(torch.device(kind)) for kind in ("cpu", "cuda")] == [5.5, 2.25]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_is_that_of_this_process():
    """Roughly: the system may count what ran in its place before."""
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert llama.peak_memory_mib(torch.device("cpu")) == pytest.approx(kib / 1024, rel=0.5)


# --- files: each is whole or not there, and none is overwritten


def test_results_written_at_once_all_arrive(tmp_path):
    def save(number):
        return llama.write_new_json(tmp_path, "same_second", {"number": number})

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(save, range(50)))
    assert [json.loads(path.read_text())["number"] for path in paths] == list(range(50))
    assert len(files(tmp_path)) == 50  # no temporary file is left


@pytest.mark.parametrize("lines", range(25))
def test_results_are_whole_after_an_interruption(tmp_path, lines):
    left = iter(range(lines))

    def trace(frame, event, argument):
        if event == "line" and next(left, None) is None:
            raise KeyboardInterrupt
        return trace if frame.f_code.co_filename == llama.__file__ else None

    with contextlib.suppress(KeyboardInterrupt):
        sys.settrace(trace)
        llama.write_new_json(tmp_path, "result", {})
    sys.settrace(None)
    assert [strict_json(path) for path in tmp_path.glob("*.json")] in ([], [{}])


@contextlib.contextmanager
def files_of_at_most(size):
    """Let no file grow beyond a size: another error than on a full disk, on the same way."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_found_before_the_run(cli):
    with files_of_at_most(0):
        run = cli()
    assert_refused(run, "--output-dir triton_profiles cannot be written to (File too large): give another folder")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_disk_that_fills_during_the_run(cli, tmp_path, monkeypatch, elsewhere):
    """The result is kept where temporary files are, and if that is full as well, its figures have been printed."""
    monkeypatch.setattr(hardware, "environment", lambda device: {})  # git would die and leave a lock on the repository
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    write, full = llama.write_new_json, "triton_profiles cannot be written to (File too large)"

    def write_in_full(folder, *arguments):
        with files_of_at_most(1000) if str(folder) == "triton_profiles" else contextlib.nullcontext():
            return write(folder, *arguments)

    if elsewhere:
        monkeypatch.setattr(llama, "write_new_json", write_in_full)
        run = cli()
        (path,) = (tmp_path / "tmp").iterdir()
        assert run.err.endswith(f"{full}: free space or give another; the result of this run is {path}\n")
        assert len(strict_json(path)["steps"]) == 3
    else:
        with files_of_at_most(1000):
            run = cli()
        assert run.err.endswith(f" error: {full}: free space or give another\n")
    assert run.code == 2 and run.result is None and "Average batch time" in run.out
    assert not files(tmp_path / "triton_profiles")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
@pytest.mark.parametrize("flag", ["--output-dir", "--profile"])
def test_a_folder_that_cannot_be_made_where_access_is_granted(cli, flag):
    """As with a quota, or a network's file system that maps root."""
    run = cli(flag, "/proc/nothing")
    assert_refused(run, f"{flag} /proc/nothing cannot be written to", "give another folder")


@pytest.mark.parametrize("error, code", [(OSError(errno.ENOSPC, "No space left"), 2), (KeyboardInterrupt(), 130)])
def test_a_profile_that_cannot_be_written(cli, monkeypatch, error, code):
    monkeypatch.setattr("tiny_llama.kernel_table.kernel_table", Mock(side_effect=error))
    run = cli("--profile", "profile")
    assert run.code == code and len(run.result["steps"]) == 3
    assert code != 2 or re.fullmatch(r".* error: profile cannot be written to \(No space left\): .*\n", run.err)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_a_current_folder_that_was_deleted(tmp_path):
    """In which PyTorch's libraries end the process without a word about it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'cd {gone} && rmdir {gone} && exec "$@"'
    run = subprocess.run(["sh", "-c", command, "sh", sys.executable, SCRIPT, *TINY], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.endswith(
        "current folder has been deleted: change to one that exists, as with cd\n"
    )


# --- standard streams


def start(tmp_path, *flags, **keywords):
    """The script in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, SCRIPT, *TINY, *flags], cwd=tmp_path, env=environment, **keywords)


A_RUN, STAGES = ["--num-steps", "1000000"], ["--list-stages"]  # which are flushed only at the end


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [pytest.param(A_RUN, marks=pytest.mark.slow), STAGES], ids=["run", "stages"])
def test_full_disk_under_the_output(tmp_path, flags):
    with open("/dev/full", "w") as full, start(tmp_path, *flags, stdout=full, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and re.fullmatch(rb".* error: .*No space left on device\n", err)


@pytest.mark.parametrize("flags", [A_RUN, pytest.param(STAGES, marks=pytest.mark.slow)], ids=["run", "stages"])
def test_reader_of_the_output_leaves(tmp_path, flags):
    """As in `| head -1`."""
    read, write = os.pipe()
    with start(tmp_path, *flags, stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        if flags == A_RUN:
            os.read(read, 1)
        os.close(read)
        try:
            _, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 141 and not err and not files(tmp_path)


def test_companions_are_found_beside_the_script(tmp_path):
    """Also where Python does not look into the script's folder, as under rocprof-compute, which runs it by runpy."""
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}
    by_runpy = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", by_runpy, SCRIPT, "--list-stages"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "stage 8:" in run.stdout, run.stderr


# --- a run that diverges


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("timing, bad, seen", [("phases", 2, 2), ("phases", 3, 3), ("step", 2, 3), ("step", 3, 3)])
def test_run_whose_gradient_is_not_finite(cli, after_call, timing, bad, seen, value):
    """With --timing step, only the last norm is read: the loss of the step after tells."""
    # The warm-up is one step.
    after_call(1 + bad, "backward", lambda step: step.model.norm.weight.grad[0].fill_(float(value)))
    run = cli("--timing", timing, "--profile", "profile")
    assert run.code == 1 and run.err == "" and not files(Path("profile"))
    summary, steps = run.result["summary"], run.result["steps"]
    quantity, value, field = ("gradient norm", value, "grad_norm") if bad == seen else ("loss", "nan", "loss")
    assert summary["diverged"] == {"step": seen, "quantity": quantity, "value": value}
    assert run.out.count(f"\nStep {seen}: the {quantity} is {value}: the run diverged") == 1
    assert len(re.findall(r"^step ", run.out, re.M)) == len(steps) == summary["steps"] == seen
    assert steps[-1][field] is None  # JSON has no NaN
    assert ("Final loss: nan" in run.out) == (quantity == "loss") == (summary["final_loss"] is None)


@pytest.mark.parametrize("bad, printed", [(None, [*range(1, 51), 60, 70, 73]), (57, [*range(1, 51), 57])])
def test_a_long_run_prints_every_tenth_step_and_the_last(cli, after_call, bad, printed):
    if bad:
        after_call(1 + bad, "backward", lambda step: step.model.norm.weight.grad[0].fill_(math.nan))
    run = cli("--num-steps", 73, "--impl", "torch")
    assert [int(number) for number in re.findall(r"^step +(\d+)/73 ", run.out, re.M)] == printed
    assert len(run.result["steps"]) == printed[-1]


# --- requests that cannot be met


def assert_refused(run, *fragments, left=()):
    """With one line, and no file but those that were there."""
    assert run.code == 2 and not run.losses and files(Path()) == [*left]
    assert run.err.count("\n") == 1 and run.err.startswith("tiny_llama_v3.py: error: "), run.err
    for fragment in fragments:
        assert fragment in run.err


# The flags, and parts of the message, which name them and what to do.
REFUSED = """
--hidden-dim 30                                | --hidden-dim 30; --num-heads 4; try --hidden-dim 32
--hidden-dim 35                                | --hidden-dim 35; --num-heads 4; try --hidden-dim 40
--num-heads 6 --hidden-dim 48 --num-kv-heads 4 | --num-heads 6; --num-kv-heads 4; try --num-kv-heads 2
--hidden-dim 36                                | --hidden-dim 36; --num-heads 4; gives 9; even; change
--hidden-dim 520                               | --hidden-dim 520; --num-heads 4; gives 130; at most 128; change
--learning-rate 0     | --learning-rate 0.0 is; 1.1754943508222875e-38 to 3.4028234663852886e+38
--learning-rate -1    | --learning-rate -1.0 is
--learning-rate nan   | --learning-rate nan is
--learning-rate inf   | --learning-rate inf is
--learning-rate 1e39  | --learning-rate 1e+39 is
--learning-rate 1e-50 | --learning-rate 1e-50 is
--rope-theta 0.9      | --rope-theta 0.9 is; give 1.0 to
--norm-eps 0          | --norm-eps 0.0 is
--comm-timeout 0      | --comm-timeout 0 is; give 1 to
--batch-size x        | --batch-size; 'x'; --help
--batch-size 1.5      | --batch-size; '1.5'; --help
--batch-size          | --batch-size; --help
--learning-rate x     | --learning-rate; 'x'; --help
--no-such-flag        | --no-such-flag; --help
--batch 4             | --batch; --help
--stage 9             | --stage; 9; 1, 2
--impl jax            | --impl; jax; triton
--device tpu          | --device tpu; cpu
--device mps          | --device mps; Apple's GPU; give --device cpu
--shard half          | --shard; half; optimizer
--vocab-size 3 --data markov         | --vocab-size 3; --data markov; 4 or more
--graph                              | --graph; GPU; drop
--stage 8                            | --graph; GPU; --stage 8
--batch-size 2147483647 --seq-len 2147483647 | out of memory; --batch-size 2147483647; --seq-len 2147483647; lower one
--vocab-size 2000000000                      | out of memory; --vocab-size 2000000000
--num-layers 2000000000                      | out of memory; --num-layers 2000000000
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_bad_flags(cli, line):
    flags, parts = line.split("|")
    assert_refused(cli(*flags.split()), *parts.strip().split("; "))


NUMBERS = [flag for flag in TINY if flag.startswith("--") and flag not in ("--impl", "--device")]


@pytest.mark.parametrize("flag", [*NUMBERS, "--seed"])
def test_numbers_out_of_range(cli, flag):
    least = {"--vocab-size": 2, "--warmup-steps": 0, "--seed": 0}.get(flag, 1)
    most = 2**32 - 1 if flag == "--seed" else 2**31 - 1
    for value in (least - 1, -3, most + 1, 10**30):
        assert_refused(cli(flag, value), f"{flag} {value} ", f"{least} to {most}")


HIDDEN = 1, 2, 12, 30, 36, 256, 258, 300


@pytest.mark.parametrize("heads", range(1, 8))
def test_sizes_are_taken_if_heads_fit(heads):
    """A head has an even number of dimensions, 128 at most; query heads share key/value heads evenly."""
    for hidden, kv_heads in itertools.product(HIDDEN, (None, *range(1, 8))):
        fits = hidden % (2 * heads) == 0 and hidden <= 128 * heads and heads % (kv_heads or 1) == 0
        with contextlib.nullcontext() if fits else pytest.raises(llama.UsageError):
            config = llama.Config(hidden_dim=hidden, num_heads=heads, num_kv_heads=kv_heads)
            assert (config.head_dim, config.ffn_dim) == (hidden // heads, 4 * hidden)
            assert config.num_kv_heads == (kv_heads or heads // (2 - heads % 2))


@pytest.mark.parametrize("heads", range(2, 8))
def test_sizes_that_are_named_as_a_remedy_are_taken(heads):
    """The next width of which each head has an even share, and the most key/value heads that others share."""
    remedies = {"--hidden-dim": set(), "--num-kv-heads": set()}
    for hidden, kv_heads in itertools.product((*range(1, 40), 256, 300), range(1, 2 * heads)):
        sizes = dict(hidden_dim=hidden, num_heads=heads, num_kv_heads=kv_heads)
        for _ in range(3):
            try:
                llama.Config(**sizes)
                break
            except llama.UsageError as error:
                if not (remedy := re.search(r"try (--[\w-]+) (\d+)$", str(error))):
                    assert sizes["hidden_dim"] == hidden and hidden % heads == 0  # a head is too wide, or odd
                    break
                flag, value = remedy[1], int(remedy[2])
                remedies[flag].add(value)
                sizes[flag[2:].replace("-", "_")] = value
        else:
            pytest.fail(f"still refused: {sizes}")
        if sizes["hidden_dim"] != hidden:
            assert 0 < sizes["hidden_dim"] - hidden < 2 * heads
        assert sizes["num_kv_heads"] in (kv_heads, math.gcd(heads, kv_heads))
    assert all(remedies.values())


LACKING = {  # a GPU, its flags, and what the message has
    "sm_90 --impl triton": "TRITON_INTERPRET=1.*--device cpu",
    "sm_75 --impl sdpa --use-amp": "sm_75 does not have: drop --use-amp",
    "sm_70 --impl torch --use-amp": "sm_70 does not have: drop --use-amp",
    "sm_90 --graph --no-warmup": "--no-warmup forbids that",
    "sm_90 --graph --warmup-steps 0": "--warmup-steps 0 forbids that",
}


@pytest.mark.parametrize("case", [*LACKING, "sm_90 --impl sdpa --use-amp --graph"])
def test_what_a_gpu_cannot_do_is_refused(monkeypatch, case):
    """The interpreter would multiply bf16 matrices wrongly there as well."""
    monkeypatch.setattr(llama, "INTERPRETED", True)
    arch, *flags = case.split()
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu(kind, "a GPU", arch, num_sms=132, warp_size=32))
    refused = pytest.raises(llama.UsageError, match=LACKING[case]) if case in LACKING else contextlib.nullcontext()
    with refused:
        llama.validate_on_device(llama.parse_config(flags, ""), torch.device("cuda"))


def test_cuda_without_a_gpu(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(cli("--device", "cuda"), "--device cuda", "--device cpu")


FOLDERS = ["file", "file/below", "dangling", "dangling/below", "x" * 300, "n/" + "x" * 300, ""]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("flag", ["--output-dir", "--profile"])
def test_folder_that_cannot_be_written_to(cli, tmp_path, flag, name):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    shown = f"{flag} {name} cannot be written to" if name else f"{flag} '' names no folder"
    remedy = "another folder" if name else "give one"
    remedy = f"(Not a directory): give {remedy}" if "file" in name else remedy
    assert_refused(cli(flag, name), shown, remedy, left=["dangling", "file"])


ERRORS = dict(
    GPU=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB"),
    Python=MemoryError(),
    CPU=RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes."),
)


@pytest.mark.parametrize("where", ["__init__", "forward", "backward"])
@pytest.mark.parametrize("error", ERRORS)
def test_out_of_memory(cli, monkeypatch, where, error):
    monkeypatch.setattr(llama.TrainStep, where, Mock(side_effect=ERRORS[error]))
    assert_refused(cli(), "out of memory", "--batch-size 2", "--seq-len 17", "--num-layers 2", "lower one")


@pytest.mark.parametrize("message", [
    "InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')\n\nSet ...",
    "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
], ids=["PyTorch", "Triton"])  # fmt: skip
def test_no_compiler(cli, monkeypatch, message):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(llama.TrainStep, "backward", Mock(side_effect=RuntimeError(message)))
    assert_refused(cli("--compile"), "--compile", "install", "CXX")


def test_other_errors_are_not_hidden(cli, monkeypatch):
    monkeypatch.setattr(llama.TrainStep, "forward", Mock(side_effect=RuntimeError("a mistake in the program")))
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        cli()


def test_help(capsys):
    with pytest.raises(SystemExit) as exit:
        llama.main(["--help"], "tiny_llama_v3.py")
    assert exit.value.code == 0 and "\n  --hidden-dim " in capsys.readouterr().out


# --- Ctrl-C


@pytest.mark.parametrize("timing", ["phases", "step"])
def test_interrupted_run_reports_the_steps_done(cli, after_call, timing):
    after_call(4, "forward", Mock(side_effect=KeyboardInterrupt))  # a warm-up and two steps before
    run = cli("--timing", timing, "--num-steps", 5, "--profile", "profile")
    assert run.code == 130 and "Interrupted after 2 of 5 steps" in run.out
    assert len(run.losses) == len(run.result["steps"]) == run.result["summary"]["steps"] == 2
    assert printed(run.out, "Final loss") == run.losses[-1] == round(run.result["summary"]["final_loss"], 4)
    assert not run.result["summary"]["parameters_without_gradient"] and not files(Path("profile"))


@pytest.mark.parametrize("number", [1, 2])
def test_run_interrupted_before_the_first_step_leaves_nothing(cli, tmp_path, after_call, number):
    after_call(number, "forward", Mock(side_effect=KeyboardInterrupt))
    run = cli()
    assert run.code == 130 and run.err == "tiny_llama_v3.py: interrupted\n" and not run.losses
    assert "Final loss" not in run.out and not files(tmp_path)


@pytest.mark.parametrize("where", "check_batch print_configuration summarize write_new_json write_profile".split())
def test_interrupted_elsewhere(cli, tmp_path, monkeypatch, where):
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(profiler if where == "write_profile" else llama, where, interrupt)
    run = cli("--check", "--impl", "sdpa", "--profile", "profile")
    assert run.code == 130 and run.err == "tiny_llama_v3.py: interrupted\n"
    left = [Path(name).suffix for name in files(tmp_path) if "." in name]
    assert left == [".json"] * (where == "write_profile")


def default_sigint():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a background job ignores


@pytest.mark.parametrize("number, times", [
    (signal.SIGTERM, 1), pytest.param(signal.SIGINT, 3, marks=pytest.mark.slow)
])  # fmt: skip
def test_signals(tmp_path, number, times):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with start(tmp_path, *A_RUN, **pipes, preexec_fn=default_sigint) as process:
        try:
            next(line for line in process.stdout if line.startswith("step    2/"))
            for _ in range(times):
                process.send_signal(number)
                time.sleep(0.02)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    results = [strict_json(path) for path in tmp_path.rglob("*") if path.is_file()]
    if times == 1:  # others may have ended the report of the steps done
        done = int(re.search(r"Interrupted after (\d+) of 1000000 steps", out)[1])
        assert done >= 2 and [len(result["steps"]) for result in results] == [done]
