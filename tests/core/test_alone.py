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
from tiny_llama import hardware

SCRIPT = Path(llama.__file__).resolve()
TINY = (
    "--hidden-dim 16 --num-layers 2 --num-heads 2 --num-kv-heads 1 --ffn-dim 16 --vocab-size 11 --batch-size 1 "
    "--seq-len 5 --num-steps 2 --warmup-steps 1 --device cpu"
).split()
TORCHRUN = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
RUNS = {  # name: the flags of a run, and what is in its environment
    "kernels": (["--impl", "triton" if llama.triton else "torch"], {}),
    "torch": (["--impl", "torch", "--check"], {}),
    "one process of torchrun": (["--impl", "sdpa"], TORCHRUN | {"WORLD_SIZE": "1"}),
    "two processes of torchrun": ([], TORCHRUN),
    "profile": (["--profile", "profile"], {}),
    "fp8": (["--fp8"], {}),
    "markov": (["--data", "markov"], {}),
    "text": (["--data", "tiny_llama_v3.py"], {}),
    "without Triton": (["--impl", "triton", "--check"], {}),
}
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
    runs = json.dumps({name: ([*TINY, *flags], environment) for name, (flags, environment) in RUNS.items()})
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH], cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, input=runs,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["kernels", "torch", "one process of torchrun"])
def test_it_trains_to_the_same_bits_or_losses(alone, folder, tmp_path, monkeypatch, capsys, name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flags, environment = RUNS[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert llama.main([*TINY, *flags, "--output-dir", str(tmp_path)], SCRIPT.name) == 0
    torch.set_num_threads(threads)
    code, out, err, _ = alone[name]
    assert code == 0 and err == ""
    results = [json.loads(path.read_text()) for place in (folder / name, tmp_path) for path in place.glob("*.json")]
    own, expected = ([(step["loss"], step["grad_norm"]) for step in result["steps"]] for result in results)
    if name == "kernels":  # without groups of layers, which add up in another order
        torch.testing.assert_close(torch.tensor(own), torch.tensor(expected), rtol=1e-5, atol=0)
    else:
        assert own == expected
    assert len(own) == 2

    def labels(text):
        return re.findall(r"^[A-Z][\w -]+:", text, re.M)

    only_with_companions = "Model arithmetic:"
    only_alone = "Note:"  # that tiny_llama/groups.py is missing
    full_out = capsys.readouterr().out
    assert ("Note: tiny_llama/groups.py is missing" in out) is (name == "kernels") and "Note:" not in full_out
    own_labels = [label for label in labels(out) if label != only_alone]
    assert [label for label in labels(full_out) if label != only_with_companions] == own_labels
    assert out.startswith("Check against PyTorch in fp64: passed") is ("--check" in flags)
    result, full = results
    assert set(result) == set(full) and set(result["summary"]) == set(full["summary"])
    summary = result["summary"]
    assert (summary["tflops_per_second"], summary["mfu"], result["environment"]) == (None, None, None)
    assert result["summary"]["gpu"] == dict.fromkeys(("idle", "busy"), {"power_w": None})


@pytest.mark.parametrize("name, needs", [
    ("two processes of torchrun", "WORLD_SIZE=2 needs tiny_llama/distributed.py"),
    ("profile", "--profile needs tiny_llama/profiler.py"),
    ("fp8", "--fp8 needs tiny_llama/fp8.py"),
    ("markov", "--data markov needs tiny_llama/data.py"),
    ("text", "--data tiny_llama_v3.py needs tiny_llama/data.py"),
])  # fmt: skip
def test_what_needs_a_companion_is_refused(alone, name, needs):
    code, out, err, files = alone[name]
    error = f"tiny_llama_v3.py: error: {needs}: copy tiny_llama/ beside the script\n"
    assert (code, out, err) == (2, "", error)
    assert name not in files and "profile" not in files


def test_without_triton_torch_takes_over_and_says_why(alone, folder, monkeypatch):
    code, out, err, _ = alone["without Triton"]
    assert (code, err) == (0, "") and out.count("Triton is not installed") == 1 and "Implementation: torch" in out
    (path,) = (folder / "without Triton").iterdir()
    result = json.loads(path.read_text())
    assert result["implementation"] == "torch" and result["config"]["impl"] == "triton" and len(result["steps"]) == 2
    monkeypatch.setattr(llama, "triton", None)
    assert hardware.environment(llama.get_device("cpu"))["triton"] is None
