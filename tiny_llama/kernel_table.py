"""The table of kernels that torch.profiler has recorded, with the columns of rocprofv3's kernel_stats.csv.

This module imports no Triton, as a program that is profiled may choose Triton's interpreter before it imports it.
"""

import csv
import re
import statistics

from torch.autograd import DeviceType

from tiny_llama.spans import OPERATOR


def is_work(event):
    """Return whether an event is a kernel or copy of the GPU, and no range."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def kernel_table(events, on_gpu):
    """Return the columns, and a row below them for each kernel, the longest first; of a CPU for each operator."""
    durations = {}  # {kernel: ns of each call}
    for event in events:
        us = event.device_time_total if on_gpu else event.self_cpu_time_total
        if is_work(event) if on_gpu else re.match(OPERATOR, event.name) and us > 0:
            durations.setdefault(event.name, []).append(round(us * 1e3))
    total = sum(map(sum, durations.values()))
    rows = ["Name Calls TotalDurationNs AverageNs Percentage MinNs MaxNs StdDev".split()]
    for name, ns in sorted(durations.items(), key=lambda item: -sum(item[1])):
        spread = statistics.stdev(ns) if len(ns) > 1 else 0
        figures = sum(ns), statistics.mean(ns), 100 * sum(ns) / total, min(ns), max(ns), spread
        rows.append([name, len(ns), *(round(figure, 6) for figure in figures)])
    return rows


def write_kernel_table(path, events, on_gpu):
    """Write the table of kernels as a CSV file. OSError if it cannot be written."""
    with open(path, "w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerows(kernel_table(events, on_gpu))
