#!/usr/bin/env python3
"""Write the measured parts of README_PROFILING.md, from benchmarks/results: pictures, and overhead.json.

    python profiling/guide.py            rewrite what stands between the markers
    python profiling/guide.py --check    exit with 1 if anything would change

Exit codes: 0 done, 1 the guide is out of date, 2 the request cannot be met.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import tiny_llama_v3 as llama  # noqa: E402
from benchmarks.publish import NOT_MEASURED, read_result, update  # noqa: E402
from tiny_llama_v3 import exit_code_of  # noqa: E402

GUIDE = ROOT / "README_PROFILING.md"
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = {
    "kernels_stage4.png": "The top kernels of stage 4",
    "kernels_stage5.png": "The top kernels of stage 5",
    "timeline_stage5.png": "One step of stage 5",
    "roofline.png": "The roofline of each Triton kernel alone",
}


def pictures():
    lines = [f"![{title}](benchmarks/results/{name})" for name, title in PICTURES.items() if (RESULTS / name).exists()]
    return "\n\n".join(lines) or NOT_MEASURED


def overhead():
    path = RESULTS / "overhead.json"
    if not path.exists():
        return NOT_MEASURED
    result = read_result(path)
    lines = ["| | tool | ms a step | times a step without |", "| --- | --- | ---: | ---: |"]
    lines.append(f"| no profiler | | {result['plain']['ms']:.2f} | 1 |")
    for script, row in result["scripts"].items():
        lines.append(f"| `{script}` | {row['tool']} | {row['ms']:.2f} | {row['ratio']:.2f} |")
    environment = result["environment"]
    return "\n".join(lines) + f"\n\n{environment['device']}, PyTorch {environment['torch']}, {result['date'][:10]}."


def run(argv):
    parser = llama.Parser(
        prog="guide.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    options = parser.parse_args(argv)
    out_of_date = update([GUIDE], {"pictures": pictures, "overhead": overhead}, options.check)
    return int(options.check and out_of_date)


def main(argv=None):
    return exit_code_of(lambda: run(argv), "guide.py")


if __name__ == "__main__":
    sys.exit(main())
