"""What README.md and docs/emulator.md show of the emulator."""

import importlib.util
import re

import pytest

from tests import ROOT
from tests.offline.selection import EMULATED, FAMILY, only_emulated

pytestmark = only_emulated


def block_of(page, beginning):
    """Return the only fenced block of a page that begins with some text."""
    (code,) = re.findall(rf"^```\w+\n({re.escape(beginning)}.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
    return code


@pytest.fixture
def test_of_the_page(tmp_path):
    """A function that returns the page's test, with some text replaced."""

    def load(right="", wrong=""):
        file = tmp_path / "test_double.py"
        file.write_text(block_of("docs/emulator.md", "import torch\n").replace(right, wrong, 1))
        spec = importlib.util.spec_from_file_location("test_double", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.test_double

    return load


def test_the_example_passes(test_of_the_page):
    test_of_the_page()()


@pytest.mark.parametrize("page", ["README.md", "docs/emulator.md"])
def test_the_fault_is_the_one_that_is_shown(page, test_of_the_page):
    from offline.emulator.machine import Fault

    shown = " ".join(block_of(page, "Fault: ").split()).removeprefix("Fault: ")
    pattern = r"\(.*\)".join(map(re.escape, shown.split("(...)"))).replace("gfx942", EMULATED)
    pattern = pattern if FAMILY == "cdna" else pattern.replace("buffer_load_dword", "buffer_load_b32")
    with pytest.raises(Fault) as fault:
        test_of_the_page("tl.load(x + i, i < n)", "tl.load(x + i, i < n + 1)")()
    assert re.search(f"{pattern}$", str(fault.value))
