"""rocpd of ROCm 7.1 and newer: summary to CSV."""

import argparse
import sqlite3
import statistics
from pathlib import Path

from tool import complain

parser = argparse.ArgumentParser(prog="rocpd")
modes = parser.add_subparsers(dest="mode", required=True)
summary = modes.add_parser("summary")
summary.add_argument("-i", "--input", nargs="+", required=True)
summary.add_argument("-f", "--format", nargs="+", choices=("console", "csv", "html", "json", "md", "pdf"))
summary.add_argument("-o", "--output-file", default="out")
summary.add_argument("-d", "--output-path", default="./rocpd-output-data")
for flag in ("--domain-summary", "--summary-by-rank"):
    summary.add_argument(flag, action="store_true")
summary.add_argument("--region-categories", nargs="+")
options = parser.parse_args()
complain()
connection = sqlite3.connect(options.input[0])
groups = {}
for name, duration in connection.execute("SELECT name, duration FROM kernels"):
    groups.setdefault(name, []).append(duration)
total = sum(map(sum, groups.values()))
lines = ['Name,Calls,"DURATION (nsec)","AVERAGE (nsec)","PERCENT (INC)","MIN (nsec)","MAX (nsec)",STD_DEV']
for name, ns in sorted(groups.items(), key=lambda item: -sum(item[1])):
    spread = statistics.stdev(ns) if len(ns) > 1 else ""  # SQL divides by zero
    numbers = len(ns), sum(ns), statistics.fmean(ns), 100 * sum(ns) / total, min(ns), max(ns), spread
    lines.append(",".join([f'"{name}"', *map(str, numbers)]))
folder = Path(options.output_path)
folder.mkdir(parents=True, exist_ok=True)
(folder / f"{options.output_file}_kernels_summary.csv").write_text("\n".join(lines) + "\n")
