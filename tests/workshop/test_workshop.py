"""The replay of the stages: what it runs, what it does when a run fails, and what its sentences follow from."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks.pages.replays import table_of
from exercises.performance_debugging import replay
from exercises.performance_debugging.results import kernel_figures, run_figures
from tests.workshop.summaries import RECORDED, SIGNS, cpu_summary, gpu_summary, taking

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "exercises" / "performance_debugging"
ON_GPU = torch.cuda.is_available()
TINY = "--hidden-dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --ffn-dim 16 --vocab-size 16 --warmup-steps 1"


# --- links and command line


def test_every_stage_has_its_link():
    links = sorted(FOLDER.glob("v3_stage*.py"))
    assert [llama.parse_config([], link.name).stage for link in links] == list(llama.STAGES)
    assert all(link.is_symlink() and link.resolve() == ROOT / "tiny_llama_v3.py" for link in links)


@pytest.fixture
def planned(capsys):
    """planned(options): {title of a run: its command, or ""}, as --dry-run prints them."""

    def dry_run(options):
        assert replay.main(["--dry-run", *options.split()]) == 0
        parts = re.split(r"^# (.*)\n", capsys.readouterr().out, flags=re.M)[1:]
        return {title.split(",")[0]: command.strip() for title, command in zip(parts[::2], parts[1::2], strict=True)}

    return dry_run


def config_of(command):
    """Return the Config of a command, which may begin with variables of its environment."""
    script, *arguments = shlex.split(command[command.index(sys.executable) + len(sys.executable) :])
    return llama.parse_config(arguments, script)


STAGE_6 = (
    "--check --device cpu --hidden-dim 16 --num-layers 1 --num-heads 2 --ffn-dim 16 --vocab-size 11 --batch-size 1 "
    "--seq-len 5 --num-steps 1 --warmup-steps 0"
).split()


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter has it on a CPU")
def test_the_check_of_stage_6_names_every_weight_also_the_one_with_a_gradient(capsys, tmp_path):
    """The tied embedding, which the comparison with PyTorch names as wrong, and the audit by its two slopes."""
    assert llama.main([*STAGE_6, "--output-dir", str(tmp_path)], "v3_stage6_severed_autograd.py") == 1
    head, *lines = capsys.readouterr().out.partition("Audit of the gradients: ")[2].splitlines()
    told = {
        name: float(slope) for name, slope in re.findall(r"^    (\S+): told (\S+), seen \S+$", "\n".join(lines), re.M)
    }
    assert head == "FAILED in 8 of 8 weights" and len(told) == 8
    assert [name for name, slope in told.items() if slope] == ["embed_tokens.weight"]


def test_dry_run_prints_commands_that_parse_and_writes_nothing(planned, tmp_path):
    runs = planned(f"--beyond --batch-size 3 --output {tmp_path / 'results'} -- --seed 7")
    baseline = config_of(runs.pop("baseline"))
    assert not (tmp_path / "results").exists() and (baseline.impl, baseline.profile) == ("torch", None)
    assert list(runs) == [f"stage {number}" for number in llama.STAGES] and (ON_GPU or not runs.pop("stage 8"))
    for title, command in runs.items():
        config, number = config_of(command), int(title[-1])
        assert (config.stage, config.batch_size, config.seed, config.seq_len) == (number, 3, 7, 128)
        assert config.profile == replay.PROFILE and ("TRITON_CACHE_DIR" in command) == (number == 7)
    runs = planned("--stages 4,2 --no-profile")
    assert list(runs) == ["baseline", "stage 2", "stage 4"] and "--profile" not in "".join(runs.values())


def test_a_laptop_runs_on_its_cpu_and_in_the_interpreter(planned, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runs = {title: command for title, command in planned("--laptop").items() if command}
    assert list(runs) == ["stage 1", "stage 5", "stage 6"]
    for command in runs.values():
        config = config_of(command)
        assert "TRITON_INTERPRET=1" in command and config.device == "cpu" and config.profile is None
        assert (config.impl, config.hidden_dim) == ("triton", 64)
        assert (config.num_steps, config.warmup_steps) == (1, 0)  # the naive kernel takes minutes for more


@pytest.mark.parametrize("argv, named", [
    ("--stages 2,9", "are no stages"), ("--stages 2,,4", "--stages 2,,4"), ("--stages 2 --beyond", "--beyond"),
    ("--stage 1", "--stage is set by the replay itself: choose by --stages"),
    ("--laptop -- --graph", "--graph"), ("--laptop -- --device=cuda", "--device"),
    ("--batch-size 0", "--batch-size 0"), ("--seq-len many", "--seq-len"),
    ("--bach-size 8", "--bach-size"), ("-- --stage 3", "--stage"), ("-- --output-dir=x", "--output-dir"),
    ("-- --hidden-dim 63", "--hidden-dim 63"), ("--output /dev/null/x --num-steps 1", "--output"),
    ("--output /proc/x", "/proc/x"),
])  # fmt: skip
def test_bad_requests_get_one_line_and_exit_code_2(capsys, argv, named):
    assert replay.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_script_names_the_python_that_does_not_serve(tmp_path):
    python = tmp_path / "python"
    for told in ("there is no Python at PYTHON=", "lacks one of torch"):
        command, environment = [FOLDER / "run_all_stages.sh"], os.environ | {"PYTHON": str(python)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)


def test_the_script_starts_from_any_folder_with_any_python(tmp_path):
    """A folder of CDPATH that has the same names is not ours, and a path may have a blank."""
    (tmp_path / "performance_debugging").mkdir()
    python = tmp_path / "a python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "performance_debugging/run_all_stages.sh", "--stages", "1", "--dry-run"],
        cwd=FOLDER.parent,
        env=os.environ | {"PYTHON": str(python), "CDPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("# baseline"), done.stderr


@pytest.mark.parametrize("output", [["--output", "a b"], ["--output=a b"], ["--output", "a"], ["--output=a"], []])
def test_a_command_to_repeat_names_no_folder_of_this_machine(output):
    given = ["--stages", "2", *output, "--seq-len", "8", "--", "--use-amp"]
    assert replay.without_output(given) == ["--stages", "2", "--seq-len", "8", "--", "--use-amp"]


@pytest.mark.parametrize("missing", ["torch", "jinja2", "tabulate"])
def test_the_script_wants_all_that_the_replay_imports(tmp_path, missing):
    for name in {"torch", "pandas", "matplotlib", "jinja2", "tabulate"} - {missing}:
        (tmp_path / f"{name}.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run([FOLDER / "run_all_stages.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "lacks one of torch" in done.stderr and done.stderr.count("\n") == 1


# --- running

WRITES = "open(folder + '/out.json', 'w').write('{}')"


def script_run(name, script, *arguments):
    """Return a Run of a small Python program."""
    return replay.Run(name, name, [sys.executable, "-c", f"folder = {replay.FOLDER!r}\n{script}", *arguments])


def test_a_failing_run_is_told_and_the_others_go_on(capsys, tmp_path):
    runs = [
        script_run("stage1", "print('reading'); raise SystemExit('no such tensor')"),
        script_run("stage2", "pass"),
        script_run("stage3", WRITES),
    ]
    assert replay.execute_all(runs, tmp_path)
    assert "exit status 1" in runs[0].error and "no such tensor" in runs[0].error
    assert "exit status 0, and no result was written" in runs[1].error and runs[2].error is None
    assert "    no such tensor" in capsys.readouterr().err
    logs = [f"stage{number}_output.log" for number in (1, 2, 3)]
    assert {path.name for path in tmp_path.iterdir()} == {*logs, "stage3.json"}
    assert "reading\n" in (tmp_path / logs[0]).read_text()


def test_a_long_run_shows_the_last_line_of_its_log(capsys, tmp_path):
    log = tmp_path / "log"
    log.write_text("$ command\n")
    said = iter(["", "warm-up 1/1\nstep    1/4 | loss 7\n", f"step    2/4 {'x ' * 99}\n\n"])

    def wait(seconds):
        assert seconds == replay.PROGRESS_SECONDS
        with open(log, "a") as file:
            if (text := next(said, None)) is None:
                return 3
            file.write(text)
        raise subprocess.TimeoutExpired("command", seconds)

    assert replay.wait_for(SimpleNamespace(wait=wait), log) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" s: ")[2][:16] for line in lines] == ["$ command", "step 1/4 | loss ", "step 2/4 x x x x"]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("ends, told", [("; raise SystemExit('no profile')", "no profile"), ("", "holds no kernel")])
def test_a_process_that_fails_in_its_profile_keeps_what_it_measured(tmp_path, ends, told):
    run = script_run("stage1", f"import os; os.mkdir(folder + '/profile'); {WRITES}{ends}", "--profile", replay.PROFILE)
    assert replay.execute_all([run], tmp_path) and told in run.error
    assert {path.name for path in tmp_path.iterdir()} == {"stage1.json", "stage1_output.log"}


def test_a_profile_without_steps_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "read_step_stats", lambda recording: (pd.DataFrame({"Name": ["k"]}), 0))
    with pytest.raises(RuntimeError, match="no kernels within a range named step"):
        replay.write_kernels(tmp_path, tmp_path / "profile.csv")


def test_an_interruption_keeps_what_is_done(tmp_path):
    interrupt = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    runs = [script_run("stage1", WRITES), script_run("stage2", interrupt), script_run("stage3", WRITES)]
    assert replay.execute_all(runs, tmp_path) is False
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".log", ".log"]  # no temporary folder


def test_results_of_an_earlier_replay_are_put_aside(tmp_path):
    names = ["baseline.json", "notes.txt", "report.html", "stage2_profile.csv", "summary.json", "summary.md"]
    for name in names:
        (tmp_path / name).touch()
    replay.put_aside(tmp_path)
    (aside,) = tmp_path.glob("previous_*")
    assert sorted(path.name for path in [*aside.iterdir(), tmp_path / "notes.txt"]) == names
    assert {*tmp_path.iterdir()} == {tmp_path / "notes.txt", aside}


# --- a whole replay


def replayed(folder, python, options, script_options=""):
    """Replay at tiny sizes into a folder; return the console and the summary."""
    command = [FOLDER / "run_all_stages.sh", *options.split(), "--output", folder, "--", *TINY.split()]
    environment = os.environ | {"PYTHON": python}
    done = subprocess.run([*command, *script_options.split()], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(len(line) for line in done.stdout.splitlines() if str(folder) not in line) <= 100
    return done.stdout, json.loads((folder / "summary.json").read_text())


def test_a_replay_writes_the_files_and_figures_of_its_runs(tmp_path, python):
    (tmp_path / "stage4.json").write_text("{}")
    options = "--stages 5,6 --batch-size 1 --seq-len 4 --num-steps 2"
    shown, summary = replayed(tmp_path, python, options)
    expected = {"summary.json", "summary.md", "report.html", "baseline.json", "baseline_output.log"}
    expected |= {f"stage{n}{end}" for n in (5, 6) for end in (".json", "_profile.csv", "_output.log")}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == expected
    assert len(list(tmp_path.glob("previous_*/stage4.json"))) == 1 and ON_GPU == ("no GPU: --laptop" not in shown)
    header = (tmp_path / "stage5_profile.csv").read_text().splitlines()[0]
    assert header.replace('"', "") == "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev"
    assert re.findall(r"^\[(\d)/3\] ", shown, flags=re.M) == ["1", "2", "3"]
    correct, severed = summary["stages"]
    assert sum(kernel["share"] for kernel in severed["kernels"]) == pytest.approx(1)
    assert correct["over_previous"] is None  # stage 4 was not run
    if llama.triton and not ON_GPU:  # the interpreter's times are nobody's
        assert severed["over_previous"] is None
    assert summary["command"] == f"./run_all_stages.sh {options} -- {TINY}"
    assert [seen["shown"] for seen in summary["observations"]] == [True, llama.triton is not None]


@pytest.mark.skipif(ON_GPU, reason="the interpreter runs the kernels, and on a GPU it may fail")
def test_a_laptop_replays_in_one_report(tmp_path, python):
    _, summary = replayed(tmp_path, python, "--laptop --stages 1,6,8 --seq-len 4", "--num-steps 4")
    assert summary["environment"]["arch"] == "cpu" and summary["recorded"][0]["environment"]["arch"] != "cpu"
    assert [stage["stage"] for stage in summary["stages"] if "batch_ms" in stage] == [1, 6]
    assert (tmp_path / "report.html").exists()


# --- figures


def test_figures_of_a_run_by_hand(tmp_path):
    # Each step is the sum of its phases; but the median forward of 2 and backward of 3 are no step's, and 5 of 6 ms.
    run = RECORDED["run"]
    figures = run_figures(run)
    assert figures["phase_ms"] == {"forward": 4.0, "backward": 2.0}  # of the median step
    assert figures["phases_share"] == 1.0 and figures["step_ms"] == [10.0, 4.0, 6.0]
    partly = [step | {"batch_ms": ms} for step, ms in zip(run["steps"], (10.0, 8.0, 8.0), strict=True)]
    assert run_figures(run | {"steps": partly})["phases_share"] == 0.75  # the median of 1, 0.5 and 0.75
    even = run_figures(run | {"steps": [*run["steps"], run["steps"][0]]})["phase_ms"]  # the faster of two
    assert even == {"forward": 4.0, "backward": 2.0}
    assert figures["mean_over_median"] == pytest.approx(7 / 6) and figures["gradient_share"] == 0.25
    table = "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev\nk,4,8000,2000,100,2000,2000,0\n"
    (tmp_path / "stage5_profile.csv").write_text(table)
    (kernel,) = kernel_figures(tmp_path / "stage5_profile.csv")
    assert kernel == {"name": "k", "average_us": 2.0, "share": 1.0}


RESTLESS = dict.fromkeys((1, 2, 3, 4), taking(5.0, 5.5, 7.0, 7.5, 7.6, 7.7, 9.0, 9.5))
QUIET = dict.fromkeys((1, 2), taking(6.0)) | dict.fromkeys((3, 4), taking(5.5))  # 3 and 4 differ in the clock only

LATE = {7: taking(7.0) | {"host_ms": 6.9}}  # the same work, which the host launches more slowly


@pytest.mark.parametrize("changes, run, expected", [
    (RESTLESS | {5: taking(4.5, 4.8, 5.0, 5.0, 5.1, 6.0)}, "5 optimized", "same"),  # within the spread of their steps
    (QUIET, "5 optimized", "1.10"), (QUIET, "4 slow kernels", "same"),
    (QUIET | {6: taking(1.0)}, "6 severed autograd", "5.00"),
    (QUIET | {3: taking(7.0)}, "5 optimized", "same"),  # no more than between processes of the same work
    (dict.fromkeys((1, 2, 3, 4), taking(20.0, 20.0, 20.0)), "5 optimized", "too few"),
    ({7: taking(9000.0, *[5.0] * 19)}, "7 cold start", "same"), (LATE, "7 cold start", "host"),
    ({8: taking(1.0)}, "8 one graph launch", "5.00"),
])  # fmt: skip
def test_only_a_difference_is_shown_as_a_ratio(changes, run, expected):
    assert table_of(gpu_summary(changes)).loc["speed / previous", run] == expected


# --- observations: figures as a GPU gives them, one by one made to show their sign, and not to


SENTENCES = {  # {stage: what its sign says, and what there is without it}
    1: ("470, 68 times", "7.00, 1.0 times"),
    2: ("25.0 us, 5.0 times the 5.00 us", "1.0 times"),
    3: ("add up to 30 %", "busy for 40 %"),
    4: ("4.2 times stage 5's. swiglu_kernel is first.* 80 %", "spread. flash_attention_kernel is first.* 13 %"),
    5: ("2.0 times the baseline's", "100 %"),
    6: ("1.6 %.* 0.200 ms where .* 3.00 ms", "100 %"),
    7: ("40 times the median; the first took 7,340 ms", "1.0 times"),
    8: ("4.0 times as fast.* 40 %", "within the measured spread.* 40 %"),
}


@pytest.mark.parametrize("stage, shows, changes, figures", [
    *((stage, True, SIGNS, words) for stage, (words, _) in SENTENCES.items()),
    *((stage, stage == 5, {}, words) for stage, (_, words) in SENTENCES.items()),
    (1, True, {1: {"first_loss": None}}, "not a number"), (2, None, {2: {"attention_us": None}}, "no profile"),
    (4, None, {4: {"kernels": None}}, "4 was not profiled."),
    (3, None, {3: {"phases_share": None}}, "--timing step"), (3, False, {3: {"host_ms": 4.5}}, "busy for 90 %"),
    (4, False, {4: taking(20.0)}, "flash_attention_kernel is first"),
    (5, False, {5: {"gradient_share": 0.99}}, "99 %"), 
    (8, False, {5: taking(100.0, *[5.0] * 19) | {"host_ms": 4.0}}, "needs 80 %"),  # of the median step
    (8, False, {8: taking(1.0, 1.0, 1.0)}, "Fewer than 4 steps"),
])  # fmt: skip
def test_an_observation_follows_the_figures(stage, shows, changes, figures):
    seen = gpu_summary(changes)["observations"][stage - 1]
    assert seen["stage"] == stage and seen["shown"] is shows and re.search(figures, seen["text"]), seen


def test_an_observation_names_what_is_missing():
    failed = {"stage": 4, "title": "slow kernels", "obstacle": None, "error": "exit status 9\nthe log's end"}
    stages = [gpu_summary()["stages"][7], failed, failed | {"error": None}]
    seen = [(each["shown"], each["text"]) for each in gpu_summary(stages=stages)["observations"]]
    missing = "stage 5 was not measured.", "It failed: exit status 9.", "The replay was interrupted before it was done."
    assert seen == [(None, text) for text in missing]
    (seen, *_) = gpu_summary({1: {"error": "exit status 9\nthe log's end"}})["observations"]  # measured, then failed
    assert seen["shown"] is False and seen["text"].endswith("it grows, is 512. Beyond that it failed: exit status 9.")


@pytest.mark.parametrize("implementation, shown", [("torch", {1, 5}), ("triton", {1, 5, 6})])
def test_a_cpu_shows_no_sign_that_is_a_time(implementation, shown):
    # As noise may have it, every time looks like the sign of its stage.
    summary = cpu_summary(implementation, SIGNS | {4: taking(20.0)})
    assert {seen["stage"] for seen in summary["observations"] if seen["shown"]} == shown
