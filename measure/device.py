"""The device that kernels are measured on, and whether they can run there."""

import torch

import tiny_llama_v3 as llama


def synchronize(device):
    """Waits for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def require_triton():
    if llama.triton is None:
        raise llama.UsageError("Triton is not installed: pip install triton, on Linux")


def kernel_device():
    """Return the torch.device on which kernels are measured; UsageError if they cannot run there."""
    require_triton()
    device = llama.select_device("auto")
    obstacle = llama.triton_obstacle(device)
    if obstacle:
        raise llama.UsageError(f"the kernels need a GPU: {obstacle}")
    return device
