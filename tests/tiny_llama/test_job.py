"""job.slurm, with fakes of Slurm's commands: two agents on this machine, each as if alone on its node."""

import ast
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = (ROOT / "site" / "job.slurm").read_text()
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
        foreign = re.compile("SLURM_|NCCL_|FI_|PYTHONUNBUFFERED|.*_CACHE_DIR$")
        self.env = {name: value for name, value in os.environ.items() if not foreign.match(name)}
        self.env |= dict(PATH=f"{commands}:/usr/bin:/bin", USER="somebody", PYTHONDONTWRITEBYTECODE="1")
        self.env |= dict(SLURM_JOB_NODELIST="localhost,localhost", SLURM_GPUS_ON_NODE="2")
        self.env["SLURM_JOB_ID"] = str(os.getpid())

    def sbatch(self, *arguments, job=JOB, **env):
        submitted = self.submit(*arguments, job=job, **env)
        try:
            stdout, stderr = submitted.communicate(timeout=300)
        except subprocess.TimeoutExpired:  # srun ends its tasks
            os.killpg(submitted.pid, signal.SIGTERM)
            raise
        print(stdout, stderr)
        return subprocess.CompletedProcess(submitted.args, submitted.returncode, stdout, stderr)

    def submit(self, *arguments, job=JOB, **env):
        """Return the process of a job that has begun."""
        assert JOB.count("cache=/tmp ") == JOB.replace("in /tmp any", "").count("/tmp") == 1  # not in this machine's
        (self.folder / "job.slurm").write_text(job.replace("cache=/tmp ", f"cache={self.folder} "))
        options = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(
            ["bash", "job.slurm", *arguments], cwd=self.folder, env=self.env | env, start_new_session=True, **options
        )

    @property
    def cache(self):
        """The folder of compiled kernels, which all nodes share here."""
        return self.folder / f"tiny-llama-{os.getuid()}-{self.env['SLURM_JOB_ID']}"


@pytest.fixture
def cluster(tmp_path):
    """A Cluster whose programs are children of each other, to which cores and signals are handed down."""
    return Cluster(tmp_path)


LAUNCHER = f"""#!/bin/sh
[ "$1" = -m ] || exec {sys.executable} "$@"
while [ "$1" != --no_python ]; do shift; done
shift
RANK=0 LOCAL_RANK=0 exec "$@"
"""


@pytest.fixture
def one_process(tmp_path):
    """one_process(program, job) runs a program in the job's place, as the only process of the only node, at once."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "python").write_text(LAUNCHER)
    (tmp_path / "fake" / "python").chmod(0o755)
    cluster = Cluster(tmp_path, tmp_path / "fake" / "python")

    def run(program, *arguments, job=JOB, begin=cluster.sbatch, **env):
        return begin(*arguments, job=with_program(job, program), SLURM_JOB_NODELIST="localhost", **env)

    run.cluster = cluster
    return run


def with_program(job, code):
    """job.slurm with another program in the script's place."""
    return job.replace("process tiny_llama_v3.py", f"process -c {shlex.quote(code)}")


def test_two_agents_train_as_one_process_does_with_the_batch_of_all(tmp_path, python, run):
    done = Cluster(tmp_path, python).sbatch(*RUN, "--batch-size", "2")
    assert done.returncode == 0 and done.stdout.count("Final loss: ") == 1  # rank 0 alone prints
    told = rf"job.slurm: first run on {re.escape(platform.node())}: \d+ s, of which compilation and warm-up [\d.]+ s\n"
    assert re.match(rf"({told}){{2}}(?!job.slurm)", done.stdout)  # a line for each node, before the run
    (path,) = tmp_path.glob("triton_profiles/*.json")
    result = json.loads(path.read_text())
    assert result["summary"]["world"]["size"] == 4
    losses, expected = [step["loss"] for step in result["steps"]], run(*RUN, "--batch-size", "8").losses
    assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != losses[-1]


RANKS = """
import os
names = "SLURM_NODEID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"
values = [os.environ[name] for name in names]
open("rank" + values[1], "w").write(" ".join(values + sorted(map(str, os.sched_getaffinity(0)))))
"""


def test_every_node_takes_part_and_each_process_has_its_cores(cluster):
    """A process without a list of cores may use them all: the agent's own task is bound to none."""
    available = sorted(map(str, os.sched_getaffinity(0)))
    job = with_program(JOB, RANKS).replace("\ncores=()", f"\ncores=({available[-1]})")
    assert cluster.sbatch(job=job).returncode == 0
    ranks = [path.read_text().split() for path in sorted(cluster.folder.glob("rank*"))]
    assert sorted(node for node, *_ in ranks) == ["0", "0", "1", "1"]
    for number, (_, rank, local, *rest) in enumerate(ranks):
        cores = available if local == "1" else available[-1:]
        assert rank == str(number) and rest == ["4", "2", str(os.getpid()), *cores]


def test_a_node_that_fails_ends_the_job(cluster):
    code = """
import os, time
if os.environ["WORLD_SIZE"] == "4":
    os.environ["RANK"] == "3" and exit(7)
    time.sleep(60)
    print("still here")
"""
    done = cluster.sbatch(job=with_program(JOB, code))
    assert done.returncode != 0 and "still here" not in done.stdout and not cluster.cache.exists()


def test_the_variables_of_the_network(one_process):
    code = "import os; print({n: v for n, v in os.environ.items() if n.startswith(('NCCL_', 'FI_', 'GLOO_'))})"
    assert eval(one_process(code).stdout) == {"NCCL_DEBUG": "WARN"}
    job = JOB.replace("\ninterface= ", "\ninterface=hsn0 ").replace("\nnetwork=infiniband", "\nnetwork=slingshot")
    slingshot = eval(one_process(code, job=job).stdout)
    assert slingshot["NCCL_SOCKET_IFNAME"] == slingshot["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert slingshot["NCCL_NET_GDR_LEVEL"] == "PHB" and slingshot["FI_MR_CACHE_MONITOR"] == "kdreg2"


def test_the_cache_of_compiled_kernels_is_this_user_s_alone(one_process):
    """On a disk that everybody writes to: what lies there is executed."""
    names, own = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), one_process.cluster.cache
    code = f"import os; print(*map(os.environ.get, {names}), oct(os.stat('{own}').st_mode))"
    for mode in (0o700, 0o2700):  # 2: in a folder whose group is handed down
        assert one_process(code).stdout == f"{own}/triton {own}/inductor {oct(0o40000 + mode)}\n"
        assert not own.exists()  # removed at the end of the job
        own.mkdir()
        own.chmod(0o2700)  # left by a node that failed before the job was queued again
    assert one_process(code, **dict.fromkeys(names, "/elsewhere")).stdout.startswith("/elsewhere /elsewhere ")
    changes = [lambda: own.mkdir(0o770) or own.chmod(0o770), lambda: own.rmdir() or own.symlink_to(own.parent)]
    if os.getuid() == 0:  # only root can give a folder away
        changes.append(lambda: own.unlink() or own.mkdir(0o700) or os.chown(own, 12345, 12345))
    for made_before in changes:
        made_before()
        done = one_process(code)
        assert done.returncode == 2 and done.stdout == "" and f"job.slurm: error: {own} on " in done.stderr
        assert done.stderr.count("\n") == 1 and os.path.lexists(own)  # what the job has not made stays


def test_each_node_compiles_in_a_run_of_its_own_before(one_process):
    """With the same flags, and with nothing written but into the cache: a model would keep the run from its own."""
    code = "import sys; open('calls', 'a').write(f'{sys.argv[1:]}\\n')"
    flags, own = ["--num-steps", "9", "--impl", "torch"], one_process.cluster.cache / "first"
    cases = [], ["--profile", "a b"], ["--profile=c"], ["--save", "a b"], ["--save=c"], ["--output-dir", "--profiles"]
    for more in cases:
        assert one_process(code, *flags, *more).returncode == 0
        calls = one_process.cluster.folder / "calls"
        first, second = map(ast.literal_eval, calls.read_text().splitlines())
        calls.unlink()
        given = {flag.split("=")[0] for flag in more}
        places = {"--profile": str(own), "--save": f"{own}/model"}
        moved = [word for flag, place in places.items() if flag in given for word in (flag, place)]
        assert second == [*flags, *more]
        assert first == [*second, "--num-steps", "1", "--output-dir", str(own), *moved]


@pytest.mark.parametrize("failure, reason", [
    ("sys.exit('a\\nprogram: error: no room\\nb')", "program: error: no room"),
    ("sys.exit('a\\nthe last')", "the last"),
])  # fmt: skip
def test_a_first_run_that_fails_is_no_reason_not_to_begin(one_process, failure, reason):
    done = one_process(f"import sys; '--num-steps' in sys.argv and {failure}; print('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("job.slurm: the first run on ") and done.stderr.endswith(f" compiles: {reason}\n")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_job_that_is_ended_removes_the_cache(one_process, is_first):
    """And begins nothing more."""
    code = """
import pathlib, sys, time
now = "first" if "--num-steps" in sys.argv else "second"
pathlib.Path(now).touch()
now == sys.argv[1] and time.sleep(60)
"""
    cluster, now = one_process.cluster, "first" if is_first else "second"
    job = one_process(code, now, begin=cluster.submit)
    deadline = time.monotonic() + 60
    while not (cluster.folder / now).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cluster.cache.exists()
    job.terminate()
    job.communicate(timeout=60)
    assert job.returncode == 143 and not cluster.cache.exists()
    assert (cluster.folder / "second").exists() != is_first


@pytest.mark.parametrize("number", ["1+BASH_VERSINFO[$(touch executed)0]", "x", ""])
def test_no_variable_of_slurm_is_executed(cluster, number):
    done = cluster.sbatch(*RUN, SLURM_JOB_ID=number)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (cluster.folder / "executed").exists()


@pytest.mark.parametrize("changes, removed, named", [
    ({}, "SLURM_JOB_ID", "Slurm did not start it: sbatch site/job.slurm"),
    ({}, "SLURM_GPUS_ON_NODE", "Slurm gives no number of GPUs on a node: call sbatch --gpus-per-node=N, or write"),
    (dict(SLURM_GPUS_ON_NODE=""), None, "no number of GPUs on a node"),
    (dict(SLURM_GPUS_ON_NODE="0"), None, "Slurm gives 0 GPUs on a node"),
    (dict(SLURM_GPUS_ON_NODE="a[$(touch executed)]"), None, "GPUs on a node"),
    ({}, "SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST is not set, as in a heterogeneous job: give all nodes in one group"),
    (dict(SLURM_JOB_NODELIST=""), None, "SLURM_JOB_NODELIST is not set"),
    ({}, "bin/scontrol", "scontrol is not found: have its folder in PATH, or its module in modules="),
    ({}, "bin/srun", "srun is not found"),
    ({"\ncores=()": "\ncores=(0-7)", "taskset}": "no_taskset}"}, None, "no_taskset is not found"),
    ({}, ".venv/bin/activate", "there is no .venv/bin/activate: make run makes it, or name another in venv="),
    ({}, "tiny_llama_v3.py", "call sbatch in the project's folder"),
    ({"\nmodules=()": "\nmodules=(rocm)"}, None, "there is no command module: empty modules="),
    ({"\nmodules=()": "\nmodules=(rocm); module() { false; }"}, None, "module load rocm failed"),
    ({"\nnetwork=infiniband": "\nnetwork=ib"}, None, "network=ib is none of infiniband, slingshot and ethernet"),
])  # fmt: skip
def test_what_is_missing_is_named_with_a_remedy(cluster, changes, removed, named):
    job, env = JOB, {name: value for name, value in changes.items() if name.startswith("SLURM_")}
    for old in changes.keys() - env.keys():
        assert old in job
        job = job.replace(old, changes[old])
    if not cluster.env.pop(removed or "", None) and removed:
        (cluster.folder / removed).unlink()
    done = cluster.sbatch(job=job, **env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("job.slurm: error: ") and named in done.stderr
    assert not (cluster.folder / "executed").exists()


def test_a_list_of_nodes_that_slurm_does_not_know(cluster):
    (cluster.folder / "bin" / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    done = cluster.sbatch()
    assert done.returncode == 2 and "scontrol does not know the nodes of SLURM_JOB_NODELIST=localhost" in done.stderr


@pytest.mark.parametrize("own, slurm_s, used", [("", "2", 2), ("8", "", 8), ("4", "2", 4)])
def test_the_number_of_gpus_may_be_given_in_the_job(cluster, own, slurm_s, used):
    """Slurm counts none where it gives whole nodes; those of all nodes do not count here.

    Modules may use variables that are not set.
    """
    (cluster.folder / "bin" / "srun").write_text('#!/bin/sh\necho "$GPUS" "$@"\n')
    job = JOB.replace("\ngpus= ", f"\ngpus={own} ").replace(
        "\nmodules=()", '\nmodules=(a b); module() { echo "$@$UNSET"; }'
    )
    done = cluster.sbatch("--graph", job=job, SLURM_GPUS_ON_NODE=slurm_s, SLURM_GPUS="16")
    assert done.returncode == 0 and done.stdout.startswith(
        f"load a b\n{used} --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 "
    )
    assert done.stdout.endswith(" tiny_llama_v3.py --graph\n")
