"""Each mistake that a flag brings back shows its sign, a correct run does not, and a stage is exactly its flags."""

import dataclasses
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY, run_of
from tiny_llama import fp8

needs_triton = pytest.mark.skipif(llama.triton is None, reason="Triton is not installed")
SCRIPT = Path(llama.__file__).resolve()

# The table of the documentation: history's five stages, and three more.
STAGES = {
    1: {"no_init", "noncontiguous_kv", "unsynced_timing", "triton_matmul_swiglu"},
    2: {"noncontiguous_kv", "unsynced_timing", "triton_matmul_swiglu"},
    3: {"unsynced_timing", "triton_matmul_swiglu"},
    4: {"triton_matmul_swiglu"},
    5: set(),
    6: {"severed_autograd"},
    7: {"no_warmup"},
    8: {"graph"},
}


@pytest.fixture
def run_step(make_step):
    """A TrainStep after one forward and backward pass."""

    def run(config=TINY, **changes):
        step = make_step(config, **changes)
        step.forward()
        step.backward()
        return step

    return run


def assert_same_results(step, other):
    torch.testing.assert_close(step.loss, other.loss, rtol=1e-6, atol=0)
    for (name, p), q in zip(step.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


# --- the mistakes


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=needs_triton), "torch"])
@pytest.mark.parametrize("hidden", [64, 128])
def test_no_init_shows_in_the_first_loss(make_step, impl, hidden):
    for no_init in (True, False):
        step = make_step(impl=impl, hidden_dim=hidden, num_layers=1, seq_len=8, vocab_size=1000, no_init=no_init)
        step.forward()
        assert step.loss.item() > hidden / 2 if no_init else step.loss.item() == pytest.approx(math.log(1000), abs=0.3)


@needs_triton
def test_noncontiguous_kv_has_bad_strides_and_the_same_result(run_step, monkeypatch):
    seen, forward = [], llama.flash_attention_forward

    def spy(q, k, v, o):
        seen.append((k.stride(3), v.stride(3)))
        return forward(q, k, v, o)

    monkeypatch.setattr(llama, "flash_attention_forward", spy)
    correct, bad = run_step(), run_step(noncontiguous_kv=True)
    batch_times_heads = TINY.batch_size * TINY.num_kv_heads
    assert seen == [(1, 1)] * TINY.num_layers + [(batch_times_heads, batch_times_heads)] * TINY.num_layers
    assert_same_results(bad, correct)


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched."""
    counts, launch = Counter(), llama.launch

    def spy(kernel, *args, **kwargs):
        counts[kernel] += 1
        launch(kernel, *args, **kwargs)

    monkeypatch.setattr(llama, "launch", spy)
    return counts


@needs_triton
def test_triton_matmul_swiglu_launches_the_naive_kernel(run_step, launches):
    correct = run_step(seq_len=5, ffn_dim=9)
    assert launches[llama.swiglu_kernel] == 0 and launches[llama.swiglu_activation_kernel] == TINY.num_layers
    launches.clear()
    naive = run_step(seq_len=5, ffn_dim=9, triton_matmul_swiglu=True)
    assert launches[llama.swiglu_kernel] == TINY.num_layers and launches[llama.swiglu_activation_kernel] == 0
    assert_same_results(naive, correct)


@needs_triton
def test_severed_autograd_leaves_a_gradient_to_the_embedding_only(run_step):
    correct, severed = run_step(), run_step(severed_autograd=True)
    assert not llama.without_gradient(correct.model)
    names = [name for name, _ in severed.model.named_parameters()]
    assert names[0] == "embed_tokens.weight" and llama.without_gradient(severed.model) == names[1:]
    torch.testing.assert_close(severed.loss, correct.loss)  # which is why nobody sees it


@needs_triton
def test_severed_autograd_keeps_the_other_mistakes(run_step, launches):
    run_step(num_layers=1, seq_len=2, ffn_dim=9, severed_autograd=True, triton_matmul_swiglu=True)
    assert launches[llama.swiglu_kernel] == 1


def test_severed_autograd_at_the_default_sizes():
    with torch.device("meta"):
        model = llama.TinyLlamaTriton(llama.Config())
    embedding, total = model.embed_tokens.weight.numel(), sum(p.numel() for p in model.parameters())
    assert (embedding, total) == (512_000, 31_977_984)
    assert f"{100 * embedding / total:.1f} %" == "1.6 %"


def ignoring_bugs(function):
    return lambda *args, bugs=(): function(*args)


@needs_triton
def test_severed_autograd_stops_learning(device, monkeypatch):
    """The flag's own path with PyTorch's operations in it, which the interpreter need not run."""
    if not torch.cuda.is_available():
        operations = {name: ignoring_bugs(f) for name, f in llama.OPERATIONS["torch"]._asdict().items() if f}
        monkeypatch.setitem(llama.OPERATIONS, "triton", llama.Operations(**operations))
        monkeypatch.setattr(llama, "FlatAdamW", lambda model, lr, low_precision: llama.TorchAdamW(model, lr))

    def final_loss(**changes):
        chain = dict(data="markov", vocab_size=12, batch_size=8, seq_len=32, num_steps=120, learning_rate=1e-2)
        config = dataclasses.replace(TINY, **chain, **changes)
        return sum(record.loss for record in run_of(config, device)[1][-10:]) / 10

    entropy = 1.75 * math.log(2)
    assert final_loss() < entropy + 0.2
    assert final_loss(severed_autograd=True) > entropy + 0.6


@pytest.mark.parametrize("timing", ["phases", "step"])
def test_no_warmup_times_the_very_first_step(capsys, monkeypatch, timing):
    calls, forward = [], llama.TrainStep.forward
    monkeypatch.setattr(llama.TrainStep, "forward", lambda step: (calls.append(step.config.no_warmup), forward(step)))

    def warm_ups(**changes):
        config = llama.Config(
            impl="torch", device="cpu", hidden_dim=16, num_layers=1, num_heads=2, vocab_size=5, seq_len=4, batch_size=1,
            num_steps=3, warmup_steps=2, timing=timing, **changes,
        )  # fmt: skip
        assert len(run_of(config, "cpu")[1]) == 3
        return capsys.readouterr().out.count("warm-up")

    assert warm_ups() == 2 and len(calls) == 5
    assert warm_ups(no_warmup=True) == 0 and len(calls) == 5 + 3


@pytest.mark.gpu
def test_unsynced_timing_loses_most_of_the_step():
    def shares(**changes):
        config = llama.Config(hidden_dim=1024, batch_size=16, seq_len=512, num_layers=4, num_steps=3, **changes)
        return [sum(record.phase_ms.values()) / record.batch_ms for record in run_of(config, "cuda")[1]]

    assert max(shares(unsynced_timing=True)) < 0.5
    assert min(shares()) > 0.95


# --- what a run says about them


def printed(capsys, **changes):
    config = llama.Config(hidden_dim=16, num_layers=1, num_heads=2, vocab_size=5, seq_len=4, device="cpu", **changes)
    llama.print_configuration(llama.TrainStep(config, llama.get_device("cpu")))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["noncontiguous_kv", "triton_matmul_swiglu", "severed_autograd", "unsynced_timing"])
def test_a_flag_without_effect_says_so(capsys, name):
    flag = "--" + name.replace("_", "-")
    notes = [line for line in printed(capsys, impl="torch", **{name: True}).splitlines() if line.startswith("Note:")]
    assert len(notes) == 1 and f"{flag} has no effect" in notes[0]
    plain = printed(capsys, impl="torch")
    assert "Note:" not in plain and "Mistakes" not in plain


@needs_triton
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "flags", [["noncontiguous_kv"], ["triton_matmul_swiglu"], ["severed_autograd"], ["severed_autograd", "no_init"]]
)
def test_operations_in_use_have_readable_names(device, flags, compile):
    config = dataclasses.replace(TINY, compile=compile, **dict.fromkeys(flags, True))
    step = llama.TrainStep(config, llama.get_device(device))
    names = llama.operation_names(step.model)
    assert ("group" in names) == ("severed_autograd" not in flags and not compile)
    assert names.pop("group", "LayerGroup") == "LayerGroup"
    assert names == {name: f"triton_{name}" for name in llama.Operations._fields}


# --- stages


def test_every_mistake_has_a_flag_and_is_off_by_default():
    assert set(llama.BUGS) == set.union(*STAGES.values()) - {"graph"}
    assert llama.Config().bugs == () and not llama.Config().graph


@pytest.mark.parametrize("stage", STAGES)
def test_stage_sets_exactly_its_flags(stage):
    plain, staged = (dataclasses.asdict(llama.Config(stage=s)) for s in (None, stage))
    changed = {name for name in plain if plain[name] != staged[name]} - {"stage"}
    assert changed == STAGES[stage] | ({"warmup_steps"} if stage == 7 else set())
    assert all(staged[name] is True for name in STAGES[stage])
    assert stage != 7 or staged["warmup_steps"] == 0


def test_a_stage_leaves_the_other_flags_alone():
    config = llama.parse_config(["--stage", "4", "--no-init", "--hidden-dim", "64"], "tiny_llama_v3.py")
    assert set(config.bugs) == {"triton_matmul_swiglu", "no_init"} and config.hidden_dim == 64


@pytest.mark.parametrize("stage", STAGES)
def test_a_link_runs_its_stage(stage):
    link = f"/some/where/v3_stage{stage}_of_the_workshop.py"
    assert llama.parse_config([], link) == llama.Config(stage=stage)
    assert llama.parse_config(["--stage", str(stage)], link) == llama.Config(stage=stage)
    assert llama.parse_config([], f"/v3_stage{stage}_dir/tiny_llama_v3.py").stage is None


@pytest.mark.parametrize("link, flags, words", [
    ("v3_stage3_fake_timing.py", ["--stage", "2"], ["--stage 2", "v3_stage3_fake_timing.py", "drop"]),
    ("v3_stage9_new.py", [], ["--stage 9"]),
])  # fmt: skip
def test_a_link_that_contradicts_or_of_an_unknown_stage_is_refused(capsys, monkeypatch, link, flags, words):
    monkeypatch.setattr(llama, "train_and_report", lambda config: pytest.fail("this should have been refused"))
    assert llama.main(flags, link) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words)


def test_symbolic_link_on_disk(tmp_path):
    link = tmp_path / "v3_stage3_fake_timing.py"
    os.symlink(SCRIPT, link)
    flags = "--device cpu --impl torch --hidden-dim 16 --num-layers 1 --num-heads 2 --seq-len 4 --num-steps 1".split()
    done = subprocess.run([sys.executable, link, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Mistakes brought back: --unsynced-timing, --triton-matmul-swiglu\n" in done.stdout
    assert "Note: --unsynced-timing has no effect" in done.stdout


def test_list_stages_prints_all(capsys):
    with pytest.raises(SystemExit) as exit:
        llama.main(["--list-stages"], "tiny_llama_v3.py")
    assert not exit.value.code
    text = capsys.readouterr().out
    starts = [text.index(f"stage {stage}: ") for stage in STAGES] + [len(text)]
    for stage, start, end in zip(STAGES, starts, starts[1:], strict=False):
        flags = {word for word in text[start:end].split("\n    ") if word.startswith("--")}
        assert {flag.split()[0] for flag in flags} == {"--" + n.replace("_", "-") for n in STAGES[stage]}
        assert text[start:end].count("sign: ") == len(STAGES[stage] - {"graph"})


def test_mistakes_are_marked_where_they_live():
    lines = [*SCRIPT.read_text().splitlines(), *Path(fp8.__file__).read_text().splitlines()]
    assert all(any(f"BUG {name}" in line for line in lines) for name in llama.BUGS)
