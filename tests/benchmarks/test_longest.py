"""benchmarks.longest: the search finds the longest length from any guess, in few tries."""

import json
from types import SimpleNamespace

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
        assert guess != largest or len(tried) <= 2 + (guess // 32).bit_length(), "a right guess needs few more tries"


@pytest.fixture
def reserved(monkeypatch):
    """Call it with {units: bytes that a step reserves}, on a card of 1 TiB; return the units that were tried."""
    limits, tried = [], []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**40))
    monkeypatch.setattr(longest.harness, "release_all", lambda device: None)

    def give(needed):
        def peak_memory(row, units, device):
            tried.append(units)
            return needed(units) if needed(units) <= limits[-1] * 2**40 else None

        monkeypatch.setattr(longest, "peak_memory", peak_memory)
        return tried

    return give


SDPA = longest.Row.named("sdpa")


def test_what_does_not_fit_at_all_has_no_length(reserved):
    reserved(lambda units: 2**39)
    assert longest.measure(SDPA, 24, "cuda", {}) == {"tokens": 0, "reserved_mib": None}
    with pytest.raises(longest.Unavailable, match="needs a card of 2000 GiB"):
        longest.measure(SDPA, 2000, "cuda", {})


def test_what_is_known_of_one_memory_is_not_tried_again_in_a_larger_one(reserved):
    """1 GiB of weights and 2 of each 1,024 tokens: 11 of them fill 23 GiB, and 39 fill 79."""
    tried = reserved(lambda units: (1 + 2 * units) * 2**30)
    peaks = {}
    assert longest.measure(SDPA, 24, "cuda", peaks) == {"tokens": 11 * 1024, "reserved_mib": 23 * 1024}
    assert longest.measure(SDPA, 80, "cuda", peaks) == {"tokens": 39 * 1024, "reserved_mib": 79 * 1024}
    assert tried == [4, 8, 11, 12, 39, 40]


def test_what_fits_into_a_larger_memory_is_tried_again_in_a_smaller_one(reserved):
    reserved(lambda units: (1 + 2 * units) * 2**30)
    peaks = {}
    for memory, units in (80, 39), (24, 11):
        assert longest.measure(SDPA, memory, "cuda", peaks, 39)["tokens"] == units * 1024


def test_a_guess_that_is_given_is_tried_first(reserved):
    tried = reserved(lambda units: units * 2**30)
    assert longest.measure(SDPA, 24, "cuda", {}, 23) == {"tokens": 23 * 1024, "reserved_mib": 23 * 1024}
    assert tried == [23, 24]


@pytest.mark.gpu
def test_a_step_is_tried_until_it_does_not_fit(tmp_path, capsys):
    if torch.cuda.get_device_properties(0).total_memory < 4 * 2**30:
        pytest.skip("needs 4 GiB")
    assert longest.main(["--memory", "4", "--rows", "triton", "--output-dir", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("longest_*.json")
    row = json.loads(path.read_text())["memory"]["4"]["triton"]
    shown = capsys.readouterr().out
    assert row["error"] is None and f"{row['tokens'] + 1024:,} tokens do not fit" in shown, row
