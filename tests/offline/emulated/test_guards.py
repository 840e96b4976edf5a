"""What the emulator says of kernels that are wrong on any GPU, and of right ones that look alike."""

import inspect

import pytest
import torch
import triton
import triton.language as tl

from tests.offline.selection import EMULATED, only_emulated

if EMULATED:
    from offline.emulator.code_object import CodeObject
    from offline.emulator.machine import Fault, Machine

pytestmark = only_emulated


@pytest.fixture(autouse=True)
def thorough(emulated):
    """Launches run three times, as those of other people's tests."""
    triton.runtime.driver.active.machine = Machine(EMULATED, 7, is_thorough=True)


@triton.jit
def copy_kernel(x, y, first, n, last, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + first + i, first + i < last)
    tl.store(y + i, value, i < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("n", [1, 60, 61, 64])
def test_an_element_too_far_is_seen_at_any_size(dtype, n):
    x, y = torch.ones(n, dtype=dtype), torch.empty(n, dtype=dtype)
    copy_kernel[(1,)](x, y, 0, n, n, BLOCK=128)
    assert torch.equal(x, y)
    size = x.element_size()
    at_the_end = f"touches byte {n * size} of .*, which has {n * size}"
    load = inspect.getsourcelines(copy_kernel.fn)[1] + 3
    for arguments, line, told in (
        ((x, y, 0, n, n + 1), load, at_the_end),
        ((x, y, -1, n, n), load, f"byte -{size} of x"),
        ((x.repeat(2), y, 0, n + 1, n + 1), load + 1, at_the_end),
    ):
        with pytest.raises(Fault, match=rf"test_guards.py:{line}: copy_kernel on {EMULATED}, workgroup .* {told}"):
            copy_kernel[(1,)](*arguments, BLOCK=128)


def test_a_view_is_held_to_the_memory_of_its_tensor():
    """As on a GPU, where a view is no more than an address."""
    copy_kernel[(1,)](torch.arange(9.0)[3:5], y := torch.empty(4), 0, 4, 4, BLOCK=4)
    assert y.tolist() == [3, 4, 5, 6]


@triton.jit
def scatter_kernel(x, y, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i // SHARE, tl.load(x + i))


def test_a_store_of_several_values_to_one_place_is_seen():
    y = torch.empty(64)
    scatter_kernel[(1,)](torch.ones(64), y, SHARE=2, BLOCK=64)  # of one value
    scatter_kernel[(1,)](torch.arange(64.0), y, SHARE=1, BLOCK=64)
    assert y.tolist() == list(range(64))
    with pytest.raises(Fault, match=r"stores more than one value at byte 0 of y, which has 256"):
        scatter_kernel[(1,)](torch.arange(64.0), y, SHARE=2, BLOCK=64)


@triton.jit
def count_kernel(counter, values, HOW: tl.constexpr):
    value = tl.load(values + tl.program_id(0))
    if HOW == "atomic":
        tl.atomic_add(counter, value)
    else:
        place = counter + 2 * (HOW == "store_third")
        tl.store(place, tl.load(place) + value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("n", [2, 7, 30])
def test_an_update_that_is_lost_between_workgroups_is_seen(dtype, n):
    """Though one workgroup after the other adds up the same sum of integers in any order."""
    values = (torch.arange(1, n + 1) * 31.25).to(dtype)  # whose sums are exact
    counter = torch.zeros(1, dtype=dtype)
    count_kernel[(n,)](counter, values, "atomic")
    torch.testing.assert_close(counter, values.sum(0, keepdim=True, dtype=dtype))
    with pytest.raises(Fault, match="counter, element 0, is .* or .*: it depends on the order of its workgroups"):
        count_kernel[(n,)](torch.zeros(1, dtype=dtype), values, "store")


def test_an_element_is_counted_from_the_beginning_of_its_view():
    counters = torch.zeros(9)
    with pytest.raises(Fault, match="counter, element 2, is .* or .*"):
        count_kernel[(7,)](counters[3:], torch.ones(7), "store_third")


def test_workgroups_may_change_what_they_read_themselves():
    x = torch.arange(30.0)
    copy_kernel_in_place[(30,)](x)
    assert x.tolist() == list(range(1, 31))


@triton.jit
def copy_kernel_in_place(x):
    tl.store(x + tl.program_id(0), tl.load(x + tl.program_id(0)) + 1)


@triton.jit
def print_kernel(x, PRINTS: tl.constexpr):
    value = tl.load(x)
    if PRINTS:
        tl.device_print("value", value)
    tl.store(x, value + 1)


def test_printing_is_refused_by_name():
    print_kernel[(1,)](torch.zeros(1), PRINTS=False)
    with pytest.raises(Fault, match="Printing and failed assertions are not emulated"):
        print_kernel[(1,)](torch.zeros(1), PRINTS=True)


def test_a_tensor_that_nobody_wrote_is_nan():
    assert torch.empty(5).isnan().all() and torch.empty_like(torch.ones(2, dtype=torch.int8)).tolist() == [127, 127]


def test_a_line_begins_with_its_first_instruction():
    code = object.__new__(CodeObject)
    code.lines = [(100, "/a/k.py", 3), (108, "/a/k.py", 4), (108, "/a/k.py", 5), (120, "/a/k.py", 0)]
    found = [code.line_of(address) for address in (99, 100, 104, 108, 119, 120)]
    assert found == ["", "k.py:3", "k.py:3", "k.py:5", "k.py:5", ""]
