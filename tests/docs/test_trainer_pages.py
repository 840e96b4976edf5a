"""The pages of the trainer and of the audit: outputs are what code prints, the quiz's numbers what one computes."""

import contextlib
import io
import itertools
import math
import re

import pytest
import torch

import tiny_llama_v3 as llama
from exercises.solutions.exercise1_triton_basics import bytes_moved, memory_lines
from exercises.solutions.exercise2_swiglu_optimization import matmul_flop
from exercises.solutions.exercise3_flash_attention import key_blocks
from offline import architectures
from tests import ROOT

CARD = (ROOT / "exercises/performance_debugging/WORKSHOP_GUIDE.md").read_text()
TRAINER = (ROOT / "docs/trainer.md").read_text()
SHOWN = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", flags=re.S)
AUDIT = (ROOT / "docs/audit.md").read_text()
EXAMPLES = SHOWN.findall(TRAINER + CARD + AUDIT)
NUMBER = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)( ms|%)?")
assert len(EXAMPLES) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pages show a CPU's output")
@pytest.mark.parametrize("code, shown", EXAMPLES)
def test_a_shown_output_is_what_the_code_prints(code, shown, monkeypatch):
    """But for times, and for digits that another release of PyTorch may round differently."""
    monkeypatch.setattr(llama, "flash_attention_forward", llama.flash_attention_forward)  # one of them replaces it
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, {})
    printed = output.getvalue()
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    ours, theirs = (
        [float(number.replace(",", "")) for number, is_time in NUMBER.findall(text) if not is_time]
        for text in (printed, shown)
    )
    assert ours == pytest.approx(theirs, rel=0.01, abs=0.01)


def test_the_minutes_of_each_plan_add_up():
    rows = re.findall(r"^\|[^|]*((?:\| *\d* *){4})\|", TRAINER, flags=re.M)
    for minutes in zip(*(row.split("|")[1:] for row in rows), strict=True):
        assert sum(int(f"0{each.strip()}") for each in minutes) == 2 * int(minutes[-1])


@pytest.mark.parametrize("arch, column, lanes", [("sm_90", 208, "warps of 32"), ("gfx942", 344, "waves of 64")])
def test_the_picture_of_a_gpu_has_the_sizes_that_occupancy_is_computed_from(arch, column, lanes):
    chip, picture = architectures.CHIPS[arch], (ROOT / "exercises/pictures/gpu.svg").read_text()
    units, warps, registers, place, shared, each = re.findall(rf'x="{column}" y="\d+">(.*?)<', picture)[1:7]
    assert units.split()[0] == str(chip.units) and warps == f"{4 * chip.warps} {lanes}"
    # Four schedulers, each with so many registers of 4 bytes in each lane.
    assert registers == f"{4 * chip.registers * int(lanes[-2:]) * 4 // 1024} KiB"
    assert shared.startswith(f"{chip.unit_kib} ") and place == each == f"in each {units.split()[1][:-1]}"


def test_the_picture_of_exercise_3_has_the_sums_of_its_text():
    text = (ROOT / "exercises/exercise3_flash_attention.md").read_text()
    picture = (ROOT / "exercises/pictures/online_softmax.svg").read_text()
    tiles = [eval(tile) for tile in re.findall(r"`(\[[\d, ]+\])`", text)[:4]]
    scores, values = torch.tensor(tiles, dtype=float).view(2, 4)
    p = torch.exp(scores - scores.max())
    assert f">l = {p.sum():.3f}<" in picture and f">acc = {p @ values:.2f}<" in picture


def test_the_pictures_and_notes_of_the_online_softmax_have_its_sums():
    """Of eight scores in tiles of two: after each tile the sums over what has been seen, under its maximum."""
    folder, slides = ROOT / "exercises/pictures", (ROOT / "docs/slides.md").read_text()
    whole, second, last = ((folder / f"online_softmax{name}.svg").read_text() for name in ("", "2", "4"))
    scores = [float(score) for score in re.findall(r"middle; [^>]*>(\d)<", last)]
    sums = []
    for seen in (2, 4, 6, 8):
        p = [math.exp(score - max(scores[:seen])) for score in scores[:seen]]
        sums.append((f"l = {sum(p):.3f}", f"acc = {sum(10 * at * each for at, each in enumerate(p, 1)):.2f}"))
        assert all(f">{each}<" in whole for each in sums[-1])
    assert f">so far {', '.join(sums[0])}<" in second and f">so far {', '.join(sums[2])}<" in last
    assert all(f">{each}<" in last for each in sums[3])
    assert all(", ".join(each) in slides.replace("\n", " ") for each in sums[1:3])


# --- quiz

QUESTION = re.compile(r"^\*\*(\d+)\.\*\* (.*?)^<details>.*?\n\n\*\*(.+?)\*\*(.*?)^</details>", flags=re.M | re.S)
QUIZ = {int(number): rest for number, *rest in QUESTION.findall((ROOT / "docs" / "quiz.md").read_text())}
TILES = sum(sum(key_blocks(block, 64, 64, 2048)) for block in range(32))
SPLITS = list(itertools.combinations(range(6), 3))
COMPUTED = {
    1: math.log(32_000), 3: 100 * 512_000 / llama.count_weights(llama.TinyLlamaTriton(llama.Config()).parameters()),
    5: llama.entropy(llama.Config(vocab_size=20, data="markov")), 6: memory_lines(64, 2, 1), 7: memory_lines(64, 2, 64),
    9: bytes_moved(8, 64, 4)[1] / bytes_moved(8, 64, 4)[0], 11: 1024 * 2048, 12: matmul_flop(1, 512, 1) / (3 * 512 * 4),
    14: math.exp(3 - 5), 15: TILES, 17: (1000 + 19) / 20, 19: 1 / (1 - 0.87),
    20: len(SPLITS) / sum(max(split) == 2 or min(split) == 3 for split in SPLITS),
    22: sum([torch.ones((), dtype=torch.bfloat16)] * 1000).item(),
}  # fmt: skip


def test_each_question_has_an_answer():
    assert [*QUIZ] == [*range(1, 26)]
    for number, (question, answer, _) in QUIZ.items():
        choices = "".join(re.findall(r"^- ([a-d])\) ", question, flags=re.M))
        assert choices == ("" if number in COMPUTED else "abcd") and (answer in choices) == bool(choices)


@pytest.mark.parametrize("number", COMPUTED)
def test_a_number_of_the_quiz_is_computed(number):
    _, answer, _ = QUIZ[number]
    assert f"{COMPUTED[number]:,.{len(answer.partition('.')[2])}f}" == answer


def test_the_slow_view_of_the_quiz_is_the_one_that_it_names():
    question, answer, _ = QUIZ[8]
    x = torch.zeros(2, 3, 4, 8)
    views = {letter: eval(view, {"x": x}) for letter, view in re.findall(r"- ([a-d])\) `(x.*?)`", question)}
    assert [letter for letter, view in views.items() if view.stride(-1) != 1] == [answer]
