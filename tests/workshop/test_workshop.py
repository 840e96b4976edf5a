"""The replay of the stages: what it runs, what it does when a run fails, and what its sentences follow from."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks.pages import replays
from exercises.performance_debugging import replay
from exercises.performance_debugging.report import console, markdown
from exercises.performance_debugging.results import kernel_figures, run_figures
from profilers.readers import read_kernel_stats
from tests.fakes import records
from tests.workshop import summaries
from tests.workshop.summaries import NAIVE, SIGNS, WIDE, cpu_summary, gpu_summary, laptop_summary, observed, taking

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
def dry_run(capsys):
    """dry_run(options) returns {title: [commands]}."""

    def run(options):
        assert replay.main(["--dry-run", *options.split()]) == 0
        parts = re.split(r"^# (.*)\n", capsys.readouterr().out, flags=re.M)
        return {title: block.splitlines() for title, block in zip(parts[1::2], parts[2::2], strict=True)}

    return run


def config_of(command):
    """Return the Config of a command, which may begin with variables of its environment."""
    script, *arguments = shlex.split(command[command.index(sys.executable) + len(sys.executable) :])
    return llama.parse_config(arguments, script)


def test_dry_run_prints_commands_that_parse_and_writes_nothing(dry_run, tmp_path):
    planned = dry_run(f"--beyond --batch-size 3 --output {tmp_path / 'results'} -- --seed 7")
    assert not (tmp_path / "results").exists()
    titles = [title for title in planned if title.startswith("stage")]
    assert [int(re.match(r"stage (\d)", title)[1]) for title in titles] == list(llama.STAGES)
    for number, title in enumerate(titles, 1):
        assert bool(planned[title]) == (number != 8 or ON_GPU)  # without a GPU, stage 8 is left out
        for command in planned[title]:
            config = config_of(command)
            assert (config.stage, config.batch_size, config.seed, config.seq_len) == (number, 3, 7, 128)
            assert ("TRITON_CACHE_DIR" in command) == (number == 7)
    assert "--impl torch" in planned["baseline, plain PyTorch"][0]


def test_stages_and_profiles_are_chosen(dry_run):
    planned = dry_run("--stages 4,2 --no-profile")
    assert [title.split(",")[0] for title in planned] == ["baseline", "stage 2", "stage 4"]
    assert all(len(commands) == 1 and "--profile" not in commands[0] for commands in planned.values())


@pytest.mark.parametrize("options, gpu, cpu", [
    ("--stages 2,5", ["ceilings", "attention_layouts"], ["ceilings"]), ("--stages 4", ["ceilings"], ["ceilings"]),
    ("--beyond", ["ceilings", "attention_layouts", "kernel_timeline"], ["ceilings"]), ("--beyond --no-profile", [], []),
])  # fmt: skip
def test_the_replay_measures_what_its_stages_pictures_need(monkeypatch, options, gpu, cpu):
    for is_available, expected in ((True, gpu), (False, cpu)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_available=is_available: is_available)
        _, runs = replay.plan(replay.parse(options.split()))
        assert [run.name for run in runs if run.name in replay.MEASUREMENTS] == expected


def test_each_mistake_is_isolated_that_a_stage_has_beside_others(dry_run):
    planned = dry_run("--isolate --beyond --no-profile")
    alone = {title.split()[0]: commands for title, commands in planned.items() if title.endswith(" alone")}
    assert list(alone) == ["--no-init", "--noncontiguous-kv", "--unsynced-timing"]
    for flag, (command,) in alone.items():
        assert list(map(llama.flag_of, config_of(command).bugs)) == [flag]
    assert "stage 5, optimized" in dry_run("--isolate --stages 2")  # which it is compared with


def test_a_laptop_runs_on_its_cpu_and_in_the_interpreter(dry_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    planned = dry_run("--laptop")
    assert [title.split(",")[0] for title in planned] == [
        "stage 1",
        "stage 5",
        "stage 6",
        "what kernels ask memory for",
    ]
    del planned["what kernels ask memory for"]
    for (command,) in planned.values():
        config = config_of(command)
        assert "TRITON_INTERPRET=1" in command and config.device == "cpu" and config.profile is None
        assert (config.impl, config.hidden_dim) == (("torch", 512) if config.stage == 1 else ("triton", 64))
    assert not list(dry_run("--laptop --stages 3,8"))


def test_rocprofv3_profiles_on_amd_only(dry_run, monkeypatch):
    title = "stage 2, slow performance"
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/rocm/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (command,) = dry_run("--stages 2")[title]
    assert not command.startswith("rocprofv3") and "--profile" in command
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    measured, command = dry_run("--stages 2")[title]
    assert "rocprofv3" not in measured and "--profile" not in measured
    assert command.startswith("rocprofv3 --kernel-trace --marker-trace --output-format csv ")
    assert "--profile" not in command and "--num-steps 3 " in f"{command} "  # as many as --profile records
    (command,) = dry_run("--stages 2 -- --device cpu")[title]
    assert not command.startswith("rocprofv3")


@pytest.mark.parametrize("argv, named", [
    ("--stages 9", "there is no stage 9"), ("--stages one", "--stages one"), ("--stages 2 --beyond", "--beyond"),
    ("--stages 2,,4", "--stages 2,,4"), ("--laptop --isolate", "--isolate"),
    ("--laptop -- --use-amp", "--use-amp"), ("--laptop -- --graph", "--graph"),
    ("--laptop -- --device=cuda", "--device"), ("--batch-size 0", "--batch-size 0"), ("--seq-len many", "--seq-len"),
    ("--bach-size 8", "--bach-size"), ("-- --stage 3", "--stage"), ("-- --output-dir=x", "--output-dir"),
    ("-- --hidden-dim 63", "--hidden-dim 63"), ("--output /dev/null/x --num-steps 1", "--output"),
])  # fmt: skip
def test_bad_requests_get_one_line_and_exit_code_2(capsys, argv, named):
    assert replay.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("body, told", [(None, "there is no Python at PYTHON="), ("exit 1", "lacks one of torch")])
def test_the_script_names_the_python_that_does_not_serve(body, told, tmp_path):
    if body:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python")}
    done = subprocess.run([FOLDER / "run_all_stages.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1


def test_a_folder_of_the_same_name_below_cdpath_is_not_taken(tmp_path, python):
    (tmp_path / FOLDER.name).mkdir()
    environment = os.environ | {"CDPATH": str(tmp_path), "PYTHON": python}
    command = ["bash", f"{FOLDER.name}/run_all_stages.sh", "--help"]
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--stages" in done.stdout, done.stderr


# --- running

WRITES = "open(folder + '/out.json', 'w').write('{}')"


def script_run(name, *scripts, arguments=()):
    """Return a Run of small Python programs."""
    commands = [[sys.executable, "-c", f"folder = {replay.FOLDER!r}\n{script}", *arguments] for script in scripts]
    return replay.Run(name, name, commands)


def test_a_failing_run_is_told_and_the_others_go_on(capsys, tmp_path):
    runs = [
        script_run("stage1", "print('reading'); raise SystemExit('no such tensor')", WRITES),
        script_run("stage2", "pass"),
        script_run("stage3", WRITES, "pass"),
    ]
    assert replay.execute_all(runs, tmp_path)
    assert "exit status 1" in runs[0].error and "no such tensor" in runs[0].error
    assert "no result was written" in runs[1].error and runs[2].error is None
    assert "    no such tensor" in capsys.readouterr().err
    logs = [f"stage{number}_output.log" for number in (1, 2, 3)]
    assert {path.name for path in tmp_path.iterdir()} == {*logs, "stage3.json"}
    assert "reading\n" in (tmp_path / logs[0]).read_text()


@pytest.mark.parametrize("ends, told", [("; raise SystemExit('no profile')", "no profile"), ("", "holds no kernel")])
def test_a_process_that_fails_in_its_profile_keeps_what_it_measured(tmp_path, ends, told):
    makes = f"import os; os.mkdir(folder + '/profile'); {WRITES}{ends}"
    run = script_run("stage1", makes, arguments=["--profile", replay.PROFILE])
    assert replay.execute_all([run], tmp_path) and told in run.error
    assert {path.name for path in tmp_path.iterdir()} == {"stage1.json", "stage1_output.log"}


def test_an_interruption_keeps_what_is_done(tmp_path):
    interrupt = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    runs = [script_run("stage1", WRITES), script_run("stage2", interrupt), script_run("stage3", WRITES)]
    assert replay.execute_all(runs, tmp_path) is False
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".log", ".log"]  # no temporary folder


def test_results_of_an_earlier_replay_are_put_aside(tmp_path):
    written = {"stage2_alone.json", "counted.json", "attention_layouts.json", "stages.png"}
    for name in {"notes.txt"} | written:
        (tmp_path / name).touch()
    replay.put_aside(tmp_path)
    (aside,) = tmp_path.glob("previous_*")
    assert {path.name for path in aside.iterdir()} == written
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", aside.name}


@pytest.fixture
def rocprofv3(tmp_path, monkeypatch):
    """rocprofv3(release) returns the kernels of a program that does nothing, in the fake profiler of a release."""

    def profiled(release, **environment):
        fake = tmp_path / "bin" / "rocprofv3"
        fake.parent.mkdir()
        program = shlex.join([sys.executable, str(ROOT / "tests" / "fakes" / "rocprofv3.py")])
        fake.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        fake.chmod(0o755)
        path = f"{fake.parent}:{os.environ['PATH']}"
        for name, value in (environment | {"FAKE_ROCM": release, "PATH": path}).items():
            monkeypatch.setenv(name, value)
        (tmp_path / "program.py").touch()
        commands = replay.training_commands(tmp_path / "program.py", [], "rocprofv3")
        run = script_run("stage2", WRITES)
        run.commands.append(commands[1])
        replay.execute(run, tmp_path)
        return read_kernel_stats(tmp_path / "stage2_profile.csv").set_index("Name")

    return profiled


@pytest.mark.parametrize("release", ["6.4", "7.0"])
def test_a_profile_of_rocprofv3_holds_the_kernels_of_the_steps_alone(rocprofv3, release):
    """Warm-up, compilation and tuning run before the first step; torch.profiler's tables lack them as well."""
    calls = rocprofv3(release, FAKE_STEPS="4")["Calls"]
    assert calls.to_dict() == {name: 4 * count for name, (count, _) in records.KERNELS.items()}


def test_a_profile_without_steps_is_refused(rocprofv3, monkeypatch):
    monkeypatch.setattr(replay, "ROCPROFV3", replay.ROCPROFV3.replace("--marker-trace ", ""))
    with pytest.raises(RuntimeError, match="no kernels within a range named step"):
        rocprofv3("7.0")


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
    expected = {"summary.json", "summary.md", "stages.png", "report.html", "baseline.json", "baseline_output.log"}
    expected |= {"ceilings.json", "ceilings_output.log"}
    expected |= {f"stage{n}{end}" for n in (5, 6) for end in (".json", "_profile.csv", "_output.log")}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == expected
    assert len(list(tmp_path.glob("previous_*/stage4.json"))) == 1
    header = (tmp_path / "stage5_profile.csv").read_text().splitlines()[0]
    assert header.replace('"', "") == "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev"
    assert re.findall(r"^\[(\d)/4\] ", shown, flags=re.M) == ["1", "2", "3", "4"]

    correct, severed = summary["stages"]
    run = json.loads((tmp_path / "stage6.json").read_text())
    assert severed["phase_steps_ms"]["backward"] == [step["phase_ms"]["backward"] for step in run["steps"]]
    assert sum(kernel["share"] for kernel in severed["kernels"]) == pytest.approx(1)
    assert correct["over_previous"] is None  # stage 4 was not run
    if llama.triton and not ON_GPU:  # the interpreter's times are nobody's
        assert severed["over_previous"] is None and "x previous" not in shown
    assert summary["command"] == f"./run_all_stages.sh {options} -- {TINY}"
    assert summary["commands"][2].startswith("python v3_stage6_severed_autograd.py --batch-size 1")
    assert [seen["shown"] for seen in summary["observations"]] == [True, llama.triton is not None]


@pytest.mark.skipif(ON_GPU, reason="the interpreter runs the kernels, and on a GPU it may fail")
def test_a_laptop_replays_in_one_report(tmp_path, python):
    _, summary = replayed(tmp_path, python, "--laptop --stages 1,6,8 --seq-len 4", "--num-steps 4")
    assert summary["environment"]["arch"] == "cpu" and summary["recorded"][0]["environment"]["arch"] != "cpu"
    assert [stage["stage"] for stage in summary["stages"] if "batch_ms" in stage] == [1, 6]
    sources = {n: [seen["source"] for seen in summary["observations"] if seen["stage"] == n] for n in (1, 8)}
    assert sources[1][0] == "measured" and set(sources[1][1:]) == set(sources[8]) != {"measured"}
    assert (tmp_path / "report.html").exists()


# --- observations: figures as a GPU gives them, one by one made to show their sign, and not to

NAIVE_ALL = dict.fromkeys((1, 2, 3, 4), taking(20.0) | {"kernels": NAIVE})  # it is in all of them
CASES = [  # (stage, whether its sign shows, figures, what is said)
    (1, True, {1: {"first_loss": 470.0}}, "470, 68 times"),
    (2, True, {2: {"attention_us": 25.0}}, "25.0 us, 5.0 times the 5.0 us of stage 3"),
    (3, True, {3: {"phases_share": 0.3}}, "add up to 30 % of the step"),
    (4, True, NAIVE_ALL, "4.0 times stage 5's. swiglu_kernel is first.* 80 %"),
    (5, True, {}, "2.0 times the baseline's, measured in the same replay"),
    (6, True, SIGNS, "1.6 %.* takes 0.200 ms where .* 3.00 ms"),
    (7, True, SIGNS, "40 times the median; the first took 7,340.0 ms"),
    (8, True, {8: taking(1.0)}, "5.0 times as fast"),
    (1, False, {}, "512 is too narrow"),
    (2, False, {}, r"1.0 times .* in fp32\. .*try --seq-len 2048 -- --use-amp"),
    (3, False, {3: {"host_ms": 4.5}}, "busy for 90 % of the step"),
    (4, False, {}, "weighs more than the naive swiglu_kernel"),
    (5, False, {5: {"gradient_share": 0.99}}, "99 % of the weights"),
    (6, False, {}, "100 % of the weights"),
    (7, False, {}, "1.0 times the median"),
    (8, False, {}, "40 % of stage 5's step to launch the kernels: there is little to win.* try -- --use-amp"),
    (5, True, {5: {"host_ms": 4.8}}, "What is left is the host: it needs 96 % of the step"),
    (8, False, {5: {"host_ms": 4.8}}, "96 % of stage 5's step to launch the kernels: its time varied"),
    (2, None, {2: {"kernels": None, "attention_us": None}}, "stage 2 was not profiled."),
    (4, False, dict.fromkeys((1, 2, 3, 4), taking(20.0, 20.0, 20.0)), "Fewer than 4 steps"),
]


@pytest.mark.parametrize("stage, shows, changes, text", CASES)
def test_an_observation_follows_the_figures(stage, shows, changes, text):
    seen = gpu_summary(changes)["observations"][stage - 1]
    assert seen["stage"] == stage and seen["shown"] is shows and re.search(text, seen["text"]), seen


def test_an_observation_names_what_failed():
    failed = {"stage": 4, "title": "slow kernels", "obstacle": None, "error": "exit status 9\nthe log's end"}
    summary = gpu_summary(stages=[gpu_summary()["stages"][7], failed])
    seen = [(each["shown"], each["text"]) for each in summary["observations"]]
    assert seen == [(None, "stage 5 was not measured."), (None, "It failed: exit status 9.")]


# As noise may have it, every time looks like the sign of its stage.
NOISE = SIGNS | {4: taking(20.0), 6: {"phase_ms": {"backward": 0.2}}}
CPU_REASONS = {
    "torch": {2: "takes any layout", 3: "runs behind", 4: "did not run", 5: "noise", 6: "cannot be cut", 7: "compiled"},
    "triton": {2: "interpreter", 3: "runs behind", 4: "interpreter", 5: "interpreter", 7: "compiled"},
}


@pytest.mark.parametrize("implementation", CPU_REASONS)
def test_on_a_cpu_every_observation_says_why_it_cannot_show(monkeypatch, implementation):
    monkeypatch.setattr(llama, "INTERPRETED", implementation == "triton")
    severed = {6: SIGNS[6]} if implementation == "triton" else {}
    summary = cpu_summary(implementation, NOISE | severed)
    seen = {seen["stage"]: seen for seen in summary["observations"]}
    assert {stage for stage in seen if seen[stage]["shown"]} == {1, 5} | severed.keys()  # a loss shows anywhere
    for number, reason in CPU_REASONS[implementation].items():
        assert reason in seen[number]["text"]
    note = replays.notes(summary)[-1]
    assert ("the same operations" if implementation == "torch" else "interpreter") in note
    assert note in markdown(summary) and note not in replays.notes(gpu_summary())


@pytest.mark.parametrize("us, config, said", [
    (8.0, {"seq_len": 2048}, "try -- --use-amp."), (8.0, {"use_amp": True}, "try --seq-len 2048."),
    (80.0, {}, "in fp32."),
])  # fmt: skip
def test_a_small_sign_of_the_layout_comes_with_the_way_to_a_larger_one(us, config, said):
    summary = gpu_summary({2: {"attention_us": us}})
    seen = observed(summary, config=summary["config"] | config)["observations"][1]
    assert seen["shown"] and seen["text"].endswith(said)


# --- no difference that is not there


def cells(changes, figure="speed / previous"):
    """Return the cells of a figure in the table of a summary, or of a GPU's with changes."""
    labels, rows = replays.comparison_table(changes if "stages" in changes else gpu_summary(changes))
    return dict(zip(labels, dict(rows)[figure], strict=True))


def test_identical_code_is_never_called_faster(monkeypatch):
    """On a CPU all stages run the same operations: here those of stage 4 met a neighbour."""
    monkeypatch.setattr(llama, "INTERPRETED", False)
    summary = cpu_summary("torch", {4: taking(27.25), 7: {"mean_over_median": 1.0}})
    assert {*cells(summary).values(), *cells(summary, "speed / baseline").values()} == {"", "same"}
    assert "5.45" not in console(summary) + markdown(summary)
    assert "the same work as the baseline" in summary["observations"][4]["text"]


RESTLESS = dict.fromkeys((1, 2, 3, 4), taking(5.0, 5.5, 7.0, 7.5, 7.6, 7.7, 9.0, 9.5) | {"kernels": NAIVE})
QUIET = dict.fromkeys((1, 2), taking(6.0)) | dict.fromkeys((3, 4), taking(5.5))  # 3 and 4 differ in the clock only


@pytest.mark.parametrize("changes, run, expected", [
    (RESTLESS | {5: taking(4.5, 4.8, 5.0, 5.0, 5.1, 6.0)}, "5 optimized", "same"),  # within the spread of their steps
    (QUIET, "5 optimized", "1.10"), (QUIET, "4 slow kernels", "same"),
    (QUIET | {6: taking(1.0)}, "6 severed autograd", "5.00"),
    (QUIET | {3: taking(7.0)}, "5 optimized", "same"),  # no more than between processes of the same work
    (dict.fromkeys((1, 2, 3, 4), taking(20.0, 20.0, 20.0)), "5 optimized", "too few"),
    ({7: taking(9000.0, *[5.0] * 19)}, "7 cold start", "same"),
])  # fmt: skip
def test_only_a_difference_is_shown_as_a_ratio(changes, run, expected):
    assert cells(changes)[run] == expected


def test_runs_of_two_sizes_are_not_compared(monkeypatch):
    """Where there is no Triton, a laptop's stages all run in plain PyTorch, the first of them at full width."""
    monkeypatch.setattr(llama, "INTERPRETED", False)
    summary = cpu_summary("torch", {1: WIDE | taking(900.0)})
    assert replays.compare_speed(summary, summary["stages"][1], summary["stages"][0]) is None
    assert replays.spread_of_processes(summary) == 2  # that of the baseline, and not of stage 1


def test_each_mistake_alone_is_compared_with_the_optimized():
    labels, rows = replays.isolated_table(gpu_summary(NAIVE_ALL, isolated=summaries.RECORDED["isolated"]))
    assert labels == ["5 optimized", "--no-init", "--noncontiguous-kv", "--triton-matmul-swiglu"]
    assert dict(rows)["speed / stage 5"] == ["", "same", "same", "0.250"]
    assert dict(rows)["added by the mistake, ms"] == ["", "", "", "15.0"]


# --- a laptop


def test_a_laptop_s_report_says_of_each_observation_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(llama, "INTERPRETED", True)
    summary = laptop_summary()
    seen = " ".join(f"{line['stage']}{line['source'][0]}" for line in summary["observations"])
    assert seen == "1m 1r 2c 2r 3r 4c 4r 5m 5r 6m 6r 7r 8r"  # measured, counted, recorded
    lines = [*replays.observation_lines(summary)]
    assert lines[0][1] == "shows" and lines[1][1].endswith("recorded on NVIDIA H200")
    assert "4,800 cache lines of 128 bytes instead of 200, 24 times as many" in lines[2][2]
    assert "each byte 22 times" in lines[5][2]
    assert not any("try " in text for *_, text in lines)  # what a laptop cannot
    for shown in (markdown(summary), " ".join(console(summary).split())):
        assert re.search(r"Recorded on NVIDIA H200, PyTorch .*results/some.json: not measured here\.", shown)
    measured = markdown(summary).split("## ")[1]
    assert "speed" not in measured and "1 broken loss, hidden 512" in measured and re.search(r"\| 470 +\|", measured)


@pytest.mark.parametrize("of", [gpu_summary, laptop_summary])
def test_a_terminal_of_100_columns_shows_it_all(of):
    assert max(map(len, console(of()).splitlines())) <= 100


def run_counted(python, stage, patches):
    """Return the cases of a stage, counted in a process of its own: the interpreter must be chosen before Triton."""
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


# --- tables


def test_the_table_has_a_column_a_stage_and_the_unit_of_every_figure():
    figures = {name: cells(gpu_summary(), name) for name in ("speed / baseline", "attention kernel, us")}
    assert list(figures["speed / baseline"]) == ["baseline", *(f"{n} {replays.short_title(n)}" for n in llama.STAGES)]
    assert [list(row.values())[:2] for row in figures.values()] == [["", "2.00"], ["", "5.00"]]
    assert [replays.predecessor(stage) for stage in (2, 5, 6, 8)] == [1, 4, 5, 5]


def test_figures_of_a_run_by_hand(tmp_path):
    # Each step is the sum of its phases; but the median forward of 2 and backward of 3 are no step's, and 5 of 6 ms.
    run = summaries.RECORDED["run"]
    figures = run_figures(run)
    assert figures["phase_ms"] == {"forward": 4.0, "backward": 2.0}  # of the median step
    assert figures["phases_share"] == 1.0 and figures["step_ms"] == [10.0, 4.0, 6.0]
    assert figures["phase_steps_ms"] == {"forward": [2.0, 1.0, 4.0], "backward": [8.0, 3.0, 2.0]}
    even = run_figures(run | {"steps": [*run["steps"], run["steps"][0]]})["phase_ms"]  # the median is between two
    assert even == {"forward": 3.0, "backward": 5.0}
    assert figures["mean_over_median"] == pytest.approx(7 / 6) and figures["gradient_share"] == 0.25
    table = "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev\nk,4,8000,2000,100,2000,2000,0\n"
    (tmp_path / "stage5_profile.csv").write_text(table)
    (kernel,) = kernel_figures(tmp_path / "stage5_profile.csv")
    assert kernel == {"name": "k", "calls": 4, "average_us": 2.0, "share": 1.0}
