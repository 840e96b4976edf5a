"""pytest -p offline.pytest_plugin --emulate=gfx942: Triton kernels that tests launch run on an emulated AMD GPU.

Tensors are the CPU's; those of torch.empty() are filled with NaN or the largest integer. Every launch runs in three
orders or on other values where nothing was written, and must compute the same bits. Waves run in an order that depends
on --emulate-seed and the test's name, so that a test which failed fails again by itself.
"""

import contextlib
import os

import pytest

from offline.emulator import CHIPS, source


def pytest_addoption(parser):
    group = parser.getgroup("emulation of AMD GPUs")
    group.addoption("--emulate", metavar="ARCH", choices=list(CHIPS), help=f"the GPU: {', '.join(CHIPS)}")
    group.addoption("--emulate-seed", metavar="N", type=int, default=1, help="of the order of waves (default: 1)")
    group.addoption("--emulate-once", action="store_true", help="run a launch once: bits may depend on the order")
    group.addoption("--tinygrad", metavar="DIR", help="a copy of the emulator's commit (default: fetched by git)")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before a conftest.py imports Triton, which decides then whether it compiles."""
    option = early_config.known_args_namespace
    if option.emulate:
        os.environ["TRITON_INTERPRET"] = "0"
        try:
            source.activate(option.tinygrad)
        except source.NoSource as error:
            raise pytest.UsageError(str(error)) from None


def pytest_report_header(config):
    option = config.option
    if not option.emulate:
        return "not emulated: give --emulate=ARCH"
    return f"emulated: {option.emulate}, the order of waves from --emulate-seed={option.emulate_seed}"


def machine_of(config, name):
    """Return a new Machine, whose order of waves depends on a test's name."""
    from offline.emulator.machine import Machine  # needs tinygrad

    option = config.option
    return Machine(option.emulate, f"{option.emulate_seed} {name}", is_thorough=not option.emulate_once)


def pytest_sessionstart(session):
    """Modules and fixtures that ask for the GPU find it, too."""
    if session.config.option.emulate:
        import torch

        from offline.emulator.driver import emulating

        emulation = contextlib.ExitStack()
        emulation.enter_context(emulating(machine_of(session.config, "")))
        emulation.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty() returns
        session.config.add_cleanup(emulation.close)


@pytest.fixture(autouse=True)
def emulated(request):
    """The Machine on which the test's kernels run, or None."""
    if not request.config.option.emulate:
        return None
    import triton

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("kernels are interpreted, not compiled: drop TRITON_INTERPRET=1 where the tests set it")
    machine = machine_of(request.config, request.node.nodeid)
    triton.runtime.driver.active.machine = machine
    return machine
