"""The contest: the judge believes its own clock, data and arithmetic, and nothing that an entry says."""

import contextlib
import copy
import errno
import hashlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny_llama_v3 as llama
from exercises.contest import __main__ as contest
from exercises.contest import board, entry, entry_torch, judge, task
from tests import ROOT
from tiny_llama import checkpoint

CPU = torch.device("cpu")
TINY = task.Division(vocab_size=16, seconds=60, target=9.0, parameters=20_000, sequences=64)
SIZES = dict(hidden_dim=8, num_layers=1, num_heads=2, ffn_dim=8, vocab_size=16, seq_len=task.LENGTH, untied_head=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the model of an honest entry that learnt nothing: its loss is about ln 16."""
    folder, config = tmp_path_factory.mktemp("saved") / "model", llama.Config(**SIZES)
    model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    checkpoint.write(folder, config, ((name, p.detach()) for name, p in model.named_parameters()), 0, {})
    return folder


# An entry that needs no PyTorch, and so starts at once. It copies weights that were there before.
ENTRY = """
import json, os, shutil, sys, time
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file, save_file

def train(task):
    model = task.folder / "model"
    weights = model / "model.safetensors"
    shutil.copytree({saved!r}, model)

    def change(**tensors):
        save_file(load_file(weights) | {{name.replace("__", "."): t for name, t in tensors.items()}}, weights)

    def configure(**fields):
        config = model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))

    {code}
"""


@pytest.fixture
def judged(saved, monkeypatch):
    """judged(code, **limits) judges an entry that saves a model and runs the code; returns the fields of its seed."""
    monkeypatch.setattr(judge, "HELD_OUT", 64)

    def run(code="pass", **limits):
        monkeypatch.setitem(judge.DIVISIONS, "laptop", TINY._replace(**limits))
        return judge.judge_once(text(saved, code).encode(), "laptop", CPU)

    return run


def text(saved, code):
    return ENTRY.format(saved=str(saved), code=code.replace("\n", "\n    "))


def ends(pid):
    """Whether a process is gone, or will be as soon as its parent has looked."""
    with contextlib.suppress(OSError):
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    return True


# --- what an entry leaves


def test_an_honest_entry_is_measured(judged):
    fields = judged()
    assert fields["outcome"] == "reached" and fields["reason"] is None and fields["seconds"] > 0
    assert abs(fields["loss"] - math.log(16)) < 0.1 and 1 < fields["floor"] < 1.4


def test_weights_from_before_know_nothing_of_the_source(judged):
    assert judged(target=2.0)["outcome"] == "missed"


NOT_FINITE = """change(model__norm__weight=np.full(8, np.nan, "f4"))"""
OVERFLOW = """change(model__norm__weight=np.full(8, 3e38, "f4"), lm_head__weight=np.ones((16, 8), "f4") * 3e38)"""
LINKED_FILE = "weights.rename(task.folder / 'elsewhere'); weights.symlink_to(task.folder / 'elsewhere')"
LINKED_FOLDER = "model.rename(task.folder / 'elsewhere'); model.symlink_to(task.folder / 'elsewhere')"
REFUSED = {
    "weights that are not finite": (NOT_FINITE, "model.norm.weight holds weights that are not finite"),
    "logits that are not finite": (OVERFLOW, "the loss of its model is not finite"),
    "a link to weights": (LINKED_FILE, "beside its model it saved 'model.safetensors'"),
    "a link to a folder": (LINKED_FOLDER, "it saved no model"),
    "a pipe": ("os.remove(weights); os.mkfifo(weights)", "beside its model it saved 'model.safetensors'"),
    "code beside it": ("(model / 'modeling.py').write_text('1')", "beside its model it saved 'modeling.py'"),
    "weights too many": ("change(extra=np.ones(3, 'f4'))", "has, beside the model's, extra"),
    "weights of another shape": ("change(model__norm__weight=np.ones(4, 'f4'))", "has the shape [4]"),
    "another vocabulary": ("configure(vocab_size=8)", "its model has 8 tokens, not 16"),
    "another activation": ("configure(hidden_act='relu')", "hidden_act is 'relu'"),
    "too large": ("configure(intermediate_size=2**20)", "parameters, and 20,000 are allowed"),
    "larger than any memory": ("configure(num_hidden_layers=2**30)", "parameters, and 20,000 are allowed"),
    "too deep": ("configure(num_hidden_layers=65, intermediate_size=1)", "its model has 65 layers"),
    "nothing": ("shutil.rmtree(model)", "it saved no model"),
    "not even its folder": ("shutil.rmtree(task.folder)", "it saved no model"),
    "an exit code": ("sys.exit(3)", "it ended with exit code 3"),
    "an error": ("raise ValueError", "it ended with exit code 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_a_rule_is_refused(name, judged):
    code, reason = REFUSED[name]
    fields = judged(code)
    assert fields["outcome"] == "refused" and reason in fields["reason"] and "contest_" not in fields["reason"]


@pytest.mark.parametrize("allowed, outcome", [(640, "reached"), (639, "refused")])
def test_a_head_of_its_own_counts(judged, allowed, outcome):
    """Embedding and head have 16 x 8 weights each, attention has 4 x 8 x 8 and the feed-forward layer 3 x 8 x 8."""
    assert judged(parameters=allowed)["outcome"] == outcome


DEEP = """
os.chdir(task.folder)
for _ in range(1100):
    os.mkdir("deeper")
    os.chdir("deeper")
"""


def test_a_folder_that_python_cannot_remove_is_left(judged, tmp_path, monkeypatch):
    monkeypatch.setattr(judge.tempfile, "tempdir", str(tmp_path))
    try:
        assert judged(DEEP)["outcome"] == "reached"
    finally:
        subprocess.run(["rm", "-rf", *tmp_path.glob("contest_*")], check=True)


def test_what_cannot_be_read_is_refused(judged, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(judge.Path, "iterdir", refuse)
    fields = judged()
    assert (fields["outcome"], fields["reason"]) == ("refused", "what it saved cannot be read (Permission denied)")


@pytest.mark.parametrize(
    "loss, error",
    [(1.0, "below that of the source"), (math.nan, "not finite"), (1.5, "above"), (1.3, None), (1.2, None)],
)
def test_a_loss_counts_between_that_of_the_source_and_the_target(loss, error):
    """The loss of a model that is as good as the source differs from its own by chance."""
    expected = judge.Missed if error == "above" else judge.Refused
    with pytest.raises(expected, match=error) if error else contextlib.nullcontext():
        judge.check_loss(loss, floor=1.21, target=1.35)


# --- what an entry does


def test_the_clock_is_the_judge_s(judged):
    fields = judged("time.sleep(1); time.monotonic = time.time = time.perf_counter = lambda: 0.0")
    assert fields["outcome"] == "reached" and fields["seconds"] >= 1


def test_what_does_not_end_is_killed(judged, tmp_path):
    pid = tmp_path / "pid"
    fields = judged(f"Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)", seconds=3)
    assert fields["outcome"] == "missed" and fields["reason"] == "it did not end within 3 seconds"
    assert not pid.exists() or ends(int(pid.read_text()))  # on a busy machine it may not have come so far


# A process of a session of its own, whose parents have ended, and which goes on to train.
DAEMON = """
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    Path({folder!r}, "part").write_text(str(os.getpid()))
    Path({folder!r}, "part").rename(Path({folder!r}, "pid"))
    time.sleep(600)
    os._exit(0)
while not Path({folder!r}, "pid").exists():
    time.sleep(0.01)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose child a process was")
def test_what_an_entry_leaves_behind_is_killed_before_the_weights_are_read(judged, tmp_path, monkeypatch):
    read_model, ended = judge.read_model, []

    def look_and_read(*args):
        ended.append(ends(int((tmp_path / "pid").read_text())))
        return read_model(*args)

    monkeypatch.setattr(judge, "read_model", look_and_read)
    assert judged(DAEMON.format(folder=str(tmp_path)))["outcome"] == "reached"
    assert ended == [True]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose child a process was")
def test_a_process_may_end_while_others_are_looked_for(monkeypatch):
    """Of one that ends meanwhile, Linux says that there is no such process, where a missing file is expected."""
    sleeps = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    file = f"/proc/{sleeps[0].pid}/stat"

    def unless_ended(call):
        def run(path, *args, **kwargs):
            if str(path) == file:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), file)
            return call(path, *args, **kwargs)

        return run

    try:
        monkeypatch.setattr(os, "stat", unless_ended(os.stat))
        monkeypatch.setattr(io, "open", unless_ended(io.open))
        assert sleeps[0].pid not in (found := judge.descendants()) and sleeps[1].pid in found
    finally:
        for sleep in sleeps:
            sleep.kill()
            sleep.wait()


def test_processes_that_do_not_end_are_refused(judged, monkeypatch):
    """As each has started another by the time that it is killed."""
    monkeypatch.setattr(judge, "ENDING", 0)
    before = iter([set()])
    monkeypatch.setattr(judge, "descendants", lambda: next(before, {2**30}))
    fields = judged()
    assert fields["outcome"] == "refused" and "processes that it started could not be ended" in fields["reason"]
    assert fields["seconds"] is None


def test_the_limit_holds_for_a_judge_that_waits_longer(judged, monkeypatch):
    """As does one whose process the entry has stopped, and which another process wakes once the entry has ended."""
    run_apart = judge.run_apart
    monkeypatch.setattr(judge, "run_apart", lambda folder, seconds: run_apart(folder, 60))
    fields = judged("time.sleep(1)", seconds=1)
    assert (fields["outcome"], fields["reason"]) == ("missed", "it did not end within 1 seconds")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the project's modules that the judge imports, which entries may change."""
    for name in judge.file_hashes():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(judge, "ROOT", tmp_path)
    return tmp_path


def test_the_hashes_are_those_of_all_that_the_judge_imports():
    hashes = judge.file_hashes()
    assert hashes["tiny_llama_v3.py"] == hashlib.sha256((ROOT / "tiny_llama_v3.py").read_bytes()).hexdigest()
    code = "import sys; from exercises.contest import __main__; print(*(m.__spec__.origin for m in sys.modules.values()"
    code += " if m.__name__.partition('.')[0] in sys.argv), sep=chr(10))"
    ours = [path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    said = subprocess.run([sys.executable, "-c", code, *ours], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {os.path.relpath(path, ROOT) for path in said.stdout.split()}
    assert "exercises/progress_file.py" in imported and imported <= hashes.keys()


def touch(path):
    return f"Path({path!r}).parent.mkdir(exist_ok=True); Path({path!r}).touch()"


CHANGES = {
    "the script": ("Path('tiny_llama_v3.py').open('a').write('# faster')", "tiny_llama_v3.py"),
    "what each process of an entry imports": ("Path('exercises/__init__.py').open('a').write('# 1')", "__init__.py"),
    "what the next judge imports": ("Path('benchmarks/harness.py').open('a').write('# 1')", "harness.py"),
    "what the script is compiled to": (
        "import importlib.util; Path(importlib.util.cache_from_source('tiny_llama_v3.py')).open('ab').write(b'1')",
        f"tiny_llama_v3.{sys.implementation.cache_tag}.pyc",
    ),
    "a module before a library": (touch("jinja2.py"), "jinja2.py"),
    "a package before a library": (touch("safetensors/__init__.py"), "safetensors"),
    "a package before a module": (touch("tiny_llama/data/__init__.py"), "data"),
    "a library before a module": (touch("measure/results.abi3.so"), "results.abi3.so"),
    "code that each Python runs as it starts": (touch("packages/mine.pth"), "mine.pth"),
    "code that the user's Python runs": (touch("user/usercustomize.py"), "usercustomize.py"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_modules_are_refused(name, judged, project, monkeypatch):
    monkeypatch.syspath_prepend(project / "packages")
    monkeypatch.setattr(judge.site, "getusersitepackages", lambda: str(project / "user"))
    code, changed = CHANGES[name]
    fields = judged(code)
    assert fields["outcome"] == "refused"
    assert fields["reason"] == f"files of the project or of libraries changed while it ran: {changed}"


def test_compiled_files_are_no_change(judged, project, monkeypatch):
    """Python writes them as it imports."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert judged("import measure.tables; assert Path('measure/__pycache__').exists()")["outcome"] == "reached"


def test_an_entry_sees_its_sequences_and_no_others(judged, tmp_path):
    """Those on which it is judged are drawn once it has ended."""
    seen, drawn = tmp_path / "seen", []
    draw = judge.Source.draw

    def record(source, count):
        drawn.append((count, seen.exists()))
        return draw(source, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge.Source, "draw", record)
        judged(f"Path({str(seen)!r}).write_text(' '.join(sorted(os.listdir(task.folder))))")
    assert seen.read_text() == "entry.py model sequences.npy task.json"
    assert drawn == [(TINY.sequences, False), (64, True)]


# --- the source and the loss


def test_each_pair_of_tokens_has_its_four_successors(monkeypatch):
    monkeypatch.setattr(judge, "BLOCK", 1536)
    source = judge.Source(16)
    sequences = source.draw(4000)
    floor = source.loss(sequences)
    assert sequences.shape == (4000, task.LENGTH + 1) and sequences.dtype == np.uint8
    first, second, third = (sequences[:, i : i + task.LENGTH - 1].ravel() for i in range(3))
    rank = (source.successors[first, second] == third[:, None]).argmax(1)
    assert (np.take_along_axis(source.successors[first, second], rank[:, None], 1)[:, 0] == third).all()
    shares = np.bincount(rank) / len(rank)
    assert np.abs(shares - [0.5, 0.25, 0.125, 0.125]).max() < 0.01
    assert floor == pytest.approx(-(shares * np.log([0.5, 0.25, 0.125, 0.125])).sum())
    # Who counts pairs, and trains nothing, stays far above every target.
    pairs = np.bincount(second.astype(int) * 16 + third, minlength=256).reshape(16, 16)
    counted = -(pairs * np.log(pairs.clip(1) / pairs.sum(1, keepdims=True))).sum() / pairs.sum()
    assert counted > 2 > max(division.target for division in task.DIVISIONS.values())


def test_no_source_is_like_another():
    one, other = judge.Source(16), judge.Source(16)
    assert (one.successors == other.successors).mean() < 0.2


def test_a_source_draws_what_its_state_does_not_tell():
    """Whoever finds the state of a generator from the training data must not know the sequences of the judge."""
    source = judge.Source(16)
    twin = copy.deepcopy(source)
    assert (source.draw(64) != twin.draw(64)).mean() > 0.5


def test_the_loss_leaves_out_what_nobody_can_predict():
    """A model that is right from the third token on has no loss; one that says nothing has ln 16."""
    sequences = judge.Source(16).draw(64)
    targets = torch.from_numpy(sequences[:, 1:].astype(np.int64))

    class Perfect:
        embed_tokens = SimpleNamespace(weight=torch.zeros(1))

        def __call__(self, tokens):
            logits = 100.0 * torch.nn.functional.one_hot(targets, 16)
            logits[:, 0] = 0
            return logits

    assert judge.held_out_loss(Perfect(), sequences) == pytest.approx(0, abs=1e-6)
    model = llama.TinyLlamaTriton(llama.Config(**SIZES), llama.OPERATIONS["torch"])
    torch.nn.init.zeros_(model.lm_head.weight)
    assert judge.held_out_loss(model, sequences) == pytest.approx(math.log(16))


# --- our entries


@pytest.mark.parametrize("module", [entry, entry_torch])
def test_our_entries_learn_and_save_what_the_judge_reads(module, tmp_path, monkeypatch):
    monkeypatch.setitem(module.MODELS, "laptop", module.MODELS["laptop"] | dict(num_steps=30))
    limits, source = task.DIVISIONS["laptop"], judge.Source(16)
    sequences = source.draw(1024)
    module.train(task.Task(tmp_path, sequences, "laptop", limits, "cpu", 7, time.monotonic() + 600))
    model = judge.read_model(tmp_path / "model", limits, CPU)
    loss = judge.held_out_loss(model, source.draw(256))
    assert loss < math.log(16) - 0.1


@pytest.mark.parametrize("module", [entry, entry_torch])
def test_our_entries_save_in_time(module, tmp_path):
    """Without time left they train nothing."""
    sequences = judge.Source(16).draw(64)
    module.train(task.Task(tmp_path, sequences, "laptop", task.DIVISIONS["laptop"], "cpu", 7, time.monotonic()))
    assert (tmp_path / "model" / checkpoint.MODEL).exists()


@pytest.mark.parametrize("name", task.DIVISIONS)
def test_our_models_fit_their_divisions(name):
    """Counted without memory."""
    assert entry.MODELS == entry_torch.MODELS and entry.LEARNING_RATES == entry_torch.LEARNING_RATES
    limits = task.DIVISIONS[name]
    given = SimpleNamespace(
        division=name, limits=limits, device="cpu", seed=1, sequences=np.empty((1, task.LENGTH + 1))
    )
    with torch.device("meta"):
        model = llama.TinyLlamaTriton(entry.model(given), llama.OPERATIONS["torch"])
    assert llama.count_weights(model.parameters()) <= limits.parameters
    assert limits.vocab_size <= 256  # tokens are bytes


# --- the command


@pytest.fixture
def command(saved, tmp_path, monkeypatch, capsys):
    """command(code, *options, **limits) judges an entry with one seed; returns (exit code, result, what it says)."""
    monkeypatch.setattr(judge, "HELD_OUT", 64)
    monkeypatch.setattr(judge, "SEEDS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"

    def run(code, *options, **limits):
        monkeypatch.setitem(task.DIVISIONS, "laptop", TINY._replace(**limits))
        (tmp_path / "mine.py").write_text(text(saved, code))
        known = {*out.glob("*.json")}
        exit_code = contest.main(["run", str(tmp_path / "mine.py"), "--output-dir", str(out), *options])
        said = capsys.readouterr()
        new = [path for path in out.glob("contest_*.json") if path not in known]
        return exit_code, json.loads(new[0].read_text()) if new else None, said

    return run


def test_a_run_writes_what_it_found(command):
    code, result, said = command("pass", "--name", "ada")
    assert code == 0 and result["reached"] and result["participant"] == "ada" and result["division"] == "laptop"
    assert [fields["outcome"] for fields in result["seeds"]] == ["reached"]
    assert result["median_seconds"] == result["seeds"][0]["seconds"] and "ada: reached, median" in said.out
    assert result["limits"]["target"] == 9.0 and result["entry"]["file"] == "mine.py"
    assert result["project"] == judge.file_hashes() and result["environment"]["torch"] == torch.__version__


def test_a_missed_target_and_a_refused_entry_end_with_1(command):
    code, result, said = command("pass", target=2.0)
    assert code == 1 and not result["reached"] and result["median_seconds"] is None
    assert len(result["seeds"]) == 1 and "above the target 2.00" in said.out
    code, result, said = command("sys.exit(3)")  # in the warm-up already
    assert code == 1 and [fields["outcome"] for fields in result["seeds"]] == ["refused"]
    assert "seed 1" not in said.out


def test_a_result_that_the_entry_wrote_is_not_the_judge_s(command, tmp_path):
    forged = tmp_path / "out" / "contest_forged.json"
    forge = f"Path({str(forged)!r}).write_text('{{}}'); print('mine: reached, median 0.1 s')"
    code, _, said = command(forge, target=2.0)
    assert code == 1 and "mine: not reached" in said.out
    name = said.out.strip().splitlines()[-1].removeprefix("Result: ")
    assert name != str(forged) and json.loads(open(name).read())["reached"] is False


@pytest.mark.parametrize(
    "argv, remedy",
    [
        (["run", "missing.py"], "give the file of an entry"),
        (["run", "large.py"], "more than 65,536"),
        (["run", "entry.py", "--division", "small"], "give laptop, or nothing"),
        (["run", "entry.py", "--output-dir", "entry.py"], "give another folder"),
        (["walk", "entry.py"], "--help lists the options"),
        (["board", "empty"], "run an entry first"),
    ],
)
def test_what_cannot_be_done_takes_one_line(argv, remedy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "entry.py").write_text("def train(task): pass")
    (tmp_path / "large.py").write_text("#" * (2**16 + 1))
    (tmp_path / "empty").mkdir()
    before = {*tmp_path.rglob("*")}
    assert contest.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and remedy in said.err
    assert {*tmp_path.rglob("*")} == before


def test_a_system_without_groups_of_processes_is_refused(command, monkeypatch):
    monkeypatch.delattr(os, "killpg")
    code, result, said = command("pass")
    assert (code, result) == (2, None) and "use Linux" in said.err


@pytest.mark.parametrize("gib, asked, expected", [(24, None, "small"), (24, "large", "large"), (80, None, "large")])
def test_the_division_follows_from_the_device(gib, asked, expected, monkeypatch):
    card = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert judge.choose_division(asked, torch.device("cuda")) == expected


@pytest.mark.parametrize("gib, asked", [(80, "small"), (80, "laptop"), (24, "laptop")])
def test_a_device_stays_out_of_the_divisions_of_smaller_ones(gib, asked, monkeypatch):
    card = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(llama, "get_gpu", lambda kind: SimpleNamespace(name="a card"))
    with pytest.raises(llama.UsageError, match=f"--division {asked} is not for this device, a card"):
        judge.choose_division(asked, torch.device("cuda"))


def test_an_interrupted_run_ends_the_entry_and_writes_nothing(tmp_path):
    pid, out = tmp_path / "pid", tmp_path / "out"
    entry = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()) + '\\n')\ntime.sleep(600)\n"
    (tmp_path / "entry.py").write_text(entry)
    options = ["run", tmp_path / "entry.py", "--output-dir", out]
    process = subprocess.Popen([sys.executable, "-m", "exercises.contest", *options], cwd=ROOT)
    while not (pid.exists() and pid.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130 and ends(int(pid.read_text())) and os.listdir(out) == []


# --- the board


def result(participant, median=None, **fields):
    """A result as the judge writes it: reached with this median, or missed."""
    seed = dict(seconds=median or 9.0, loss=1.3, joules=None, outcome="reached", reason=None)
    if median is None:
        seed |= dict(outcome="missed", reason="its loss is <above>")
    return {
        "participant": participant,
        "division": "laptop",
        "limits": task.DIVISIONS["laptop"]._asdict(),
        "seeds": [seed] * 3,
        "reached": median is not None,
        "median_seconds": median,
        "environment": {"device": "x86", "commit": "abc"},
        "host": None,
        "entry": {"sha256": participant.ljust(64, "0")},
        "date": "2030-01-02T03:04:05",
        **fields,
    }


def test_the_board_has_the_fastest_first_and_who_did_not_reach_last(tmp_path, capsys):
    joules = [dict(seconds=30.0, loss=1.3, joules=5000.0, outcome="reached", reason=None)] * 3
    card = dict(division="large", limits=task.DIVISIONS["large"]._asdict(), seeds=joules)
    for own in (result("slow", 50.0), result("never"), result("fast", 20.0), result("card", 30.0, **card)):
        (tmp_path / f"{own['participant']}.json").write_text(json.dumps(own))
    assert contest.main(["board", str(tmp_path)]) == 0
    assert str(tmp_path / board.PAGE) in capsys.readouterr().out
    page = (tmp_path / board.PAGE).read_text()
    assert [page.index(f">{name}<") for name in ("fast", "slow", "never", "card")] == sorted(
        page.index(f">{name}<") for name in ("fast", "slow", "never", "card")
    )
    assert "<h2>laptop: loss 1.40</h2>" in page
    assert "not reached: its loss is &lt;above&gt;" in page and "5000, 5000, 5000" in page and ">fast0000<" in page


def test_our_entries_are_the_first_on_the_board():
    shown = board.board_of(contest.RESULTS)
    ours = {row["participant"]: row for row in shown["divisions"]["laptop"]}
    assert {"entry", "entry_torch"} <= ours.keys() and not shown["left_out"]
    assert all(ours[name]["median"] for name in ("entry", "entry_torch"))


BROKEN = ["{", "[]", "{}"]
BROKEN += [json.dumps(result("x", 1.0, **fields)) for fields in (dict(seeds=3), dict(division="none"), dict(limits={}))]
# Numbers that somebody has changed, or a seed that somebody has taken away.
BROKEN += [
    json.dumps(result("x", 1.0, **fields))
    for fields in (dict(median_seconds=0.5), dict(seeds=result("x", 1.0)["seeds"][:1]))
]
BROKEN += [json.dumps(result("x", None, **fields)) for fields in (dict(seeds=[]), dict(median_seconds=0.5))]


@pytest.mark.parametrize("content", BROKEN)
def test_what_is_no_result_of_this_contest_is_named_and_left_out(content, tmp_path, capsys):
    (tmp_path / "ada.json").write_text(json.dumps(result("ada", 20.0)))
    (tmp_path / "other.json").write_text(content)
    assert contest.main(["board", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "left out: " in said and "other.json" in said and len(said.splitlines()) == 1
    assert "ada" in (tmp_path / board.PAGE).read_text()
