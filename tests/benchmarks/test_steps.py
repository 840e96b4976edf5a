"""benchmarks.steps: gate first, failures named, one rule for the strongest peer."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import gpt, harness, kernels, scaling, steps
from benchmarks.pages import publish
from measure.results import Unavailable
from measure.work import SHAPES
from tests.core.tiny import TINY

ON_GPU = torch.cuda.is_available()
ROWS = ["triton", "torch", "sdpa", "hf", "hf liger"] + (["triton graph", "sdpa graph"] if ON_GPU else [])
SLANT = 1.1 if ON_GPU else 1.001  # more than bf16, there, and fp32, here, can err
SHORT = ["--tiny", "--windows", "2", "--steps", "1"]
SMALLER = dict(batch_size=1, seq_len=8, hidden_dim=16, num_layers=1, num_heads=2, vocab_size=16)
IN_FP8 = dataclasses.replace(TINY, seq_len=16, use_amp=True)


def run_steps(folder, *flags):
    """(exit code, the result)"""
    code = steps.main([*SHORT, *flags, "--output-dir", str(folder)])
    (path,) = folder.glob("steps_*.json")
    return code, json.loads(path.read_text())


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not ON_GPU:  # the interpreter takes seconds for a step
            monkeypatch.setitem(steps.SIZES, "tiny", SMALLER)
            monkeypatch.setattr(steps, "WARMUP_STEPS", 1)
            monkeypatch.setattr(harness, "UNCOUNTED", 0)
        monkeypatch.setattr(steps.hardware, "peak_tflops", lambda device, precision: 2.0)
        code, result = run_steps(folder, "--rows", *ROWS)
    assert code == 0
    return folder, result


def test_every_row_has_a_time_or_a_reason(comparison, tmp_path):
    _, result = comparison
    size = result["sizes"]["tiny"]
    assert list(size["rows"]) == ROWS
    tokens = size["config"]["batch_size"] * size["config"]["seq_len"]
    timed = {name: row for name, row in size["rows"].items() if not row["error"]}
    assert {"triton", "torch", "sdpa"} <= timed.keys()
    for name, row in size["rows"].items():
        assert ("ms" in row) == (name in timed) == size["gate"][row["implementation"]]["passed"], name
    for row in timed.values():
        assert row["mfu"] * row["ms"]["median"] == pytest.approx(size["tflop_per_step"] / 2 * 1e3)
        assert row["tokens_per_second"] * row["ms"]["median"] == pytest.approx(tokens * 1e3)
    losses = [row["first_loss"] for row in timed.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3 if ON_GPU else 1e-4)  # of one batch
    others = [row["reference_windows_ms"] for row in timed.values() if row.get("reference") == "triton"]
    assert timed["triton"]["windows_ms"] == sum(others, [])
    (tmp_path / "steps_a.json").write_text(json.dumps(result | {"sizes": {"small": size}}))  # tiny is in no table
    assert re.search(r"\| triton \| \d", publish.SECTIONS["steps"](tmp_path))


def losses_of(step, config):
    step.load(*next(llama.batches(config)))
    return [step.run() or step.loss.item() for _ in range(3)]


def test_yardsticks_train_as_their_peer(device):
    config = llama.Config(**steps.SIZES["tiny"], device=device, impl="sdpa", use_amp=True)
    in_fp32, device = dataclasses.replace(config, use_amp=False), torch.device(device)
    peer = losses_of(llama.TrainStep(config, device), config)
    assert losses_of(steps.with_our_optimizer(in_fp32, device), config) == pytest.approx(peer, rel=5e-3)
    step = steps.in_bf16(config, device)
    assert losses_of(step, config) == pytest.approx(peer, rel=5e-3) and len(set(peer)) == 3
    moments = [value for state in step.optimizer.state.values() for value in state.values() if value.dim()]
    assert {t.dtype for t in [*step.model.parameters(), *moments]} == {torch.bfloat16}
    with pytest.raises(steps.Unavailable, match="bf16"):
        steps.in_bf16(in_fp32, device)


# --- the gate


@pytest.mark.parametrize("swiglu", [
    lambda x, gate_up_weight, down_weight: llama.torch_swiglu(x, gate_up_weight.detach(), down_weight),
    lambda *tensors: llama.torch_swiglu(*tensors) * SLANT,
], ids=["cut", "slanted"])  # fmt: skip
def test_wrong_gradients_get_no_time(tmp_path, monkeypatch, swiglu):
    monkeypatch.setitem(llama.OPERATIONS, "sdpa", llama.OPERATIONS["sdpa"]._replace(swiglu=swiglu))
    code, result = run_steps(tmp_path, "--rows", "torch", "sdpa")
    size = result["sizes"]["tiny"]
    assert code == 1
    assert "wrong gradients" in size["rows"]["sdpa"]["error"] and "ms" not in size["rows"]["sdpa"]
    assert size["strongest_peer"] == "torch"


@pytest.mark.parametrize("factor, passed", [(1.0, True), (1.2, False), (None, False)])
def test_the_model_with_flash_attention_4_is_checked(run, monkeypatch, factor, passed):
    fake = SimpleNamespace(flash_attn_func=lambda *qkv, causal: (factor * kernels.torch_attention(*qkv), None))
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, fake if factor else None)
    (gate,) = steps.check(run, ["sdpa fa4"], TINY).values()
    assert gate["passed"] == passed and (factor or gate["error"].endswith("is not installed"))


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_autotuned_code_is_checked_with_the_batch_that_is_timed(run, monkeypatch, factor):
    make_step, batches = steps.make_step, []

    def make_as_if_compiled(row, config, device):
        step = make_step(row._replace(compile=False), config, device)
        if row.compile:  # by a compiler that errs
            batches.append(config.batch_size)
            step.run_model = lambda *batch: factor * step.model(*batch)
        return step

    monkeypatch.setattr(steps, "make_step", make_as_if_compiled)
    config = dataclasses.replace(TINY, batch_size=2 * llama.CHECK_BATCH)
    gate = steps.check(run, [steps.AUTOTUNED], config)[steps.AUTOTUNED]
    assert batches == [config.batch_size] and gate["passed"] == (factor == 1.0)
    assert gate["passed"] or "wrong gradients once it is compiled" in gate["error"] and run.any_wrong


@pytest.mark.parametrize("in_fp8", [True, False])
def test_a_row_in_fp8_may_err_as_plain_pytorch_in_fp8(run, monkeypatch, in_fp8):
    def rounded(config, device):
        return llama.TrainStep(dataclasses.replace(config, impl="torch", fp8=True), device)

    name = "sdpa rowwise" if in_fp8 else "sdpa"
    monkeypatch.setitem(steps.IMPLEMENTATIONS, name, rounded)
    gate = steps.check(run, [name], IN_FP8)[name]
    assert gate["passed"] == in_fp8 and (not in_fp8 or gate["relative_error"] > 0.05)


@pytest.mark.parametrize("row, arch, use_amp, words", [
    ("sdpa rowwise", "cpu", True, "torchao(.float8)? is not installed"),
    ("sdpa rowwise", "gfx90a", True, r"FP8 is for bf16, and for a GPU that has it \(gfx90a\)"),
    ("triton fp8", "gfx90a", True, "FP8 is for bf16"), ("triton fp8", "cpu", False, "FP8 is for bf16"),
])  # fmt: skip
def test_what_is_missing_takes_one_line(monkeypatch, row, arch, use_amp, words):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu(kind, "Some GPU", arch, 1, 32))
    with pytest.raises(Unavailable, match=words):
        steps.make_step(steps.Row(row), dataclasses.replace(IN_FP8, use_amp=use_amp), torch.device("cpu"))


# --- what follows from the rows


def concluded(times, **fields):
    """What conclude() finds in rows of these ms; fields: more of some of them."""
    rows = {name: {"error": None, "ms": {"median": ms}, "peak_memory_mib": 50 * ms} for name, ms in times.items()}
    for name, more in fields.items():
        rows[name] |= more
    result = {"rows": rows | {"hf": {"error": "not installed"}}}
    steps.conclude(result)
    pairs = {(pair["ours"], pair["peer"]): pair["time_ratio"] for pair in result["comparisons"]}
    return result["strongest_peer"], pairs, result["comparisons"]


def test_the_strongest_peer_is_the_fastest_that_is_not_ours():
    times = {"triton": 1.0, "torch": 8.0, "sdpa": 4.0}
    times |= {"sdpa flat compile graph": 2.0, "sdpa bf16 compile graph": 1.5}  # yardsticks, and no peers
    in_turns = {"reference": "triton", "ratio": {"p20": 0.2, "median": 0.3, "p80": 0.7}}
    strongest, pairs, (first, second) = concluded(times, torch=in_turns)
    assert strongest == "sdpa" and pairs == {("triton", "sdpa"): 0.25, ("triton", "torch"): 0.3}
    assert first["spread"] is None and second["spread"] == [0.2, 0.7] and second["memory_ratio"] == 0.125
    # Its ratio is to another row of ours.
    _, pairs, (pair,) = concluded({"triton graph": 10.0, "triton": 30.0, "sdpa": 12.5}, sdpa=in_turns)
    assert pairs == {("triton graph", "sdpa"): 0.8} and pair["spread"] is None


def test_fp8_is_compared_with_fp8():
    times = {"triton graph": 10, "sdpa compile graph": 12, "triton fp8 graph": 7, "sdpa rowwise compile graph": 9,
             "sdpa tensorwise compile graph": 8, "sdpa bf16 compile graph": 5}  # fmt: skip
    strongest, pairs, _ = concluded(times)
    assert strongest == "sdpa compile graph" and pairs == {
        ("triton graph", "sdpa compile graph"): 10 / 12,
        ("triton fp8 graph", "sdpa tensorwise compile graph"): 7 / 8,
        ("triton fp8 graph", "triton graph"): 7 / 10,
    }


def test_the_last_table_has_each_model_beside_its_strongest_peer(run):
    """Of a model that is not compared it has the reason."""
    ours, peer = ({"error": None, "ms": dict(p20=ms, median=ms, p80=2 * ms), "peak_memory_mib": mib}
                  for ms, mib in ((8.0, 3000), (10.0, 4000)))  # fmt: skip
    rows = {"triton graph": ours, "sdpa compile graph": peer, "hf graph": peer | {"peak_memory_mib": None}}
    in_turns = {"reference": "triton graph", "ratio": {"p20": 0.72, "median": 0.7, "p80": 0.78}}
    sizes = {
        "a": {"rows": {"triton graph": ours, "sdpa compile graph": peer | in_turns}},
        "b": {"rows": rows | {"hf graph": rows["hf graph"] | {"ms": dict(p20=9.0, median=9.5, p80=9.0)}}},
        "c": {"rows": {"triton graph": {"error": "it broke. Badly"}, "sdpa compile graph": peer}},
    }
    for size in sizes.values():
        steps.conclude(size)
    header, lines, median = steps.comparison_table(sizes | {"d": {"error": "OutOfMemoryError: a|b"}, "e": {}})
    assert {len(line) for line in [header, *lines]} == {8}
    assert [" | ".join(filter(None, line)) for line in lines] == [
        "a | 8.00 (8.00–16.0) | sdpa compile graph | 10.0 (10.0–20.0) | 0.70 (0.72–0.78) | 3,000 | 4,000 | 0.75",
        "b | 8.00 (8.00–16.0) | hf graph | 9.50 (9.00–9.00) | 0.84 | 3,000",
        "c | it broke", "d | OutOfMemoryError: a/b", "e | not measured",
    ]  # fmt: skip
    assert median == f"Median of 2: {(0.7 + 8 / 9.5) / 2:.3f} of the time, 0.750 of the memory"
    assert steps.comparison_table({"e": {}})[2] == "Nothing was compared"


NARROW = dict(batch_size=1, seq_len=7, hidden_dim=16, num_layers=1, num_heads=2, num_kv_heads=1)


def test_shapes_are_measured_and_compared_in_one_run(tmp_path, monkeypatch, capsys):
    """Here small ones, on this machine; one of them does not run, one begins too late."""
    sizes = {"odd": NARROW | dict(ffn_dim=13, vocab_size=17), "wide": NARROW | dict(vocab_size=2**30), "late": NARROW}
    monkeypatch.setattr(steps, "sizes_of", lambda options, on_gpu: steps.SWEEPS[options.sweep])
    monkeypatch.setitem(steps.SWEEPS, "shapes", sizes)
    monkeypatch.setattr(steps, "WARMUP_STEPS", 1)
    monkeypatch.setattr(harness, "UNCOUNTED", 0)
    measure_size = steps.measure_size

    def measured(run, size, *rest):
        run.options.time_limit = 0.0 if size == "late" else 100.0
        if size == "wide":
            raise MemoryError
        return measure_size(run, size, *rest)

    monkeypatch.setattr(steps, "measure_size", measured)
    flags = ["--sweep", "shapes", "--rows", "torch", "triton", "--windows", "2", "--steps", "1"]
    assert steps.main([*flags, "--output-dir", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("steps_*.json")
    result, out = json.loads(path.read_text()), capsys.readouterr().out
    assert result["sweep"] == "shapes" and list(result["sizes"]) == ["odd"]
    assert re.search(r"\nodd +[\d,.]+ \(.*\) +torch .*\nwide +MemoryError *\nlate +not started within", out)
    section = publish.SECTIONS["shapes"](tmp_path)
    assert "\nMedian of 1: " in out and "| odd (16 x 1, 2/1, 13, 17) | " in section
    assert "Not measured yet: wide, late." in section


@pytest.mark.parametrize("flags, rows", [
    ("--sweep shapes", steps.GROUPS["shapes"]), ("--sweep width", steps.GROUPS["sweep"]), ("", list(steps.ROWS)),
    ("--sweep shapes --rows sdpa", ["sdpa"]),
])  # fmt: skip
def test_rows_are_those_asked_for_or_usual(monkeypatch, tmp_path, flags, rows):
    measured = []
    monkeypatch.setattr(llama, "select_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(llama, "get_gpu", lambda kind: llama.Gpu(kind, "Some GPU", "sm_90", 1, 32))
    monkeypatch.setattr(harness.Run, "attempt", lambda run, measure: measured.append(measure.args) or {"error": ""})
    monkeypatch.setattr(harness, "header", lambda *rest: {"environment": {"device": "Some GPU"}, "benchmark": "steps"})
    assert steps.main([*flags.split(), "--output-dir", str(tmp_path)]) == 0
    assert [list(of_size) for *_, of_size in measured] == [rows] * len(measured) and measured


# --- the command line


@pytest.mark.parametrize("program, flags", [
    (steps, "--rows fastest"), (steps, "--time-limit nan"), (steps, "--tiny --sizes small"), (gpt, "--windows 0"),
    (kernels, "--only fft"), (scaling, "--sizes huge"),
])  # fmt: skip
def test_wrong_flags_end_in_one_line_that_names_one(capsys, program, flags):
    assert program.main(flags.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search("|".join(re.findall(r"--\S+", flags)), error)


@pytest.mark.parametrize("program, flags, words", [
    (kernels, "", "need a GPU"), (steps, "--sizes small large", "need a GPU.*--tiny"), (gpt, "", "needs a GPU.*--tiny"),
])  # fmt: skip
def test_what_needs_a_gpu_is_refused_before_any_work(capsys, monkeypatch, tmp_path, program, flags, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(llama, "INTERPRETED", False)
    assert program.main([*flags.split(), "--output-dir", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(words, error) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name, row", [
    ("torch", ("torch", False, False)), ("sdpa fa4 compile graph", ("sdpa fa4", True, True)),
    ("hf liger compile", ("hf liger", True, False)),
])  # fmt: skip
def test_a_row_is_an_implementation_and_how_it_is_run(name, row):
    assert steps.Row.named(name) == row and steps.Row(*row).name == name and steps.rows_of(name) == [name]


def test_each_group_has_the_anchor_and_what_it_is_timed_against():
    for name, rows in steps.GROUPS.items():
        anchors = {"triton", "sdpa compile"} if name == "eager" else {"triton graph", "sdpa compile graph"}
        assert anchors <= {*rows} and steps.rows_of(name) == rows
    assert all(row.implementation in steps.IMPLEMENTATIONS for row in steps.ROWS.values())


@pytest.mark.parametrize("flags, found", [
    ([], ["small", "medium", "large", "large-128"]), (["--sizes", "large", "small"], ["large", "small"]),
    (["--sweep", "vocab", "--sizes", "vocab 32,000"], ["vocab 32,000"]), (["--tiny"], ["tiny"]),
    (["--sweep", "shapes"], list(SHAPES)), (["--sweep", "shapes", "--sizes", "heads of 80"], ["heads of 80"]),
])  # fmt: skip
def test_sizes_are_those_asked_for(flags, found):
    assert list(steps.sizes_of(steps.parse(flags), on_gpu=True)) == found
    with pytest.raises(llama.UsageError, match="--sizes: there is no 'vocab 2', only '"):
        steps.sizes_of(steps.parse([*flags, "--sizes", "vocab 2"]), on_gpu=True)
