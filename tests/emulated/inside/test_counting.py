"""Kernels whose accesses can be counted by hand, counted while they are executed."""

import pytest
import torch

import tiny_llama_v3 as llama
from tests.core.tiny import TINY
from tests.emulated.selection import EMULATED, only_emulated

if EMULATED:
    from emulated.counting import CountingMachine, count_step
    from emulated.driver import emulating
    from emulated.memory_system import LINE_BYTES

pytestmark = only_emulated


@pytest.fixture
def count():
    """A function that returns the Counts of the one kernel that a function launches."""

    def count(function, watched=None):
        with emulating(CountingMachine(EMULATED, watched)) as machine:
            function()
        (counts,) = machine.counts.values()
        return counts

    return count


def test_a_pass_over_contiguous_rows(count):
    gate_up = torch.randn(8, 4096)
    counts = count(lambda: llama.swiglu_activation(gate_up))
    assert counts.launches == 1
    assert counts.bytes == {"load": gate_up.nbytes, "store": gate_up.nbytes // 2}
    line = LINE_BYTES[EMULATED]
    assert counts.lines == counts.fewest_lines == {kind: n // line for kind, n in counts.bytes.items()}
    assert counts.instructions["matrix"] == 0
    assert counts.instructions["global memory"] == sum(counts.accesses.values())


def test_masked_lanes_ask_for_nothing(count):
    gate_up = torch.randn(3, 2 * 100)
    counts = count(lambda: llama.swiglu_activation(gate_up))
    assert counts.bytes == {"load": gate_up.nbytes, "store": gate_up.nbytes // 2}


def attention_of(layout):
    q = torch.randn(1, 64, 2, 64)
    k, v = (layout(torch.randn(1, 64, 2, 64)) for _ in range(2))
    return lambda: llama.flash_attention_forward(q, k, v)


def strided(x):
    """x (batch, seq, heads, head_dim), whose head_dim is strided by a line."""
    memory = torch.zeros(*x.shape, 32)
    memory[..., 0] = x
    return memory[..., 0]


def test_a_strided_head_touches_a_line_for_each_element(count):
    good, bad = count(attention_of(lambda x: x)), count(attention_of(strided))
    assert good.bytes == bad.bytes
    assert good.instructions["matrix"] == bad.instructions["matrix"] > 0
    elements_of_k_and_v = 2 * 2 * 64 * 64
    q_lines = good.bytes["load"] // 3 // LINE_BYTES[EMULATED]
    assert good.lines["load"] == 3 * q_lines  # one tile of q, k and v
    assert bad.lines["load"] == q_lines + elements_of_k_and_v


def test_what_is_not_watched_is_only_executed(count):
    counts = count(attention_of(lambda x: x), watched=())
    assert counts.launches == 1 and counts.instructions["matrix"] > 0 and not counts.bytes


def test_a_step():
    counts = count_step(EMULATED, TINY)
    assert {"rmsnorm_kernel", "flash_attention_kernel", "adamw_kernel"} <= set(counts)
    assert all(c.launches and c.instructions["scalar"] for c in counts.values())
