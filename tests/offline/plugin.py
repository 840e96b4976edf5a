"""pytest -p tests.offline.plugin: our launchers, too, take an emulated GPU, and choose as they would on a real one."""

import contextlib
import os
from unittest import mock

import pytest

import tiny_llama_v3 as llama

llama.INTERPRETED = True  # before others import it: kernels take tensors of the CPU, though nothing interprets them

from offline.architectures import CHIPS, wave_size  # noqa: E402
from offline.recorded import gpu_found  # noqa: E402


def pytest_configure(config):
    os.environ["EMULATE"] = config.option.emulate  # for selection.py


def launch(kernel, grid, tensors, scalars, constants, num_warps=4, num_stages=2, **options):
    """Launch as llama.launch() does, but by Triton: given addresses, the driver would not know the tensors' sizes."""
    options |= dict(num_warps=num_warps, num_stages=num_stages)
    return llama.launch_by_triton(kernel, grid, tensors, scalars, constants, **options)


@contextlib.contextmanager
def our_gpu(arch, units=None):
    """Have our launchers find an emulated GPU. units: its number of compute units, by default that of the chip."""
    chip = CHIPS[arch]
    gpu = llama.Gpu("cpu", chip.name, arch, units or chip.units, wave_size(arch))
    with (
        gpu_found(gpu, launch=launch),
        mock.patch.object(llama, "triton_obstacle", lambda device, use_amp=False: None),
    ):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Skip, with the reason, what spills on gfx90a."""
    try:
        return (yield)
    except NotImplementedError as reason:
        if "which gfx90a does not emulate" in str(reason):
            pytest.skip(str(reason))
        raise


@pytest.fixture(autouse=True)
def ours(emulated):
    with our_gpu(emulated.arch):
        yield
