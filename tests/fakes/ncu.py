"""ncu 2025: the options that the scripts use; --import prints the raw page of a report."""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

from tool import complain, finish

KERNELS = {"rmsnorm_kernel": 9_000, "flash_attention_kernel": 60_000}

parser = argparse.ArgumentParser(prog="ncu", allow_abbrev=False)
parser.add_argument("--nvtx", action="store_true")
parser.add_argument("--nvtx-include")
parser.add_argument("--clock-control", choices=("base", "none", "reset"))
parser.add_argument("--print-kernel-base", choices=("function", "demangled", "mangled"))
parser.add_argument("--print-units", choices=("auto", "base"))
parser.add_argument("--metrics")
parser.add_argument("-k", "--kernel-name")
parser.add_argument("-c", "--launch-count", type=int)
parser.add_argument("-f", "--force-overwrite", action="store_true")
parser.add_argument("-o", "--export")
parser.add_argument("--import", dest="report")
parser.add_argument("--csv", action="store_true")
parser.add_argument("--page", choices=("details", "raw", "source", "session"))
parser.add_argument("program", nargs=argparse.REMAINDER)
options = parser.parse_args()
if options.report:
    metrics = Path(options.report).read_text().split()
    writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Process ID", "Kernel Name", *metrics])
    writer.writerow(["", "", "", *("nsecond" if "time" in m else "%" for m in metrics)])
    for i in range(4):
        for name, ns in KERNELS.items():
            values = [f"{ns + i:,}" if "time" in m else f"{ns * 100:,}" if "bytes" in m else "40.5" for m in metrics]
            writer.writerow([i, 1, name, *values])
    sys.exit()
complain()
status = subprocess.run(options.program).returncode
if status == 0:
    Path(f"{options.export}.ncu-rep").write_text(" ".join((options.metrics or "").split(",")))
finish(status)
