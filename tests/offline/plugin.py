"""pytest -p tests.offline.plugin, as `make emulate` calls it: every test runs on the emulated GPU that EMULATE names.

Waves run in an order that depends on EMULATE_SEED and the test's name, so that a test fails again by itself.
"""

import os

import pytest

import tiny_llama_v3 as llama

llama.INTERPRETED = True  # before others import it: kernels take tensors of the CPU, though nothing interprets them

from offline.driver import emulating  # noqa: E402
from offline.machine import Machine  # noqa: E402

ARCH, SEED = os.environ["EMULATE"], os.environ["EMULATE_SEED"]


def pytest_report_header():
    return f"emulated: {ARCH}, the order of waves from EMULATE_SEED={SEED}"


@pytest.fixture(autouse=True)
def emulated(request):
    with emulating(Machine(ARCH, f"{SEED} {request.node.nodeid}")):
        yield
