"""docs/scaling.md says what several processes print, and job.slurm binds them to the right cores."""

import re

from tests import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text()
SOURCES = (ROOT / name for name in ("tiny_llama_v3.py", "tiny_llama/distributed.py", "tiny_llama/hardware.py"))
CODE = "".join(re.sub(r'"\n\s+f?"', "", path.read_text()) for path in SOURCES)  # strings that go over several lines


def test_the_lines_of_a_run_are_what_it_prints():
    section = PAGE.split("\n## What a run says\n")[1].split("\n## ")[0]
    labels = re.findall(r"^\| `(.*?)`", section, flags=re.M)
    assert len(labels) > 4 and [label for label in labels if f'"{label}: ' not in CODE] == []


def test_the_job_s_cores_leave_out_those_of_the_system():
    job = (ROOT / "site" / "job.slurm").read_text()
    # Device 0 of an MI250X node is next to cores 48 to 55, of which the first is the system's.
    lists = re.search(r"^# cores=\((.*)\)", job, flags=re.M)[1].split()
    cores = [range(*map(int, text.split("-"))) for text in lists]
    assert lists[0] == "49-55" and len(lists) == 8 and {len(each) for each in cores} == {6}
    assert sorted(each.start // 8 for each in cores) == list(range(8)) and all(each.start % 8 == 1 for each in cores)
