"""What releases of Triton cost: the comparison, the installing, and that the result is of today's launches."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from offline import compilers, gate, recorded

pytestmark = pytest.mark.triton

GPU, KERNEL = "gfx942", "a_kernel"


def compiled(case, tile, registers, share, scalar_spills=0, error=None):
    """A row as offline.pages writes it."""
    row = {"arch": GPU, "kernel": KERNEL, "variant": "", "case": case, "precision": "bf16", "tile": tile}
    if error:
        return row | {"error": error}
    spills = {"vector_spills": 0, "scalar_spills": scalar_spills, "scratch_bytes": 0}
    return row | spills | {"registers": registers, "occupancy": {"share": share}}


OLD = [
    compiled("small", "8 m", 100, 0.5),
    compiled("large", "8 m", 100, 0.5),
    compiled("small", "16 m", 264, 0.125, scalar_spills=4),
    compiled("small", "32 m", 0, 0, error="it crashed"),
]
NEW = [
    compiled("small", "8 m", 128, 0.375),
    compiled("large", "8 m", 128, 0.375),
    compiled("small", "16 m", 238, 0.25),
    compiled("small", "32 m", 64, 1.0),
]


def test_what_several_cases_launch_alike_is_one_row():
    rows = compilers.merged({"1.9.0": OLD, "1.10.0": NEW})
    assert [(row["tile"], row["case"]) for row in rows] == [("8 m", "small"), ("16 m", "small"), ("32 m", "small")]
    assert rows[1]["compiled"] == {
        "1.9.0": {"registers": 264, "spilled": 4, "occupancy": 0.125},
        "1.10.0": {"registers": 238, "spilled": 0, "occupancy": 0.25},
    }
    assert rows[2]["compiled"]["1.9.0"] is None


def test_the_summary_counts_what_each_release_loses():
    versions = ["1.9.0", "1.10.0"]
    for old, worst in ((OLD, "32 m"), (OLD[:3], "16 m"), (OLD[:2], None)):
        rows = compilers.merged({"1.9.0": old, "1.10.0": NEW[: len(old)]})
        ours, newest = compilers.summarize(rows, versions)
        assert (ours["worst"] and ours["worst"]["tile"]) == worst
        losses = len(rows) - 1  # all but the first, which wins
        assert (ours["launches"], ours["lower"], ours["higher"], ours["spilling"]) == (losses + 1, losses, 1, losses)
        assert (newest["lower"], newest["higher"], newest["spilling"], newest["worst"]) == (0, 0, 0, None)


def pip(monkeypatch, tmp_path, status, said=""):
    """Make pip end with a status, and return a list of its calls."""
    calls = []

    def run(command, env, **options):
        calls.append(command)
        command[command.index("--target") + 1].mkdir()
        assert env["PIP_CONFIG_FILE"] == "/dev/null"
        return SimpleNamespace(returncode=status, stderr=said)

    monkeypatch.setattr(compilers.subprocess, "run", run)
    monkeypatch.setattr(compilers, "ROOT", tmp_path)
    monkeypatch.setattr(compilers, "FOLDER", tmp_path / "kept")
    return calls


def test_a_release_is_installed_once(monkeypatch, tmp_path):
    calls = pip(monkeypatch, tmp_path, 0)
    assert compilers.install("3.9.0") == compilers.install("3.9.0") == tmp_path / "kept" / "triton-3.9.0"
    assert len(calls) == 1 and calls[0][-1] == "triton==3.9.0" and "--no-deps" in calls[0]


@pytest.mark.parametrize("versions, told", [
    (["3.9"], "--versions 3.9: give releases such as 3.9.0"),
    (["3.9.0", "3.9.0"], "--versions 3.9.0: give two releases or more"),
    (["0.0.1", "3.9.0"], "Triton 0.0.1 cannot be installed (no such release): choose others by --versions"),
])  # fmt: skip
def test_what_cannot_be_compared_is_told_in_a_line_and_leaves_nothing(monkeypatch, tmp_path, capsys, versions, told):
    pip(monkeypatch, tmp_path, 1, "trying\nno such release\n")
    output = tmp_path / "results"
    assert compilers.main(["--versions", *versions, "--output-dir", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compilers.py: error: ") and told in error and error.count("\n") == 1
    assert not list(output.glob("*")) and not list(tmp_path.glob("kept/*"))


def test_the_rows_of_each_release_go_into_one_file(monkeypatch, tmp_path):
    """Each is compiled by its own Triton, which comes first in the path; another than the asked one is refused."""
    pip(monkeypatch, tmp_path, 0)
    compiled_by = {"1.9.0": OLD, "1.10.0": NEW}

    def run(command, env, **options):
        version = env["PYTHONPATH"].split(":")[0].rpartition("-")[2]
        told = {"triton": version.replace("1.11", "1.12"), "rows": compiled_by.get(version, NEW)}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(told))
        assert command[1:3] == ["-m", "offline.pages"] and "--check" in command
        return SimpleNamespace(returncode=1, stdout="a launch spills\n", stderr="")

    for version in ("1.9.0", "1.10.0", "1.11.0"):
        compilers.install(version)
    monkeypatch.setattr(compilers.subprocess, "run", run)
    monkeypatch.setattr(compilers, "header", lambda *_: {"benchmark": "compilers"})
    flags = ["--output-dir", str(tmp_path / "results")]
    assert compilers.main(["--versions", "1.10.0", "1.9.0", *flags]) == 0
    result = json.loads((tmp_path / "results" / "compilers.json").read_text())
    assert result["versions"] == ["1.9.0", "1.10.0"]  # by number
    assert result["rows"] == compilers.merged(compiled_by) and len(result["summary"]) == 2
    assert compilers.main(["--versions", "1.10.0", "1.11.0", *flags]) == 2


# --- the result


@pytest.fixture(scope="module")
def committed():
    return json.loads(compilers.RESULT.read_text())


def test_result_has_the_launches_of_today(committed):
    selection = dict.fromkeys(recorded.CASES, tuple(recorded.PRECISIONS))
    jobs = recorded.jobs_for(compilers.ARCHITECTURES, selection)
    rows = (gate.make_row(job, {"error": "not compiled"}, {}) for job in jobs)
    now, then = ({tuple(row[name] for name in compilers.LAUNCH) for row in each} for each in (rows, committed["rows"]))
    assert now == then, "run `python -m offline.compilers`"


def test_the_summary_follows_from_the_rows(committed):
    assert tuple(committed["versions"]) == compilers.VERSIONS
    assert committed["summary"] == compilers.summarize(committed["rows"], committed["versions"])
    assert all(row["compiled"].keys() == {*compilers.VERSIONS} for row in committed["rows"])
