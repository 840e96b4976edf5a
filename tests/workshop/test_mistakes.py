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
HAVE_MISTAKES = [*check.EXERCISES.values(), check.JUDGED["examination"]]
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
    for exercise in HAVE_MISTAKES
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


BY_DESCRIPTORS = """
    x = tl.make_tensor_descriptor(x_ptr, [n_elements], [1], [BLOCK_SIZE])
    y = tl.make_tensor_descriptor(y_ptr, [n_elements], [1], [BLOCK_SIZE])
    first = tl.program_id(0) * BLOCK_SIZE
    y.store([first], x.load([first]))
    return
"""
GRID_COPY = "    offsets = tl.program_id(0) *"
TILE = "tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :], mask=x_mask, other=0.0)"
TILE_OF_DESCRIPTOR = (
    "tl.make_tensor_descriptor(x_ptr, [n_rows, n_inner], [n_inner, 1], [BLOCK_M, BLOCK_K])"
    ".load([tile_row * BLOCK_M, start])"
)


@pytest.mark.parametrize("exercise, task, old, new", [
    ("puzzles", "grid_copy_kernel", GRID_COPY, BY_DESCRIPTORS + GRID_COPY),
    ("puzzles", "multiply_tile", TILE, TILE_OF_DESCRIPTOR),
    ("puzzles", "row_max_kernel", "row, largest)", 'row, float("-inf"))\n    tl.atomic_max(y_ptr + row, largest)'),
    # A mask may hold a condition of the whole program.
    ("puzzles", "rope_kernel", "mask = pair < half", "mask = (pair < half) & (row >= 0)"),
    ("exercise2", "silu_mul_kernel", "tl.sigmoid(gate)", "(1 / (1 + tl.exp(-gate)))"),
    ("exercise3", "attention_gradients", ".masked_fill(future, 0.0)", ".tril()"),
    ("exercise3", "attention_kernel", "p.to(v.dtype), v,", "p, v.to(tl.float32),"),
])  # fmt: skip
def test_another_right_answer_passes(exercise, task, old, new, tmp_path):
    path = tmp_path / check.EXERCISES[exercise].file
    path.write_text((check.SOLUTIONS / path.name).read_text().replace(old, new))
    assert check.judge(path, check.EXERCISES[exercise], task).passed


def test_every_task_has_mistakes_that_are_likely():
    for exercise in HAVE_MISTAKES:
        found = mutants.mistakes_of(check.SOLUTIONS / exercise.file)
        assert found.keys() == exercise.checks.TASKS.keys() and min(map(len, found.values())) >= 4
