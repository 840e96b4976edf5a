#!/usr/bin/env python3
"""Write the measured parts of README_PROFILING.md, from profiling/results: pictures, and overhead.json.

    python profiling/guide.py            rewrite what stands between the markers
    python profiling/guide.py --check    exit with 1 if anything would change

Exit codes: 0 done, 1 the guide is out of date.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "README_PROFILING.md"
RESULTS = ROOT / "profiling" / "results"
NOT_MEASURED = "_Not measured yet._"
PICTURES = {
    "kernels_stage4.png": "The top kernels of stage 4",
    "kernels_stage5.png": "The top kernels of stage 5",
    "timeline_stage5.png": "One step of stage 5",
    "roofline.png": "The roofline of each Triton kernel alone",
}


def pictures():
    lines = [f"![{title}](profiling/results/{name})" for name, title in PICTURES.items() if (RESULTS / name).exists()]
    return "\n\n".join(lines) or NOT_MEASURED


def overhead():
    path = RESULTS / "overhead.json"
    if not path.exists():
        return NOT_MEASURED
    result = json.loads(path.read_text())
    lines = ["| | tool | ms a step | times a step without |", "| --- | --- | ---: | ---: |"]
    lines.append(f"| no profiler | | {result['plain']['ms']:.2f} | 1 |")
    for script, row in result["scripts"].items():
        lines.append(f"| `{script}` | {row['tool']} | {row['ms']:.2f} | {row['ratio']:.2f} |")
    environment = result["environment"]
    return "\n".join(lines) + f"\n\n{environment['device']}, PyTorch {environment['torch']}, {result['date'][:10]}."


def updated(text):
    """The guide with its measured parts rewritten."""
    for name, part in (("pictures", pictures()), ("overhead", overhead())):
        markers = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        text = re.sub(markers, lambda match, part=part: f"{match[1]}\n{part}\n\n{match[2]}", text, flags=re.S)
    return text


def main(argv=None):
    arguments = sys.argv[1:] if argv is None else argv
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    text = GUIDE.read_text()
    if arguments:
        return int(updated(text) != text)
    GUIDE.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
