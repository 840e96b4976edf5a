"""FP8 beside bf16: what follows from losses, what a run records, and what the page says of it."""

import json
import math

import pytest
import torch

import tiny_llama_v3 as llama
from benchmarks import fp8_learning
from benchmarks.pages import fp8_tables, publish


def run(losses, ms=10.0, **others):
    names = {"size": "large", "data": "text", "seed": 1, "precision": "bf16", "error": None}
    final = fp8_learning.smoothed(losses)[-1]
    return names | {"losses": losses, "ms": {"median": ms}, "final_loss": final, "seconds": 1.0, "tflop": 1.0} | others


def falling(final, steps=200):
    """Losses of a straight line, so that the mean of 50 is the loss 24.5 steps before; the last mean is final."""
    return [final + 0.01 * (steps - 24.5 - step) for step in range(1, steps + 1)]


def test_the_smoothed_loss_is_the_mean_of_the_last_fifty():
    means = fp8_learning.smoothed(falling(1.0))
    assert len(means) == 151 and means[-1] == pytest.approx(1.0) and means[-2] == pytest.approx(1.01)
    assert fp8_learning.smoothed([1.0, 3.0]) == [2.0]
    broken = fp8_learning.smoothed([5.0] * 60 + [math.nan] + [4.0] * 60)
    assert math.isnan(broken[11]) and broken[10] == 5.0 and broken[-1] == 4.0


def test_seconds_to_a_loss_count_the_steps_until_it_is_reached():
    bf16 = run(falling(1.0), ms=20.0)
    assert fp8_tables.seconds_to(bf16, bf16["final_loss"]) == pytest.approx(200 * 0.020)
    assert fp8_tables.seconds_to(bf16, 1.4951) == pytest.approx(151 * 0.020)
    assert fp8_tables.seconds_to(bf16, 9.0) == pytest.approx(50 * 0.020)  # no mean of fewer steps
    assert fp8_tables.seconds_to(bf16, 0.999) is None
    assert fp8_tables.seconds_to(run([math.nan] * 60), 9.0) is None


def test_fp8_that_learns_as_well_is_as_much_faster_as_its_steps():
    pairs = {1: (run(falling(1.0)), run(falling(0.895), 8.0)), 2: (run(falling(2.0)), run(falling(1.955), 8.0))}
    found = fp8_tables.compare(pairs)
    assert found["differences"] == {1: pytest.approx(-10.5), 2: pytest.approx(-2.25)}
    assert found["difference"] == pytest.approx(-6.375) and found["unreached"] == []
    # bf16 takes 200 steps of 10 ms, FP8 190 and 196 of 8 ms.
    assert found["seconds"] == pytest.approx([2.0, 193 * 0.008]) and found["ratio"] == pytest.approx(200 / 193 / 0.8)
    assert fp8_tables.spread([1.0, 2.0, 1.5]) == pytest.approx(100 / 1.5)


def test_fp8_that_learns_worse_has_a_ratio_at_its_own_final_loss_only():
    pairs = {1: (run(falling(1.0)), run(falling(0.895), 8.0)), 2: (run(falling(1.0)), run(falling(1.205), 8.0))}
    found = fp8_tables.compare(pairs)
    assert found["unreached"] == [2] and found["seconds"] is None and found["ratio"] is None
    # Seed 1: 200 steps and 190 to 1.0. Seed 2: 180 and 200 to 1.205.
    assert found["ratio_both"] == pytest.approx((200 + 180) * 10 / ((190 + 200) * 8))


# --- runs

TINY = ["--tiny", "--seeds", "1"]


def measure(folder, *flags):
    assert fp8_learning.main([*TINY, *flags, "--output-dir", str(folder)]) == 0
    (path,) = folder.glob("fp8_learning_*.json")
    return json.loads(path.read_text())


def test_both_precisions_train_on_the_same(tmp_path, monkeypatch):
    started = []
    original = llama.warm_up
    monkeypatch.setattr(llama, "warm_up", lambda step: started.append(step) or original(step))
    monkeypatch.setattr(fp8_learning, "SMOOTHED", 3)
    result = measure(tmp_path, "--num-steps", "12")
    assert [(r["data"], r["precision"]) for r in result["runs"]] == [
        (data, precision) for data in ("text", "markov") for precision in ("bf16", "fp8")
    ]
    for index, (bf16, fp8) in enumerate((result["runs"][:2], result["runs"][2:])):
        ours, theirs = started[2 * index + 1], started[2 * index]
        assert all(map(torch.equal, ours.initial_weights, theirs.initial_weights))
        assert torch.equal(ours.tokens, theirs.tokens)  # of the last batch
        assert fp8["config"] == bf16["config"] | {"fp8": True} and not bf16["config"]["fp8"]
        assert bf16["losses"][0] == pytest.approx(fp8["losses"][0], rel=1e-2) and bf16["losses"] != fp8["losses"]
    for found in result["runs"]:
        assert found["seconds"] > 0 and found["tflop"] > 0
        assert found["error"] is None and len(found["losses"]) == 12 == found["config"]["num_steps"]
        assert found["losses"] == [round(loss, 5) for loss in found["losses"]]
        assert found["final_loss"] == pytest.approx(sum(found["losses"][-3:]) / 3)
        assert set(found["ms"]) == set(found["wall_ms"]) == {"p20", "median", "p80"} and found["ms"]["median"] > 0
        is_text = found["data"] == "text"
        assert (found["held_out_loss"] is not None) == is_text == (found["config"]["vocab_size"] == 256)
        assert found["config"]["data"] == found["data"] and found["config"]["learning_rate"] == 3e-4
    assert result["text"]["bytes"] > 2e6 and len(result["text"]["sha256"]) == 64 and result["missing"] == []


def test_the_text_is_the_library_without_its_tests(tmp_path, monkeypatch):
    for name in ("b.py", "a/z.py", "a/b.py", "a/b.txt", "test/c.py", "a/tests/d.py", "site-packages/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} ")
    monkeypatch.setattr(fp8_learning.sysconfig, "get_path", lambda name: str(tmp_path) if name == "stdlib" else None)
    monkeypatch.setattr(fp8_learning.Path, "rglob", lambda path, pattern: reversed(sorted(path.glob(f"**/{pattern}"))))
    assert fp8_learning.library_text() == b"a/b.py a/z.py b.py "


def test_a_text_of_one_s_own(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"abc " * 300)
    flags = ["--data", "text", "--precisions", "bf16", "--num-steps", "2", "--learning-rate", "0.001"]
    result = measure(tmp_path, *flags, "--text", str(tmp_path / "text"))
    assert result["text"]["bytes"] == 1200 and result["runs"][0]["config"]["learning_rate"] == 0.001
    assert fp8_learning.main([*TINY, "--text", str(tmp_path / "none")]) == 2
    assert "--text" in capsys.readouterr().err


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: the results of the runs, exceptions among them, and what was saved after each."""
    outcomes, saved = [], []

    def train(config, device):
        outcome = outcomes.pop(0) if outcomes else run([1.0])
        if isinstance(outcome, Exception):
            raise outcome
        return {name: outcome[name] for name in ("error", "losses", "final_loss")} | {"ms": {"median": 1.0}}

    class File(fp8_learning.ResultFile):
        def save(self, result):
            super().save(result)
            saved.append(len(json.loads(self.path.read_text())["runs"]))

    monkeypatch.setattr(fp8_learning, "train", train)
    monkeypatch.setattr(fp8_learning, "ResultFile", File)
    return outcomes, saved


def test_a_run_that_fails_says_why_and_all_are_saved_one_by_one(tmp_path, trained):
    outcomes, saved = trained
    outcomes += [run([1.0]), torch.OutOfMemoryError("no room\nfor this")]
    result = measure(tmp_path, "--data", "markov", "--seeds", "1", "2")
    assert saved == [1, 2, 3, 4]
    assert [found["error"] for found in result["runs"]] == [None, "OutOfMemoryError: no room", None, None]


def test_a_loss_that_is_not_finite_ends_the_run(monkeypatch):
    config = llama.Config(**fp8_learning.SIZES["tiny"], data="markov", use_amp=True, impl="torch", num_steps=30)
    original, calls = llama.TrainStep.forward, []

    def forward(step):
        calls.append(step)
        original(step)
        if len(calls) >= config.warmup_steps + 4:
            step.loss = step.loss * math.inf

    monkeypatch.setattr(llama.TrainStep, "forward", forward)
    found = fp8_learning.train(config, llama.get_device("cpu"))
    assert found["error"] == "diverged: the loss of step 4 is inf" and len(found["losses"]) == 4
    assert found["final_loss"] is None and found["held_out_loss"] is None
    assert len(calls) == config.warmup_steps + fp8_learning.WINDOW_STEPS


def test_what_would_end_too_late_is_not_started(tmp_path, trained, monkeypatch, capsys):
    monkeypatch.setattr(fp8_learning, "expected_seconds", lambda runs, wanted: 50.0 * len(runs))
    result = measure(tmp_path, "--data", "markov", "--seeds", "1", "2", "--time-limit", "99")
    assert [(found["seed"], found["precision"]) for found in result["runs"]] == [(1, "bf16"), (1, "fp8")]
    assert result["missing"] == ["tiny markov seed 2 bf16", "tiny markov seed 2 fp8"]
    assert "tiny markov seed 2 fp8: left out by --time-limit 99" in capsys.readouterr().out


def test_the_time_of_a_run_is_that_of_the_runs_most_like_it():
    done = [
        {"size": "medium", "precision": "bf16", "seconds": 10, "tflop": 1, "error": None},
        {"size": "large", "precision": "bf16", "seconds": 60, "tflop": 10, "error": None},
        {"size": "large", "precision": "fp8", "seconds": 1, "tflop": 10, "error": "OutOfMemoryError"},
    ]
    for size, precision, expected in (("medium", "fp8", 100), ("large", "fp8", 60), ("small", "bf16", 100)):
        assert fp8_learning.expected_seconds(done, {"size": size, "precision": precision, "tflop": 10}) == expected
    assert fp8_learning.expected_seconds([], {"size": "large", "precision": "fp8", "tflop": 10}) == 0


def test_bad_requests_take_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fp8_learning, "ResultFile", lambda *args: pytest.fail("work before the refusal"))
    assert fp8_learning.main(["--sizes", "large"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--sizes large needs a GPU" in error and "--tiny" in error
    monkeypatch.setattr(fp8_learning.fp8, "formats_of", lambda arch: None)
    assert fp8_learning.main(TINY) == 2
    assert "--precisions fp8 needs a GPU with FP8" in capsys.readouterr().err


# --- pages


def save(folder, day, benchmark="fp8_learning", **fields):
    environment = {"device": "Some GPU", "torch": "2.11", "triton": "3.6"}
    result = {"date": f"2026-01-0{day}", "command": f"a run of day {day}", "environment": environment, "missing": []}
    (folder / f"{benchmark}_{day}.json").write_text(json.dumps(result | fields))


def test_the_table_of_learning(tmp_path):
    bf16, fp8 = {"precision": "bf16"}, {"precision": "fp8", "ms": 8.0}
    large = [run(falling(1.0), **bf16), run(falling(0.895), **fp8)]
    large += [run(falling(1.5), seed=2, **bf16), run([9.0], seed=2, precision="fp8") | {"error": "diverged: step 7"}]
    large.append(run(falling(1.575), seed=2, precision="fp8-wide-margin"))
    medium = [run(falling(1.0), size="medium", data="markov", **bf16)]
    medium.append(run(falling(1.205), size="medium", data="markov", **fp8))
    alone = run(falling(3.0), size="small", data="markov", **bf16)
    tiny = [found | {"size": "tiny"} for found in large]
    save(tmp_path, 1, runs=[*large, alone, *tiny], missing=["large text seed 3 bf16", "tiny text seed 3 bf16"])
    save(tmp_path, 2, runs=medium)
    save(tmp_path, 3, runs=[run(falling(7.0), **bf16)])  # without FP8
    lines = fp8_tables.learning_section(tmp_path).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    none = "not measured"
    assert rows == [
        ["small, markov, fp8", "3.000", none, none, none, "10.0 / not measured", none, none],
        ["medium, markov, fp8", "1.000", "1.205", "+20.50 % (+20.50)", none, "10.0 / 8.00",
         "not reached in 200 steps (seed 1)", "1.12 to the worse of both final losses"],
        ["large, text, fp8", "1.000", "0.8950", "-10.50 % (-10.50)", "40.00 %", "10.0 / 8.00", "2.00 / 1.52", "1.32"],
        ["large, text, fp8-wide-margin", "1.500", "1.575", "+5.00 % (+5.00)", "40.00 %", "10.0 / 10.0",
         "not reached in 200 steps (seed 2)", "0.96 to the worse of both final losses"],
    ]  # fmt: skip
    assert [line for line in lines if line.startswith("- ")] == [
        "- large text seed 2 fp8: diverged: step 7", "- large text seed 3 bf16: not measured",
    ]  # fmt: skip
    assert [line[-18:] for line in lines if line.startswith("Some GPU")] == [": `a run of day 1`", ": `a run of day 2`"]


def test_the_table_of_speed(tmp_path):
    def rows(ms):
        times = {"triton graph": 100.0, "triton fp8 graph": ms, "sdpa compile graph": 1.0}
        times["sdpa tensorwise compile graph"] = 99.0
        found = {name: {"error": None, "ms": {"median": ms}} for name, ms in times.items()}
        return found | {"sdpa rowwise compile graph": {"error": "torchao is not installed"}}

    failed = {"triton fp8 graph": {"error": "no room"}}
    save(tmp_path, 1, "steps", sizes={"large": {"rows": rows(80.0)}, "medium": {"rows": rows(90.0)}})
    save(tmp_path, 2, "steps", sizes={"large": {"rows": rows(72.0)}, "small": {"rows": rows(70.0)}})
    save(tmp_path, 3, "steps", sizes={"large": {"rows": {"triton graph": rows(1.0)["triton graph"]}}})
    save(tmp_path, 4, "steps", sizes={"large": {"rows": failed}})
    text = fp8_tables.speed_section(tmp_path)
    assert [line for line in text.splitlines() if "large" in line] == [
        "| large, triton graph | 100 | 1.39 |", "| large, triton fp8 graph | 72.0 | 1.00 |",
        "| large, sdpa tensorwise compile graph | 99.0 | 1.38 |",
        "| large, sdpa rowwise compile graph | torchao is not installed |  |",
    ]  # fmt: skip
    assert (
        "| medium, triton fp8 graph | 90.0 | 1.00 |" in text
        and "| small, triton graph |" in text
        and "sdpa compile" not in text
    )
    assert "a run of day 1" in text and "a run of day 2" in text


def test_the_page_and_its_picture(tmp_path, monkeypatch):
    page, picture = tmp_path / "page.md", tmp_path / "fp8.png"
    names = "fp8-speed", "fp8-layer", "fp8-recipes", "fp8-learning"
    page.write_text("".join(f"<!-- begin: {name} -->\n<!-- end: {name} -->\n" for name in names))
    monkeypatch.setattr(publish, "PAGES", [page])
    monkeypatch.setattr(publish, "DRAWN", {picture: fp8_tables.draw})
    (tmp_path / "other.json").write_text("{}")
    assert publish.main(["--results", str(tmp_path)]) == 0
    assert page.read_text().count(publish.NOT_MEASURED) == 4 and not picture.exists()
    drawn = []
    monkeypatch.setattr(fp8_tables.drawing, "save_png", lambda figure, path, dpi: drawn.append(figure))
    sizes = [run(falling(1.0), precision=p, size=size) for size in ("large", "medium") for p in ("bf16", "fp8")]
    save(tmp_path, 1, runs=[*sizes, run(falling(5.0), seed=2) | {"error": "diverged"}])
    assert publish.main(["--results", str(tmp_path)]) == 0
    assert "| large, text, fp8 | 1.000 | 1.000 |" in page.read_text()
    left, right = drawn[0].axes
    for axes in (left, right):
        assert axes.get_title("left") == "large"
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["bf16", "fp8"]
    assert len(left.lines) == 2 and list(left.lines[0].get_xdata())[::150] == [50, 200]
    assert right.lines[0].get_xdata()[-1] == pytest.approx(200 * 10 / 6e4)
    assert left.lines[0].get_ydata()[-1] == pytest.approx(1.0)
    save(tmp_path, 2, runs=[*sizes, *(run(falling(1.0), size="medium", precision=p, seed=2) for p in ("bf16", "fp8"))])
    fp8_tables.draw(tmp_path, picture)
    assert drawn[1].axes[0].get_title("left") == "medium" and len(drawn[1].axes[0].lines) == 4
    mistaken = run(falling(1.0), precision="fp8-wide-margin", size="medium")
    save(tmp_path, 3, runs=[*sizes, mistaken])
    fp8_tables.draw(tmp_path, picture)
    left, right = drawn[2].axes
    assert [axes.get_title("left") for axes in (left, right)] == ["medium", "large"] and len(left.lines) == 3


def test_the_table_and_the_picture_of_a_layer(tmp_path, monkeypatch):
    def part(name, amount, unit, **contenders):
        rows = {n: {"error": None, "us": us, "rate": rate} for n, (us, rate) in contenders.items()}
        return {"part": name, "amount": amount, "unit": unit, "contenders": rows}

    rounding = part("rounding", 3e8, "TB/s", triton=(100.0, 3.0), torch=(400.0, 0.75))
    rounding["contenders"]["compile"] = {"error": "no compiler"}
    weights, gradients = (part(name, 1e8, "TB/s", triton=(40.0, 2.5)) for name in ("weights", "gradients"))
    products = part("products", 7.5e10, "TFLOP/s", fp8=(50, 1500.0), bf16=(100, 750))
    parts = [part("copy", 1e8, "TB/s", torch=(1.0, 4.0)), rounding, weights, gradients, products]
    drawn = []
    monkeypatch.setattr(fp8_tables.drawing, "save_png", lambda figure, path: drawn.append(figure.axes[0]))
    for peaks, shares in (([2000.0, 1000.0], (" (75%)", " (75%)")), ([None, None], ("", ""))):
        save(tmp_path, 1, "fp8_layer", parts=parts, peaks=peaks)
        lines = fp8_tables.layer_section(tmp_path).splitlines()
        assert [lines[2], lines[5]] == [
            "| rounding | 300 MB | 100 us, 3.00 TB/s (75%) | 400 us, 0.750 TB/s (19%) | no compiler |",
            "| products | 0.0750 TFLOP | 50.0 us, 1,500 TFLOP/s{} | 100 us, 750 TFLOP/s{} |  |".format(*shares),
        ]
        fp8_tables.draw_layer(tmp_path, None)
    (axes,) = drawn  # nothing is drawn without the peaks
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [
        (0, 100),
        (0, 50),
        (50, 100),
        (150, 40),
        (190, 40),
    ]
    floors = 7.5e10 / 1000 / 1e6, 7.5e10 / 2000 / 1e6 + 5e8 / 4 / 1e6  # in us, of peaks and rates per 1e12
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx(floors)


def test_the_table_of_recipes(tmp_path):
    sizes = {size: {"bf16": {"median": 0.01, "worst": worst}} for size, worst in (("small", 0.02), ("large", 0.03))}
    save(tmp_path, 1, "fp8_recipes", sizes=sizes)
    lines = fp8_tables.recipes_section(tmp_path).splitlines()
    assert lines[0] == "|  | small | large |" and lines[2] == "| bf16 | 0.010 (0.020) | 0.010 (0.030) |"
