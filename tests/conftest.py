"""Without a GPU the kernels run in Triton's interpreter; the variable must be set before triton is imported."""

import importlib.util
import os
import signal

import pytest

# A shell without job control has what it starts in the background ignore Ctrl-C; and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores; more threads would wait for each other

import torch  # noqa: E402  (after the variable)

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # `make emulate` says 0


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def own_settings():
    """What a run sets for its process is not left to the next test: after TF32, full fp32 on a GPU would fail."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ticking(monkeypatch):
    """A clock that only work moves: a function that lets some seconds pass."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    return work


def pytest_collection_modifyitems(items):
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "compiled" in item.keywords and interpreted:
            item.add_marker(pytest.mark.skip(reason="needs compiled kernels: a GPU, or `make emulate`"))
