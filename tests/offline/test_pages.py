"""The page of the compiled kernels shows its result, and the result is of today's launches."""

import json
from collections import Counter

import pytest

from offline import gate, pages, recorded
from offline.architectures import CHIPS

pytestmark = pytest.mark.triton


def committed():
    return json.loads(pages.RESULT.read_text())


def test_page_shows_the_result():
    assert pages.PAGE.read_text() == pages.page(committed()), "run `make kernel-report`"


def test_result_has_the_launches_of_today():
    """The tiles that the dispatch chooses now, not those of some time ago."""
    selection = {name: case.reported for name, case in recorded.CASES.items() if case.reported}
    jobs = recorded.jobs_for(CHIPS, selection)
    keys = ("arch", "case", "precision", "kernel", "variant", "tile", "calls", "wide_loads_expected")
    now, then = (
        Counter(tuple(row[key] for key in keys) for row in rows)
        for rows in ((gate.make_row(job, {"error": "not compiled"}, {}) for job in jobs), committed()["rows"])
    )
    assert now == then, "run `make kernel-report`"


def test_result_passes_the_check():
    assert not [line for row in committed()["rows"] for line in gate.violations(row)]
