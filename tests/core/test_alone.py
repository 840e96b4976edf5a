"""The script copied into an empty folder: it trains as with its companions, and names the one that is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama

SCRIPT = Path(llama.__file__).resolve()
TINY = (
    "--hidden-dim 16 --num-layers 2 --num-heads 2 --num-kv-heads 1 --ffn-dim 16 --vocab-size 11 --batch-size 1 "
    "--seq-len 5 --num-steps 2 --warmup-steps 1 --device cpu"
).split()
TORCHRUN = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
RUNS = {  # name: the flags of a run
    "kernels": f"--impl {'torch' if llama.triton_obstacle(torch.device('cpu')) else 'triton'}",
    "torch": "--impl torch --check",
    "one process of torchrun": "--impl sdpa",
    "two processes of torchrun": "",
    "profile": "--profile profile",
    "fp8": "--fp8",
    "markov": "--data markov",
    "text": "--data tiny_llama_v3.py",
    "without Triton": "--impl triton --check",
}
ENVIRONMENTS = {"one process of torchrun": TORCHRUN | {"WORLD_SIZE": "1"}, "two processes of torchrun": TORCHRUN}
RUN_EACH = """
import contextlib, io, json, os, runpy, sys
answers = {}
for name, (flags, environment) in json.load(sys.stdin).items():
    if name == "without Triton":
        sys.modules["triton"] = None  # importing it raises ImportError
    os.environ.update(environment)
    sys.argv, out, err = ["tiny_llama_v3.py", *flags, "--output-dir", name], io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path("tiny_llama_v3.py", run_name="__main__")
    except SystemExit as exit:
        answers[name] = exit.code, out.getvalue(), err.getvalue(), sorted(os.listdir())
    for variable in environment:
        del os.environ[variable]
assert not [name for name in sys.modules if name.startswith("tiny_llama.")]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With nothing but the script at first."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """{name: (exit code, output, errors, files afterwards)} of RUNS, all in one process: PyTorch takes most of it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", *TORCHRUN)}
    runs = {name: ([*TINY, *flags.split()], ENVIRONMENTS.get(name, {})) for name, flags in RUNS.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def result_in(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["kernels", "torch", "one process of torchrun"])
def test_it_trains_to_the_same_bits_or_losses(alone, folder, tmp_path, monkeypatch, capsys, name):
    flags = RUNS[name].split()
    for variable, value in ENVIRONMENTS.get(name, {}).items():
        monkeypatch.setenv(variable, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert llama.main([*TINY, *flags, "--output-dir", str(tmp_path)], SCRIPT.name) == 0
    torch.set_num_threads(threads)
    code, out, err, _ = alone[name]
    assert code == 0 and err == ""
    results = result_in(folder / name), result_in(tmp_path)
    own, expected = ([(step["loss"], step["grad_norm"]) for step in result["steps"]] for result in results)
    # Without groups of layers kernels add up in another order.
    rtol = 1e-5 if name == "kernels" else 0
    torch.testing.assert_close(torch.tensor(own), torch.tensor(expected), rtol=rtol, atol=0)
    assert len(own) == 2

    # It prints the same labels, but for arithmetic, which a companion counts, and the note that groups are missing.
    own_labels, labels = (re.findall(r"^[A-Z][\w -]+:", text, re.M) for text in (out, capsys.readouterr().out))
    is_grouped = "triton" in flags
    assert set(labels) - set(own_labels) == {"Model arithmetic:"}
    assert set(own_labels) - set(labels) == ({"Note:"} if is_grouped else set())
    assert ("Note: tiny_llama/groups.py is missing" in out) == is_grouped
    assert out.startswith("Check against PyTorch in fp64: passed") is ("--check" in flags)
    assert ("gradients: not done, as tiny_llama/audit.py is missing\n" in out) is ("--check" in flags)
    own, expected = results
    assert own.keys() == expected.keys() and own["summary"].keys() == expected["summary"].keys()
    summary = own["summary"]
    assert (summary["tflops_per_second"], summary["mfu"], own["environment"]) == (None, None, None)
    assert summary["gpu"] == dict.fromkeys(("idle", "busy"), {"power_w": None})


NEEDS = {
    "two processes of torchrun": "WORLD_SIZE=2 needs tiny_llama/distributed.py",
    "profile": "--profile needs tiny_llama/profiler.py",
    "fp8": "--fp8 needs tiny_llama/fp8.py",
    "markov": "--data markov needs tiny_llama/data.py",
    "text": "--data tiny_llama_v3.py needs tiny_llama/data.py",
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_a_companion_is_refused(alone, name):
    code, out, err, files = alone[name]
    error = f"tiny_llama_v3.py: error: {NEEDS[name]}: copy tiny_llama/ beside the script\n"
    assert (code, out, err) == (2, "", error)
    assert name not in files and "profile" not in files


def test_without_triton_torch_takes_over_and_says_why(alone, folder):
    code, out, err, _ = alone["without Triton"]
    assert (code, err) == (0, "") and out.count("Triton is not installed") == 1
    result = result_in(folder / "without Triton")
    assert result["implementation"] == "torch" and result["config"]["impl"] == "triton" and len(result["steps"]) == 2
