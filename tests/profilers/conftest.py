"""What the tests of the shell scripts share."""

import re
import shutil
import subprocess

import pytest

from tests.fakes import fork_server
from tests.fakes.machine import ROOT, Machine

GUIDE = (ROOT / "README_PROFILING.md").read_text()


@pytest.fixture(scope="session")
def python_without_torch(tmp_path_factory):
    """A Python that starts at once: on a Machine the scripts find another one that has torch."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    with fork_server.serving(tmp_path_factory.mktemp("python"), fork_server.REPORTS) as executable:
        yield executable


@pytest.fixture
def machine(tmp_path, python_without_torch, capsys):
    return Machine(tmp_path, python_without_torch, capsys)


@pytest.fixture
def interruptible_machine(tmp_path):
    """Its programs are processes of their own, which signals reach."""
    return Machine(tmp_path)


@pytest.fixture
def type_commands(machine):
    """type_commands(heading, edit) runs what the guide tells those with ROCm to type there, and returns the lines."""

    def run(heading, edit=str):
        section = GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]
        blocks = re.findall(r"```bash\n# needs ROCm: [^\n]*\n(.*?)```", section, flags=re.S)
        commands = "".join(blocks).splitlines()
        (machine.bin / "python3").symlink_to(machine.env["PYTHON"])
        env = machine.env | {"PATH": f"{machine.env['PATH']}:{machine.env['ROCM_PATH']}/bin"}
        for command in commands:
            words = ["bash", "-c", edit(command).replace("./", f"{ROOT}/")]
            done = subprocess.run(words, cwd=machine.work, env=env, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
        return commands

    return run
