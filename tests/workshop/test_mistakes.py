"""The usual mistakes: each fails its own task, with the words that name it."""

import pytest

import tiny_llama_v3 as llama
from exercises import check
from exercises.checks import ON_GPU, mutants

pytestmark = [
    pytest.mark.skipif(llama.triton is None, reason="Triton is not installed"),
    pytest.mark.skipif(ON_GPU, reason="mistakes are looked for in the interpreter"),
]
# Of the mistakes of a task, so many are among the fast tests: fewest of the kernels that take longest.
FAST = {"attention_kernel": 6, "grouped_matmul_kernel": 2, "tuned_matmul_kernel": 2}
MISTAKES = [
    # The edit is made when the tests are collected: one that does not fit its solution is an error there.
    pytest.param(
        exercise,
        task,
        mistake.words,
        mutants.edited(mistake, task, path),
        id=f"{task}: {mistake.new}",
        marks=[pytest.mark.slow] * (number >= FAST.get(task, 10)),
    )  # fmt: skip
    for exercise in check.EXERCISES.values()
    for path in [check.SOLUTIONS / exercise.file]
    for task, mistakes in mutants.mistakes_of(path).items()
    for number, mistake in enumerate(mistakes)
]


@pytest.mark.parametrize("exercise, task, words, code", MISTAKES)
def test_a_mistake_fails_its_task_and_is_named(exercise, task, words, code, tmp_path):
    path = tmp_path / exercise.file
    path.write_text(code)
    verdict = check.judge(path, exercise, task)
    assert not verdict.passed and verdict.begun
    assert words in verdict.message


def test_every_task_has_mistakes_that_are_likely():
    for exercise in check.EXERCISES.values():
        found = mutants.mistakes_of(check.SOLUTIONS / exercise.file)
        assert found.keys() == exercise.checks.TASKS.keys() and min(map(len, found.values())) >= 4
