"""What a trace is measured by, whoever recorded it: names of launches, and the time that spans cover.

This module imports only the standard library, as the reports of profiles run without PyTorch.
"""

import math

# What a CPU has for kernels: PyTorch's operators, and Inductor's code in C++.
OPERATOR = r"aten::|(graph_\d+_)?cpp_fused_"
LAUNCH = r"(?:cuda|cu|hip)\w*Launch"  # how the name of a call begins that launches a kernel


def covered(spans):
    """Return how long at least one of the spans lasted: (start, end, ...) in the order of their starts, in any unit."""
    total, until = 0.0, -math.inf
    for start, end, *_ in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
