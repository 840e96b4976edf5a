"""The costs of kernels: lines are counted as code, and what is saved is a difference within one result."""

import json

import pandas as pd

from benchmarks.pages import kernel_costs
from benchmarks.pages.training_steps import PLAIN, WITH_OUR_OPTIMIZER

SOURCE = '''
import triton

# 5 Linear
def linear(x):
    """Counts in 5."""
    return x

# ---
# 6 RMSNorm, of two lines

@jit
def norm_kernel(
    x_ptr,  # each argument in a line of its own
    y_ptr,
):
    """A docstring
    of two lines."""
    # A comment.
    y = x_ptr

    return y

def norm_tile(n_rows):
    return (n_rows,
            1)

class NormFunction:
    """A docstring."""

    def forward(ctx):
        """Only a docstring."""

def torch_norm(x):
    return x  # a reference is not ours
'''


def test_lines_are_code_of_kernels_and_around_them():
    # @jit, def, y =, return; and def, return (...); class, def, pass.
    assert kernel_costs.lines_of(SOURCE) == {5: [0, 2], 6: [4, 5]}
    counted = kernel_costs.lines_of(kernel_costs.inspect.getsource(kernel_costs.llama))
    assert all(min(counted[section]) > 10 for section in kernel_costs.SECTIONS.values())


def test_what_is_saved_follows_from_the_ratios_to_ours_within_one_result():
    """Ours takes 0.2 of the time of one and 0.5 of the other, which thus saves 0.6; their medians have drifted."""

    def rows(files=("a", "a"), errors=(None, None)):
        columns = {"row": [PLAIN, kernel_costs.FUSED], "ms median": [40.0, 15.0], "ratio median": [0.2, 0.5]}
        return pd.DataFrame(columns | {"file": files, "error": errors})

    sizes = {"small": rows(), "medium": rows(files=("a", "b")), "large": rows(errors=("OutOfMemoryError", None))}
    sizes |= {"xl": rows(errors=(None, "OutOfMemoryError")).assign(**{"ms median": [40.0, None]})}
    assert kernel_costs.saved(sizes, PLAIN, kernel_costs.FUSED) == {
        "small": "24.0 of 40.0",
        "large": "out of memory without",
    }
    assert kernel_costs.saved(sizes, kernel_costs.FUSED, WITH_OUR_OPTIMIZER) == {"xl": "out of memory without"}
    ours = pd.DataFrame({"row": [kernel_costs.OUR_STEP], "ms median": [8.0], "file": "a", "error": None})
    sizes = {"small": pd.concat([rows(), ours])}
    assert kernel_costs.saved(sizes, kernel_costs.FUSED, kernel_costs.OUR_STEP) == {"small": "7.50 of 15.0"}


def test_a_call_alone_is_both_passes_of_one_case(tmp_path):
    def case(name, group="swiglu", **us):
        failed = {"error": "it failed"}
        contenders = {
            row: {"us": value, "rate": 1.0, "error": None} if value else failed
            for row, value in (us | {"liger": None}).items()
        }
        return {"group": group, "case": name, "amount": 1, "unit": "TB/s", "contenders": contenders}

    cases = [
        case("SwiGLU, F = 8", triton=100.0, torch=300.0, compile=150.0),
        case("SwiGLU backward, F = 8", triton=200.0, torch=900.0, compile=190.0),
        case("SwiGLU, F = 16", triton=100.0, torch=300.0),
        case("SwiGLU backward, F = 16", triton=None, torch=900.0),  # no sum of one pass
        case("attention, (1, 8, 4/2, 64)", "attention", triton=4.0, torch=3.0),
        case("attention, (1, 8, 4/2, 128)", "heads-128", triton=4.0, torch=3.0),  # whose kernels are not counted
    ]
    environment = {"device": "Some GPU", "torch": "2.11", "triton": "3.6"}
    result = {"date": "2030-01-02", "environment": environment, "dtype": "bfloat16", "cases": cases}
    (tmp_path / "kernels_a.json").write_text(json.dumps(result))
    rows = kernel_costs.kernel_rows(kernel_costs.long_table(tmp_path, *kernel_costs.KERNELS))
    table = kernel_costs.alone_table(rows, {7: [170, 160], 8: [30, 60]})
    assert table.fillna("").values.tolist() == [
        ["SwiGLU, F = 8", "30 + 60", "0.300", "0.900", "0.0400"],
        ["attention, (1, 8, 4/2, 64)", "170 + 160", "0.00400", "-0.00100", ""],
    ]
