"""What profiling costs: a run without a profiler beside those of the scripts."""

import json
import sys
from pathlib import Path

import pytest

from measure.command_line import Failure
from profilers import overhead


def test_overhead_of_a_real_profile(tmp_path, monkeypatch, capsys, python):
    """On a CPU or a GPU: a plain run, then get_hotspots.sh through torch.profiler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", python)
    sizes = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --batch-size 2 --seq-len 16 --num-steps 2"
    arguments = ["--scripts", "get_hotspots.sh", "--output-dir", ".", "--", *sizes.split(), "--impl", "torch"]
    assert overhead.main(arguments) == 0
    result = json.loads(Path("overhead.json").read_text())
    row = result["scripts"]["get_hotspots.sh"]
    assert row["tool"].startswith("torch.profiler") and row["ms"] > 0 and result["plain"]["ms"] > 0
    assert row["ratio"] == pytest.approx(row["ms"] / result["plain"]["ms"])
    assert f"get_hotspots.sh: {row['ms']:.3f} ms a step" in capsys.readouterr().out
    with pytest.raises(Failure, match="ended with 3: so it goes"):
        overhead.time_command([sys.executable, "-c", "import sys; print('so it goes'); sys.exit(3)"])


def test_the_recorded_step_is_in_ms(tmp_path):
    of_step = {"ph": "X", "tid": 1, "cat": "user_annotation", "name": "step"}
    steps = [of_step | {"ts": ts, "dur": dur} for ts, dur in ((0, 8000), (9000, 4000), (19000, 3000))]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": steps}))
    assert overhead.recorded_step_ms(tmp_path) == 4.0
