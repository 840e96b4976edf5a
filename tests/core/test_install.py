"""`make` sets up .venv: shown offline, with fake packages on a local index.

test_make_run.py has what needs no real pip, and takes less time.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("make"), reason="needs make")]

ROOT = Path(__file__).resolve().parents[2]
FILES = ["Makefile", "site/setup_env.sh", "profilers/rocm.py", "requirements.txt", "tests/requirements.txt"]
REQUIREMENTS = "".join((ROOT / name).read_text() for name in FILES if name.endswith(".txt"))
LOWEST = dict(re.findall(r"^([\w-]+)[>=]=([\d.]+)", REQUIREMENTS, re.MULTILINE))  # {name: its lowest version}
TESTED_TORCH = re.search(r"^torch(>\S+)", REQUIREMENTS, re.MULTILINE)[1]
NEWEST_TORCH = "2.13.0"

TORCH_SOURCE = """
from types import SimpleNamespace
__version__ = {version!r}
version = SimpleNamespace(hip={hip!r})
"""

# Stands for the training script: tells where it finds modules and distributions.
SCRIPT = """
import json, importlib.metadata as metadata, importlib.util as util
modules = {name: util.find_spec(name).origin for name in ("torch", "triton") if util.find_spec(name)}
installed = [(dist.name, dist.version, str(dist.locate_file(""))) for dist in metadata.distributions()]
print(json.dumps({**modules, "installed": installed}))
"""

# Stands for python3: as ensurepip takes seconds to compile pip, an environment gets a copy of one that is compiled.
QUICK_PYTHON = """#!/usr/bin/env bash
[[ "$1 $2" = "-m venv" ]] || exec REAL "$@"
REAL -m venv --without-pip "${@:3}" && cp -r PIP/* "${!#}"/lib/python*/site-packages
"""


def make_wheel(folder, name, version, requires=(), files=None):
    """Write a wheel of these files, {path: text}, by default of a module that knows its version."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = files or {f"{name.replace('-', '_')}.py": f"__version__ = {version!r}"}
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files |= {
        f"{stem}.dist-info/METADATA": "\n".join(metadata) + "\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{stem}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def publish(index, name, version, **wheel):
    """Put a wheel on a package index that pip reads through a file:// address."""
    make_wheel(index / name, name, version, **wheel)
    links = (f'<a href="{path.name}">{path.name}</a>' for path in (index / name).glob("*.whl"))
    (index / name / "index.html").write_text("\n".join(links))


def unpack(folder, wheels):
    """Install wheels into a folder, as somebody else has done."""
    for wheel in wheels:
        zipfile.ZipFile(make_wheel(folder, **wheel)).extractall(folder)


def torch_wheel(version, hip=None, requires=()):
    source = TORCH_SOURCE.format(version=version, hip=hip)
    return dict(name="torch", version=version, requires=requires, files={"torch.py": source})


def rocm_wheels():
    """Return ROCm's torch, and its triton, which another distribution owns."""
    triton = dict(name="pytorch-triton-rocm", version="3.3.1", files={"triton.py": "__version__ = '3.3.1'"})
    return [triton, torch_wheel("2.7.1+rocm6.4", "6.4", ["pytorch-triton-rocm==3.3.1"])]


class Project:
    """A copy of the set-up files, and a package index with a fake of every requirement."""

    def __init__(self, folder):
        self.root, self.pypi, self.rocm = folder / "a project", folder / "pypi", folder / "rocm"
        self.venv = self.root / ".venv"
        self.root.mkdir()
        for name in FILES:
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        (self.root / "tiny_llama_v3.py").write_text(SCRIPT)
        for name, version in LOWEST.items():
            publish(self.pypi, name, version)
        publish(self.pypi, **torch_wheel(NEWEST_TORCH))
        own = ("PIP_", "PYTHON", "MAKE", "MFLAGS", "VIRTUAL_ENV", "TORCH_INDEX", "LOADEDMODULES")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self.env |= {
            "PIP_INDEX_URL": self.pypi.as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
            "ROCM_PATH": "",
            "ROCM_PARENT": str(folder),
            "KFD_DEVICE": str(folder / "kfd"),
            "KFD_TOPOLOGY": str(folder / "topology"),
            "NVIDIA_DEVICE": str(folder / "nvidia"),
            "WSL_DEVICE": str(folder / "dxg"),
            "NVIDIA_SMI": str(folder / "nvidia-smi"),
            # User packages come before the base interpreter's, whatever those are.
            "PYTHONUSERBASE": str(folder / "user"),
        }

    def execute(self, *command, cwd=None, **env):
        pipes = dict(capture_output=True, text=True, timeout=300)
        return subprocess.run(command, cwd=cwd or self.root, env=self.env | env, **pipes)

    def make(self, *goals, python, torch_index=""):
        users = dict(PIP_USER="1", PIP_TARGET=str(self.root), PIP_PREFIX=str(self.root))  # of other environments
        return self.execute("make", *goals, f"PYTHON={python}", f"TORCH_INDEX={torch_index}", **users)

    def run(self, python, torch_index=""):
        """Run `make run`, and return what the script saw."""
        done = self.make("run", python=python, torch_index=torch_index)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-2])  # the last line says how to go on

    def pip_install(self, package):
        """Do what a user types in .venv: pip's configuration files count, of which .venv's is one."""
        del self.env["PIP_CONFIG_FILE"]
        # Set, they take the place of what this machine's configuration says.
        links = {"PIP_EXTRA_INDEX_URL": self.pypi.as_uri(), "PIP_FIND_LINKS": str(self.pypi)}
        done = self.execute(self.venv / "bin/python", "-m", "pip", "install", package, **links)
        self.env["PIP_CONFIG_FILE"] = os.devnull
        return done


def owned(seen, folder):
    """Return {name: version} of the distributions that lie under a folder."""
    return {name: version for name, version, place in seen["installed"] if Path(place).is_relative_to(folder)}


def site_packages(environment):
    return next(environment.glob("lib/python*/site-packages"))


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture(scope="module")
def compiled_pip(tmp_path_factory):
    """A folder with pip."""
    folder = tmp_path_factory.mktemp("pip")
    venv.create(folder, symlinks=True, with_pip=True)
    return site_packages(folder)


@pytest.fixture
def bare(tmp_path, compiled_pip):
    """An interpreter without torch."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare/bin/quick"
    python.write_text(QUICK_PYTHON.replace("REAL", f"{python.parent}/python").replace("PIP", str(compiled_pip)))
    python.chmod(0o755)
    return python


@pytest.fixture
def cluster(bare):
    """An environment that imports ROCm's torch, and the folder that holds it."""
    folder = site_packages(bare.parents[1])
    unpack(folder, rocm_wheels())
    return bare, folder


def test_wheel_holds_what_other_code_can_import(tmp_path):
    source, importable = tmp_path / "source", ("tiny_llama_v3.py", "tiny_llama", "nanogpt_triton")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "benchmarks", *importable):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {Path(name).parts[0] for name in names if "dist-info" not in name} == {*importable}
    assert {"nanogpt_triton/kernels/layer_norm.py", "tiny_llama/distributed.py"} <= {*names}


# --- torch comes from the interpreter, or from an index


@pytest.mark.parametrize("kind", ["venv", "system"])
def test_torch_of_the_interpreter_is_kept(project, cluster, kind):
    python, folder = cluster
    if kind == "system":
        python = Path(sys.executable).resolve()
        folder = Path(project.execute(python, "-m", "site", "--user-site").stdout.strip())
        unpack(folder, rocm_wheels())
    venv.create(project.venv, symlinks=True, with_pip=True)
    (project.venv / "mine").touch()
    for goals in ["run"], ["test", "run"]:
        done = project.make(*goals, python=python)
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout.splitlines()[-2])
        assert seen["torch"] == str(folder / "torch.py") and seen["triton"] == str(folder / "triton.py")
        assert owned(seen, folder) == {"torch": "2.7.1+rocm6.4", "pytorch-triton-rocm": "3.3.1"}
        assert not {"torch", "triton"} & owned(seen, project.venv).keys()
    assert {"numpy", "matplotlib", "pytest"} <= owned(seen, project.venv).keys()
    assert (project.root / ".venv.old" / "mine").exists()


def test_nothing_can_bring_a_second_triton(project, cluster):
    """Neither what is installed later, nor a requirement's own requirement."""
    python, _ = cluster
    project.run(python)
    publish(project.pypi, "liger-kernel", "0.6.0", requires=["triton>=2.3"])
    publish(project.pypi, "harmless", "1.0", requires=["torch>=2.7"])
    done = project.pip_install("liger-kernel")
    assert done.returncode != 0 and "triton<0" in done.stdout + done.stderr
    assert project.pip_install("harmless").returncode == 0
    shutil.rmtree(project.venv)
    publish(project.pypi, "matplotlib", LOWEST["matplotlib"], requires=["triton"])
    done = project.make("run", python=python)
    assert done.returncode != 0 and "triton<0" in done.stdout + done.stderr


@pytest.mark.parametrize("version, warns", [("2.7.0a0+git1", False), ("2.14.0a0", True)])
def test_untested_torch_is_kept_with_a_warning(project, cluster, version, warns):
    python, folder = cluster
    (folder / "torch.py").write_text(TORCH_SOURCE.format(version=version, hip="6.4"))
    done = project.make("run", python=python)
    assert done.returncode == 0
    warning = f"setup_env.sh: warning: torch {version} is kept; tested is torch{TESTED_TORCH}"
    assert done.stderr.splitlines().count(warning) == warns


def test_what_an_index_brings_is_kept(project, bare):
    """AMD's has a triton of its own, older than PyPI's, and ROCm's programs."""
    publish(project.pypi, "triton", "3.99.0")
    version = "3.8.0+git4cff872c.rocm10.0.0"
    wheels = [
        dict(name="triton", version=version),
        dict(name="rocm-sdk-core", version="10.0.0", files={"_rocm_sdk_core/bin/rocprofv3": ""}),
        torch_wheel("2.13.0+rocm10.0.0", "7.15.26333", [f"triton=={version}", "rocm-sdk-core==10.0.0"]),
    ]
    for wheel in wheels:
        publish(project.rocm, **wheel)
    seen, folder = project.run(bare, torch_index=project.rocm.as_uri()), site_packages(project.venv)
    assert {wheel["name"]: wheel["version"] for wheel in wheels}.items() <= owned(seen, folder).items()
    assert (seen["torch"], seen["triton"]) == (str(folder / "torch.py"), str(folder / "triton.py"))
    assert (folder / "_rocm_sdk_core/bin/rocprofv3").exists()


# --- what was there before, and what happens to it


def test_bare_interpreter_gets_the_requirements_once(project, bare):
    bare = bare.with_name("python")
    seen = project.run(bare)
    assert seen["torch"] == str(site_packages(project.venv) / "torch.py")
    assert {"torch": NEWEST_TORCH, "numpy": LOWEST["numpy"]}.items() <= owned(seen, project.venv).items()
    stamp = project.venv / "run.stamp"
    before = stamp.stat().st_mtime_ns
    again = project.make("run", python=bare)
    assert len(again.stdout.splitlines()) == 3  # the script's command line, its output and how to go on
    go_on = again.stdout.splitlines()[-1].partition(": ")[2].removesuffix(" --help")
    assert json.loads(project.execute("sh", "-c", go_on).stdout)["torch"] == seen["torch"]
    assert stamp.stat().st_mtime_ns == before
    (project.root / "requirements.txt").touch()
    assert project.make("-q", ".venv/run.stamp", python=bare).returncode == 1


@pytest.mark.parametrize("made", ["uv", "system site packages"])
def test_an_environment_of_the_user_s_own_is_kept(project, bare, tmp_path, made):
    """`uv venv` makes one without pip."""
    by_uv = made == "uv"
    venv.create(project.venv, symlinks=True, with_pip=not by_uv, system_site_packages=not by_uv)
    own = site_packages(project.venv)
    folder = own if by_uv else tmp_path / "base"
    unpack(folder, rocm_wheels())
    (own / "base.pth").write_text("" if by_uv else str(folder))
    seen = project.run(bare)
    assert Path(seen["torch"]).parent == folder
    assert {"numpy", "matplotlib"} <= owned(seen, project.venv).keys()
    assert project.make("test", python=bare).returncode == 0
    publish(project.pypi, "harmful", "1.0", requires=["triton"])
    assert project.pip_install("harmful").returncode != 0


@pytest.mark.parametrize("links", [False, True])
def test_an_environment_without_torch_is_never_emptied(project, bare, tmp_path, links):
    """It gets torch; a link to one elsewhere is renamed."""
    own = tmp_path / "own" if links else project.venv
    venv.create(own, symlinks=True, with_pip=True)
    if links:
        project.venv.symlink_to(own)
    (own / "mine").touch()
    (own / "pip.conf").write_text("[global]\ntimeout = 77\n")
    seen = project.run(bare)
    assert "timeout = 77" in (own / "pip.conf").read_text()
    assert (own / "mine").exists() and (site_packages(own) / "torch.py").exists() != links
    assert (project.root / ".venv.old").is_symlink() == links
    assert Path(seen["torch"]) == site_packages(project.venv) / "torch.py"


def test_moved_checkout_is_set_up_anew_and_the_old_environment_renamed(project, bare, tmp_path):
    project.run(bare)
    (project.venv / "mine").touch()
    (project.root / ".venv.old").symlink_to("gone")
    project.root = project.root.rename(tmp_path / "elsewhere")
    project.venv = project.root / ".venv"
    done = project.make("run", python=bare)
    assert done.returncode == 0 and "The .venv that was here is now .venv.old2: delete it if" in done.stdout
    assert (project.root / ".venv.old2" / "mine").exists() and not (project.venv / "mine").exists()
    assert project.pip_install("numpy").returncode == 0


def test_failed_and_broken_installs_are_repaired(project, bare):
    (project.pypi / "matplotlib").rename(project.pypi / "hidden")
    assert project.make("run", python=bare).returncode != 0
    assert not (project.venv / "run.stamp").exists()
    (project.pypi / "hidden").rename(project.pypi / "matplotlib")
    project.run(bare)
    (project.venv / "bin/python").unlink()
    project.run(bare)


def test_no_network_is_needed_where_everything_is_there(project, bare):
    assert project.make("test", python=bare).returncode == 0
    (project.venv / "bin/ruff").touch()  # which the fake of the package does not bring
    shutil.rmtree(project.pypi)
    for name in FILES[1:]:
        (project.root / name).touch()
        assert project.make("test", python=bare).returncode == 0


# --- what the environment may say, and what is said to a user


@pytest.mark.parametrize("code", ["$(shell touch executed)", "'; touch executed; '"])
def test_the_environment_is_not_executed(project, bare, code):
    """By make or by the shell, for it is called like the options that are typed behind make."""
    project.env |= dict.fromkeys(("ARGS", "PYTEST_ARGS", "ARCH", "TINYGRAD"), code)
    command = ["make", "run", "test", f"PYTHON={bare}"]
    done = project.execute(*command, TORCH_INDEX=code)
    assert done.returncode != 0 and "TORCH_INDEX=URL names another index" in done.stderr
    assert project.execute(*command).returncode == 0
    assert project.execute("make", "--dry-run", "emulate").returncode == 0
    assert not (project.root / "executed").exists()
