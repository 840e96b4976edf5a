"""The documentation's commands are real: flags parse, make targets and files exist."""

import re
import shlex
from pathlib import Path

import pytest

import tiny_llama_v3 as llama

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (ROOT / "README.md", ROOT / "benchmarks" / "README.md") if page.exists()]
SCRIPT_DOC = re.findall(r"^ {4}(python .*?)(?:  .*)?$", llama.__doc__, flags=re.M)


def fenced_commands(page):
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#")


COMMANDS = [(page.relative_to(ROOT), command) for page in PAGES for command in fenced_commands(page)]
COMMANDS += [("tiny_llama_v3.py", command) for command in SCRIPT_DOC]


@pytest.mark.parametrize("page, command", COMMANDS, ids=[command for _, command in COMMANDS])
def test_command_is_understood(page, command):
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert set(a for a in arguments if "=" not in a) <= set(targets)
        return
    assert program == "python", f"{page}: {command}"
    script, *arguments = arguments
    assert (ROOT / script).exists()
    if script == "tiny_llama_v3.py" and "--list-stages" not in arguments:
        llama.parse_config(arguments, script)


def test_commands_were_found():
    assert len(COMMANDS) > 8


def test_flags_named_in_the_documentation_exist():
    known = {llama.flag_of(name) for name in llama.Config.__dataclass_fields__} | {"--list-stages", "--help"}
    readme = (ROOT / "README.md").read_text()
    # The generated tables name the benchmarks' flags, blocks of bash and pip's --no-deps those of other programs.
    text = re.sub(r"<!-- begin.*?<!-- end|```bash.*?```|`--no-deps`", "", readme, flags=re.S)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


def test_stage_table_matches_the_script():
    rows = re.findall(r"^\| (\d) ([\w ]+?) \| (.*?) \|", (ROOT / "README.md").read_text(), flags=re.M)
    assert [int(number) for number, _, _ in rows] == list(llama.STAGES)
    for number, _, wrong in rows:
        flags = [llama.flag_of(name) for name in llama.stage_flags(int(number))]
        named = re.findall(r"--[a-z-]+", wrong)
        assert named == flags[: len(named)]
        assert len(named) == len(flags) or "all that follows" in wrong


def test_exit_codes_are_documented():
    for text in (llama.__doc__, (ROOT / "README.md").read_text()):
        assert re.search(r"Exit codes: 0 done, 1 a check failed, 2 .*130 interrupted", text, flags=re.S)
