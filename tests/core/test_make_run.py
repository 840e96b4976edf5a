"""`make run`, everybody's first command, without a network and at once: pip is a fake one.

test_install.py has the real pip, and environments that were there before.
"""

import json
import re
import shutil
import sys
import venv
from pathlib import Path

import packaging
import pytest

import tiny_llama_v3 as llama
from tests.core.test_install import (
    LOWEST,
    NEWEST_TORCH,
    QUICK_PYTHON,
    ROOT,
    TESTED_TORCH,
    Project,
    owned,
    publish,
    rocm_wheels,
    site_packages,
    torch_wheel,
    unpack,
)

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")

OWN_REQUIREMENTS = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
TRITON = re.search(r"^triton(.+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
TEST_REQUIREMENTS = re.findall(r"^[\w-]+", (ROOT / "tests" / "requirements.txt").read_text(), re.MULTILINE)

# Stands for pip: unpacks the newest wheels of an index that fit, without what they require, and says what it was asked.
PIP = """
import importlib.metadata, os, sys, sysconfig, zipfile
from pathlib import Path
from urllib.parse import unquote, urlsplit
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version

def read(path):
    lines = [line.partition("#")[0].strip() for line in Path(path).read_text().splitlines()]
    return [Requirement(line) for line in lines if line]

installed = {dist.name: dist.version for dist in importlib.metadata.distributions()}
command, *words = sys.argv[1:]
print("pip:", *sys.argv[1:])
if command == "list" and words == ["--format=freeze"]:
    print(*map("==".join, installed.items()), sep="\\n")
elif command == "config" and words[:-1] == ["--quiet", "--site", "set", "global.constraint"]:
    Path(sys.prefix, "pip.conf").write_text(f"[global]\\nconstraint = {words[-1]}\\n")
elif command == "install":
    if os.environ.get("PIP_USER") != "0" or {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"} & {*os.environ}:
        sys.exit("pip was told to install elsewhere")
    index, constraints, wanted, words = os.environ["PIP_INDEX_URL"], [], [], iter(words)
    for word in words:
        if word == "--index-url":
            index = next(words)
        elif word == "-c":
            constraints += read(next(words))
        elif word == "-r":
            wanted += read(next(words))
        elif word != "--force-reinstall":
            wanted.append(Requirement(word))
    for one in wanted:
        limits = [one.specifier, *(limit.specifier for limit in constraints if limit.name == one.name)]
        wheels = Path(unquote(urlsplit(index).path), one.name).glob("*.whl")
        versions = {Version(wheel.name.split("-")[1]): wheel for wheel in wheels}
        fits = lambda version: all(version in limit for limit in limits)
        if one.name in installed and fits(Version(installed[one.name])):
            versions = {Version(installed[one.name]): None}
        fitting = [*filter(fits, versions)]
        if one.marker is None or one.marker.evaluate():
            if not fitting:
                sys.exit(f"no version of {one} fits")
            if wheel := versions[max(fitting)]:
                zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))
else:
    sys.exit("pip was asked for something else")
"""

# Stands for python3: makes no environment, and prints what pip is asked to install first.
ASKED_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *"import torch") exit 1 ;;
    *profilers.rocm*) exec REAL "$@" ;;
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip install"*) printf 'pip: %s\\n' "${*:4}" && exit 1 ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def python(tmp_path):
    """An interpreter without torch, whose environments have the fake pip."""
    packages, bare = tmp_path / "packages", tmp_path / "bare"
    pip = packages / "pip"
    shutil.copytree(Path(packaging.__file__).parent, pip / "_vendor" / "packaging")
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(PIP)
    venv.create(bare, symlinks=True)
    text = QUICK_PYTHON.replace("REAL", f"{bare}/bin/python").replace("PIP", str(packages))
    return executable(bare / "bin" / "quick", text)


@pytest.fixture
def asked(tmp_path):
    """An interpreter that prints what pip is asked for."""
    return executable(tmp_path / "asked", ASKED_PYTHON.replace("REAL", sys.executable))


def run_of(done):
    """Return what `make run` printed: its lines of pip, and what the script saw, after its command line."""
    assert done.returncode == 0, done.stdout + done.stderr
    *before, command, seen, go_on = done.stdout.splitlines()
    assert command.startswith(".venv/bin/python tiny_llama_v3.py ") and go_on.startswith("To go on: ")
    return [line for line in before if line.startswith("pip: ")], json.loads(seen)


def test_version_is_the_same_everywhere():
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "tiny_llama_v3.py").read_text(), re.MULTILINE)[1]
    citation = (ROOT / ".github" / "CITATION.cff").read_text()
    date = re.search(r"^date-released: (.*)$", citation, re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in citation
    changelog = (ROOT / "docs" / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(\d.*)$", changelog, re.MULTILINE)[1] == f"{version}] - {date}"


# --- make run


def test_the_first_run_installs_what_it_needs_and_starts_the_script(project, python):
    """And a second one starts it at once, until the requirements change; options of make reach the script."""
    asked, seen = run_of(project.make("run", python=python))
    assert [line for line in asked if line.startswith("pip: install")] == [
        f"pip: install torch{TESTED_TORCH}",
        f"pip: install triton{TRITON}",
        "pip: install -c .venv/constraints.txt -r .venv/requirements.txt",
    ]
    assert {name: version for name, version in owned(seen, project.venv).items() if name != "pip"} == {
        name: NEWEST_TORCH if name == "torch" else LOWEST[name] for name in OWN_REQUIREMENTS
    }
    assert seen["torch"] == str(site_packages(project.venv) / "torch.py")
    stamp = project.venv / "run.stamp"
    before = stamp.stat().st_mtime_ns
    again = project.execute("make", "run", f"PYTHON={python}", "ARGS=--num-steps 50")
    assert run_of(again) == ([], seen) and stamp.stat().st_mtime_ns == before
    command, _, go_on = again.stdout.splitlines()
    config = llama.parse_config(command.split()[2:], command.split()[1])
    assert (config.data, config.batch_size, config.seq_len, config.num_steps) == (
        "markov",
        8,
        128,
        50,
    )  # whose loss falls
    go_on = go_on.partition(": ")[2].removesuffix(" --help")
    assert json.loads(project.execute("sh", "-c", go_on).stdout) == seen
    for name in ("requirements.txt", "site/setup_env.sh"):
        (project.root / name).touch()
        asked, _ = run_of(project.make("run", python=python))
        assert asked[-1] == "pip: install -c .venv/constraints.txt -r .venv/requirements.txt"


def test_tests_have_more_than_a_run(project, python):
    """They are started by pytest, here none, with the requirements of both files."""
    publish(project.pypi, "pytest", "9.0.0", files={"pytest.py": "import sys; print(sys.argv[1:])"})
    done = project.make("test", python=python)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == str(
        "-n auto --maxprocesses 4 --dist loadfile -m".split() + ["not slow"]
    )
    _, seen = run_of(project.make("run", python=python))
    assert owned(seen, project.venv).keys() == {*OWN_REQUIREMENTS, *TEST_REQUIREMENTS}


@pytest.mark.parametrize("name, installs", [("torch", 3), ("triton", 2), ("matplotlib", 1)])
def test_an_install_that_fails_ends_the_run_and_is_repaired(project, python, name, installs):
    """By what is missing: torch, triton and the rest are installed one after the other."""
    (project.pypi / name).rename(project.pypi / "hidden")
    done = project.make("run", python=python)
    assert done.returncode != 0 and f"no version of {name}" in done.stderr and "To go on" not in done.stdout
    assert not (project.venv / "run.stamp").exists()
    (project.pypi / "hidden").rename(project.pypi / name)
    asked, _ = run_of(project.make("run", python=python))
    assert len([line for line in asked if line.startswith("pip: install")]) == installs


def test_the_script_may_be_called_without_make(project, python):
    """Whatever pip is told for other environments; it has no options."""
    users = dict(PIP_USER="1", PIP_TARGET=str(project.root), PYTHON=str(python))
    done = project.execute("site/setup_env.sh", **users, cwd=project.root)
    assert done.returncode == 0 and (project.venv / "constraints.txt").exists()
    shutil.rmtree(project.venv)
    done = project.execute("site/setup_env.sh", "--help", **users)
    assert (done.returncode, done.stdout, project.venv.exists()) == (2, "", False)
    assert done.stderr.startswith("setup_env.sh: --help is not an option: ")


def hide_ensurepip(project, folder):
    """Let no Python of the project find it."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "ensurepip.py").write_text("raise ImportError")
    project.env["PYTHONPATH"] = str(folder / "hidden")


@pytest.mark.parametrize("has_torch", [True, False])
def test_a_python_without_ensurepip_lends_its_pip(project, python, tmp_path, has_torch):
    """As Colab's, which has torch and triton too."""
    hide_ensurepip(project, tmp_path)
    python = python.with_name("python")
    done = project.execute("site/setup_env.sh", PYTHON=str(python))
    assert (done.returncode, project.venv.exists()) == (2, False) and "apt install python3-venv" in done.stderr
    shutil.copytree(tmp_path / "packages", site_packages(tmp_path / "bare"), dirs_exist_ok=True)
    if has_torch:
        unpack(site_packages(tmp_path / "bare"), [dict(name="triton", version="3.9.0"), torch_wheel("2.10.0")])
    asked, seen = run_of(project.make("run", python=python))
    assert (f"pip: install torch{TESTED_TORCH}" in asked) != has_torch
    assert asked[-1] == "pip: install -c .venv/constraints.txt -r .venv/requirements.txt"
    assert not has_torch or seen["torch"] == str(site_packages(tmp_path / "bare") / "torch.py")
    assert not (site_packages(project.venv) / "pip").exists()
    assert run_of(project.make("run", python=python)) == ([], seen)


# --- a torch that is outside of .venv


@pytest.fixture
def module(project, tmp_path):
    """What a module with ROCm's torch sets where it is loaded."""
    folder = tmp_path / "sw" / "pytorch"
    unpack(folder, rocm_wheels())
    return dict(PYTHONPATH=str(folder), LOADEDMODULES="rocm/6.4:pytorch/2.7")


def test_a_module_that_is_not_loaded_is_named_and_no_second_torch_is_installed(project, python, module):
    _, seen = run_of(project.execute("make", "run", f"PYTHON={python}", **module))
    torch = f"{module['PYTHONPATH']}/torch.py"
    assert seen["torch"] == torch
    before = sorted(project.venv.rglob("*"))
    forgotten = project.execute("site/setup_env.sh", PYTHON=str(python))
    assert (forgotten.returncode, forgotten.stdout) == (2, "")
    why = f"setup_env.sh: this .venv builds on {torch}, which Python no longer finds"
    assert forgotten.stderr == f"{why}: module load rocm/6.4 pytorch/2.7, or make clean to start anew\n"
    by_make = project.execute("make", "run", f"PYTHON={python}")
    assert by_make.returncode == 2 and forgotten.stderr in by_make.stderr and "pip:" not in by_make.stdout
    assert sorted(project.venv.rglob("*")) == before
    assert run_of(project.execute("make", "run", f"PYTHON={python}", **module)) == ([], seen)
    assert project.execute("make", "clean").returncode == 0
    _, seen = run_of(project.execute("make", "run", f"PYTHON={python}"))
    assert seen["torch"] == str(site_packages(project.venv) / "torch.py")


def test_the_script_says_what_is_missing(project, python):
    done = project.execute(python, ROOT / "tiny_llama_v3.py")
    needs = "tiny_llama_v3.py: error: tiny_llama_v3 needs numpy and torch, and numpy is missing: "
    remedy = "load the module that has it, or make run, or pip install numpy torch\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", needs + remedy)


def test_without_a_module_the_way_back_is_said(project, python, module):
    run_of(project.execute("make", "run", f"PYTHON={python}", PYTHONPATH=module["PYTHONPATH"]))
    shutil.rmtree(module["PYTHONPATH"])
    done = project.make("run", python=python)
    assert done.returncode == 2 and "set PYTHON and PYTHONPATH as they were, or make clean to start anew" in done.stderr


def test_a_torch_that_came_into_venv_is_the_one_that_counts(project, python, module):
    """Nothing has to be loaded for it any more."""
    run_of(project.execute("make", "run", f"PYTHON={python}", **module))
    unpack(site_packages(project.venv), [torch_wheel("2.10.0")])
    (project.root / "requirements.txt").touch()
    run_of(project.make("run", python=python))
    (site_packages(project.venv) / "torch.py").unlink()
    shutil.rmtree(site_packages(project.venv) / "torch-2.10.0.dist-info")
    asked, _ = run_of(project.make("run", python=python))
    assert f"pip: install torch{TESTED_TORCH}" in asked


@pytest.mark.parametrize("hip", ["6.4", None])
def test_the_container_uses_the_torch_of_its_base(project, python, tmp_path, hip):
    """Of ROCm or, with another --build-arg, of CUDA, whose image has no ensurepip."""
    lines = (ROOT / "site" / "Containerfile").read_text().splitlines()
    assert lines.index("FROM $BASE") > next(i for i, line in enumerate(lines) if line.startswith("ARG BASE="))
    (run,) = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    base = site_packages(tmp_path / "bare")
    if hip:
        unpack(base, rocm_wheels())
    else:
        unpack(base, [dict(name="triton", version="3.9.0"), torch_wheel("2.10.0")])
        shutil.copytree(tmp_path / "packages", base, dirs_exist_ok=True)
        hide_ensurepip(project, tmp_path)
        python = python.with_name("python")
    (tmp_path / "path").mkdir()
    executable(tmp_path / "path" / "python3", f'#!/bin/sh\nexec {python} "$@"\n')
    project.env["PATH"] = f"{tmp_path / 'path'}:{project.env['PATH']}"
    done = project.execute("sh", "-c", run)
    assert done.returncode == 0 and f"from {base / 'torch.py'}\n" in done.stdout, done.stderr
    asked, seen = run_of(project.execute("make", "run"))
    assert asked == [] and seen["torch"] == str(base / "torch.py") and seen["triton"] == str(base / "triton.py")


def test_a_script_that_fails_fails_the_run(project, python):
    (project.root / "tiny_llama_v3.py").write_text("raise SystemExit(3)")
    done = project.make("run", python=python)
    assert done.returncode != 0 and "Error 3" in done.stderr and "To go on" not in done.stdout


@pytest.mark.parametrize("triton, numpy", [("3.6.0", "2.3.5"), ("3.10.0", "2.4.0")])
def test_numpy_is_one_that_triton_can_interpret_with(project, python, triton, numpy):
    publish(project.pypi, "triton", triton)
    for version in ("2.3.5", "2.4.0"):
        publish(project.pypi, "numpy", version)
    _, seen = run_of(project.make("run", python=python))
    installed = owned(seen, project.venv)
    assert (installed["triton"], installed["numpy"]) == (triton, numpy)


def test_torch_of_another_index_brings_its_own_triton(project, python):
    """Only torch is asked of it, and PyPI's triton is shut out beside a torch for ROCm."""
    publish(project.rocm, **torch_wheel("2.13.0+rocm7.2", "7.2"))
    asked, seen = run_of(project.make("run", python=python, torch_index=project.rocm.as_uri()))
    assert f"pip: install --index-url {project.rocm.as_uri()} torch{TESTED_TORCH}" in asked
    installed = owned(seen, project.venv)
    assert installed["torch"] == "2.13.0+rocm7.2" and "triton" not in installed
    assert (project.venv / "constraints.txt").read_text() == "torch==2.13.0+rocm7.2\ntriton<0\n"
    address = (project.venv / "constraints.txt").as_uri()
    assert (project.venv / "pip.conf").read_text() == f"[global]\nconstraint = {address}\n"


def test_make_alone_lists_what_can_be_made(project):
    listed = project.execute("make").stdout.splitlines()
    assert any(re.match(r"make run +train ", line) for line in listed)
    for line in listed:
        assert "No rule to make" not in project.execute("make", "--dry-run", line.split()[1]).stderr


# --- which torch is asked for


PYTORCH, AMD = "https://download.pytorch.org/whl/rocm", "https://stable.repo.amd.com/rocm/whl-next/"


@pytest.mark.parametrize(
    "installed, targets, devices, index, others",
    [  # folder=release of each ROCm; what the driver calls the architectures, 0 for a CPU; None: there is no driver
        ("", None, "device-all", "", ""),
        ("module=6.4.1", None, "device-all", PYTORCH + "6.4", ""),
        ("rocm-7.2.1=7.2.1", None, "device-all", PYTORCH + "7.2", ""),
        ("module=10.0.0", None, "device-all", AMD, " rocm==10.0.*"),
        ("rocm=7.2.1 nvidia=", None, "device-all", "", ""),
        ("", "0 90402", "device-gfx942", PYTORCH + "7.2", ""),
        ("rocm=6.2.4-125", "0 90402", "device-gfx942", PYTORCH + "6.4", ""),
        ("rocm-6.4.3=6.4.3-1 rocm-7.1.0=7.1.0", "0 90010", "device-gfx90a", PYTORCH + "7.1", ""),
        ("rocm/core=7.13.0", "0 90402", "device-gfx942", PYTORCH + "7.2", ""),
        ("rocm/core=7.14.1", "0 90500", "device-gfx950", PYTORCH + "7.14", ""),
        ("rocm=7.2.1 module=6.4.1", "0 90402", "device-gfx942", PYTORCH + "6.4", ""),
        ("rocm-7.2.1=7.2.1 rocm/core-10.0=10.0.0", "0 90402 90402", "device-gfx942", AMD, " rocm==10.0.*"),
        ("rocm=10.1.0", "0 90010 90500", "device-gfx90a,device-gfx950", AMD, " rocm==10.1.*"),
        ("rocm=10.1.0", "", "device-all", AMD, " rocm==10.1.*"),
    ],
)
def test_torch_is_the_one_for_the_release_of_rocm(project, tmp_path, asked, installed, targets, devices, index, others):
    files = {tmp_path / folder / ".info/version": release for folder, release in re.findall(r"(\S+)=(\S+)", installed)}
    if "nvidia" in installed:
        files[tmp_path / "nvidia"] = ""
    for node, target in enumerate((targets or "").split()):
        files[tmp_path / f"topology/nodes/{node}/properties"] = f"simd_count 8\ngfx_target_version {target}\n"
    if targets is not None:
        files[tmp_path / "kfd"] = ""
    if "module" in installed:
        project.env["ROCM_PATH"] = str(tmp_path / "module")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def asked_for(torch_index):
        done = project.make(".venv/run.stamp", python=asked, torch_index=torch_index)
        return re.search(r"^pip: (?:--index-url (\S+) )?(.*)$", done.stdout, re.MULTILINE).groups("")

    newer = TESTED_TORCH.replace("<2.14", "<2.15")  # what is built for ROCm 7.14 and 10.1
    torch, of_amd = f"torch{newer if index.endswith('14') else TESTED_TORCH}", f"torch[{devices}]{newer}"
    assert asked_for("") == (index, (of_amd if index == AMD else torch) + others)
    nightly = "https://rocm.nightlies.amd.com/whl-multi-arch/"
    assert asked_for(nightly) == (nightly, of_amd)


def test_what_is_downloaded_without_a_gpu_is_said_first(project, tmp_path, asked):
    cpu = "https://download.pytorch.org/whl/cpu"

    def said(torch_index=""):
        return project.make(".venv/run.stamp", python=asked, torch_index=torch_index).stdout

    assert f"give the target TORCH_INDEX={cpu}\npip: " in said()
    assert "CUDA" not in said(cpu)
    for device in ("kfd", "nvidia"):
        (tmp_path / device).touch()
        assert "CUDA" not in said()
        (tmp_path / device).unlink()


def test_wsl_has_a_gpu_of_nvidia_if_it_has_nvidia_smi(project, tmp_path, asked):
    """One device file stands for GPUs of all makes there; without ROCm its torch has to be asked for."""

    def said(torch_index=""):
        return project.make(".venv/run.stamp", python=asked, torch_index=torch_index).stdout

    assert "CUDA" in said() and "WSL" not in said()
    executable(tmp_path / "nvidia-smi", "#!/bin/sh\n")
    assert "CUDA" in said()  # it is installed on login nodes too
    (tmp_path / "dxg").touch()
    assert "CUDA" not in said() and f"pip: torch{TESTED_TORCH}\n" in said()
    (tmp_path / "nvidia-smi").unlink()
    assert "There is no GPU of NVIDIA" in said() and "an AMD GPU under WSL, ROCm's index" in said()
    assert "WSL" not in said(PYTORCH + "7.2")
