"""Without a GPU the kernels run in Triton's interpreter; the variable must be set before triton is imported."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys

import pytest

# A shell without job control has what it starts in the background ignore Ctrl-C; and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores; more threads would wait for each other

import torch  # noqa: E402  (after the variable)

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # `make emulate` says 0

from tests.fakes import fork_server, interpreter  # noqa: E402


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """The executable of a Python that starts at once, as it has what the programs import. On a GPU the usual one, since
    the other one cannot compile kernels.
    """
    if torch.cuda.is_available():
        yield sys.executable
        return
    with fork_server.serving(tmp_path_factory.mktemp("python")) as executable:
        yield executable


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """A run collects garbage, which takes ten times as long as the run if what the tests have imported counts."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    with interpreter.quicken() if os.environ.get("TRITON_INTERPRET") == "1" else contextlib.nullcontext():
        yield


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def own_settings():
    """What a run sets for its process is not left to the next test: after TF32, full fp32 on a GPU would fail.

    Under deterministic algorithms PyTorch fills fresh memory with NaN: what a kernel has not written shows.
    """
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if dynamo := sys.modules.get("torch._dynamo"):  # after a benchmark, what recompiles often would be an error
        dynamo.config.fail_on_recompile_limit_hit = False


@pytest.fixture
def right_fp8_rounding(monkeypatch):
    """Where rounding carries into the exponent, Triton's interpreter (3.9) returns half of the number."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    types = dict(fp8e4nv=torch.float8_e4m3fn, fp8e5=torch.float8_e5m2)
    types |= dict(fp8e4b8=torch.float8_e4m3fnuz, fp8e5b16=torch.float8_e5m2fnuz)
    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        dtype = types.get(dst_type.scalar.name)
        if dtype is None:
            return convert(self, src, dst_type, rounding_mode)
        codes = torch.from_numpy(src.data.copy()).to(dtype).view(torch.uint8)
        return interpreter.TensorHandle(codes.numpy(), dst_type.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)


@pytest.fixture
def ticking(monkeypatch):
    """A clock that only work moves: a function that lets some seconds pass."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    return work


def pytest_collection_modifyitems(items):
    needed = {  # mark: whether what it needs is here, and what that is
        "gpu": (torch.cuda.is_available(), "a GPU"),
        "triton": (importlib.util.find_spec("triton"), "Triton"),
        "compiled": (os.environ.get("TRITON_INTERPRET") != "1", "compiled kernels: a GPU, or `make emulate`"),
    }
    for item in items:
        for mark, (is_here, what) in needed.items():
            if item.get_closest_marker(mark) and not is_here:  # not a keyword: a folder has the name of one
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))
