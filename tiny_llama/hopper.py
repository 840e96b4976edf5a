"""What the kernels for NVIDIA Hopper share: barriers, tiles in shared memory, the TMA's descriptors, launches.

They are written in Gluon, Triton's language for what tiles hide. The warps of a program have roles: a producer has the
TMA, the unit that copies tiles, fill slots of shared memory, and consumers multiply what it brings. They meet at
barriers.
"""

import functools
from types import SimpleNamespace

import torch

import tiny_llama_v3 as llama

if llama.triton is None or [*map(int, llama.triton.__version__.split(".")[:2])] < [3, 6]:
    raise ModuleNotFoundError("Triton has no Gluon for these kernels before 3.6", name=__name__)

# The kernels' files take Gluon's names from here, and so ask first whether Triton has it.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: F401
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton has renamed them since 3.6.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

# ----------------------------------------------------------------------------------------------------------------------
# Barriers. One counts arrivals, of threads or of bytes, and then changes its phase, 0 or 1. A wait names the phase that
# must be over. The n-th use of a ring's slot is in phase n % 2; before the first, the phase that counts as over is 1.


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return a barrier for each slot of a ring, in shared memory."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), ARRIVALS)
    return barriers


@gluon.jit
def wait_until_full(barriers, use, SLOTS: gl.constexpr):
    """Wait until a ring's slot has what this use of it reads; uses count from 0."""
    mbarrier.wait(barriers.index(use % SLOTS), use // SLOTS & 1)


@gluon.jit
def wait_until_empty(barriers, use, SLOTS: gl.constexpr):
    """Wait until a ring's slot may be filled for this use of it."""
    mbarrier.wait(barriers.index(use % SLOTS), use // SLOTS & 1 ^ 1)


@gluon.jit
def make_tiles(desc, COUNT: gl.constexpr):
    """Return shared memory for some of a descriptor's tiles."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


# ----------------------------------------------------------------------------------------------------------------------
# Which program computes which tiles of attention, whose lengths differ


@gluon.jit
def dealt(turn):
    """Return the number of the tile that a program gets at its turn; it may be beyond the last one.

    There is one program for each multiprocessor. Tiles are dealt as cards are: the longest first, and every second
    round backwards, so that who got a longer one gets a shorter one next.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def tile_of(turn, num_blocks, num_others):
    """Return the block and what else is counted of the program's tile: the last blocks are the longest."""
    return num_blocks - 1 - dealt(turn) // num_others, dealt(turn) % num_others


@gluon.jit
def count_tiles(num_tiles):
    """Return how many tiles the program has: in all rounds but perhaps the last one, everybody has one."""
    rounds = num_tiles // gl.num_programs(0)
    return rounds + (dealt(rounds) < num_tiles)


# ----------------------------------------------------------------------------------------------------------------------
# Launch


def serves(num_tiles, *tensors):
    """Return whether tensors are readable, of one type of 2 bytes, and on a Hopper with a tile for each processor."""
    first = tensors[0]
    if not (first.is_cuda and first.dtype.itemsize == 2 and all(t.dtype == first.dtype for t in tensors)):
        return False
    gpu = llama.get_gpu("cuda")
    is_current = all(t.get_device() == torch.cuda.current_device() for t in tensors)
    return gpu.arch == "sm_90" and num_tiles >= gpu.num_sms and is_current and all(map(is_readable, tensors))


def is_readable(tensor):
    """Return whether the current device's TMA can read it: rows without gaps, all at multiples of 16 bytes."""
    *strides, last = tensor.stride()
    return last == 1 and not any(n * tensor.element_size() % 16 for n in strides) and tensor.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=4096)
def make_descriptor(address, dtype, shape, strides, block):
    """Return the TensorDescriptor of a tensor that the TMA reads or writes in tiles of the shape of block."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))
    # It keeps what it needs of the tensor, not the tensor, whose memory would never be freed.
    base = SimpleNamespace(dtype=dtype, data_ptr=lambda: address)
    return TensorDescriptor(base, list(shape), list(strides), list(block), layout)


def descriptor(tensor, *block):
    """See make_descriptor."""
    return make_descriptor(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), block)


COMPILED = {}  # {(kernel, device, what a launch was compiled for): Triton's CompiledKernel}


def launch(kernel, programs, arguments, constants=(), **options):
    """Call kernel[programs,](*arguments, *constants) as llama.launch() does, which has no TensorDescriptors."""
    device = torch.cuda.current_device()
    key = kernel, device, *map(specialized, arguments), *constants
    if compiled := COMPILED.get(key):
        own = torch._C._cuda_getCurrentRawStream(device), compiled.function, compiled.packed_metadata
        compiled.run(programs, 1, 1, *own, None, None, None, *arguments, *constants)
    else:
        COMPILED[key] = kernel[programs, 1, 1](*arguments, *constants, num_warps=4, **options)


def specialized(argument):
    """Return what of an argument a kernel is compiled for."""
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() & 15
    return argument
