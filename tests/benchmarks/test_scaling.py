"""Several processes on a CPU: a time or a reason for every row, none for wrong losses; figures follow from windows."""

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.pages import scaling_tables
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
    contender = scaling.Contender(config, scaling.llama.get_device("cpu"), scaling.ALONE, steps=1)
    assert apart == [contender.step.model] == [contender.step.run_model]


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
    assert set(size["phases_ms"]) == {"forward", "backward", "optimizer"} and result["collectives"]["bandwidth"] > 0


def test_figures_follow_from_the_windows(measured):
    size = measured[1]["sizes"]["tiny"]
    alone_ms = {}
    for mode in ("weak", "strong"):
        tokens = 2 * size[mode]["batch_size"] * SIZES["tiny"]["seq_len"]
        for name in ("DDP", "FSDP2"):
            row = size[mode]["rows"][name]
            windows, ms = row["windows_ms"], row["ms"]
            # One process trains the same model for both, and in both modes: it is measured once.
            assert set(windows) == {"exchanging"} | ({"alone", "side by side"} if not alone_ms else set())
            assert all(len(values) == 3 for values in windows.values())
            if "alone" in windows:
                alone_ms = statistics.median(windows["alone"])
            assert ms["alone"] == alone_ms and ms["exchanging"] == statistics.median(windows["exchanging"])
            assert row["tokens_per_second"] == pytest.approx(tokens / ms["exchanging"] * 1e3)
            alone = SIZES["tiny"]["batch_size"] * SIZES["tiny"]["seq_len"] / alone_ms * 1e3
            assert row["efficiency"] == pytest.approx(row["tokens_per_second"] / alone / 2)


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
    assert [row["error"] for row in result["gpt2"]["rows"].values()] == ["left out by --time-limit"] * 2


def test_one_process_is_too_few(capsys):
    assert scaling.main(["--tiny"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "one process has nothing to exchange" in error


def test_without_gpus_the_models_are_refused(tmp_path, python):
    program = PLAIN.replace("sys.exit", "sys.argv.remove('--tiny')\nsys.exit")
    code, output, result = run(python, tmp_path, program=program)
    assert code != 0 and result is None
    assert len(re.findall("error: rank [01]: the models that are measured need GPUs", output)) == 1


# --- pages


def row(alone, exchanging, tokens, efficiency, **others):
    times = {"ms": {"alone": alone, "exchanging": exchanging}, "tokens_per_second": tokens, "efficiency": efficiency}
    return {"error": None, **times, "peak_memory_mib": 23501.0, **others}


def result_of(processes, day):
    weak = {
        "triton graph": row(100.0, 101.0, 162e3, 0.99), "triton": {"error": "no room"},
        "DDP": row(110.0, 121.0, 135e3, 0.909, ratio=0.8), "FSDP2": row(110.0, 118.0, 138e3, 0.932, ratio=0.85),
    }  # fmt: skip
    strong = {"triton graph": row(100.0, 55.0, 148e3, 0.909)}
    large = {
        "config": SIZES["large"] | {"use_amp": True},
        "weak": {"rows": weak},
        "strong": {"rows": strong},
    }
    gpt = {"ms": {"alone": 20.0, "exchanging": 25.0}, "tokens_per_second": 2e6, "efficiency": 0.8, "error": None}
    return {
        "benchmark": "scaling", "command": f"torchrun --nproc_per_node={processes}",
        "date": f"2026-01-{day:02}T03:04:05", "environment": {"device": "Some GPU", "torch": "2.11", "triton": "3.6"},
        "processes": processes, "collectives": {"bandwidth": 300.0, "latency_us": 20.0}, "sizes": {"large": large},
        "gpt2": {"size": "gpt2", "rows": {"eager": gpt}},
    }  # fmt: skip


@pytest.fixture
def results(tmp_path):
    for processes, day in ((2, 2), (4, 3)):
        (tmp_path / f"scaling_some-gpu_2026010{day}.json").write_text(json.dumps(result_of(processes, day)))
    older = result_of(2, 1) | {"sizes": {}}
    (tmp_path / "scaling_some-gpu_20260101.json").write_text(json.dumps(older))
    return tmp_path


def test_the_table_holds_the_figures(results):
    text = scaling_tables.scaling_section(results)
    ours = "| **large, triton graph** | 100 | 101 | 162,000 | 99.0 % | 23,501 | 55.0 | 90.9 % |"
    assert text.count(ours) == 2 and "| large, triton | no room |" in text
    # The faster of the peers, by its windows in turns with ours.
    assert text.count(f"large {1 / 0.85:.2f} times those of FSDP2") == 2
    large = result_of(2, 2)["sizes"]["large"]
    large["weak"]["rows"]["triton"] = row(100.0, 120.0, 151.8e3, 0.9)
    assert scaling_tables.peer_line("large", large) == f"large {1 / 0.85:.2f} times (1.10 without) those of FSDP2"
    assert text.index("2 GPUs, ms") < text.index("4 GPUs, ms") < text.index("nanogpt_triton")
    assert text.count("| eager | 20.0 ms | 25.0 ms | 2,000,000 | 80.0 % |") == 2 and "of 4 times one" in text
    assert "scaling_some-gpu_20260101" not in text  # superseded


def test_weak_and_strong_may_come_from_two_results(results):
    """Each from the newest one that has times of it; both are named."""
    newer = result_of(2, 9)
    late = {"error": "not started within --time-limit 1"}
    newer["sizes"]["large"]["weak"]["rows"] = dict.fromkeys(newer["sizes"]["large"]["weak"]["rows"], late)
    newer["sizes"]["large"]["strong"]["rows"] = {"triton graph": row(100.0, 51.0, 160e3, 0.98)}
    del newer["gpt2"]
    (results / "scaling_some-gpu_20260109.json").write_text(json.dumps(newer))
    text = scaling_tables.scaling_section(results)
    assert "| **large, triton graph** | 100 | 101 | 162,000 | 99.0 % | 23,501 | 51.0 | 98.0 % |" in text
    first = text[: text.index("4 GPUs, ms")]
    assert "scaling_some-gpu_20260102" in first and "scaling_some-gpu_20260109" in first and "not started" not in text


def test_the_picture_shows_what_was_measured(results):
    scaling_tables.draw_measured(results, results / "measured.png")
    assert (results / "measured.png").read_bytes().startswith(b"\x89PNG")
    points = scaling_tables.points_of(scaling_tables.newest_sizes(results), "large", "DDP")
    assert [(gpus, efficiency) for gpus, _, efficiency in points] == [(1, 1.0), (2, 0.909), (4, 0.909)]
    assert points[0][1] == pytest.approx(4 * 2048 / 110.0 * 1e3)
