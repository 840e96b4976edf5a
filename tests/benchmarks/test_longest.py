"""benchmarks.longest: the search finds the longest length from any guess, in few tries."""

import json

import pytest
import torch

from benchmarks import longest


@pytest.mark.parametrize("guess", [1, 2, 17, 70])
def test_the_search_finds_the_largest_number_that_fits(guess):
    for largest in range(80):
        tried = []

        def fits(number, largest=largest, tried=tried):
            tried.append(number)
            return number <= largest

        assert longest.longest(fits, guess) == largest
        assert min(tried) >= 1 and len(tried) == len(set(tried)), "a length that cannot be, or one tried twice"
        assert guess != largest or len(tried) == 2, "a right guess needs one more try"


def test_what_does_not_fit_at_all_has_no_length(monkeypatch):
    """As a limit below what the weights take; a length that raises another error is no answer."""
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": 2**40}))
    monkeypatch.setattr(longest.harness, "release_all", lambda device: None)
    row, device = longest.Row.named("sdpa"), torch.device("cpu")
    monkeypatch.setattr(longest, "peak_memory", lambda row, units, device: None)
    assert longest.measure(row, 24, device) == {"tokens": 0, "peak_memory_mib": None}
    # 1 GiB of weights and 2 of each 1,024 tokens: 11 of them fill 23 GiB.
    gib = lambda units: (1 + 2 * units) * 2**30  # noqa: E731
    monkeypatch.setattr(longest, "peak_memory", lambda row, units, device: gib(units) if units < 12 else None)
    assert longest.measure(row, 24, device) == {"tokens": 11 * 1024, "peak_memory_mib": 23 * 1024}
    with pytest.raises(longest.Unavailable, match="needs a card of 2000 GiB"):
        longest.measure(row, 2000, device)


@pytest.mark.gpu
def test_a_step_is_tried_until_it_does_not_fit(tmp_path, capsys):
    if torch.cuda.get_device_properties(0).total_memory < 4 * 2**30:
        pytest.skip("needs 4 GiB")
    assert longest.main(["--memory", "4", "--rows", "triton", "--output-dir", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("longest_*.json")
    row = json.loads(path.read_text())["memory"]["4"]["triton"]
    shown = capsys.readouterr().out
    assert row["error"] is None and f"{row['tokens'] + 1024:,} tokens do not fit" in shown, row
