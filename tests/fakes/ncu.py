"""ncu 2025: the options that the scripts use; --import prints the raw page of a report."""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

from tool import complain, finish

KERNELS = {"rmsnorm_kernel": 9_000, "flash_attention_kernel": 60_000}

parser = argparse.ArgumentParser(prog="ncu", allow_abbrev=False)
for flag in ("--nvtx", "--csv", "-f"):
    parser.add_argument(flag, action="store_true")
for option in ("--nvtx-include", "--clock-control", "--print-kernel-base", "--print-units", "--metrics", "--page"):
    parser.add_argument(option)
for option in ("--kernel-name", "--launch-count", "-o", "--import"):
    parser.add_argument(option)
parser.add_argument("program", nargs=argparse.REMAINDER)
options = parser.parse_args()
if report := getattr(options, "import"):
    metrics = Path(report).read_text().split()
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
if options.nvtx_include and os.environ.get("FAKE_STEPS") == "0":
    print("==WARNING== No kernels were profiled.", file=sys.stderr)
elif status == 0:
    Path(f"{options.o}.ncu-rep").write_text(" ".join((options.metrics or "").split(",")))
finish(status)
