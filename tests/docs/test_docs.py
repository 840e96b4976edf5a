"""The documentation is true: blocks run, links resolve, flags exist, every measured number comes from a file.

The `sh` and `python` blocks of the pages at the top and in docs/, benchmarks/ and exercises/ are executed in a copy of
the project in which the exercises are done, exactly as a reader with a new shell in its top folder types them. There is
no python on the PATH before a block of the page has activated `.venv`, and each block must leave the shell in the
folder where it was. A block that begins with "# needs a GPU:" or "# needs ROCm:" and a reason shows nothing without
one, or takes minutes: there, the python in `.venv` runs the same programs at small sizes, with a fake of rocprofv3. In
other blocks, but those of FRONT_PAGES, a training run has one sequence and two steps. A `bash` block is for another
machine (a container, a job script): its syntax and the files that it names are checked. A `text` block is the output of
a run.
"""

import dataclasses
import functools
import os
import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks.pages import publish
from exercises import check
from exercises.check import EXERCISES, JUDGED
from measure.work import SIZES
from tests import ROOT
from tiny_llama import hardware

HERE = Path(__file__).parent
LEFT_OUT = {"tests", "results", "triton_profiles", "build"}
FOUND = [*ROOT.glob("*.md"), *sorted(ROOT.glob("[!.]*/**/*.md"))]
PAGES = {str(page.relative_to(ROOT)): page for page in FOUND if not LEFT_OUT & {*page.relative_to(ROOT).parts}}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(name):
    """Return the fenced blocks of a page, also those that are indented in a list."""
    text = PAGES[name].read_text()
    for fence in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, flags=re.M | re.S):
        code = re.sub(f"^{fence[1]}", "", fence[3], flags=re.M)
        yield Block(name, text[: fence.start()].count("\n") + 1, fence[2], code)


# nanoGPT's training has commands for hours.
BLOCKS = [block for name in PAGES if name != "nanogpt_triton/README.md" for block in blocks_of(name)]
RUNNABLE = [block for block in BLOCKS if block.language in ("sh", "python")]
NEEDS = "# needs "  # a GPU, ROCm or clang: at the beginning of a block for such a machine
# A replay of stages is many runs, and so is a profile of each kernel by itself: tests/workshop and tests/profilers have
# a fast test of each. A model of full size takes many seconds.
LONG = r"run_all_stages\.sh(?!.*--dry-run)|run_rocprof"
FULL_SIZE = rf"{LONG}|(tiny_llama_v3|v3_stage\w+)\.py|get_\w+\.sh(?!.*--dry-run)|benchmarks\.steps"
FRONT_PAGES = "README.md", "README_WORKSHOP.md", "docs/trainer.md"  # whose first run is typed by everybody
ACTIVATE = ". .venv/bin/activate\n"


def case(*values, long, id=None):
    """Return a case that is slow if its code, the last of the values, is one of what takes long."""
    return pytest.param(*values, marks=[pytest.mark.slow] * bool(re.search(long, values[-1])), id=id)


# --- blocks

TIKTOKEN = """
def get_encoding(name):
    return type(name, (), {"encode": staticmethod(lambda text, allowed_special: list(text.encode()))})
"""
# `head` leaves before its writer is done, which shall not show as a failure of the pipe. All else shall.
SHELL = """
head() { command head "$@" && cat >/dev/null; }
cd "$PROJECT"
eval "$BEFORE"
eval "$CODE"
[ "$PWD" = "$PROJECT" ] || { pwd && exit 1; }
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, python):
    """run(language, code, before) executes a block in a copy of the project, in a shell that has run what is before."""
    folder = tmp_path_factory.mktemp("docs")
    copy = folder / "project"
    names = "__pycache__ triton_profiles results traces hotspots out meta.pkl".split()
    ignored = shutil.ignore_patterns(".?*", *names)
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    for exercise in JUDGED.values():
        shutil.copy(copy / "exercises" / "solutions" / exercise.file, copy / "exercises" / exercise.file)
    venv.create(copy / ".venv")
    for name in ("python", "python3", "torchrun"):
        (copy / ".venv/bin" / name).unlink(missing_ok=True)
        (copy / ".venv/bin" / name).symlink_to(HERE / "small_python.sh")
    # What the trainer's commands would download.
    (folder / "tiktoken.py").write_text(TIKTOKEN)
    for name in ("input.txt", "train.bin", "val.bin"):
        for dataset in ("shakespeare", "openwebtext", "pysource"):
            (copy / "nanogpt_triton" / "data" / dataset / name).write_text("to be or not to be " * 20)
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHON")}
    environment |= dict(PROJECT=str(copy), PATH=f"{HERE}/bin:{os.environ['PATH']}", PYTHONPATH=str(folder))
    environment |= dict(REAL_PYTHON=python, FAKES=str(ROOT / "tests" / "fakes"))

    @functools.cache  # some pages begin with the same block
    def execute(language, code, before="", small=True, short=False):
        (copy / "block.py").write_text(code)
        code = code if language == "sh" else "python block.py"
        shell = environment | dict(BEFORE=before, CODE=code, SMALL="1" * small, SHORT="1" * short)
        command = ["bash", "-euo", "pipefail", "-c", SHELL]
        done = subprocess.run(command, env=shell, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    return execute


CASES = [case(b, b.code, long=LONG if b.code.startswith(NEEDS) else FULL_SIZE, id=str(b)) for b in RUNNABLE]


@pytest.mark.parametrize("block, code", CASES)
def test_a_block_runs(block, code, run):
    """In the shell of a reader who activated .venv where the page said so."""
    earlier = "".join(other.code for other in BLOCKS if other.page == block.page and other.line < block.line)
    small = code.startswith(NEEDS)
    short = not small and block.page not in FRONT_PAGES
    run(block.language, code, ACTIVATE if ACTIVATE in earlier else "", small, short)


@pytest.mark.triton
def test_what_the_laptop_s_page_counts_is_written_in_a_fresh_copy(capsys):
    """Above, the exercises are done."""
    (arguments,) = re.findall(r"exercises/check\.py (.*--time\b[^`\n]*)", PAGES["docs/laptop.md"].read_text())
    assert check.main(arguments.split()) == 0 and "PyTorch eager" in capsys.readouterr().out


PUBLISHED = (HERE / "published.txt").read_text().split("\n\n")[1:]


@pytest.mark.parametrize("code", [case(code, long=LONG) for code in PUBLISHED])
def test_what_was_published_can_be_typed_as_it_stands(code, run):
    small = "run_triton_profiling.py" not in code  # whose own sizes are small on a CPU
    run("sh", f"({code}\n)\n", ACTIVATE, small=small)


@pytest.mark.parametrize("exercise", EXERCISES.values())
def test_a_page_of_an_exercise_judges_the_reader_s_own_file_until_its_end(exercise):
    """The trainer's page may use the solutions, a participant's may not."""
    page = PAGES[f"exercises/{exercise.file.removesuffix('.py')}.md"].read_text()
    assert "solutions." not in page and "--solution" not in page.split("## The solution")[0]


def labels(text):
    """Return what stands before the numbers of each line that is not an ellipsis."""
    return {re.match(r"[^\d:]*", line)[0].rstrip() for line in text.splitlines() if line not in ("", "…")}


def test_the_output_on_the_front_page_is_what_a_run_prints(run):
    shown = next(labels(block.code) for block in blocks_of("README.md") if block.language == "text")
    assert len(shown) > 8 and shown <= labels(run("sh", "python tiny_llama_v3.py\n", ACTIVATE))


def test_blocks_end_and_are_of_a_kind_that_is_known():
    """After a block without an end, the end of the next one would begin a block of no kind."""
    assert {block.language for block in BLOCKS} <= {"sh", "python", "bash", "text", "math"}


def test_blocks_for_another_machine_are_well_formed():
    code = "".join(block.code for block in BLOCKS if block.language == "bash")
    subprocess.run(["bash", "-n", "-c", code], check=True)
    names = re.findall(r"(?<![\w/.$-])[\w/]+\.(?:sh|py)\b", code)
    assert [name for name in names if not (ROOT / name).exists()] == []
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {*re.findall(r"\bmake ([\w-]+)", code)} <= {*targets}


# --- links, flags, tables, numbers


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_relative_link_resolves(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for path, anchor in re.findall(r"\]\((?!https://)([^)\s#]*)#?([^)\s]*)\)", text):
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists() and ROOT in (linked, *linked.parents), path
        assert not anchor or anchor in anchors_of(linked), f"{path}#{anchor}"


def without_generated(text):
    if "<!-- Generated by" in text:  # the whole page
        return ""
    return re.sub(r"<!-- begin: ([\w-]+) -->.*?<!-- end: \1 -->|```(?:bash|text)\n.*?```", "", text, flags=re.S)


WRITTEN = {name: without_generated(page.read_text()) for name, page in PAGES.items()}
# Of programs that this project only names: the profilers of ROCm, Perfetto and pip; and a setting of nanoGPT.
FOREIGN_FLAGS = """--plugin --basenames --roctx-trace --roctx-rename --list-basic --list-derived --timestamp --httpd
--overwrite --hip-trace --att-library-path
--python --hsa-trace --memory-copy-trace --sys-trace --truncate-kernels --eval_interval""".split()
FLAG = r"(?<![\w-])--[a-z][\w-]*\w"
SOURCES = ("*.py", "*.sh", "*.slurm", "Makefile")


@pytest.fixture(scope="module")
def known_flags():
    own = {llama.flag_of(name) for name in llama.Config.__dataclass_fields__}
    paths = [path for kind in SOURCES for place in (kind, f"[!.]*/**/{kind}") for path in ROOT.glob(place)]
    texts = [path.read_text() for path in paths if path != Path(__file__)]
    settings = re.findall(r"^ *(\w+): \w.* = ", (ROOT / "nanogpt_triton/train.py").read_text(), flags=re.M)
    return own.union(FOREIGN_FLAGS, (f"--{name}" for name in settings), *(re.findall(FLAG, text) for text in texts))


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page, known_flags):
    assert {*re.findall(FLAG, WRITTEN[page])} - known_flags == set()


def test_measured_tables_are_what_the_results_say(capsys):
    assert publish.main(["--check"]) == 0, capsys.readouterr().out


def test_every_measured_table_stands_on_a_page_once():
    markers = [re.findall(r"<!-- begin: ([\w-]+) -->", page.read_text()) for page in PAGES.values()]
    assert sorted(sum(markers, [])) == sorted(publish.SECTIONS)


MEASURED = r"(?<![\w.])\d[\d.,]*[ -]?(?:ms|us|µs|samples/s(?:ec)?|tokens/s|tok/s|[GT]B/s|[GMT]FLOP/s|MiB|GiB)\b"


@pytest.mark.parametrize("page", PAGES)
def test_no_number_that_looks_measured_stands_outside_the_generated_tables(page):
    assert re.findall(f".*{MEASURED}.*", WRITTEN[page]) == []


def test_constants_on_pages_are_those_of_the_script():
    named = re.findall(r"`([A-Z][A-Z_]+)` \(([\d,]+)\)", "".join(WRITTEN.values()))
    assert len(named) > 2
    assert named == [(name, str(getattr(llama, name))) for name, _ in named]


def test_bytes_of_a_token_are_what_memory_is_counted_by():
    """The table of step.md, of the large size in bf16, adds up to what another layer needs."""
    rows = re.findall(r"^\|[^|]+\|[^|]*\| \**([\d,]+)\** \|$", WRITTEN["docs/step.md"], re.M)
    *parts, together = (int(number.replace(",", "")) for number in rows)
    config = llama.Config(**SIZES["large"], use_amp=True)
    two, three = (dataclasses.replace(config, num_layers=number) for number in (2, 3))
    memory = [hardware.memory_needed(each, torch.device("cuda")).sequence for each in (two, three)]
    assert sum(parts) == together == (memory[1] - memory[0]) / config.seq_len and len(parts) == 7


def test_commands_of_the_script_s_help_parse():
    commands = re.findall(r"^ {4}python (?!.*--list-stages)(.*?)(?:  .*)?$", llama.__doc__, flags=re.M)
    assert len(commands) > 4
    for command in commands:
        script, *arguments = shlex.split(command)
        llama.parse_config(arguments, script)
