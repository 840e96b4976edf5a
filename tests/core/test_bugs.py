"""Each mistake that a flag brings back shows its sign, a correct run does not, and a stage is exactly its flags."""

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY, run_of

needs_triton = pytest.mark.triton
SCRIPT = Path(llama.__file__).resolve()
FLAGS_OF_A_TINY_RUN = (
    "--device cpu --impl torch --hidden-dim 16 --num-layers 1 --num-heads 2 "
    "--vocab-size 5 --seq-len 4 --batch-size 1 --num-steps 3"
).split()

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


def flags_of(names):
    return {llama.flag_of(name) for name in names}


@pytest.fixture
def launches(monkeypatch):
    """Count the launches of each kernel."""
    counts, launch = Counter(), llama.launch

    def spy(kernel, *args, **kwargs):
        counts[kernel] += 1
        launch(kernel, *args, **kwargs)

    monkeypatch.setattr(llama, "launch", spy)
    return counts


def backward(step):
    step.forward()
    step.backward()
    return step


# --- the mistakes; test_kernels.py sees that the results of slow kernels are right


@pytest.mark.parametrize("no_init", [True, False])
def test_no_init_shows_in_the_first_loss(make_step, no_init):
    step = make_step(impl="torch", hidden_dim=128, num_layers=1, seq_len=8, vocab_size=1000, no_init=no_init)
    step.forward()
    # With the default initialization the logits have a standard deviation of sqrt(hidden).
    assert step.loss > 64 if no_init else step.loss.item() == pytest.approx(math.log(1000), abs=0.3)


@needs_triton
@pytest.mark.parametrize("is_bad", [False, True])
def test_noncontiguous_kv_has_bad_strides(make_step, monkeypatch, is_bad):
    seen, forward = [], llama.flash_attention_forward

    def spy(q, k, v, o):
        seen.append((k.stride(3), v.stride(3)))
        return forward(q, k, v, o)

    monkeypatch.setattr(llama, "flash_attention_forward", spy)
    make_step(noncontiguous_kv=is_bad).forward()
    stride = TINY.batch_size * TINY.num_kv_heads if is_bad else 1
    assert seen == [(stride, stride)] * TINY.num_layers


@needs_triton
@pytest.mark.parametrize("is_bad", [False, True])
def test_triton_matmul_swiglu_launches_the_naive_kernel(make_step, launches, is_bad):
    make_step(seq_len=5, ffn_dim=9, triton_matmul_swiglu=is_bad).forward()
    naive, activation = launches[llama.swiglu_kernel], launches[llama.swiglu_activation_kernel]
    assert (naive, activation) == ((TINY.num_layers, 0) if is_bad else (0, TINY.num_layers))


@needs_triton
def test_severed_autograd_leaves_a_gradient_to_the_embedding_only(make_step, launches):
    sizes = dict(num_layers=1, seq_len=2, ffn_dim=9, triton_matmul_swiglu=True)
    correct = backward(make_step(**sizes))
    launches.clear()
    severed = backward(make_step(**sizes, severed_autograd=True))
    assert launches[llama.swiglu_kernel] == 1  # the other mistake is still there
    assert not llama.without_gradient(correct.model)
    names = [name for name, _ in severed.model.named_parameters()]
    assert names[0] == "embed_tokens.weight"
    assert llama.without_gradient(severed.model) == names[1:]
    torch.testing.assert_close(severed.loss, correct.loss)  # which is why nobody sees it


@pytest.mark.parametrize("flags, warm_ups", [(["--warmup-steps", "2"], 2), (["--no-warmup"], 0)])
def test_no_warmup_times_the_very_first_step(capsys, monkeypatch, flags, warm_ups):
    calls, forward = [], llama.TrainStep.forward
    monkeypatch.setattr(llama.TrainStep, "forward", lambda step: (calls.append(step), forward(step)))
    _, records = run_of(llama.parse_config(FLAGS_OF_A_TINY_RUN + flags, SCRIPT), "cpu")
    assert capsys.readouterr().out.count("warm-up") == warm_ups
    assert (len(records), len(calls)) == (3, 3 + warm_ups)


# --- what a run says about them


@pytest.mark.parametrize("name", ["noncontiguous_kv", "triton_matmul_swiglu", "severed_autograd", "unsynced_timing"])
def test_a_flag_without_effect_says_so(capsys, name):
    flag = llama.flag_of(name)

    def notes(*flags):
        step = llama.TrainStep(llama.parse_config(FLAGS_OF_A_TINY_RUN + [*flags], SCRIPT), torch.device("cpu"))
        llama.print_configuration(step)
        return re.findall(r"^(?:Note|Mistakes).*", capsys.readouterr().out, re.M)

    note, mistakes = notes(flag)
    assert f"{flag} has no effect" in note and flag in mistakes
    assert notes() == []


@needs_triton
@pytest.mark.parametrize("others, is_grouped", [((), True), (["severed_autograd"], False), (["compile"], False)])
def test_operations_in_use_have_readable_names(make_step, others, is_grouped):
    step = make_step(triton_matmul_swiglu=True, **dict.fromkeys(others, True))
    group = {"group": "LayerGroup"} if is_grouped else {}
    assert llama.operation_names(step.model) == {name: f"triton_{name}" for name in llama.Operations._fields} | group


# --- stages


def test_every_mistake_has_a_stage_and_a_mark_and_is_off_by_default():
    assert set(llama.BUGS) == set.union(*STAGES.values()) - {"graph"}
    assert llama.Config().bugs == () and not llama.Config().graph
    assert all(f"BUG {name}" in SCRIPT.read_text() for name in llama.BUGS)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_and_a_link_set_exactly_the_flags_of_the_stage(stage):
    link = f"/some/where/v3_stage{stage}_of_the_workshop.py"
    staged = llama.parse_config([], link)
    assert staged == llama.Config(stage=stage) == llama.parse_config(["--stage", str(stage)], link)
    set_by_hand = dict.fromkeys(STAGES[stage], True)
    assert staged == dataclasses.replace(llama.Config(**set_by_hand), stage=stage)
    assert staged.warmup_steps == (0 if stage == 7 else 3)
    assert llama.parse_config([], f"/v3_stage{stage}_dir/tiny_llama_v3.py").stage is None


def test_a_stage_leaves_the_other_flags_alone():
    config = llama.parse_config(["--stage", "4", "--no-init", "--hidden-dim", "64"], SCRIPT)
    assert set(config.bugs) == {"triton_matmul_swiglu", "no_init"} and config.hidden_dim == 64


@pytest.mark.parametrize(
    "link, flags, words",
    [
        ("v3_stage3_fake_timing.py", ["--stage", "2"], ["--stage 2", "v3_stage3_fake_timing.py", "drop"]),
        ("v3_stage9_new.py", [], ["--stage 9"]),
    ],
)
def test_a_link_that_contradicts_or_of_an_unknown_stage_is_refused(capsys, monkeypatch, link, flags, words):
    monkeypatch.setattr(llama, "train_and_report", lambda config: 0)
    assert llama.main(flags, link) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words)


def test_list_stages_prints_all(capsys):
    with pytest.raises(SystemExit) as exit:
        llama.main(["--list-stages"], SCRIPT)
    assert not exit.value.code
    _, *parts = re.split(r"^stage (\d): ", capsys.readouterr().out, flags=re.M)
    assert [int(number) for number in parts[::2]] == list(STAGES)
    for names, text in zip(STAGES.values(), parts[1::2], strict=True):
        assert set(re.findall(r"^ +(--\S+)$", text, re.M)) == flags_of(names)
        assert text.count("sign: ") == len(names - {"graph"})
