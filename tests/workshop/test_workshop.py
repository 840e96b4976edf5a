"""The replay of the stages: what it runs, what it does when a run fails, and what its sentences follow from."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks.pages import replays
from exercises.performance_debugging import replay
from exercises.performance_debugging.summary import console, kernel_figures, markdown, run_figures, shared_config
from measure import heartbeat
from profilers.readers import read_kernel_stats
from tests.fakes import records
from tiny_llama import hardware

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "exercises" / "performance_debugging"
FAKES = ROOT / "tests" / "fakes"
ON_GPU = torch.cuda.is_available()
TINY = "--hidden-dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --ffn-dim 16 --vocab-size 16 --warmup-steps 1"
SIZES = ["--batch-size", "1", "--seq-len", "4", "--num-steps", "2"]


# --- links and command line


def test_every_stage_has_its_link():
    links = sorted(FOLDER.glob("v3_stage*.py"))
    assert [llama.parse_config([], link.name).stage for link in links] == list(llama.STAGES)
    assert all(link.is_symlink() and link.resolve() == ROOT / "tiny_llama_v3.py" for link in links)


def dry_run(capsys, *argv):
    """{title: [commands]}"""
    assert replay.main(["--dry-run", *argv]) == 0
    parts = re.split(r"^# (.*)\n", capsys.readouterr().out, flags=re.M)
    return {title: block.splitlines() for title, block in zip(parts[1::2], parts[2::2], strict=True)}


def config_of(command):
    """The Config of a command, which may begin with variables of its environment."""
    _, script, *arguments = (word for word in shlex.split(command) if not re.match("[A-Z_]+=", word))
    return llama.parse_config(arguments, script)


def test_dry_run_prints_commands_that_parse_and_writes_nothing(capsys, tmp_path):
    planned = dry_run(capsys, *f"--beyond --batch-size 3 --output {tmp_path / 'results'} -- --seed 7".split())
    assert not (tmp_path / "results").exists()
    titles = [title for title in planned if title.startswith("stage")]
    assert [int(re.match(r"stage (\d)", title)[1]) for title in titles] == list(llama.STAGES)
    for number, title in enumerate(titles, 1):
        for command in planned[title]:
            config = config_of(command)
            assert (config.stage, config.batch_size, config.seed, config.seq_len) == (number, 3, 7, 128)
        with_own_cache = ["TRITON_CACHE_DIR" in command for command in planned[title]]
        assert with_own_cache == [number == 7] * bool(planned[title])
    assert bool(planned[titles[7]]) == ON_GPU  # without a GPU, stage 8 is left out
    assert "--impl torch" in planned["baseline, plain PyTorch"][0]


def test_stages_and_profiles_are_chosen(capsys):
    planned = dry_run(capsys, "--stages", "4,2", "--no-profile")
    assert [title.split(",")[0] for title in planned] == ["baseline", "stage 2", "stage 4"]
    assert all(len(commands) == 1 for commands in planned.values())


def test_each_mistake_is_isolated_that_a_stage_has_beside_others(capsys):
    planned = dry_run(capsys, "--isolate", "--beyond", "--no-profile")
    alone = {title: commands for title, commands in planned.items() if title.endswith(" alone")}
    assert list(alone) == [f"--{name} alone" for name in ("no-init", "noncontiguous-kv", "unsynced-timing")]
    for title, (command,) in alone.items():
        assert config_of(command).bugs == (title.split()[0][2:].replace("-", "_"),)
    assert "stage 5, optimized" in dry_run(capsys, "--isolate", "--stages", "2")  # which it is compared with


def test_a_laptop_runs_on_its_cpu_and_in_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    planned = dry_run(capsys, "--laptop")
    titles = [title.split(",")[0] for title in planned]
    assert titles == ["stage 1", "stage 5", "stage 6", "what kernels ask memory for"]
    for title, (command,) in planned.items():
        assert "TRITON_INTERPRET=1" in command or title.startswith("what")
        if title.startswith("stage"):
            config = config_of(command)
            assert config.device == "cpu" and config.profile is None
            assert (config.impl, config.hidden_dim) == (("torch", 512) if config.stage == 1 else ("triton", 64))
    assert not list(dry_run(capsys, "--laptop", "--stages", "3,8"))


def test_rocprofv3_profiles_on_amd_only(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/rocm/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (command,) = dry_run(capsys, "--stages", "2")["stage 2, slow performance"]
    assert not command.startswith("rocprofv3") and "--profile" in command
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    measured, command = dry_run(capsys, "--stages", "2")["stage 2, slow performance"]
    assert "rocprofv3" not in measured and "--profile" not in measured
    assert command.startswith("rocprofv3 --kernel-trace --marker-trace --output-format csv ")
    assert "--profile" not in command and "--num-steps 3 " in f"{command} "  # as many as --profile records
    (command,) = dry_run(capsys, "--stages", "2", "--", "--device", "cpu")["stage 2, slow performance"]
    assert not command.startswith("rocprofv3")


@pytest.mark.parametrize("argv, named", [
    ("--stages 9", "there is no stage 9"), ("--stages one", "--stages one"), ("--stages 2 --beyond", "--beyond"),
    ("--isolate --stages 5,8", "--isolate"), ("--laptop --isolate", "--isolate"), ("--laptop --beyond", "--beyond"),
    ("--laptop --seq-len 128", "--seq-len"), ("--laptop -- --use-amp", "--use-amp"), ("--laptop -- --graph", "--graph"),
    ("--laptop -- --device=cuda", "--device"), ("--batch-size 0", "--batch-size 0"), ("--seq-len many", "--seq-len"),
    ("--bach-size 8", "--bach-size"), ("-- --stage 3", "--stage"), ("-- --output-dir=x", "--output-dir=x"),
    ("-- --hidden-dim 63", "--hidden-dim 63"), ("--output /dev/null/x --num-steps 1", "--output"),
])  # fmt: skip
def test_bad_requests_get_one_line_and_exit_code_2(capsys, argv, named):
    assert replay.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    "body, told", [(None, "there is no Python at PYTHON="), ("exit 1", "lacks one of torch pandas")]
)
def test_the_script_names_the_python_that_does_not_serve(body, told, tmp_path):
    if body:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python")}
    done = subprocess.run([FOLDER / "run_all_stages.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1


# --- running


def script_run(name, *scripts, stage=None):
    """A Run of small Python programs, each of which is asked to write FOLDER/out.json."""
    commands = [[sys.executable, "-c", f"folder = {replay.FOLDER!r}\n{script}"] for script in scripts]
    parts = [replay.Part("measured", command, "out.json", f"{name}_{i}.json") for i, command in enumerate(commands)]
    return replay.Run(name, name, parts, stage)


WRITES = "open(folder + '/out.json', 'w').write('{}')"


def test_a_failing_run_is_told_and_the_others_go_on(capsys, tmp_path):
    runs = [
        script_run("stage1", "print('reading'); raise SystemExit('no such tensor')", WRITES),
        script_run("stage2", "pass"),
        script_run("stage3", WRITES, WRITES),
    ]
    assert replay.execute_all(runs, tmp_path)
    assert "exit status 1" in runs[0].error and "no such tensor" in runs[0].error
    assert "no out.json was written" in runs[1].error
    assert runs[2].error is None
    assert "    no such tensor" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "stage1_output.log", "stage2_output.log", "stage3_0.json", "stage3_1.json", "stage3_output.log",
    ]  # fmt: skip
    assert "reading\n" in (tmp_path / "stage1_output.log").read_text()


def test_a_process_that_fails_in_its_profile_keeps_what_it_measured(capsys, tmp_path):
    run = script_run("stage1", WRITES + "; raise SystemExit('no profile')")
    run.parts[0].profile = "stage1_profile.csv"
    assert replay.execute_all([run], tmp_path) and "no profile" in run.error
    assert (tmp_path / "stage1_0.json").exists() and not (tmp_path / "stage1_profile.csv").exists()
    capsys.readouterr()
    run = script_run("stage2", WRITES)
    run.parts[0].profile = "stage2_profile.csv"
    assert replay.execute_all([run], tmp_path) and "holds no kernel statistics" in run.error
    assert (tmp_path / "stage2_0.json").exists() and capsys.readouterr().err.count("\n") == 1


def test_an_interruption_keeps_what_is_done(tmp_path):
    interrupt = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    runs = [script_run("stage1", WRITES), script_run("stage2", interrupt), script_run("stage3", WRITES)]
    assert replay.execute_all(runs, tmp_path) is False
    assert [run.done for run in runs] == [True, False, False]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".log", ".log"]  # no temporary folder


def test_the_environment_of_a_part_lies_in_its_temporary_folder(tmp_path):
    run = script_run("stage7", "import os; print(os.environ['TRITON_CACHE_DIR'] == folder + '/triton')\n" + WRITES)
    run.parts[0].environment["TRITON_CACHE_DIR"] = f"{replay.FOLDER}/triton"
    assert replay.execute_all([run], tmp_path) and run.error is None
    assert (tmp_path / "stage7_output.log").read_text().splitlines()[-1] == "True"


def test_what_runs_long_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.1)
    quick = script_run("stage1", WRITES)
    long = script_run("stage2", f"import time; print('x' * 200, flush=True); time.sleep(1)\n{WRITES}")
    assert replay.execute_all([quick, long], tmp_path)
    beats = [line for line in capsys.readouterr().out.splitlines() if " min: " in line]
    assert 2 <= len(beats) and "    0 min: xxxx" in beats[-1] and max(map(len, beats)) == 100


def test_time_left_follows_the_kinds_of_parts():
    progress = replay.Progress(["measured", "profiled", "measured", "profiled", "profiled"])
    assert progress.remaining() is None
    progress.seconds = [10.0]
    assert progress.remaining() == 40
    progress.seconds = [10.0, 2.0]
    assert progress.remaining() == 14


def test_a_folder_of_the_same_name_below_cdpath_is_not_taken(tmp_path):
    (tmp_path / FOLDER.name).mkdir()
    environment = os.environ | {"CDPATH": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", f"{FOLDER.name}/run_all_stages.sh", "--help"]
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--stages" in done.stdout, done.stderr


def test_results_of_an_earlier_replay_are_put_aside(tmp_path):
    (tmp_path / "stage3_profile.csv").write_text("old")
    written = {"stage2_alone.json", "counted.json", "attention_layouts.json", "kernel_timeline.json"}
    for name in written:
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").write_text("mine")
    replay.put_aside(tmp_path)
    (aside,) = tmp_path.glob("previous_*")
    assert (aside / "stage3_profile.csv").read_text() == "old"
    assert {path.name for path in aside.iterdir()} == {"stage3_profile.csv"} | written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", aside.name]
    for text in ("older", "oldest"):  # with the same date again
        shutil.copy2(aside / "stage3_profile.csv", tmp_path)
        (aside / "stage3_profile.csv").write_text(text)
        replay.put_aside(tmp_path)
    assert sorted(path.read_text() for path in tmp_path.glob("previous_*/*.csv")) == ["old", "older", "oldest"]


def test_two_replays_cannot_share_a_folder(tmp_path):
    """Nor does one delete what lies there, or write through a link."""
    work, precious = tmp_path / ".work-1" / "profile", tmp_path / "precious"
    work.mkdir(parents=True)
    precious.write_text("mine")
    (tmp_path / ".lock").symlink_to(precious)
    with replay.locked(tmp_path):
        with pytest.raises(llama.UsageError, match="in use"), replay.locked(tmp_path):
            pass
    assert work.exists() and precious.read_text() == "mine"


@pytest.fixture
def rocprofv3(tmp_path, monkeypatch):
    """A replay's profiled part of a program that does nothing, in the fake rocprofv3 of a release."""

    def profiled(release, **environment):
        fake = FAKES / "rocprofv3.py"
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "rocprofv3").write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(fake)])} "$@"\n')
        (tmp_path / "bin" / "rocprofv3").chmod(0o755)
        for name, value in (environment | {"FAKE_ROCM": release}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "hip", release)
        (tmp_path / "program.py").touch()
        run = replay.training_run("stage2", "", tmp_path / "program.py", [], llama.Config(), 2, with_profile=True)
        replay.execute_part(run.parts[1], tmp_path / "stage2_output.log", tmp_path)
        return read_kernel_stats(tmp_path / "stage2_profile.csv").set_index("Name")

    return profiled


@pytest.mark.parametrize("release", ["6.4", "7.0"])
def test_a_profile_of_rocprofv3_holds_the_kernels_of_the_steps_alone(rocprofv3, release):
    """Warm-up, compilation and tuning run before the first step; torch.profiler's tables lack them as well."""
    calls = rocprofv3(release, FAKE_STEPS="4")["Calls"]
    assert records.WARM_UP_KERNEL not in calls
    assert calls.to_dict() == {name: 4 * count for name, (count, _) in records.KERNELS.items()}


def test_a_profile_without_steps_is_refused(rocprofv3, monkeypatch):
    unmarked = replay.rocprofv3_command
    monkeypatch.setattr(replay, "rocprofv3_command", lambda *args: [w for w in unmarked(*args) if "marker" not in w])
    with pytest.raises(RuntimeError, match="no kernels within a range named step"):
        rocprofv3("7.0")


# --- a whole replay


@pytest.fixture(scope="module")
def replayed(tmp_path_factory, python):
    """The folder of a replay of stages 5 and 6, with kernels where they are interpreted too, and its console."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "stage4.json").write_text("{}")
    command = [FOLDER / "run_all_stages.sh", "--stages", "5,6", *SIZES, "--output", folder, "--", *TINY.split()]
    done = subprocess.run(command, env=os.environ | {"PYTHON": python}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_a_replay_writes_every_file_of_its_own_and_no_other(replayed):
    folder, _ = replayed
    expected = {"summary.json", "summary.md", "stages.png", "report.html", "ceilings.json", "ceilings_output.log"}
    expected |= {"baseline.json", "baseline_output.log", ".lock"}
    expected |= {f"stage{n}{end}" for n in (5, 6) for end in (".json", "_profile.csv", "_output.log")}
    assert {path.name for path in folder.iterdir() if path.is_file()} == expected
    (aside,) = folder.glob("previous_*")
    assert [path.name for path in aside.iterdir()] == ["stage4.json"]
    header = (folder / "stage5_profile.csv").read_text().splitlines()[0]
    assert header.replace('"', "") == "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev"


def test_a_replay_shows_where_it_is(replayed):
    lines = re.findall(r"^\[(\d)/(\d)\] (.*)", replayed[1], flags=re.M)
    assert [(int(n), int(of)) for n, of, _ in lines] == [(n, 4) for n in range(1, 5)]
    assert all(" left" in title for _, _, title in lines[1:])


def test_figures_are_those_of_the_runs(replayed):
    folder, console = replayed
    summary = json.loads((folder / "summary.json").read_text())
    names = ("baseline", "stage5", "stage6")
    runs = {name: json.loads((folder / f"{name}.json").read_text())["summary"] for name in names}
    correct, severed = summary["stages"]
    for stage, run in ((correct, runs["stage5"]), (severed, runs["stage6"])):
        assert stage["samples_per_second"] == run["samples_per_second"]
        assert stage["first_loss"] == run["first_loss"]
        assert sum(kernel["share"] for kernel in stage["kernels"]) == pytest.approx(1)
        phases = json.loads((folder / f"stage{stage['stage']}.json").read_text())["steps"]
        assert stage["phase_steps_ms"]["backward"] == [step["phase_ms"]["backward"] for step in phases]
    assert correct["over_previous"] is None  # stage 4 was not run
    if llama.triton and not ON_GPU:  # the interpreter's times are nobody's
        assert severed["over_previous"] is None and "x previous" not in console
    assert summary["command"] == f"./run_all_stages.sh --stages 5,6 {shlex.join(SIZES)} -- {TINY}"
    assert [seen["shown"] for seen in summary["observations"]] == [True, llama.triton is not None]


# --- observations: figures as a GPU gives them, one by one made to show their sign, and not to


KERNELS = {"flash_attention_kernel": 5.0, "swiglu_activation_kernel": 4.0, "nvjet_gemm": 30.0}


def taking(*ms):
    """The figures of steps that took so long, of twenty that all took as long if it is one time."""
    ms = [*ms] * 20 if len(ms) == 1 else [*ms]
    batch_ms = dict(zip(("p20", "p50", "p80"), np.percentile(ms, [20, 50, 80]).tolist(), strict=True))
    batch_ms["mean"] = sum(ms) / len(ms)
    return {"batch_ms": batch_ms, "step_ms": ms, "samples_per_second": 1e3 * 8 / batch_ms["mean"]}


def stage_figures(number, **changes):
    figures = {
        "stage": number, "title": replays.short_title(number), "obstacle": None, "error": None,
        "implementation": "triton", "first_loss": 7.0, "final_loss": 6.9, "losses": [7.0, 6.9],
        **taking(5.0), "tokens_per_second": 2e5, "mean_over_median": 1.0,
        "phase_ms": {"forward": 1.5, "backward": 3.0, "optimizer": 0.5}, "phases_share": 1.0, "host_ms": 2.0,
        "gradient_share": 1.0, "peak_memory_mib": 600.0, "mfu": 0.1, "attention_us": 5.0, "swiglu_us": 4.0,
        "kernels": [{"name": k, "calls": 24, "average_us": us, "share": us / 39} for k, us in KERNELS.items()],
    }  # fmt: skip
    return figures | changes


def gpu_summary(changes=None):
    """A summary of all stages on a GPU; changes: {stage: {figure: value}}."""
    changes = changes or {}
    summary = {
        "benchmark": "stages", "command": "./run_all_stages.sh --beyond", "commands": ["python v3_stage5.py"],
        "date": "2026-11-21T10:00:00", "profiler": "torch.profiler", "interrupted": False, "entropy": math.log(1000),
        "environment": hardware.environment(llama.Device("cuda", "NVIDIA H200", "sm_90", 132, 32)),
        "config": shared_config(llama.dataclasses.asdict(llama.Config(seq_len=128))),
        "precision": "fp32",
        "ceilings": {"bytes_per_second": 4e12, "flop_per_second": 5e13, "peak_tflops": 66.9},
        "baseline": {k: v for k, v in stage_figures(5, **taking(10.0), implementation="torch").items()
                     if k not in ("stage", "title", "obstacle", "error", "kernels", "attention_us", "swiglu_us")},
        "stages": [stage_figures(number, **changes.get(number, {})) for number in llama.STAGES],
        "laptop": False, "isolated": [], "counted": None, "recorded": [],
    }  # fmt: skip
    return summary | {"observations": replays.observations(summary)}


def observed(number, changes):
    (seen,) = [seen for seen in gpu_summary(changes)["observations"] if seen["stage"] == number]
    return seen["shown"], seen["text"]


NAIVE_FIRST = [{"name": "swiglu_kernel", "calls": 24, "average_us": 2000.0, "share": 0.8}]
NAIVE_ALL = dict.fromkeys((1, 2, 3, 4), taking(20.0) | {"kernels": NAIVE_FIRST})  # it is in all of them
SHOWN = {
    1: ({1: {"first_loss": 470.0}}, "470, 68 times"),
    2: ({2: {"attention_us": 25.0}}, "25.0 us, 5.0 times the 5.0 us of stage 3"),
    3: ({3: {"phases_share": 0.3}}, "add up to 30 % of the step"),
    4: (NAIVE_ALL, "4.0 times stage 5's. swiglu_kernel is first.* 80 %"),
    5: ({}, "2.0 times the baseline's, measured in the same replay"),
    6: ({6: {"gradient_share": 0.016, "phase_ms": {"backward": 0.2}}}, "1.6 %.* takes 0.200 ms where .* 3.00 ms"),
    7: ({7: {"mean_over_median": 40.0, "step_ms": [9000.0, 5.0]}}, "40 times the median; the first took 9,000.0 ms"),
    8: ({8: taking(1.0)}, "5.0 times as fast"),
}  # fmt: skip
HIDDEN = {
    1: ({}, "512 is too narrow"),
    2: ({}, r"1.0 times .* in fp32\. .*try --seq-len 2048 -- --use-amp"),
    3: ({3: {"host_ms": 4.5}}, "busy for 90 % of the step"),
    4: ({}, "weighs more than the naive swiglu_kernel"),
    5: ({5: {"gradient_share": 0.99}}, "99 % of the weights"),
    6: ({}, "100 % of the weights"),
    7: ({}, "1.0 times the median"),
    8: ({}, "40 % of stage 5's step to launch the kernels: there is little to win.* try -- --use-amp"),
}


@pytest.mark.parametrize("number", SHOWN)
def test_an_observation_follows_the_figures(number):
    for expected, cases in ((True, SHOWN), (False, HIDDEN)):
        changes, text = cases[number]
        shown, said = observed(number, changes)
        assert shown is expected and re.search(text, said), said


def test_an_observation_names_the_figure_that_is_missing():
    without_profile = {number: {"kernels": None, "attention_us": None} for number in llama.STAGES}
    assert observed(2, without_profile) == (None, "stage 2 was not profiled.")
    summary = gpu_summary()
    failed = {"stage": 4, "title": "slow kernels", "obstacle": None, "error": "measured run: killed\nthe log's end"}
    summary["stages"] = [stage_figures(8), failed]
    assert [(seen["shown"], seen["text"]) for seen in replays.observations(summary)] == [
        (None, "stage 5 was not measured."), (None, "It failed: measured run: killed."),
    ]  # fmt: skip


def cpu_summary(implementation, changes=None):
    """A summary as a CPU gives it: no kernel of ours is in a profile, and there is no graph to capture."""
    summary = gpu_summary(changes)
    summary["environment"]["arch"] = "cpu"
    operators = [{"name": "aten::mm", "calls": 24, "average_us": 9.0, "share": 1.0}]
    for stage in summary["stages"]:
        stage |= {"implementation": implementation, "attention_us": None, "swiglu_us": None, "kernels": operators}
    summary["stages"][-1] = {"stage": 8, "title": "", "obstacle": "--graph needs a GPU", "error": None}
    return summary


# As noise may have it, every time looks like the sign of its stage.
NOISE = {
    3: {"phases_share": 0.3}, 4: taking(20.0), 6: {"phase_ms": {"backward": 0.2}},
    7: {"mean_over_median": 40.0, "step_ms": [9000.0, 5.0]},
}  # fmt: skip
CPU_REASONS = {
    "torch": {2: "takes any layout", 3: "runs behind", 4: "did not run", 5: "noise", 6: "cannot be cut", 7: "compiled"},
    "triton": {2: "interpreter", 3: "runs behind", 4: "interpreter", 5: "interpreter", 7: "compiled"},
}


@pytest.mark.parametrize("implementation", CPU_REASONS)
def test_on_a_cpu_every_observation_says_why_it_cannot_show(monkeypatch, implementation):
    monkeypatch.setattr(llama, "INTERPRETED", implementation == "triton")
    interpreted = {6: NOISE[6] | {"gradient_share": 0.016}} if implementation == "triton" else {}
    summary = cpu_summary(implementation, NOISE | interpreted | {1: {"first_loss": 470.0}})
    seen = {seen["stage"]: seen for seen in replays.observations(summary)}
    assert seen[1]["shown"]  # a loss shows anywhere
    assert not any(seen[number]["shown"] for number in (2, 3, 4, 7, 8))
    assert seen[6]["shown"] is bool(interpreted)
    for number, reason in CPU_REASONS[implementation].items():
        assert reason in seen[number]["text"]


def test_times_of_stages_that_ran_the_same_operations_are_called_noise(monkeypatch):
    monkeypatch.setattr(llama, "INTERPRETED", False)
    assert "the same operations" in replays.notes(cpu_summary("torch"))[-1]
    assert "interpreter" in replays.notes(cpu_summary("triton"))[-1]
    assert replays.notes(gpu_summary()) == replays.NOTES
    assert replays.notes(cpu_summary("torch"))[-1] in markdown(cpu_summary("torch"))


def test_a_launch_bound_stage_says_so():
    assert "What is left is the host: it needs 96 % of the step" in observed(5, {5: {"host_ms": 4.8}})[1]
    assert "96 % of stage 5's step to launch the kernels: its time varied" in observed(8, {5: {"host_ms": 4.8}})[1]
    assert "What is left is the host" not in observed(5, {})[1]


def test_a_small_sign_of_the_layout_comes_with_the_way_to_a_larger_one():
    def said(attention_us, **config):
        summary = gpu_summary({2: {"attention_us": attention_us}})
        summary["config"] |= config
        return replays.observations(summary)[1]

    small = said(8.0, seq_len=2048)
    assert small["shown"] and "2048 tokens a sequence in fp32" in small["text"]
    assert small["text"].endswith("try -- --use-amp.")
    assert said(8.0, use_amp=True)["text"].endswith("try --seq-len 2048.")
    for plain in (said(8.0, seq_len=2048, use_amp=True), said(80.0)):
        assert plain["shown"] and "try" not in plain["text"]


# --- no difference that is not there


def cells(summary, figure):
    labels, rows = replays.comparison_table(summary)
    return dict(zip(labels, dict(rows)[figure], strict=True))


def test_identical_code_is_never_called_faster(monkeypatch):
    """On a CPU all stages run the same operations: here those of stage 4 met a neighbour."""
    monkeypatch.setattr(llama, "INTERPRETED", False)
    summary = cpu_summary("torch", {4: taking(27.25), 7: {"mean_over_median": 1.0}})
    said = [*cells(summary, "speed / previous").values(), *cells(summary, "speed / baseline").values()]
    assert set(said) == {"", "same"}
    assert "5.45" not in console(summary) + markdown(summary)
    assert "the same work as the baseline" in dict(enumerate(replays.observations(summary)))[4]["text"]


def test_medians_within_the_spread_of_their_steps_are_the_same():
    naive = taking(5.0, 5.5, 7.0, 7.5, 7.6, 7.7, 9.0, 9.5)
    restless = dict.fromkeys((1, 2, 3, 4), naive | {"kernels": NAIVE_FIRST})
    restless[5] = taking(4.5, 4.8, 5.0, 5.0, 5.1, 6.0)
    summary = gpu_summary(restless)
    assert naive["batch_ms"]["p50"] > 1.4 * 5.0
    assert cells(summary, "speed / previous")["5 optimized"] == "same"
    shown, text = observed(4, restless)
    assert shown is False and "as long as stage 5's, within the measured spread" in text


def test_a_difference_no_larger_than_between_processes_of_the_same_work_is_none():
    """Stages 3 and 4 differ in the clock only."""
    quiet = dict.fromkeys((1, 2), taking(6.0)) | dict.fromkeys((3, 4), taking(5.5))
    assert cells(gpu_summary(quiet), "speed / previous")["5 optimized"] == "1.10"
    apart = quiet | {3: taking(7.0)}
    assert cells(gpu_summary(apart), "speed / previous")["5 optimized"] == "same"
    assert cells(gpu_summary(quiet), "speed / previous")["4 slow kernels"] == "same"  # the same operations
    assert cells(gpu_summary(quiet | {6: taking(1.0)}), "speed / previous")["6 severed autograd"] == "5.00"


def test_a_few_steps_cannot_tell():
    few = {number: taking(20.0, 20.0, 20.0) for number in (1, 2, 3, 4)}
    assert cells(gpu_summary(few), "speed / previous")["5 optimized"] == "too few"
    assert observed(4, few)[0] is False and "Fewer than 4 steps" in observed(4, few)[1]


def test_the_cold_start_s_steps_are_those_of_the_others():
    cold = {7: taking(9000.0, *[5.0] * 19)}
    assert cells(gpu_summary(cold), "speed / previous")["7 cold start"] == "same"
    assert cells(gpu_summary(cold), "speed / baseline")["7 cold start"] == "2.00"


def test_runs_of_two_sizes_are_not_compared(monkeypatch):
    """Where there is no Triton, a laptop's stages all run in plain PyTorch, the first of them at full width."""
    monkeypatch.setattr(llama, "INTERPRETED", False)
    summary = cpu_summary("torch", {1: {"config": {"hidden_dim": 512, "vocab_size": 1000}} | taking(900.0)})
    assert replays.compare_speed(summary, summary["stages"][1], summary["stages"][0]) is None
    assert replays.spread_of_processes(summary) == 2  # that of the baseline, and not of stage 1


def with_isolated(summary):
    """A summary with --isolate: the layout alone takes as long as stage 5, the naive kernel 15 ms longer."""
    alone = (
        ("no_init", "stage1_alone", taking(5.0)),
        ("noncontiguous_kv", "stage2_alone", taking(*[4.9, 5.0, 5.1] * 4)),
        ("triton_matmul_swiglu", "stage4", taking(20.0)),
    )
    isolated = [
        stage_figures(number) | figures | {"mistake": mistake, "run": run}
        for number, (mistake, run, figures) in zip((1, 2, 4), alone, strict=True)
    ]
    return summary | {"isolated": isolated}


def test_each_mistake_alone_is_compared_with_the_optimized():
    labels, rows = replays.isolated_table(with_isolated(gpu_summary(dict.fromkeys((1, 2, 3, 4), taking(20.0)))))
    assert labels == ["5 optimized", "--no-init", "--noncontiguous-kv", "--triton-matmul-swiglu"]
    assert dict(rows)["speed / stage 5"] == ["", "same", "same", "0.250"]
    assert dict(rows)["added by the mistake, ms"] == ["", "", "", "15.0"]


# --- a laptop


CASE = {"programs": 64, "waves": 100, "lines": {"64": 200, "128": 200}, "fewest_lines": {"64": 200, "128": 200}}
FULL_WIDTH = {1: {"first_loss": 470.0, "config": {"hidden_dim": 512, "vocab_size": 1000}}}


def laptop_summary(changes=FULL_WIDTH, measured=(1, 5, 6)):
    """Measured in the interpreter, counted, and recorded on an H200."""
    summary = cpu_summary("triton", changes)
    for index, stage in enumerate(summary["stages"]):
        if stage["stage"] not in measured:
            not_run = {"planned": False, "obstacle": None, "error": None}
            summary["stages"][index] = {"stage": stage["stage"], "title": stage["title"]} | not_run
    loads = ((2, "flash_attention_kernel", 4e6, 2e6, 4800), (3, "flash_attention_kernel", 4e6, 2e6, 200),
             (4, "swiglu_kernel", 2.2e6, 1e5, 200), (5, "swiglu_activation_kernel", 1e4, 1e4, 200))  # fmt: skip
    cases = [
        CASE | {"stage": n, "kernel": kernel, "bytes": asked, "distinct_bytes": distinct, "same_result": True,
                "lines": {"64": lines, "128": lines}}
        for n, kernel, asked, distinct, lines in loads
    ]  # fmt: skip
    replay_there = gpu_summary({2: {"attention_us": 25.0}}) | {"file": "benchmarks/results/stages_nvidia-h200_x.json"}
    there = {"ceilings": None, "recorded": [replay_there]}
    return summary | there | {"laptop": True, "baseline": None, "counted": {"wave": 64, "cases": cases}}


def test_a_laptop_s_report_says_of_each_observation_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(llama, "INTERPRETED", True)
    seen = [(line["stage"], line["source"].split(" on ")[0]) for line in replays.observations(laptop_summary())]
    assert seen == [
        (1, "measured"), (1, "recorded"), (2, "counted"), (2, "recorded"), (3, "recorded"), (4, "counted"),
        (4, "recorded"), (5, "measured"), (5, "recorded"), (6, "measured"), (6, "recorded"), (7, "recorded"),
        (8, "recorded"),
    ]  # fmt: skip
    lines = [*replays.observation_lines(laptop_summary())]
    assert lines[0][1] == "shows" and lines[1][1].endswith("recorded on NVIDIA H200")
    assert "4,800 cache lines of 128 bytes instead of 200, 24 times as many" in lines[2][2]
    assert "each byte 22 times" in lines[5][2]
    assert not any("try " in text for *_, text in lines)  # what a laptop cannot


def test_what_was_recorded_is_marked_and_meets_no_measured_figure(monkeypatch):
    monkeypatch.setattr(llama, "INTERPRETED", True)
    text, table = markdown(laptop_summary()), console(laptop_summary())
    for shown in (text, " ".join(table.split())):
        assert "stages_nvidia-h200_x.json: not measured here." in shown
        versions = r"PyTorch \S+, (Triton \S+, )?2026-11-21"
        assert re.search(f"Recorded on NVIDIA H200, {versions}, in benchmarks/results/", shown)
    measured = text.split("## ")[0]
    assert "speed" not in measured.replace("speed /", "").split("- ")[0] and "| 470 |" in measured
    assert "1 broken loss, hidden 512" in measured


@pytest.mark.parametrize("of", [gpu_summary, laptop_summary, lambda: with_isolated(gpu_summary())])
def test_a_terminal_of_100_columns_shows_it_all(of):
    assert max(map(len, console(of()).splitlines())) <= 100


@pytest.mark.skipif(ON_GPU or llama.triton is None, reason="the interpreter counts, and on a GPU it may fail")
def test_the_interpreter_counts_the_lines_that_an_emulated_gpu_does(python):
    """With its tile docs/emulated_counts.md has the same bytes and lines, of compiled code and twice the heads."""
    tile = "llama.ATTENTION_TILES['interpreter', 'any', 128] = ((64, 32, 4, 1),) * 4"
    counted = run_counted(python, 2, patches=f"{tile}\nmemory_counts.HEADS = 4")
    emulated = json.loads((ROOT / "benchmarks" / "results" / "emulated_counts.json").read_text())["counts"]
    for case in counted:
        for arch, line_bytes in (("gfx90a", "64"), ("gfx942", "128")):
            there = emulated[arch][f"stage {case['stage']}"]["flash_attention_kernel"]
            assert 2 * case["bytes"] == there["bytes"]["load"]
            assert 2 * case["lines"][line_bytes] == there["lines"]["load"]
    assert all(case["same_result"] for case in counted)


def run_counted(python, stage, patches):
    """The cases of a stage, counted in a process of its own: the interpreter must be chosen before Triton is there."""
    script = (
        "import json\nfrom exercises.performance_debugging import memory_counts\nllama = memory_counts.llama\n"
        f"{patches}\ncases = memory_counts.count({{{stage}}})\nprint(json.dumps(cases))"
    )
    done = subprocess.run([python, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(ON_GPU or llama.triton is None, reason="the interpreter counts, and on a GPU it may fail")
def test_the_naive_kernel_loads_three_rows_for_each_element(python):
    naive, hybrid = run_counted(python, 4, patches="memory_counts.ROWS, memory_counts.FFN = 3, 5")
    assert naive["programs"] == 15 and naive["bytes"] == 15 * 3 * 512 * 4
    assert naive["distinct_bytes"] == (3 + 2 * 5) * 512 * 4
    assert hybrid["bytes"] == hybrid["distinct_bytes"] == 3 * 2 * 5 * 4


@pytest.mark.skipif(ON_GPU, reason="the interpreter runs the kernels, and on a GPU it may fail")
def test_a_laptop_replays_in_one_report(tmp_path, python):
    command = [FOLDER / "run_all_stages.sh", "--laptop", "--stages", "1,5,6,8", "--output", tmp_path, "--"]
    command += [*TINY.split(), "--num-steps", "4", "--seq-len", "4"]
    done = subprocess.run(command, env=os.environ | {"PYTHON": python}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 100
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["environment"]["arch"] == "cpu" and summary["recorded"][0]["environment"]["arch"] != "cpu"
    assert [stage["stage"] for stage in summary["stages"] if "batch_ms" in stage] == [1, 5, 6]
    severed = [seen for seen in summary["observations"] if seen["stage"] == 6]
    assert severed[0]["source"] == "measured" and severed[1]["source"].startswith("recorded on ")
    if llama.triton:
        assert severed[0]["shown"] and "not run backwards" in severed[0]["text"]
    assert {seen["source"] for seen in summary["observations"] if seen["stage"] == 8} == {severed[1]["source"]}
    assert (tmp_path / "report.html").exists() and (tmp_path / "stages.png").exists()


# --- tables


def test_the_table_has_a_column_a_stage_and_the_unit_of_every_figure():
    labels, rows = replays.comparison_table(gpu_summary())
    assert labels == ["baseline", *(f"{number} {replays.short_title(number)}" for number in llama.STAGES)]
    figures = dict(rows)
    assert figures["speed, samples/s"][:2] == ["800", "1,600"]
    assert figures["speed / baseline"][:2] == ["", "2.00"]
    assert figures["attention kernel, us"][:2] == ["", "5.00"]
    assert set(map(len, figures.values())) == {len(labels)}


def test_figures_of_a_run_by_hand(tmp_path):
    # Each step is the sum of its phases; but the median forward of 2 and backward of 3 are no step's, and 5 of 6 ms.
    phases = (dict(forward=forward, backward=backward) for forward, backward in ((2.0, 8.0), (1.0, 3.0), (4.0, 2.0)))
    steps = [dict(loss=7.0, batch_ms=sum(phase_ms.values()), host_ms=1.0, phase_ms=phase_ms) for phase_ms in phases]
    run = {
        "implementation": "triton",
        "summary": {
            "first_loss": 7.0, "final_loss": 6.0, "samples_per_second": 3.0, "tokens_per_second": 30.0, "host_ms": 1.0,
            "batch_ms": {"mean": 7.0, "p20": 5.0, "p50": 6.0, "p80": 9.0},
            "phase_ms": {"forward": 2.3, "backward": 4.3},
            "parameters": 200, "parameters_with_gradient": 50, "peak_memory_mib": 1.0, "mfu": 0.1,
        },
        "steps": steps,
    }  # fmt: skip
    figures = run_figures(run)
    assert figures["phase_ms"] == {"forward": 4.0, "backward": 2.0}  # of the median step
    assert figures["phases_share"] == sum(figures["phase_ms"].values()) / figures["batch_ms"]["p50"] == 1.0
    assert figures["phase_steps_ms"] == {"forward": [2.0, 1.0, 4.0], "backward": [8.0, 3.0, 2.0]}
    even = run_figures(run | {"steps": [*steps, steps[0]]})["phase_ms"]  # the median is between two steps
    assert even == {"forward": 3.0, "backward": 5.0}
    assert figures["mean_over_median"] == pytest.approx(7 / 6) and figures["gradient_share"] == 0.25
    table = "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev\nk,4,8000,2000,100,2000,2000,0\n"
    (tmp_path / "stage5_profile.csv").write_text(table)
    (kernel,) = kernel_figures(tmp_path / "stage5_profile.csv")
    assert kernel == {"name": "k", "calls": 4, "average_us": 2.0, "share": 1.0}
    assert [replays.predecessor(stage) for stage in (2, 5, 6, 8)] == [1, 4, 5, 5]
