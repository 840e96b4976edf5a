"""Several processes on a CPU: a time or a reason for every row, none for wrong losses; figures follow from windows."""

import contextlib
import json
import re
import statistics
import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks import scaling
from measure.work import SIZES
from tests import ROOT

ROWS = ["triton graph", "triton", "DDP", "FSDP2"]
SHORT = ["--tiny", "--windows", "3", "--steps", "1"]
PLAIN = "import gc, sys\nfrom benchmarks import scaling\ngc.freeze()\nsys.exit(scaling.main())\n"
# Each process trains for itself, as if it were alone.
SILENT = PLAIN.replace("sys.exit", "scaling.distributed.World.parallelize = lambda world, step: step.model\nsys.exit")
CPU = torch.device("cpu")


def run(python, folder, *flags, program=PLAIN):
    """(exit code, the only result) of torchrun."""
    script = folder / "program.py"
    script.write_text(program)
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(script), *SHORT, *flags, "--output-dir", str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(next(folder.glob("scaling_*.json")).read_text())


def test_one_process_is_compiled_for_itself(monkeypatch):
    """Dynamo would reuse the graphs that were split for the messages of several."""
    apart = []
    monkeypatch.setattr("torch.compile", lambda model: model)
    monkeypatch.setattr(scaling, "compile_apart", lambda model: apart.append(model) or model)
    config = scaling.llama.Config(**SIZES["tiny"], impl="sdpa", compile=True)
    step = scaling.make_step(config, CPU, scaling.ALONE)
    assert apart == [step.model] == [step.run_model]


class TwoProcesses:
    """A world in which the other process takes twice as long, and has the same losses."""

    rank, size = 0, 2

    def gather(self, value):
        return [value, 2 * value if isinstance(value, float) else value]


@pytest.fixture
def contender(ticking):
    """A Contender of two processes, whose step takes 3 ms here; .world.log tells when they meet."""

    class Step:
        device = CPU
        loss = torch.tensor(2.0)

        def run(self):
            world.log.append("run")
            ticking(0.003)

        def restart(self):
            pass

    class Meeting(TwoProcesses):
        log = []

        def gather(self, value):
            world.log.append("meet")
            return super().gather(value)

        def mean(self, losses):
            return [1.5 * loss for loss in losses]

    world = Meeting()
    return scaling.Contender(Step, CPU, world, graph=False, steps=None)


def test_a_window_is_that_of_the_slowest_process(contender):
    """All begin together, and all take as many steps: 0.25 s of the 6 ms of the other one."""
    assert contender.steps == 42 and contender.losses == [3.0] * scaling.GATE_STEPS
    contender.world.log.clear()
    assert contender.window(4) == pytest.approx(6.0)
    assert contender.world.log == ["meet", *4 * ["run"], "meet"]


def test_the_figures_of_a_row_by_hand(tmp_path, monkeypatch):
    options = SimpleNamespace(output_dir=str(tmp_path), windows=3, time_limit=9.0)
    run = scaling.Run(TwoProcesses(), [], options, CPU)
    config = scaling.llama.Config(batch_size=1, seq_len=100)

    def contender(*ms, **results):
        window = iter(ms).__next__
        results = {"peak_memory_mib": None} | results
        return SimpleNamespace(window=window, step="a step", losses=[3.0, 2.0], results=results)

    def build(config):
        assert config.batch_size == 2  # of one process beside two that divide it
        return contender(24.0, 20.0, 70.0)

    def count_kernels(step, ms):
        assert (step, ms) == ("a step", 40.0)
        return {"kernels": 9, "exposed_communication_ms": 1.5}

    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(scaling.profiler, "count_kernels", count_kernels)
    row = run.time(contender(90.0, 40.0, 38.0), config, 2)
    assert row["windows_ms"] == {"exchanging": [90.0, 40.0, 38.0], "alone": [24.0, 20.0, 70.0]}
    assert row["losses"] == [3.0, 2.0]
    waiting = {"waiting least": 1.5, "waiting most": 3.0}
    assert row["ms"] == pytest.approx({"alone": 24.0, "exchanging": 40.0, "p20": 38.8, "p80": 70.0} | waiting)
    assert row["peak_memory_mib"] is None
    assert row["tokens_per_second"] == 5000.0  # 2 x 100 in 40 ms
    assert row["efficiency"] == 0.3  # half of one process's work takes 12 ms alone
    monkeypatch.setattr(run, "build", pytest.fail)
    monkeypatch.setattr(scaling.profiler, "count_kernels", lambda step, ms: "there is no GPU")
    twice = scaling.dataclasses.replace(config, batch_size=2, shard="full")
    again = run.time(contender(30.0, 31.0, 10.0, peak_memory_mib=5.0), twice, 1)
    assert again["ms"]["alone"] == 24.0 and again["ms"]["exchanging"] == 30.0 and again["efficiency"] == 0.8
    assert again["tokens_per_second"] == pytest.approx(2 * 200 / 0.03)  # each of the processes has its own 2 x 100
    assert again["peak_memory_mib"] == 10.0 and "waiting least" not in again["ms"]


def test_a_batch_that_cannot_be_divided_is_left_out(capsys):
    config, result = scaling.llama.Config(batch_size=3), {}
    scaling.measure_mode(SimpleNamespace(world=TwoProcesses()), "strong", config, result)
    assert result == {} and "3 sequences cannot be divided among 2 processes" in capsys.readouterr().out


@pytest.mark.parametrize("losses, passes", [([5.0, 4.0019], True), ([5.0, 3.9981], True), ([5.0, 4.0021], False),
                                            ([5.0, float("nan")], False)])  # fmt: skip
def test_losses_may_be_off_by_a_share_of_their_fall(monkeypatch, losses, passes):
    monkeypatch.setitem(scaling.GATE_TOLERANCE, "fp32", 2e-3)
    with contextlib.nullcontext() if passes else pytest.raises(ArithmeticError, match="wrong losses"):
        scaling.require_losses(losses, [5.0, 4.0], "fp32")


@pytest.fixture(scope="module")
def measured(tmp_path_factory, python):
    code, result = run(python, tmp_path_factory.mktemp("scaling"))
    assert code == 0
    return result


def test_every_row_has_a_time_or_a_reason_and_one_process_is_measured_once(measured):
    parts, timed = measured["sizes"]["tiny"], []
    for mode, batch_size in (("weak", 2), ("strong", 1)):
        rows, expected = parts[mode]["rows"], parts[mode]["expected_losses"]
        assert parts[mode]["batch_size"] == batch_size and list(rows) == ROWS and len(expected) == scaling.GATE_STEPS
        assert all(re.search("needs a GPU|there is no GPU", rows[name]["error"]) for name in ROWS[:2])
        timed += [rows[name] for name in ROWS[2:]]
        # Losses are those of one process at the batch of all.
        assert all(row["losses"] == pytest.approx(expected, rel=1e-5) for row in timed[-2:])
    # One process trains the same model for both rows, and in both modes.
    assert [{*row["windows_ms"]} for row in timed] == [{"exchanging", "alone"}] + [{"exchanging"}] * 3
    assert {row["ms"]["alone"] for row in timed} == {statistics.median(timed[0]["windows_ms"]["alone"])}
    assert measured["command"] == f"torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling {' '.join(SHORT)}"
    assert measured["processes"] == 2


def test_processes_that_do_not_exchange_get_no_time(tmp_path, python):
    code, result = run(python, tmp_path, "--rows", "DDP", "--modes", "weak", program=SILENT)
    row = result["sizes"]["tiny"]["weak"]["rows"]["DDP"]
    assert code != 0 and "wrong losses" in row["error"] and "ms" not in row


def test_time_limit_leaves_rows_out(tmp_path):
    options = SimpleNamespace(output_dir=str(tmp_path), windows=2, time_limit=0.0)
    run, rows = scaling.Run(TwoProcesses(), [], options, CPU), {}
    run.record(rows, "DDP", pytest.fail)
    assert rows == {"DDP": {"error": "not started within --time-limit 0"}} and run.finish() == 0


def test_one_process_is_too_few_and_the_models_need_gpus(capsys):
    assert scaling.main(["--tiny"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "one process has nothing to exchange" in error
    with pytest.raises(scaling.llama.UsageError, match="the models that are measured need GPUs.*--tiny"):
        scaling.measure([], SimpleNamespace(size=2, select_device=lambda name: CPU))
