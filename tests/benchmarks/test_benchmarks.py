"""The benchmarks' rules: gate first, failures named, ratios that follow from the windows, results never overwritten."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import gpt, kernels, layer_norm, scaling, steps
from tests.core.tiny import TINY

ON_GPU = torch.cuda.is_available()
ROWS = ["triton", "torch", "sdpa", "hf", "hf liger"] + (["triton graph", "sdpa graph"] if ON_GPU else [])
SHORT = ["--tiny", "--no-use-amp", "--windows", "2", "--steps", "1"]
SMALLER = dict(batch_size=1, seq_len=8, hidden_dim=16, num_layers=1, num_heads=2, vocab_size=16)
NEEDS_TRITON = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
IN_INTERPRETER = pytest.mark.skipif(ON_GPU, reason="takes minutes on a GPU, where the script itself is run")


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
        code, result = run_steps(folder, "--rows", *ROWS)
    assert code == 0
    return folder, result


def test_every_row_has_a_time_or_a_reason(comparison):
    _, result = comparison
    size = result["sizes"]["tiny"]
    assert list(size["rows"]) == ROWS
    for name, row in size["rows"].items():
        assert bool(row["error"]) == ("ms" not in row) == (not size["gate"][row["implementation"]]["passed"]), name
    timed = {name: row for name, row in size["rows"].items() if not row["error"]}
    assert {"triton", "torch", "sdpa"} <= set(timed)
    losses = [row["first_loss"] for row in timed.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)  # the same weights and batch
    others = [row["reference_windows_ms"] for row in timed.values() if row.get("reference") == "triton"]
    assert timed["triton"]["windows_ms"] == sum(others, [])
    pair = next(pair for pair in size["comparisons"] if pair["peer"] == "torch" and pair["ours"] == "triton")
    assert pair["time_ratio"] == timed["torch"]["ratio"]["median"]
    rows = " ".join(f"'{name}'" if " " in name else name for name in ROWS)
    assert result["command"] == f"python -m benchmarks.steps {' '.join(SHORT)} --rows {rows}"
    assert result["environment"]["torch"] == torch.__version__


def test_yardsticks_train_as_their_peer():
    config, device = (
        llama.Config(**steps.SIZES["tiny"], device="cpu", use_amp=True, impl="sdpa"),
        llama.get_device("cpu"),
    )
    trained = {}
    for name, step in {
        "sdpa": steps.make_step(steps.Row("sdpa"), config, device),
        "sdpa flat": steps.with_our_optimizer(dataclasses.replace(config, use_amp=False), device),
        "sdpa bf16": steps.make_step(steps.Row("sdpa bf16"), config, device),
    }.items():
        step.load(*next(llama.batches(config)))
        trained[name] = []
        for _ in range(3):
            step.run()
            trained[name].append(step.loss.item())
        if name == "sdpa bf16":
            moments = [value for state in step.optimizer.state.values() for value in state.values() if value.dim()]
            assert {t.dtype for t in [*step.model.parameters(), *moments]} == {torch.bfloat16}
            assert step.model.cos.dtype == torch.float32
    assert trained["sdpa flat"] == pytest.approx(trained["sdpa"], rel=5e-3) and len(set(trained["sdpa flat"])) == 3
    assert trained["sdpa bf16"] == pytest.approx(trained["sdpa"], rel=5e-3)


def test_weights_in_bf16_are_refused_in_fp32():
    config = llama.Config(**steps.SIZES["tiny"], device="cpu")
    with pytest.raises(steps.Unavailable, match="--use-amp"):
        steps.make_step(steps.Row("sdpa bf16"), config, llama.get_device("cpu"))


def test_a_sweep_changes_one_size_only():
    grows = {"length": {"seq_len", "batch_size"}, "width": {"hidden_dim", "num_heads"}, "vocab": {"vocab_size"}}
    for name, sizes in steps.SWEEPS.items():
        configs = [dataclasses.asdict(llama.Config(**size)) for size in sizes.values()]
        derived = {"num_kv_heads", "ffn_dim"} if name == "width" else set()
        assert {key for key in configs[0] if len({str(config[key]) for config in configs}) > 1} == grows[name] | derived
    lengths = [llama.Config(**size) for size in steps.SWEEPS["length"].values()]
    assert {config.tokens_per_step for config in lengths} == {16384}
    scores = [c.num_layers * min(c.batch_size, llama.CHECK_BATCH) * c.num_heads * c.seq_len**2 for c in lengths]
    assert 4 * max(scores) < 64e9  # bytes that the reference of the check keeps
    assert {size["hidden_dim"] // size["num_heads"] for size in steps.SWEEPS["width"].values()} == {64}


@pytest.mark.parametrize("swiglu", [
    lambda x, gate_up_weight, down_weight: llama.torch_swiglu(x, gate_up_weight.detach(), down_weight),
    lambda *tensors: llama.torch_swiglu(*tensors) * 1.001,
], ids=["cut", "slanted"])  # fmt: skip
def test_wrong_gradients_get_no_time(tmp_path, monkeypatch, swiglu):
    monkeypatch.setitem(llama.OPERATIONS, "sdpa", llama.OPERATIONS["sdpa"]._replace(swiglu=swiglu))
    code, result = run_steps(tmp_path, "--rows", "torch", "sdpa")
    size = result["sizes"]["tiny"]
    assert code == 1
    assert "wrong gradients" in size["rows"]["sdpa"]["error"] and "ms" not in size["rows"]["sdpa"]
    assert size["strongest_peer"] == "torch"


def test_without_a_reference_no_row_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(llama, "exact_loss_and_gradients", lambda *args: 1 / 0)
    code, result = run_steps(tmp_path, "--rows", "torch")
    row = result["sizes"]["tiny"]["rows"]["torch"]
    assert code == 0 and row["error"] == "no reference: ZeroDivisionError: division by zero"


def test_hugging_face_names_cover_the_model():
    config = llama.Config(**steps.SIZES["tiny"])
    names = [name for name, _ in llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"]).named_parameters()]
    theirs = sum((steps.hf_names(name) for name in names), [])
    assert len(set(theirs)) == len(theirs) == 2 + 9 * config.num_layers
    assert "model.layers.1.self_attn.k_proj.weight" in theirs and "model.norm.weight" in theirs


@pytest.mark.parametrize("script, flags", [
    (steps, "--rows fastest"), (steps, "--windows 0"), (steps, "--steps -1"), (steps, "--time-limit nan"),
    (steps, "--time-limit -5"), (steps, "--tiny --sizes small"), (gpt, "--rows fastest"), (gpt, "--windows 0"),
    (gpt, "--time-limit nan"), (layer_norm, "--widths 0"), (layer_norm, "--time-limit -1"), (scaling, "--sizes huge"),
    (scaling, "--windows 0"),
])  # fmt: skip
def test_wrong_flags_end_in_one_line_that_names_one(capsys, script, flags):
    assert script.main(flags.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search("|".join(re.findall(r"--\S+", flags)), error)


@pytest.mark.parametrize("name, row", [
    ("torch", ("torch", False, False)), ("sdpa fa4 compile graph", ("sdpa fa4", True, True)),
    ("triton fp8 graph", ("triton fp8", False, True)), ("hf liger compile", ("hf liger", True, False)),
])  # fmt: skip
def test_a_row_is_an_implementation_and_how_it_is_run(name, row):
    assert steps.Row.named(name) == row and steps.Row(*row).name == name
    assert steps.rows_of(name) == [name] and steps.rows_of("peers") == steps.GROUPS["peers"]


def test_each_group_has_the_anchor_and_what_it_is_timed_against():
    for name, rows in steps.GROUPS.items():
        assert {"sdpa compile graph", "triton graph"} <= set(rows), name
    assert all(row.implementation in steps.IMPLEMENTATIONS for row in steps.ROWS.values())


@pytest.mark.parametrize("flags, found", [
    ([], ["small", "medium", "large"]), (["--sizes", "large", "small"], ["large", "small"]),
    (["--sweep", "width"], list(steps.SWEEPS["width"])),
    (["--sweep", "vocab", "--sizes", "vocab 32,000"], ["vocab 32,000"]), (["--tiny"], ["tiny"]),
])  # fmt: skip
def test_sizes_are_those_asked_for(flags, found):
    assert list(steps.sizes_of(steps.parse(flags), on_gpu=True)) == found


@pytest.mark.parametrize("flags, known", [(["--tiny"], "tiny"), (["--sweep", "width"], "hidden 256"), ([], "small")])
def test_a_size_of_another_list_is_refused(flags, known):
    with pytest.raises(llama.UsageError, match=f"--sizes: there is no 'vocab 1,000', only '{known}'"):
        steps.sizes_of(steps.parse([*flags, "--sizes", "vocab 1,000"]), on_gpu=True)


@pytest.mark.parametrize("script, flags, words", [
    (kernels, "", "need a GPU"), (steps, "--sizes small large", "--sizes small large needs a GPU.*--tiny"),
    (gpt, "", "needs a GPU.*--tiny"),
])  # fmt: skip
def test_what_needs_a_gpu_is_refused_before_any_work(capsys, monkeypatch, tmp_path, script, flags, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(llama, "INTERPRETED", False)
    assert script.main([*flags.split(), "--output-dir", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(words, error) and not (tmp_path / "new").exists()


# --- kernels and libraries of them


def applied(function):
    return SimpleNamespace(apply=lambda *arguments: function(*arguments))


def fake_liger(factor=1.0):
    """Liger-Kernel's functions in PyTorch, their gradients times a factor."""

    def scaled(x):
        return x.detach() * (1 - factor) + x * factor

    return SimpleNamespace(
        LigerRMSNormFunction=applied(lambda x, w, *_: kernels.torch_norm(scaled(x), w)),
        LigerFusedAddRMSNormFunction=applied(lambda x, b, w, _: kernels.torch_add_norm(scaled(x), b, w)),
        LigerFusedGateUpSiLUMulFunction=applied(lambda x: kernels.torch_activation(scaled(x))),
    )


def fake_quack(factor=1.0):
    """QuACK's functions in PyTorch, their results times a factor."""

    def rmsnorm(x, weight, residual=None, eps=0.0, prenorm=False):
        assert eps == kernels.EPS and prenorm == (residual is not None)
        inputs = (x,) if residual is None else (x, residual)
        return (kernels.torch_norm if residual is None else kernels.torch_add_norm)(*inputs, weight * factor)

    def cross_entropy_fwd(x, targets, return_dx):
        losses, grad = kernels.torch_losses_and_gradient(x, targets)
        return factor * losses, grad

    return SimpleNamespace(**locals())


def fake_aiter(factor=1.0):
    """AITER's functions in PyTorch, their results times a factor."""

    def rms_norm(input, weight, epsilon):
        return factor * kernels.F.rms_norm(input, weight.shape, weight, epsilon)

    def rmsnorm2d_fwd_with_add(out, input, residual_in, residual_out, weight, epsilon):
        torch.add(input, residual_in, out=residual_out)
        out.copy_(rms_norm(residual_out, weight, epsilon))

    def silu_and_mul(out, input):
        torch.mul(kernels.torch_activation(input), factor, out=out)

    def flash_attn_func(q, k, v, causal, deterministic, return_lse):
        assert causal and return_lse
        return factor * kernels.torch_attention(q, k, v), None

    return SimpleNamespace(**locals())


def fake_fa4(factor=1.0):
    """FlashAttention 4 in PyTorch, its results times a factor."""
    return SimpleNamespace(flash_attn_func=lambda *qkv, causal: (factor * kernels.torch_attention(*qkv), None))


LACKING = {  # the cases in which a library has no row
    "aiter": r" backward,(?<!attention backward,)|cross-entropy", "liger": "attention|cross-entropy",
    "quack": "attention|SwiGLU", "fa4": "RMSNorm|SwiGLU|cross-entropy",
}  # fmt: skip


@IN_INTERPRETER
@NEEDS_TRITON
@pytest.mark.parametrize("library, fake, expected, reason", [
    ("aiter", fake_aiter(), 0, "None"), ("aiter", SimpleNamespace(), 0, "AttributeError: .* has no attribute"),
    ("aiter", fake_aiter(1.01), 1, "ArithmeticError: output [123] is wrong"),
    ("liger", fake_liger(), 0, "None"), ("liger", None, 0, "liger_kernel.ops is not installed"),
    ("liger", fake_liger(1.01), 1, "None|ArithmeticError: output [12] is wrong"),
    ("quack", fake_quack(), 0, "None"), ("quack", fake_quack(1.01), 1, "ArithmeticError: output [123] is wrong"),
    ("fa4", fake_fa4(), 0, "None"), ("fa4", fake_fa4(1.01), 1, "ArithmeticError: output [123] is wrong"),
])  # fmt: skip
def test_libraries_have_rows_if_they_are_right(monkeypatch, tmp_path, library, fake, expected, reason):
    device = dataclasses.replace(llama.select_device("auto"), arch="gfx942" if library == "aiter" else "sm_90")
    monkeypatch.setattr(kernels, "kernel_device", lambda: device)
    for name in kernels.LIBRARIES:
        own = fake if name == library else None  # None: it cannot be imported
        monkeypatch.setitem(sys.modules, kernels.LIBRARIES[name].package, own)
    monkeypatch.setitem(sys.modules, "quack.cross_entropy", fake)
    groups = ["rmsnorm", "swiglu", "cross-entropy", "attention"]
    assert kernels.main(["--only", *groups, "--output-dir", str(tmp_path)]) == expected
    cases = json.loads(next(tmp_path.glob("kernels_*.json")).read_text())["cases"]
    assert {case["group"] for case in cases} == set(groups)
    rows = {case["case"]: case["contenders"].pop(library, None) for case in cases}
    others = [(name, row) for case in cases for name, row in case["contenders"].items()]
    assert all(row["error"].endswith("is not installed") for name, row in others if name in kernels.LIBRARIES)
    assert all(row["us"] > 0 for name, row in others if name not in kernels.LIBRARIES)
    for case, row in rows.items():
        assert (row is None) == bool(re.search(LACKING[library], case)), case
        assert row is None or re.match(reason, str(row["error"])) and ("us" in row) == (row["error"] is None), row
    assert expected == 0 or any(row and row["error"] for row in rows.values())


@IN_INTERPRETER
@NEEDS_TRITON
def test_a_wrong_kernel_of_ours_gets_no_time_and_its_peers_do(monkeypatch, tmp_path):
    monkeypatch.setattr(llama, "swiglu_activation", lambda x: 1.001 * kernels.torch_activation(x))
    assert kernels.main(["--only", "copy", "swiglu", "adamw", "--output-dir", str(tmp_path)]) == 1
    copy, forward, backward, adamw = json.loads(next(tmp_path.glob("kernels_*.json")).read_text())["cases"]
    assert forward["contenders"]["triton"]["error"].startswith("ArithmeticError: output 1 is wrong")
    assert forward["contenders"]["torch"]["us"] > 0
    assert all(row["us"] > 0 for case in (copy, backward, adamw) for row in case["contenders"].values())


@pytest.mark.parametrize("fake, passed", [(fake_fa4(), True), (fake_fa4(1.2), False), (None, False)])
def test_the_model_with_flash_attention_4_is_checked(monkeypatch, fake, passed):
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, fake)
    (gate,) = steps.check(["sdpa fa4"], TINY, llama.get_device("cpu")).values()
    assert gate["passed"] == passed and (fake or gate["error"].endswith("is not installed"))
