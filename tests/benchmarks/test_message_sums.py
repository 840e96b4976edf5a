"""benchmarks.message_sums: a ring rounds at each hop, fp32 does not, and what real processes add is compared too."""

import json
import subprocess
from functools import partial

import pytest
import torch

from benchmarks import message_sums
from tests import ROOT

CPU = torch.device("cpu")


def sums_of(path):
    rows = json.loads(path.read_text())["sums"]
    return {(row["how"], row["processes"], row["mean"], row["message"]): row for row in rows}


def test_a_ring_rounds_each_partial_sum(monkeypatch):
    """256 + 1 + 1 + 1 in bf16, whose neighbors of 256 are 255 and 258."""
    monkeypatch.setattr(
        message_sums, "gradient", lambda rank, mean, device: torch.tensor([1.0 if rank else 256.0]).bfloat16()
    )
    assert message_sums.ring_sum(4, 0.0, torch.bfloat16, CPU).item() == 256
    assert message_sums.ring_sum(4, 0.0, torch.float32, CPU).item() == 259
    exact = message_sums.exact_sum(4, 0.0, CPU)
    assert exact.dtype == torch.float64 and exact.item() == 259
    found = message_sums.errors(torch.tensor([256.0]), exact)
    assert found == {"relative_error": pytest.approx(3 / 259), "relative_bias": pytest.approx(-3 / 259)}


def test_errors_are_relative_to_all_of_the_exact_sum():
    """Elements of several sizes: the root of a mean square is no mean."""
    found = message_sums.errors(torch.tensor([3.0, -5.0]), torch.tensor([3.0, -4.0]).double())
    assert found == {"relative_error": pytest.approx((0.5 / 12.5) ** 0.5), "relative_bias": pytest.approx(-0.5 / 3.5)}


def test_errors_grow_with_the_root_of_the_processes():
    exact = {n: message_sums.exact_sum(n, 0.0, CPU) for n in (4, 16, 64)}
    add = partial(message_sums.ring_sum, mean=0.0, dtype=torch.bfloat16, device=CPU)
    error = {n: message_sums.errors(add(n), exact[n])["relative_error"] for n in exact}
    assert 1.7 < error[16] / error[4] < 2.3 and 1.7 < error[64] / error[16] < 2.3


def test_two_processes_add_as_the_simulation_does(python, tmp_path):
    """Of two, any order of additions has one rounding, which the ring has as well."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "benchmarks.message_sums", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("message_sums_*.json")  # of the first process alone
    command = json.loads(path.read_text())["command"]
    assert command == "torchrun --standalone --nproc_per_node=2 -m benchmarks.message_sums"
    found = sums_of(path)
    for mean in message_sums.MEANS:
        exact = message_sums.exact_sum(2, mean, CPU)
        for name, dtype in message_sums.TYPES.items():
            expected = message_sums.errors(message_sums.ring_sum(2, mean, dtype, CPU), exact)
            row = found["gloo", 2, mean, name]
            assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert {key[:2] for key in found} == {("ring", 4), ("ring", 64), ("gloo", 2)}
