"""Several processes on a CPU: a time or a reason for every row, none for wrong losses; figures follow from windows."""

import contextlib
import json
import re
import statistics
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import scaling
from measure.work import SIZES

ROOT = Path(__file__).resolve().parents[2]
ROWS = ["triton graph", "triton", "DDP", "FSDP2"]
SHORT = ["--tiny", "--windows", "3", "--steps", "1"]
PLAIN = "import gc, sys\nfrom benchmarks import scaling\ngc.freeze()\nsys.exit(scaling.main())\n"
# Each process trains for itself, as if it were alone.
SILENT = PLAIN.replace("sys.exit", "scaling.distributed.parallelize = lambda model, *others: model\nsys.exit")


def run(python, folder, *flags, program=PLAIN, processes=2):
    """(exit code, output, the only result or None) of torchrun."""
    script = folder / "program.py"
    script.write_text(program)
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(script), *SHORT, *flags, "--output-dir", str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    print(done.stdout, done.stderr)
    results = list(folder.glob("scaling_*.json"))
    return done.returncode, done.stdout + done.stderr, json.loads(results[0].read_text()) if results else None


def test_one_process_is_compiled_for_itself(monkeypatch):
    """Dynamo would reuse the graphs that were split for the messages of several."""
    apart = []
    monkeypatch.setattr(scaling.torch, "compile", lambda model: model)
    monkeypatch.setattr(scaling, "compile_apart", lambda model: apart.append(model) or model)
    config = scaling.llama.Config(**SIZES["tiny"], impl="sdpa", compile=True)
    step = scaling.make_step(config, scaling.llama.get_device("cpu"), scaling.ALONE)
    assert apart == [step.model] == [step.run_model]


class TwoProcesses:
    """A world in which the other process takes twice as long, and has the same losses."""

    rank, size = 0, 2

    def gather(self, value):
        return [value, 2 * value if isinstance(value, float) else value]


def test_the_figures_of_a_row_by_hand(tmp_path):
    options = SimpleNamespace(output_dir=str(tmp_path), windows=2, time_limit=9.0)
    run = scaling.Run(TwoProcesses(), [], options, scaling.llama.get_device("cpu"))

    def contender(ms, **results):
        return SimpleNamespace(window=lambda: ms, losses=[3.0], results={"peak_memory_mib": None} | results)

    row = run.measure(contender(40.0), "a", lambda: contender(24.0), tokens=100, factor=2, reference=contender(10.0))
    assert row["ms"] == {"alone": 24.0, "exchanging": 40.0, "side by side": 48.0, "reference": 10.0}
    assert row["tokens_per_second"] == 5000.0  # 2 x 100 in 40 ms
    assert row["efficiency"] == 0.3  # half of one process's work takes 12 ms alone
    assert row["ratio"] == 0.25 and row["peak_memory_mib"] is None
    again = run.measure(contender(30.0, peak_memory_mib=5.0), "a", pytest.fail, tokens=100)
    assert again["ms"] == {"alone": 24.0, "exchanging": 30.0} and again["efficiency"] == 0.8
    assert again["peak_memory_mib"] == 10.0 and "ratio" not in again


def test_bandwidth_and_latency_by_hand(monkeypatch):
    """A process sends half of a message to each collective; a GB/s is a byte a nanosecond."""
    seconds = iter([0.0, 0.010, 0.0, 0.030, 0.0, 0.0005, 0.0, 0.0015])  # a warm-up before each: 5 calls, then 50
    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(scaling.distributed, name, lambda *tensors: None)
    monkeypatch.setattr(scaling, "wall_seconds", lambda *args: next(seconds))
    world = TwoProcesses()
    world.gather = lambda value: [value]
    found = scaling.measure_collectives(scaling.llama.get_device("cpu"), world, 4_000_003)
    assert found["bytes"] == 4_000_000 and found["reduce_scatter_ms"] == 2.0 and found["all_gather_ms"] == 6.0
    assert found["bandwidth"] == pytest.approx(4e6 / 8e-3 / 1e9)  # 2 x 2 MB in 8 ms
    assert found["latency_us"] == pytest.approx((10 + 30) / 2)


@pytest.mark.parametrize("losses, passes", [([5.0, 4.0019], True), ([5.0, 3.9981], True), ([5.0, 4.0021], False),
                                            ([5.0, float("nan")], False)])  # fmt: skip
def test_losses_may_be_off_by_a_share_of_their_fall(monkeypatch, losses, passes):
    monkeypatch.setitem(scaling.GATE_TOLERANCE, "fp32", 2e-3)
    with contextlib.nullcontext() if passes else pytest.raises(ArithmeticError, match="wrong losses"):
        scaling.require_losses(losses, [5.0, 4.0], "fp32")


@pytest.fixture(scope="module")
def measured(tmp_path_factory, python):
    code, output, result = run(python, tmp_path_factory.mktemp("scaling"), "--sizes", "small", "--rows", *ROWS)
    assert code == 0
    return output, result


def test_every_row_has_a_time_or_a_reason(measured):
    output, result = measured
    assert result["processes"] == 2 and list(result["sizes"]) == ["tiny"]
    size = result["sizes"]["tiny"]
    for mode, batch_size in (("weak", 2), ("strong", 1)):
        assert size[mode]["batch_size"] == batch_size
        assert list(size[mode]["rows"]) == ROWS
        for name in ("triton graph", "triton"):
            assert re.search("needs a GPU|there is no GPU", size[mode]["rows"][name]["error"])
        for name in ("DDP", "FSDP2"):
            assert size[mode]["rows"][name]["error"] is None and f"tiny, {mode}" in output
    command = f"torchrun --standalone --nproc_per_node=2 -m benchmarks.scaling {' '.join(SHORT)}"
    assert result["command"] == f"{command} --sizes small --rows 'triton graph' triton DDP FSDP2"
    assert result["collectives"]["bandwidth"] > 0


def test_one_process_is_measured_once(measured):
    """It trains the same model for both rows, and in both modes."""
    size = measured[1]["sizes"]["tiny"]
    rows = [size[mode]["rows"][name] for mode in ("weak", "strong") for name in ("DDP", "FSDP2")]
    assert [set(row["windows_ms"]) for row in rows] == [{"exchanging", "alone", "side by side"}] + [{"exchanging"}] * 3
    assert {row["ms"]["alone"] for row in rows} == {statistics.median(rows[0]["windows_ms"]["alone"])}
    assert all(len(values) == 3 for row in rows for values in row["windows_ms"].values())


def test_losses_are_those_of_one_process_at_the_batch_of_all(measured):
    for mode in ("weak", "strong"):
        part = measured[1]["sizes"]["tiny"][mode]
        expected = part["expected_losses"]
        assert len(expected) == scaling.GATE_STEPS and expected[0] > expected[-1]
        for name in ("DDP", "FSDP2"):
            assert part["rows"][name]["losses"] == pytest.approx(expected, rel=1e-5)


def test_processes_that_do_not_exchange_get_no_time(tmp_path, python):
    code, _, result = run(python, tmp_path, "--sizes", "small", "--rows", "DDP", "--modes", "weak", program=SILENT)
    row = result["sizes"]["tiny"]["weak"]["rows"]["DDP"]
    assert code != 0 and "wrong losses" in row["error"] and "ms" not in row


def test_time_limit_leaves_rows_out(tmp_path, python):
    code, _, result = run(python, tmp_path, "--rows", "DDP", "--time-limit", "0")
    assert code == 0
    rows = [row for part in ("weak", "strong") for row in result["sizes"]["tiny"][part]["rows"].values()]
    assert len(rows) == 2 and all("--time-limit 0" in row["error"] for row in rows)
    assert all("--time-limit 0" in row["error"] for row in result["gpt2"]["rows"].values())


def test_one_process_is_too_few_and_the_models_need_gpus(capsys):
    assert scaling.main(["--tiny"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "one process has nothing to exchange" in error
    cpu = scaling.llama.get_device("cpu")
    with pytest.raises(scaling.llama.UsageError, match="the models that are measured need GPUs.*--tiny"):
        scaling.measure([], SimpleNamespace(size=2, select_device=lambda name: cpu))
