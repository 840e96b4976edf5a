"""The documentation is true: blocks run, links resolve, flags exist, every measured number comes from a file.

The `sh` and `python` blocks of the pages at the top and in docs/, benchmarks/ and exercises/ are executed in a copy of
the project, exactly as a reader with a new shell in its top folder types them. There is no python on the PATH before a
block of the page has activated `.venv`, and each block must leave the shell in the folder where it was. A block that
begins with "# needs a GPU:" or "# needs ROCm:" and a reason shows nothing without one, or takes minutes: there, the
python in `.venv` runs the same programs at small sizes, with a fake of rocprofv3. The copy is that of a reader who has
done the exercises; what judges them runs with the files as they are given, too, and must say so. A `bash` block is for
another machine (a container, a job script): its syntax and the files that it names are checked. A `text` block is the
output of a run.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

import tiny_llama_v3 as llama
from benchmarks.pages import publish
from exercises.check import EXERCISES

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {".venv", "tests", "results", "triton_profiles", "build"}
IN_ROOT = [path.relative_to(ROOT).parts for path in sorted(ROOT.rglob("[!.]*.md"))]
PAGES = [ROOT.joinpath(*parts) for parts in IN_ROOT if not (LEFT_OUT & set(parts) or parts[0].startswith("."))]
EXECUTED = [page for page in PAGES if page.relative_to(ROOT).parts[0] in ("benchmarks", "docs", "exercises", page.name)]


def page_name(page):
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    code: str

    def __str__(self):
        return f"{page_name(self.page)}:{self.line}"


def blocks_of(page):
    """The fenced blocks, also those that are indented in a list."""
    text = page.read_text()
    for fence in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, flags=re.M | re.S):
        code = re.sub(f"^{fence[1]}", "", fence[3], flags=re.M)
        yield Block(page, text[: fence.start()].count("\n") + 1, fence[2], code)


BLOCKS = [block for page in EXECUTED for block in blocks_of(page)]
RUNNABLE = [block for block in BLOCKS if block.language in ("sh", "python")]
NEEDS = "# needs "  # a GPU, ROCm or clang: at the beginning of a block for such a machine
# A replay of stages is many runs, and so is a profile of each kernel by itself: tests/workshop and tests/profilers have
# a fast test of each. A model of full size takes many seconds.
LONG = r"run_all_stages\.sh(?!.*--dry-run)|run_rocprof"
FULL_SIZE = rf"{LONG}|(tiny_llama_v3|v3_stage\w+)\.py|get_\w+\.sh(?!.*--dry-run)|benchmarks\.steps"
SLOW = [b for b in RUNNABLE if re.search(LONG if b.code.startswith(NEEDS) else FULL_SIZE, b.code)]


def activation_before(block):
    """What earlier blocks of the page have done to the reader's shell: the lines that activate .venv."""
    earlier = [other.code for other in BLOCKS if other.page == block.page and other.line < block.line]
    return "".join(re.findall(r"^\. .*/activate\n", "".join(earlier), flags=re.M)[:1])


# --- blocks

MODEL = "--hidden-dim 32 --num-layers 1 --num-heads 2 --num-kv-heads 1 --ffn-dim 32 --vocab-size 256 --warmup-steps 1"
TINY = f"{MODEL} --batch-size 1 --seq-len 16 --num-steps 2"
# What a program gets behind its own options in a block for another machine; the last one of a kind counts.
SMALL = {
    "tiny_llama_v3.py": TINY,
    "v3_stage*.py": TINY,
    "profilers.host_profile": TINY,
    "run_triton_profiling.py": "--no-sweeps --seq-len 16",
    "train.py": "--n_layer=1 --n_head=1 --n_embd=8 --block_size=8 --batch_size=1 --max_iters=1 --eval_iters=1 "
    "--gradient_accumulation_steps=4 --compile=False --device=cpu",
    "profilers.overhead": f"--scripts get_hotspots.sh -- {TINY}",
}
SMALL_PYTHON = """#!/usr/bin/env bash
[ -n "${{SMALL:-}}" ] || exec {real} "$@"
program=${{1##*/}}
[ "$program" != -m ] || program=$2
if [ "$program" = exercises.performance_debugging.replay ]; then
    own=() theirs=() profile=--no-profile
    while (($#)) && [ "$1" != -- ]; do own+=("$1") && shift; done
    (($#)) && shift && theirs=("$@")
    # Its profiles are read afterwards.
    if [[ " ${{own[*]}} " == *" --stages 4,5 "* ]] || ((${{#own[@]}} == 2)); then profile=; fi
    [[ " ${{own[*]}} " != *" --isolate "* ]] || own+=(--stages 2)
    [[ " ${{own[*]}} " != *" --laptop "* ]] || exec {real} "${{own[@]}}" --stages 1,5,6 -- "${{theirs[@]}}" {model}
    exec {real} "${{own[@]}}" --batch-size 1 --seq-len 8 --num-steps 1 $profile -- "${{theirs[@]}}" {model}
fi
case $program in
{cases}
esac
exec {real} "$@"
"""
SMALL_TORCHRUN = """#!/bin/sh
[ -n "${{SMALL:-}}" ] || exec {launcher}
for program; do
    case $program in
    {cases}
    esac
done
echo "$0: no program of SMALL in: $*" >&2
exit 127
"""
NO_PYTHON = """#!/bin/sh
echo "$0: there is no torch for this python: . .venv/bin/activate comes first" >&2
exit 127
"""
# A profiler that is not this project's: runs the program behind its options.
PROFILER = """#!/bin/sh
while [ "$1" != python ]; do shift; done
exec "$@"
"""
TIKTOKEN = """
def get_encoding(name):
    return type(name, (), {"encode": staticmethod(lambda text, allowed_special: list(text.encode()))})
"""
# `head` leaves before its writer is done, which shall not show as a failure of the pipe. All else shall.
SHELL = 'head() {{ command head "$@" && cat >/dev/null; }}\n{before}{code}\n'
SHELL += '[ "$PWD" = {folder} ] || {{ pwd && exit 1; }}'


def write_executables(folder, texts):
    """{name: text} as programs in folder."""
    for name, text in texts.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.fixture(scope="module")
def project(tmp_path_factory, python):
    """run(language, code, before) executes a block in a copy of the project, in a shell that has run what is before.

    done: the exercises are done; else their files are as a participant finds them.
    """
    folder = tmp_path_factory.mktemp("docs")
    copy, commands = folder / "project", folder / "bin"
    ignored = shutil.ignore_patterns(".?*", "__pycache__", "triton_profiles", "results", "traces", "hotspots", "out")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    venv.create(copy / ".venv")
    cases = "\n".join(f'{program}) exec {python} "$@" {options} ;;' for program, options in SMALL.items())
    small_python = SMALL_PYTHON.format(real=python, model=MODEL, cases=cases)
    launcher = f'{python} -m torch.distributed.run "$@"'
    cases = "\n".join(f"{program}) exec {launcher} {options} ;;" for program, options in SMALL.items())
    programs = dict.fromkeys(("python", "python3"), small_python)
    programs["torchrun"] = SMALL_TORCHRUN.format(launcher=launcher, cases=cases)
    write_executables(copy / ".venv" / "bin", programs)
    commands.mkdir()
    rocprofv3 = shlex.join([sys.executable, str(ROOT / "tests" / "fakes" / "rocprofv3.py")])
    others = dict.fromkeys(("rocprof", "rocprofv2", "nsys"), PROFILER) | {
        "make": f'#!/bin/sh\nexec {shutil.which("make")} --dry-run "$@"\n',
        "rocprofv3": f'#!/bin/sh\nexec {rocprofv3} "$@"\n',
    }
    write_executables(commands, dict.fromkeys(("python", "python3", "torchrun"), NO_PYTHON) | others)
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHON")}
    environment |= {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(folder / "site")}
    # What the trainer's commands would download.
    (folder / "site").mkdir()
    (folder / "site" / "tiktoken.py").write_text(TIKTOKEN)
    for dataset in ("shakespeare", "openwebtext"):
        for name in ("input.txt", "train.bin", "val.bin"):
            (copy / "nanogpt_triton" / "data" / dataset / name).write_text("to be or not to be " * 20)

    @functools.cache  # some pages begin with the same block
    def run(language, code, before="", done=True, small=True):
        for exercise in EXERCISES.values():
            given = exercise.solution if done else exercise.file
            shutil.copy(ROOT / "exercises" / given, copy / "exercises" / exercise.file)
        (copy / "block.py").write_text(code)
        code = code if language == "sh" else "python block.py"
        script = SHELL.format(before=before, code=code, folder=shlex.quote(str(copy)))
        command = ["bash", "-euo", "pipefail", "-c", script]
        shell = environment | {"SMALL": "1" * small}
        return subprocess.run(command, cwd=copy, env=shell, capture_output=True, text=True, timeout=900)

    return run


CASES = [pytest.param(block, marks=[pytest.mark.slow] * (block in SLOW), id=str(block)) for block in RUNNABLE]


@pytest.mark.parametrize("block", CASES)
def test_a_block_runs(block, project):
    done = project(block.language, block.code, activation_before(block), small=block.code.startswith(NEEDS))
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


# What readers of the published workshop and trainer type, with our folders in the place of the author's. Left out are
# commands without this project in them (pip, module, rocminfo, rocpd), and those of the workshop's other versions.
TRAINING = "python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps"
TYPED = {  # {folder: command lines}
    ".": [
        *(f"{profiler}{TRAINING} {steps}" for profiler in ("", "rocprof --stats ") for steps in (10, 20)),
        f"rocprofv2 --kernel-trace -o v3_trace.json {TRAINING} 5",
        "python tiny_llama_v3.py --hidden-dim 512 --num-layers 8 --num-heads 8 --learning-rate 3e-4 --use-amp",
        "python3 run_triton_profiling.py",
        "python run_triton_profiling.py --only rmsnorm --hidden-dim 4096",
        "chmod +x run_rocprof_triton.sh; ./run_rocprof_triton.sh; ls rocprof_results/; "
        "cat rocprof_results/triton_analysis_summary.md",
        *(f"./get_{name}.sh" for name in ("trace", "counters", "rocprof_compute", "rocprof_sys", "hotspots")),
    ],
    "exercises/performance_debugging": [
        "cat README.md; ./run_all_stages.sh; sort -t',' -k4 -nr results/stage4_profile.csv | head -20; "
        "diff results/stage2_profile.csv results/stage5_profile.csv || [ $? = 1 ]",
    ],
    "nanogpt_triton/data/shakespeare": ["python prepare.py"],
    "nanogpt_triton": [
        "python train.py --dataset=shakespeare --batch_size=12 --max_iters=100 --eval_interval=50 --compile=False",
        "torchrun --standalone --nproc_per_node=4 train.py --dataset=shakespeare --batch_size=12 --max_iters=100",
        "python train.py --compile=True --batch_size=12 --max_iters=100",
        "python train.py --device=cpu --batch_size=4 --max_iters=10 --compile=False",
        "nsys profile -o triton_profile python train.py --max_iters=10",
        'python -c "import torch; print(torch.cuda.is_available())"',
        """python -c "import triton; print(f'Triton {triton.__version__} installed successfully')" """,
        """python -c "from kernels import TRITON_AVAILABLE; print(f'Triton available: {TRITON_AVAILABLE}')" """,
        """python -c "
import torch
from kernels import triton_layer_norm, TRITON_AVAILABLE
x, weight, bias = torch.randn(12, 8, 768), torch.randn(768), torch.randn(768)
torch.testing.assert_close(triton_layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (768,), weight, bias))
" """,
    ],
}
LINES = [(folder, code) for folder, codes in TYPED.items() for code in codes]
MARKED = [pytest.param(*line, marks=[pytest.mark.slow] * bool(re.search(LONG, line[1]))) for line in LINES]


@pytest.mark.parametrize("folder, code", MARKED)
def test_what_was_published_can_be_typed_as_it_stands(folder, code, project):
    small = "run_triton_profiling.py" not in code  # whose own sizes are small on a CPU
    done = project("sh", f"(cd {folder}; {code})\n", ". .venv/bin/activate\n", small=small)
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_a_reader_of_all_pages_finds_every_output_folder_new():
    """The scripts refuse a folder with something in it."""
    codes = {block.code for block in RUNNABLE}  # some pages begin with the same block
    outputs = [folder for code in codes for folder in re.findall(r"--output (\S+)", code)]
    assert len(outputs) > 10 and sorted(outputs) == sorted(set(outputs))


FILES = "|".join(Path(exercise.file).stem for exercise in EXERCISES.values())
JUDGES = rf"check\.py \w+(?!.*--solution)|from exercises\.(?:\w+\.)*(?:{FILES}) import"
# The trainer's page may use the solutions, a participant's may not.
JUDGING = [block for block in RUNNABLE if block.page.parent.name == "exercises" and re.search(JUDGES, block.code)]


@pytest.mark.parametrize("block", JUDGING, ids=str)
def test_what_judges_an_exercise_judges_the_reader_s_own_file(block, project):
    """As printed, before anything is written."""
    done = project(block.language, block.code, activation_before(block), done=False)
    assert done.returncode == 1, f"{block}\n{done.stdout}\n{done.stderr}"
    assert re.search("not written yet|NotImplementedError: FILL ME IN", done.stdout + done.stderr), block


def test_solutions_are_what_a_page_of_an_exercise_ends_with():
    pages = {block.page for block in JUDGING}
    assert len(pages) == len(EXERCISES)
    for page in pages:
        own = [block.line for block in JUDGING if block.page == page]
        shown = [block.line for block in BLOCKS if block.page == page and "--solution" in block.code]
        assert len(shown) == 1 and max(own) < shown[0], page
        assert "exercises.solutions" not in page.read_text(), page


def test_a_page_that_forgets_to_activate_fails(project):
    for language, code in (("sh", "python tiny_llama_v3.py\n"), ("python", "import torch\n")):
        done = project(language, code)
        assert done.returncode == 127 and "activate comes first" in done.stderr
        assert project(language, code, ". .venv/bin/activate\n").returncode == 0


def test_the_output_on_the_front_page_is_what_a_run_prints(project):
    """But for its numbers, its names of devices, and what an ellipsis stands for."""

    def labels(text):
        return {re.match(r"[^\d:]*", line)[0].rstrip() for line in text.splitlines() if line not in ("", "…")}

    (shown,) = (block.code for block in blocks_of(ROOT / "README.md") if block.language == "text")
    printed = project("sh", "python tiny_llama_v3.py\n", ". .venv/bin/activate\n").stdout
    assert len(labels(shown)) > 8 and labels(shown) <= labels(printed)


def test_blocks_are_of_a_kind_that_runs_and_say_what_they_need():
    assert len(RUNNABLE) > 40
    assert {block.language for block in BLOCKS} <= {"sh", "python", "bash", "text", "math", ""}
    for block in BLOCKS:
        if block.language in ("", "text"):  # a tree of files, an output
            assert not re.search(r"^(\$ |python |\./)", block.code, flags=re.M), f"{block} has commands of a sh block"
        for line in re.findall(r"^# needs .*", block.code, flags=re.M):
            assert re.match(r"# needs (a GPU|ROCm|clang): \S+ \S+ \S", line), f"{block}: {line} gives no reason"
        assert "# needs ROCm: " in block.code or not re.search("^roc", block.code, flags=re.M), block


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_a_block_for_another_machine_is_well_formed(block):
    subprocess.run(["bash", "-n", "-c", block.code], check=True)
    for name in re.findall(r"(?<![\w/.$-])[\w/]+\.(?:sh|py)\b", block.code):
        assert (ROOT / name).exists(), f"{block}: {name}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"\bmake ([\w-]+)", block.code)) <= set(targets), block


# --- links, flags, tables, numbers


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_relative_link_resolves(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists() and ROOT in (linked, *linked.parents), f"{page_name(page)}: {target}"
        if anchor:
            assert anchor in anchors_of(linked), f"{page_name(page)}: {target} has no such heading"


def without_generated(text):
    if "<!-- Generated by" in text:  # the whole page
        return ""
    return re.sub(r"<!-- begin: ([\w-]+) -->.*?<!-- end: \1 -->|```(?:bash|text)\n.*?```", "", text, flags=re.S)


# Of programs that this project only names: rocprof and rocprofv2, in the table of their successors; Perfetto; pip.
FOREIGN_FLAGS = {"--plugin", "--basenames", "--roctx-trace", "--roctx-rename", "--list-basic", "--list-derived"}
FOREIGN_FLAGS |= {"--timestamp", "--help", "--httpd", "--no-deps", "--python"}
FLAG = r"(?<![\w-])--[a-z][\w-]*\w"
KINDS = ("*.py", "*.sh", "*.slurm", "Makefile")
SOURCES = [path for kind in KINDS for path in ROOT.rglob(kind) if ".venv" not in path.parts]


def test_every_flag_that_a_page_names_exists():
    known = {llama.flag_of(name) for name in llama.Config.__dataclass_fields__} | FOREIGN_FLAGS
    for path in SOURCES:
        if path.name != "test_docs.py":
            known |= set(re.findall(FLAG, path.read_text()))
            traces = re.findall(r'"([a-z-]+-trace|[a-z]+(?:-[a-z]+)+|stats)"', path.read_text())
            known |= {f"--{name}" for name in traces} if "fakes" in path.parts else set()
            settings = re.findall(r"^ *(\w+): \w.* = ", path.read_text(), flags=re.M)
            known |= {f"--{name}" for name in settings} if "nanogpt_triton" in path.parts else set()
    named = {page_name(page): set(re.findall(FLAG, without_generated(page.read_text()))) for page in PAGES}
    assert not {name: flags - known for name, flags in named.items() if flags - known}


def test_stage_tables_match_the_script():
    rows = re.findall(r"^\| (\d) ([\w ]+?) \| (.*?) \|", (ROOT / "docs" / "usage.md").read_text(), flags=re.M)
    assert [int(number) for number, _, _ in rows] == list(llama.STAGES)
    for number, _, wrong in rows:
        flags = [llama.flag_of(name) for name in llama.stage_flags(int(number))]
        named = re.findall(r"--[a-z-]+", wrong)
        assert named == flags[: len(named)]
        assert len(named) == len(flags) or "all that follows" in wrong
    titles = {number: title.split(" instead of ")[0] for number, title in llama.STAGES.items()}
    assert {int(number): title for number, title, _ in rows} == titles
    card = (ROOT / "exercises/performance_debugging/WORKSHOP_GUIDE.md").read_text()
    rows = re.findall(r"^\| (\d) ([\w ]+?) \|", card, flags=re.M)
    assert {int(number): title for number, title in rows} == titles


def test_exit_codes_are_documented():
    codes = r"Exit codes: 0 success\W+1 a check failed.* diverged.*\b2 .*\b130\s+interrupted.*\b141 "
    for text in (llama.__doc__, (ROOT / "docs" / "usage.md").read_text()):
        assert re.search(codes, text, flags=re.S)


def test_measured_tables_are_what_the_results_say(capsys):
    assert publish.main(["--check"]) == 0, capsys.readouterr().out


def test_measured_tables_stand_where_a_reader_looks_for_them():
    marked = {page_name(page): re.findall(r"<!-- begin: ([\w-]+) -->", page.read_text()) for page in PAGES}
    measured = ["steps", "sweeps", "kernels", "stages", "layer_norm", "gpt", "scaling", "overhead"]
    expected = {"README.md": ["front"], "README_WORKSHOP.md": ["published", "claims"], "docs/measured.md": measured}
    expected["docs/fp8.md"] = ["fp8-speed", "fp8-layer", "fp8-recipes", "fp8-learning"]
    assert {name: markers for name, markers in marked.items() if markers} == expected


MEASURED = r"(?<![\w.])\d[\d.,]*[ -]?(?:ms|us|µs|samples/s(?:ec)?|tokens/s|tok/s|[GT]B/s|[GMT]FLOP/s|MiB|GiB)\b"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_number_that_looks_measured_stands_outside_the_generated_tables(page):
    text = without_generated(page.read_text())
    assert not re.findall(f".*{MEASURED}.*", text)


def test_constants_on_pages_are_those_of_the_script():
    pages = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"`([A-Z][A-Z_]+)` \(([\d,]+)\)", pages)
    assert {name for name, _ in named} >= {"NORM_BACKWARD_ELEMENTS", "CROSS_ENTROPY_BLOCK", "ADAMW_BLOCK"}
    assert not [(name, value) for name, value in named if getattr(llama, name) != int(value.replace(",", ""))]


def test_commands_of_the_script_s_help_parse():
    commands = re.findall(r"^ {4}python (.*?)(?:  .*)?$", llama.__doc__, flags=re.M)
    assert len(commands) > 5
    for command in commands:
        script, *arguments = shlex.split(command)
        if "--list-stages" not in arguments:
            llama.parse_config(arguments, script)
