"""job.slurm, with fakes of Slurm's commands: two agents on this machine, each as if alone on its node."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = (ROOT / "job.slurm").read_text()
MODEL = "--impl torch --device cpu --hidden-dim 32 --num-layers 1 --num-heads 2 --ffn-dim 32 --vocab-size 32"
RUN = [*MODEL.split(), "--seq-len", "8", "--num-steps", "3", "--warmup-steps", "1", "--data", "markov"]


class Cluster:
    """Two nodes, with the project and its .venv in a folder that both see."""

    def __init__(self, folder, python=sys.executable):
        self.folder = folder
        commands, activate = folder / "bin", folder / ".venv" / "bin" / "activate"
        commands.mkdir()
        activate.parent.mkdir(parents=True)
        activate.write_text(f"PATH={shlex.quote(str(Path(python).parent))}:$PATH\n")
        for name in ("tiny_llama_v3.py", "tiny_llama"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("srun", "scontrol"):
            fake = shlex.join([sys.executable, str(ROOT / "tests" / "fakes" / f"{name}.py")])
            (commands / name).write_text(f'#!/bin/sh\nexec {fake} "$@"\n')
            (commands / name).chmod(0o755)
        # Unbuffered, a print is two writes, and the lines of two processes mix.
        foreign = ("SLURM_", "NCCL_", "FI_", "PYTHONUNBUFFERED")
        own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.env = own | {"PATH": f"{commands}:/usr/bin:/bin", "USER": "somebody", "PYTHONDONTWRITEBYTECODE": "1"}
        self.env |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "localhost,localhost"}
        self.env |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_GPUS_ON_NODE": "2"}
        self.env = {name: value for name, value in self.env.items() if not name.endswith("_CACHE_DIR")}

    def sbatch(self, *arguments, job=JOB, **env):
        assert JOB.count("/tmp/") == 1  # and not in this machine's
        (self.folder / "job.slurm").write_text(job.replace("/tmp/", f"{self.folder}/"))
        command = ["bash", "job.slurm", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env | env, capture_output=True, text=True, timeout=300,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        return done

    def results(self):
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("triton_profiles/*.json"))]


@pytest.fixture
def cluster(tmp_path, python):
    return Cluster(tmp_path, python)


@pytest.fixture
def own_processes(tmp_path):
    """A Cluster whose programs are children of each other, to which cores and signals are handed down."""
    return Cluster(tmp_path)


def with_program(job, code):
    """job.slurm with another program in the script's place."""
    return job.replace("process tiny_llama_v3.py", f"process -c {shlex.quote(code)}")


def test_two_agents_train_as_one_process_does_with_the_batch_of_all(cluster, run):
    assert cluster.sbatch(*RUN, "--batch-size", "2").returncode == 0
    (result,) = cluster.results()
    assert result["summary"]["world"]["size"] == 4
    losses, expected = [step["loss"] for step in result["steps"]], run(*RUN, "--batch-size", "8").losses
    assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != losses[-1]


RANKS = """
import os
names = "SLURM_NODEID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"
open("rank" + os.environ["RANK"], "w").write(" ".join(os.environ[name] for name in names))
open("cores" + os.environ["RANK"], "w").write(str(sorted(os.sched_getaffinity(0))))
"""


def test_every_node_takes_part_and_each_process_has_its_cores(own_processes):
    cluster, available = own_processes, sorted(os.sched_getaffinity(0))
    cores = [available[0], available[-1]]
    job = with_program(JOB, RANKS).replace("\ncores=()", f"\ncores=({cores[0]} {cores[1]})")
    assert cluster.sbatch(job=job).returncode == 0
    ranks = [path.read_text().split() for path in sorted(cluster.folder.glob("rank*"))]
    assert sorted(node for node, *_ in ranks) == ["0", "0", "1", "1"]
    assert [rank for _, rank, *_ in ranks] == ["0", "1", "2", "3"]
    assert {tuple(rest) for _, _, _, *rest in ranks} == {("4", "2", str(os.getpid()))}
    bound = [(cluster.folder / f"cores{rank}").read_text() for rank in range(4)]
    assert bound == [f"[{cores[int(local)]}]" for _, _, local, *_ in ranks]
    # Left to the operating system, a process may use them all: the agent's own task is bound to none.
    for path in cluster.folder.glob("cores*"):
        path.unlink()
    assert cluster.sbatch(job=with_program(JOB, RANKS), SLURM_JOB_NUM_NODES="1").returncode == 0
    assert [path.read_text() for path in cluster.folder.glob("cores*")] == [str(available)] * 2


def test_a_node_that_fails_ends_the_job(own_processes):
    code = "import os, time; os.environ['RANK'] == '3' and exit(7); time.sleep(60); print('still here')"
    done = own_processes.sbatch(job=with_program(JOB, code))
    assert done.returncode != 0 and "still here" not in done.stdout


def test_the_variables_of_the_network(cluster):
    code = "import os; print({n: v for n, v in os.environ.items() if n.startswith(('NCCL_', 'FI_', 'GLOO_'))})"
    plain = cluster.sbatch(job=with_program(JOB, code), SLURM_JOB_NUM_NODES="1")
    assert eval(plain.stdout.splitlines()[0]) == {"NCCL_DEBUG": "WARN"}
    job = with_program(JOB, code).replace("\ninterface= ", "\ninterface=hsn0 ")
    job = job.replace("\nnetwork=infiniband", "\nnetwork=slingshot")
    slingshot = eval(cluster.sbatch(job=job, SLURM_JOB_NUM_NODES="1").stdout.splitlines()[0])
    assert slingshot["NCCL_SOCKET_IFNAME"] == slingshot["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert slingshot["NCCL_NET_GDR_LEVEL"] == "PHB" and slingshot["FI_MR_CACHE_MONITOR"] == "kdreg2"


def test_the_cache_of_compiled_kernels_is_this_user_s_alone(cluster):
    """On a disk that everybody writes to: what lies there is executed."""
    names, own = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), cluster.folder / f"tiny-llama-{os.getuid()}"
    job = with_program(JOB, f"import os; print('in', *map(os.environ.get, {names}))")

    def made_before(change):
        change()
        done = cluster.sbatch(job=job, SLURM_JOB_NUM_NODES="1")
        assert done.returncode != 0 and "in /" not in done.stdout
        assert f"job.slurm: error: {own} on " in done.stderr and "name another in cache=" in done.stderr

    for _ in range(2):  # made, then found
        done = cluster.sbatch(job=job, SLURM_JOB_NUM_NODES="1")
        assert done.returncode == 0 and done.stdout == f"in {own}/triton {own}/inductor\n" * 2
        assert own.stat().st_mode & 0o7777 == 0o700
    done = cluster.sbatch(job=job, SLURM_JOB_NUM_NODES="1", **dict.fromkeys(names, "/elsewhere"))
    assert done.returncode == 0 and done.stdout == "in /elsewhere /elsewhere\n" * 2
    own.chmod(0o2700)  # in a folder whose group is handed down
    assert cluster.sbatch(job=job, SLURM_JOB_NUM_NODES="1").returncode == 0
    made_before(lambda: own.chmod(0o770))
    made_before(lambda: own.rmdir() or own.touch(0o700))
    made_before(lambda: own.unlink() or own.symlink_to(cluster.folder))
    if os.getuid() == 0:  # only root can give a folder away
        made_before(lambda: own.unlink() or own.mkdir(0o700) or os.chown(own, 12345, 12345))


def test_no_variable_of_slurm_is_executed(cluster):
    for number in ("BASH_VERSINFO[$(touch executed)0]", "1+BASH_VERSINFO[$(touch executed)0]", "x", ""):
        done = cluster.sbatch(*RUN, SLURM_JOB_ID=number)
        told = f"job.slurm: error: Slurm did not start it: sbatch job.slurm {' '.join(RUN)}\n"
        assert done.returncode == 2 and done.stderr == told
    assert not (cluster.folder / "executed").exists()


def test_what_a_site_changes_stands_at_the_top_a_line_each():
    top, rest = JOB.split("set -euo pipefail")
    assert "#SBATCH" not in rest  # sbatch stops reading at the first command
    assert not re.search(r"^\w+=", top[: top.rindex("#SBATCH")], flags=re.M)
    options = set(re.findall(r"^#SBATCH --([\w-]+)", JOB, flags=re.M))
    assert {"account", "partition", "gpus-per-node", "nodes", "time"} <= options
