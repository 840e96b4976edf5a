"""What the benchmarks make of a clock's readings: units, steps of a window, turns, bytes and operations."""

import json
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import gpt, kernels, layer_norm, steps
from measure import timing
from measure.results import Unavailable
from tiny_llama import hardware

CPU = llama.get_device("cpu")


def test_a_window_of_compare_is_ms_a_step_of_all_its_steps(ticking):
    contender = steps.Contender.__new__(steps.Contender)
    contender.device, contender.steps = CPU, 7
    contender.step = SimpleNamespace(run=lambda: ticking(0.004), loss=torch.tensor(1.0))
    assert contender.window() == pytest.approx((4.0, 4.0))
    assert contender.window(3) == pytest.approx((4.0, 4.0))
    contender.step.loss = torch.tensor(float("nan"))
    with pytest.raises(Unavailable, match="the loss is nan"):
        contender.window()


def test_windows_take_turns():
    order = []

    def contender(name):
        return SimpleNamespace(window=lambda steps=None: order.append(name) or name * (steps or 2))

    assert steps.time_in_turns([contender("a"), contender("b")], 3) == [["aa"] * 3, ["bb"] * 3]
    assert "".join(order) == "ab" + "abba" * (steps.UNCOUNTED // 2) + "abbaab"  # the last three rounds are measured


def test_a_row_of_compare_by_hand(monkeypatch):
    config = llama.Config(batch_size=3, seq_len=5)
    monkeypatch.setattr(hardware, "peak_tflops", lambda device, precision: 0.5)
    monkeypatch.setattr(hardware, "model_tflops", lambda config: 0.002)
    row = steps.Row("torch")
    theirs = SimpleNamespace(results={}, device=CPU, steps=2, row=row)
    summary = steps.summarize(theirs, [(20.0, 21.0), (10.0, 11.0)], config, theirs, [(10.0, 1.0), (30.0, 1.0)])
    assert summary["ms"] == pytest.approx({"p20": 12.0, "median": 15.0, "p80": 18.0})
    assert summary["samples_per_second"] == pytest.approx(200)
    assert summary["tokens_per_second"] == pytest.approx(1000)
    assert summary["tflops_per_second"] == pytest.approx(0.002 / 0.015)
    assert summary["mfu"] == pytest.approx(0.002 / 0.015 / 0.5)
    assert summary["ratio"]["median"] == pytest.approx((0.5 + 3.0) / 2)
    assert summary["windows_wall_ms"] == [21.0, 11.0]


def test_the_strongest_peer_is_the_fastest_that_is_not_ours():
    times = {"triton": 1.0, "torch": 8.0, "sdpa": 4.0}
    times |= {"sdpa flat compile graph": 2.0, "sdpa bf16 compile graph": 1.5}  # yardsticks, and no peers
    rows = {name: {"error": None, "ms": {"median": ms}, "peak_memory_mib": 50 * ms} for name, ms in times.items()}
    result = {"rows": rows | {"hf": {"error": "not installed"}}}
    steps.conclude(result)
    assert result["strongest_peer"] == "sdpa"
    assert result["comparisons"] == [
        {"ours": "triton", "peer": peer, "time_ratio": ratio, "spread": None, "memory_ratio": ratio}
        for peer, ratio in (("sdpa", 0.25), ("torch", 0.125))
    ]


def test_a_rate_is_the_work_over_the_time():
    bench = timing.Bench(CPU)
    bench.microseconds = lambda calls: 50.0
    assert kernels.measure(bench, [None], 2e9)["rate"] == pytest.approx(2e9 / 50e-6 / 1e12)
    assert kernels.measure(bench, ([None], 4e9), 2e9)["rate"] == pytest.approx(4e9 / 50e-6 / 1e12)  # its own amount


@pytest.mark.skipif(llama.triton is None or not llama.INTERPRETED, reason="a CPU's cases need Triton's interpreter")
def test_the_work_of_each_case_by_hand():
    bench = kernels.KernelBench(CPU)
    n = bench.elements * 4  # bytes of a tensor, in fp32
    work = {case: amount for name in kernels.CASES for case, amount, *_ in kernels.CASES[name](bench)}
    rows, cols = bench.elements // 64, 64
    weight, row_statistic = 4 * cols, 4 * rows
    weights = 2 * llama.ADAMW_BLOCK  # a matrix of 16 x 16 has a block to itself
    product = 2 * 1 * 2 * 32 * 32 * 16 / 2  # two operations a pair of queries and keys and dimension, half masked
    assert work == {
        "read and write (negation)": 2 * 4 * n,
        "rmsnorm forward, N = 64": 2 * n + weight + row_statistic,  # x, y
        "rmsnorm backward, N = 64": 3 * n + weight + row_statistic,  # y_grad, x, x_grad
        "add + rmsnorm forward, N = 64": 4 * n + weight + row_statistic,  # x, branch, their sum, y
        "add + rmsnorm backward, N = 64": 4 * n + weight + row_statistic,  # both gradients, the sum, x_grad
        "swiglu forward, F = 64": 3 * n,
        "swiglu backward, F = 64": 5 * n,
        "cross-entropy, losses and gradient, V = 100": 2 * 8 * 100 * 4 + 8 * (8 + 8),  # targets, losses and counts
        "AdamW, 0 M parameters": 28 * weights,
        "attention forward (1, 32, 2/1, 16)": 2 * product,
        "attention forward + backward (1, 32, 2/1, 16)": 7 * product,
    }


def test_layer_norm_s_bytes_and_wall_time(monkeypatch, ticking):
    amounts = []

    def rate(calls, amount):
        amounts.append(amount)
        return {"us": 1.0, "rate": 1.0, "error": None}

    monkeypatch.setattr(layer_norm, "check", lambda *args: 0.0)
    bench = timing.Bench(CPU)
    bench.rate = rate
    case = layer_norm.measure_case(bench, (8, 16), {"triton": layer_norm.torch_layer_norm})
    size, statistics, weight = 8 * 16 * 4, 2 * 8 * 4, 16 * 4
    forward, backward = 2 * size + statistics + 2 * weight, 3 * size + statistics + weight
    assert dict(zip(case["passes"], amounts, strict=True)) == {
        "forward": forward, "forward + backward": forward + backward, "backward": backward
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_gpu = SimpleNamespace(on_gpu=True, device=SimpleNamespace(type="cuda"))
    assert layer_norm.wall_microseconds(on_gpu, [lambda: ticking(2e-6)]) == pytest.approx(2.0)


def test_a_window_of_nanogpt_and_its_figures(monkeypatch, ticking):
    contender = gpt.Contender.__new__(gpt.Contender)
    contender.row, contender.device = gpt.ROWS["torch"], torch.device("cpu")
    contender.step = lambda: ticking(0.004) or torch.tensor(1.0)
    assert contender.window(5) == pytest.approx(4.0)
    contender.step = lambda: torch.tensor(float("inf"))
    with pytest.raises(Unavailable, match="the loss is inf"):
        contender.window(5)
    monkeypatch.setattr(hardware, "peak_tflops", lambda device, precision: 2.0)
    model = SimpleNamespace(flops_per_token=lambda: 5e8)
    figures = gpt.figures([1.0, 2.0, 3.0, 4.0, 5.0], 600, model, torch.device("cpu"))
    assert figures["ms"] == pytest.approx({"p20": 1.8, "median": 3.0, "p80": 4.2})
    assert figures["tokens_per_second"] == pytest.approx(200_000)
    assert figures["mfu"] == pytest.approx(200_000 * 5e8 / 2e12)


@pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
@pytest.mark.usefixtures("small_gpt")
def test_the_speed_of_nanogpt_s_rows_is_the_median_of_neighbouring_windows(monkeypatch, tmp_path):
    ms = {"torch": iter([1.0, 6.0, 8.0, 20.0]), "triton": iter([1.0, 3.0, 4.0, 5.0])}  # the first is the warm-up

    class Timed(gpt.Contender):
        def window(self, steps):
            return next(ms[self.row.layer_norm])

    monkeypatch.setattr(gpt, "Contender", Timed)
    flags = ["--tiny", "--rows", "torch", "triton", "--windows", "3", "--steps", "1", "--output-dir", str(tmp_path)]
    assert gpt.main(flags) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert rows["triton"]["speedup"] == {"peer": "torch", "median": 2.0}
    assert rows["triton"]["windows_ms"] == [3.0, 4.0, 5.0]
