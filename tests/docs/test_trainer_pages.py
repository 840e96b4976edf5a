"""The trainer's pages: outputs are what the code above them prints, and the quiz's numbers are what one computes."""

import contextlib
import io
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from exercises.solutions.exercise1_triton_basics import bytes_moved, memory_lines
from exercises.solutions.exercise2_swiglu_optimization import matmul_flop
from exercises.solutions.exercise3_flash_attention import key_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("docs/trainer.md", "exercises/performance_debugging/WORKSHOP_GUIDE.md")]
SHOWN = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", flags=re.S)
EXAMPLES = [(page.name, *pair) for page in PAGES for pair in SHOWN.findall(page.read_text())]
NUMBER = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)( ms|%)?")


def test_there_are_outputs_to_compare():
    assert len(EXAMPLES) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pages show a CPU's output")
@pytest.mark.parametrize("page, code, shown", EXAMPLES, ids=itertools.count(1))
def test_a_shown_output_is_what_the_code_prints(page, code, shown, monkeypatch):
    """But for times, and for digits that another release of PyTorch may round differently."""
    monkeypatch.setattr(llama, "flash_attention_forward", llama.flash_attention_forward)  # one of them replaces it
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    printed = printed.getvalue()
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    for (ours, timed), (theirs, _) in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert timed or math.isclose(*(float(n.replace(",", "")) for n in (ours, theirs)), rel_tol=0.01, abs_tol=0.01)


# --- quiz

QUESTION = re.compile(r"^\*\*(\d+)\.\*\* (.*?)^<details>.*?\n\n\*\*(.+?)\*\*(.*?)^</details>", flags=re.M | re.S)
QUIZ = QUESTION.findall((ROOT / "docs" / "quiz.md").read_text())
TILES = [sum(sum(key_blocks(block, 64, 64, 2048)) for block in range(32))]
SPLITS = list(itertools.combinations(range(6), 3))
COMPUTED = {
    1: math.log(32_000), 3: 100 * 512_000 / llama.count_weights(llama.TinyLlamaTriton(llama.Config()).parameters()),
    5: llama.entropy(llama.Config(vocab_size=20, data="markov")), 6: memory_lines(64, 2, 1), 7: memory_lines(64, 2, 64),
    9: bytes_moved(8, 64, 4)[1] / bytes_moved(8, 64, 4)[0], 11: 1024 * 2048, 12: matmul_flop(1, 512, 1) / (3 * 512 * 4),
    14: math.exp(3 - 5), 15: TILES[0], 17: (1000 + 19) / 20, 19: 1 / (1 - 0.87),
    20: len(SPLITS) / sum(max(split) == 2 or min(split) == 3 for split in SPLITS),
}  # fmt: skip


def test_the_quiz_has_twenty_questions_each_tied_to_a_place():
    assert [int(number) for number, *_ in QUIZ] == list(range(1, 21))
    for number, question, answer, reason in QUIZ:
        choices = re.findall(r"^- ([a-d])\) ", question, flags=re.M)
        assert choices in ([], list("abcd")) and bool(choices) != ("*A number.*" in question.replace("\n", " ")), number
        assert (answer in choices) if choices else re.fullmatch(r"[\d.,]+", answer), number
        assert re.search(r"\]\(\.\./(exercises|README_WORKSHOP)", reason), number


def test_every_number_of_the_quiz_is_computed():
    given = {int(number): answer for number, question, answer, _ in QUIZ if "- a)" not in question}
    assert given.keys() == COMPUTED.keys()
    for number, answer in given.items():
        decimals = len(answer.partition(".")[2])
        assert f"{COMPUTED[number]:,.{decimals}f}" == answer, number


def test_the_slow_view_of_the_quiz_is_the_one_that_it_names():
    views = dict(re.findall(r"- ([a-d])\) `x(.*?)`", QUIZ[7][1]))
    x = torch.zeros(2, 3, 4, 8)
    strides = {letter: eval(f"x{view}", {"x": x}).stride(-1) for letter, view in views.items()}
    assert [letter for letter, stride in strides.items() if stride != 1] == [QUIZ[7][2]]


# --- glossary and card


def test_the_glossary_is_in_order():
    terms = re.findall(r"^\| \*\*(.*?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), flags=re.M)
    assert len(terms) > 50 and terms == sorted(terms, key=str.lower)


def test_the_card_names_every_mistake_and_commands_that_exist():
    card = PAGES[1].read_text().partition("\n## ")[0]
    assert len(card.splitlines()) <= 55  # a page of A4
    stages = {int(number) for number in re.findall(r"^\| (\d) [a-z]", card, flags=re.M)}
    assert stages == llama.STAGES.keys()
    for path in re.findall(r"(?<![\w/.])(?:\./)?([\w/]+\.(?:sh|py))", card):
        assert (ROOT / path).exists() or path == "mine.py", path
