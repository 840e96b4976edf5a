"""The examination: the file that it begins with is broken, mends of any kind pass, and the first test counts once."""

import json
import re

import pytest

import tiny_llama_v3 as llama
from exercises import check
from exercises.checks import ON_GPU, examination

pytestmark = pytest.mark.skipif(llama.triton is None or ON_GPU, reason="the checks interpret")
SOLUTION = check.SOLUTIONS / "examination.py"
TASKS = list(examination.TASKS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A participant's folder."""
    monkeypatch.setattr(check, "HERE", tmp_path)
    return tmp_path


def test_it_begins_with_six_broken_pieces(folder, capsys):
    assert check.main(["examination"]) == 1
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert str(folder / "examination.py") in first and last == "examination: 0 of 6 tasks pass"
    assert [line.split(":")[0] for line in lines] == [f"FAIL  {task}" for task in TASKS]
    # Nobody finds the answers of the solution in it, nor its comments; a file that is there is kept.
    code = (folder / "examination.py").read_text()
    assert code.count('": "",\n') == 6 and "    # " not in code
    (folder / "examination.py").write_text(re.sub('(": )""', r'\1"race"', code))
    check.main(["examination"])
    told = capsys.readouterr().out
    assert told.count("what is wrong is not 'race'") == 5
    assert "a program loads what another one has stored: two programs may both" in told.replace("\n     ", "")


EVENTS = """
def copy_bandwidth(copy, n_bytes, calls=10):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    copy()
    start.record()
    for _ in range(calls):
        copy()
    end.record()
    end.synchronize()
    return calls * n_bytes / start.elapsed_time(end) / 1e6
"""
SYNCHRONIZE = "torch.cuda.synchronize()"
BY_NAME = """
def copy_bandwidth(copy, n_bytes, calls=10):
    copy()
    stream = torch.cuda.current_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.record_event(start)
    for _ in range(calls):
        copy()
    stream.record_event(end)
    while not end.query():
        pass
    return calls * n_bytes / start.elapsed_time(end) / 1e6
"""
GATHERED = "count_ptr + chosen, 1, mask=tokens < n_tokens"  # each lane adds its own token


@pytest.mark.parametrize("task, old, new", [
    ("copy_bandwidth", "def copy_bandwidth(", f"{EVENTS}\n\ndef another("),
    ("copy_bandwidth", "def copy_bandwidth(", f"{BY_NAME}\n\ndef another("),
    ("copy_bandwidth", SYNCHRONIZE, "torch.cuda.current_stream().synchronize()"),
    ("copy_bandwidth", SYNCHRONIZE, "torch.accelerator.synchronize()"),
    ("copy_bandwidth", SYNCHRONIZE, "torch.cuda.is_available() and torch.cuda.synchronize()"),
    ("copy_bandwidth", "time.perf_counter()", "time.perf_counter_ns() / 1e9"),
    ("count_tokens_kernel", "count_ptr + experts, counts", GATHERED),
    ("divide_columns_kernel", "row * n_cols + col", "index"),
])  # fmt: skip
def test_another_mend_is_right(task, old, new, tmp_path):
    path = tmp_path / "examination.py"
    path.write_text(SOLUTION.read_text().replace(old, new))
    assert check.judge(path, check.JUDGED["examination"], task).passed


LAUNCH = "    divide_columns_kernel[grid](x, factor, y, *x.shape, BLOCK_SIZE=256)\n    return y\n"


@pytest.mark.parametrize("old, new, told", [
    (LAUNCH, "    return x / factor\n", "divide_columns_kernel was not launched"),
    ("    return y\n", "    return x / factor\n", "but the result does not come from it"),
    (" (triton.cdiv(x.numel(), 256),)", " (1,)", "at (2, 64) it is never stored"),
    ("= index // n_cols, index % n_cols", "= index // n_rows, index % n_rows", "outside of its tensors: a row has"),
    ("    return y\n", "    return\n", "does the function return what its docstring says?"),
])  # fmt: skip
def test_the_result_comes_from_the_whole_kernel_within_its_tensors(old, new, told, tmp_path):
    path = tmp_path / "examination.py"
    assert old in SOLUTION.read_text()
    path.write_text(SOLUTION.read_text().replace(old, new))
    assert told in check.judge(path, check.JUDGED["examination"], "divide_columns_kernel").message


@pytest.mark.parametrize("bandwidth, times", [
    ("2 * n_bytes / seconds", "0.6667"),  # in and out, as if all calls were one
    ("calls * n_bytes * seconds", "16"),
])  # fmt: skip
def test_a_wrong_bandwidth_is_refused(bandwidth, times, tmp_path):
    path = tmp_path / "examination.py"
    path.write_text(SOLUTION.read_text().replace("return calls * n_bytes / seconds", f"return {bandwidth}"))
    message = check.judge(path, check.JUDGED["examination"], "copy_bandwidth").message
    assert f"every element is {times} times what is expected" in message


def test_the_first_answers_count(folder, capsys):
    code = (check.SOLUTIONS.parent / "before.py").read_text()

    def answer(**words):
        answered = code
        for letter, word in words.items():
            answered = answered.replace(f'{letter} = ""', f'{letter} = "{word}"')
        (folder / "before.py").write_text(answered)
        status, printed = check.main(["before"]), capsys.readouterr()
        return status, printed.out.replace("\n      ", " "), printed.err

    words = "clock, gradient, launches, layout, race and scale"
    _, told, _ = answer()
    assert told.count("not begun: say in one word what is wrong with it, in before.py\n") == 6
    # What is no word costs nothing, and a blank behind one does not either.
    _, told, _ = answer(A="Launches ", B="clock", C="clok", E="the gradient")
    assert f"FAIL  C: not begun: 'clok' is none of the words {words}" in told
    assert "PASS  A\n" in told and "FAIL  E: not begun: 'the gradient' is none" in told
    assert "FAIL  B: what is wrong is not 'clock'" in told and "other words" not in told
    # Those that are answered are closed.
    status, told, _ = answer(B="scale", C="clock", D="race", E="gradient", F="race")
    assert status == 1 and re.search("before: 3 of 4 tasks pass\n.* next: copy_kernel \\(puzzles\\)\n", told)
    status, _, refused = answer(B="scale")
    assert status == 2 and "the first answers count" in refused
    states = json.loads((folder / "progress.json").read_text())["exercises"]["before"]
    assert [state["passed"] for state in states.values()] == [True, False, True, True, True, False]
    assert check.main(["before", "--solution"]) == 0
