"""The first screen: its table and its picture follow from results, and say so where there are none."""

import json
import shutil

import matplotlib.image
import pytest

import tiny_llama_v3 as llama
from benchmarks.pages import front_page, publish, published_claims
from measure import drawing
from measure.results import RESULTS

ENVIRONMENT = {"device": "Some GPU", "torch": "2.11", "triton": "3.6"}
MODEL = {"hidden_dim": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 2048, "vocab_size": 1000}


def step_result(date="2030-01-02T03:04:05", ours=10.0, size="small"):
    def row(ms):
        times = {"p20": ms, "median": ms, "p80": ms}
        return {"error": None, "ms": times, "tokens_per_second": 1024e3 / ms, "peak_memory_mib": 100 * ms, "mfu": None}

    rows = {"triton graph": row(ours), "torch": row(80.0), "torch graph": row(60.0), "sdpa compile graph": row(20.0)}
    rows["sdpa flat compile graph"] = row(25.0)
    pair = {"ours": "triton graph", "peer": "sdpa compile graph", "time_ratio": ours / 20, "memory_ratio": ours / 20}
    measured = {
        "config": MODEL | {"batch_size": 8, "seq_len": 128}, "precision": "bf16", "rows": rows,
        "strongest_peer": "sdpa compile graph", "comparisons": [pair],
    }  # fmt: skip
    return {"command": "a command", "date": date, "environment": ENVIRONMENT, "sizes": {size: measured}}


def replay_result():
    def run(forward, backward, optimizer, memory, share):
        phases = {"forward": forward, "backward": backward, "optimizer": optimizer}
        batch = {"p50": forward + backward + optimizer}
        return {"phase_ms": phases, "batch_ms": batch, "peak_memory_mib": memory, "gradient_share": share}

    stages = [{"stage": 5} | run(2.0, 4.0, 0.2, 800, 1.0), {"stage": 6} | run(3.0, 0.2, 0.5, 600, 0.016)]
    result = {"command": "a replay", "date": "2030-01-02T03:04:05", "environment": ENVIRONMENT, "precision": "fp32"}
    return result | {"config": {"seq_len": 128}, "baseline": run(6.0, 8.0, 0.5, 900, 1.0), "stages": stages}


def learning_result(last, with_gradient):
    losses = [{"loss": 7 + (last - 7) * index / 49} for index in range(50)]
    summary = {"entropy": 1.2, "parameters": 1000, "parameters_with_gradient": with_gradient}
    return {"steps": losses, "summary": summary, "environment": ENVIRONMENT}


def write(folder, **results):
    for name, result in results.items():
        (folder / f"{name}_some-gpu.json").write_text(json.dumps(result))


def test_without_results_the_page_says_so(tmp_path):
    assert front_page.front_section(tmp_path) == front_page.published_section(tmp_path) == front_page.NOT_MEASURED
    with pytest.raises(llama.UsageError, match="lacks steps_"):
        front_page.draw(tmp_path, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


def test_the_table_has_ours_beside_the_strongest_peer(tmp_path):
    write(tmp_path, steps_new=step_result(), steps_old=step_result("2029-01-01T00:00:00", ours=15.0))
    text = front_page.front_section(tmp_path)
    assert "| **small**: 8 x 128 tokens, 32.0 M weights | **10.0** / 20.0 | **0.50** | 0.40 |" in text
    assert "| **102,400** / 51,200 | **1,000** / 2,000 | `sdpa compile graph` |" in text
    assert "Some GPU, PyTorch 2.11, Triton 3.6, 2030-01-02 ([steps_new_some-gpu.json]" in text and "15.0" not in text


def test_rows_that_were_measured_apart_are_in_the_same_table(tmp_path):
    main, apart, other_model = step_result(), step_result("2029-01-01T00:00:00"), step_result("2028-01-01T00:00:00")
    main["sizes"]["small"]["rows"] |= {"sdpa": {"error": "it failed"}}
    for result, ms in ((apart, 16.0), (other_model, 5.0)):
        rows = result["sizes"]["small"]["rows"]
        ours = {"reference": "triton graph", "ratio": dict.fromkeys(("p20", "median", "p80"), 10 / ms)}
        rows["hf compile graph"] = rows.pop("torch graph") | ours | {"ms": {"p20": ms, "median": ms, "p80": ms}}
        rows["triton fp8 graph"] = rows["sdpa"] = rows["triton graph"]
    other_model["sizes"]["small"]["config"] = MODEL | {"batch_size": 4, "seq_len": 128}
    write(tmp_path, steps_main=main, steps_apart=apart, steps_other=other_model)
    table = publish.steps_section(tmp_path)
    assert "| **hf compile graph** | 16.0 |" in table and "| torch graph | 60.0 |" in table and "fp8" not in table
    assert "| sdpa | it failed |" in table and "Not measured: `triton`, `sdpa compile`, " in table
    assert "`triton graph` takes 0.62 (0.62 – 0.62) of the time of `hf compile graph`" in table
    for text in (table, front_page.front_section(tmp_path)):
        assert "steps_main_" in text and "steps_apart_" in text and "steps_other_" not in text
    assert "| **0.62** |" in text and "| `hf compile graph` |" in text


@pytest.fixture
def ours_and_both(tmp_path):
    """Folders with our results of one GPU, and with these and as many of another GPU, which are newer."""
    others = shutil.ignore_patterns("*_amd-*", "*_nvidia-[!h]*", "*_nvidia-h100*")
    ours, both = (shutil.copytree(RESULTS, tmp_path / name, ignore=others) for name in ("ours", "both"))
    for path in ours.glob("*.json"):
        result = json.loads(path.read_text())
        result["environment"] = result.get("environment", {}) | {"device": "Another GPU"}
        (both / f"{path.stem}_sent.json").write_text(json.dumps(result | {"date": "2031-01-01T00:00:00"}))
    return ours, both


@pytest.mark.parametrize("name", publish.SECTIONS)
def test_results_of_another_gpu_stand_beside_ours(ours_and_both, name):
    ours, both = map(publish.SECTIONS[name], ours_and_both)
    assert both.startswith(ours)
    assert ("Another GPU" in both) == (name not in ("front", "claims"))


@pytest.mark.parametrize("picture", publish.DRAWN, ids=lambda path: path.stem)
def test_a_picture_shows_one_device(ours_and_both, picture):
    for folder in ours_and_both:
        publish.DRAWN[picture](folder, folder / "picture.png")
    assert len({(folder / "picture.png").read_bytes() for folder in ours_and_both}) == 1


def test_a_measurement_without_our_row_does_not_count(tmp_path):
    broken = step_result()
    broken["sizes"]["small"]["rows"]["triton graph"] = {"error": "out of memory"}
    write(tmp_path, steps=broken)
    assert front_page.front_section(tmp_path) == front_page.NOT_MEASURED


def test_the_published_figures_stand_beside_ours(tmp_path):
    write(tmp_path, stages=replay_result())
    text = front_page.published_section(tmp_path)
    assert "| backward | 9.2 → 0.3 ms, 31 x | 8.00 → 0.200 ms, 40 x | 8.00 → 4.00 ms, 2.0 x | not computed" in text
    assert "| memory | 522.3 → 281.8 MiB, 1.9 x | 900 → 600 MiB, 1.5 x | 900 → 800 MiB, 1.1 x |" in text
    assert "| weights with a gradient | 100 → 1.6 % | 100 → 1.60 % | 100 → 100 % |" in text


def test_a_replay_of_other_sizes_or_stages_is_not_what_was_published(tmp_path):
    whole = replay_result()
    write(tmp_path, stages_bf16=whole | {"precision": "bf16"}, stages_short=whole | {"stages": whole["stages"][:1]})
    assert front_page.published_section(tmp_path) == front_page.NOT_MEASURED


def layout_results():
    """The two replays and the steps that the table of published claims needs."""

    def stage(number, speed, **figures):
        phases = {"forward": 1.0, "backward": 1.0, "optimizer": 1.0} | figures.pop("phase_ms", {})
        batch = {"p50": 14.5 * 440 / speed}  # in ms, if the baseline takes 14.5
        return {"stage": number, "samples_per_second": speed, "batch_ms": batch, "phase_ms": phases} | figures

    speeds = {1: 100, 2: 100, 3: 110, 4: 110, 5: 880, 6: 1760, 7: 20}
    story = replay_result() | {"stages": [stage(number, speed) for number, speed in speeds.items()]}
    story["baseline"]["samples_per_second"] = 440
    for index, figures in {
        0: {"first_loss": 480.0}, 1: {"attention_us": 30.0}, 2: {"attention_us": 20.0},
        3: {"phase_ms": {"forward": 40.0}}, 4: {"phase_ms": {"forward": 2.0}},
    }.items():  # fmt: skip
        story["stages"][index] |= figures
    layouts = replay_result() | {"precision": "bf16", "config": {"seq_len": 2048}}
    layouts["stages"] = [stage(2, 10, attention_us=900.0), stage(3, 11, attention_us=100.0)]
    steps = step_result()
    steps["sizes"]["small"]["rows"]["sdpa"] = steps["sizes"]["small"]["rows"]["torch"] | {"ms": {"median": 50.0}}
    return {"stages_fp32": story, "stages_bf16": layouts, "steps": steps}


def test_published_claims_stand_beside_what_is_measured(tmp_path):
    write(tmp_path, **layout_results())
    lines = published_claims.claims_section(tmp_path).splitlines()[2:10]
    rows = {line.split(" | ")[0]: line.split(" | ")[2] for line in lines}
    assert rows["| stage 1, first loss"] == "480"
    assert rows["| stage 2"] == "100 samples/s; stage 7, compiling: 20.0 samples/s"
    contiguous = "the step 1.1 x; its attention kernel 1.5 x, in bf16 at 2048 tokens 9.0 x"
    assert rows["| stage 3 over 2, `.contiguous()`"] == contiguous
    assert rows["| stage 4 → 5, forward"] == "40.0 → 2.00 ms, 20 x"
    assert rows["| stage 5 over V1"] == "4.0 x severed, 2.0 x correct"
    assert rows["| V4, fused PyTorch, over V1"] == "1.6 x (`--impl sdpa`, bf16)"


def test_published_claims_take_steps_that_were_measured_eager(tmp_path):
    results = layout_results()
    later = step_result(date="2031-01-02T03:04:05")
    later["sizes"]["small"]["rows"]["torch"] = {"error": "not started within --time-limit 9"}
    write(tmp_path, **results, steps_later=later)
    assert "1.6 x (`--impl sdpa`, bf16)" in published_claims.claims_section(tmp_path)


@pytest.mark.parametrize("missing", ["stages_fp32", "stages_bf16", "steps"])
def test_claims_need_all_of_their_measurements(tmp_path, missing):
    results = layout_results()
    del results[missing]
    write(tmp_path, **results)
    assert published_claims.claims_section(tmp_path) == published_claims.NOT_MEASURED


def test_the_picture_is_drawn_from_the_newest_results(tmp_path):
    severed = learning_result(5.2, with_gradient=16)
    write(tmp_path, steps=step_result(), learning_correct=learning_result(1.4, 1000), learning_severed=severed)
    path = tmp_path / "pictures" / "front.png"
    front_page.draw(tmp_path, path)
    height, width, _ = matplotlib.image.imread(path).shape
    assert (width, height) == (1200, 420) and list(path.parent.iterdir()) == [path]


def test_the_two_losses_differ_by_more_than_their_colour():
    figure, axes = drawing.plt.subplots()
    front_page.draw_losses(axes, learning_result(1.4, 1000), learning_result(5.2, with_gradient=16))
    severed, correct, entropy = axes.lines
    assert len({line.get_linestyle() for line in (severed, correct)}) == 2
    assert severed.get_ydata()[-1] == 5.2 and correct.get_ydata()[-1] == pytest.approx(1.4)
    assert entropy.get_ydata()[0] == 1.2
    drawing.plt.close(figure)


def test_plain_pytorch_is_captured_as_ours_is():
    figure, axes = drawing.plt.subplots()
    front_page.draw_steps(axes, {"small": step_result()["sizes"]["small"]}, "Some GPU")
    bars = [text.get_text() for text in axes.texts if " ms" in text.get_text()]
    assert bars == ["60.0 ms,  6.0 x", "20.0 ms,  2.0 x", "10.0 ms"]
    drawing.plt.close(figure)


def test_a_newer_result_of_some_rows_leaves_the_whole_table(tmp_path):
    whole, part = step_result(), step_result("2031-01-02T03:04:05", ours=15.0)
    del part["sizes"]["small"]["rows"]["torch graph"]
    write(tmp_path, steps_part=part)
    assert "| **triton graph** | 15.0 |" in publish.steps_section(tmp_path)
    write(tmp_path, steps_whole=whole)
    section = publish.steps_section(tmp_path)
    assert "| **triton graph** | 10.0 |" in section and "| torch graph |" in section and "15.0" not in section
