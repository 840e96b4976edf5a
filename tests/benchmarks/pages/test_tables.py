"""The tables follow from a fixed set of results, whose figures show each formula; another device changes none."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.pages import front, publish, training_steps
from benchmarks.pages.long_table import OF_FILE, long_table
from measure.tables import NOT_MEASURED

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE / "tables.txt"


def test_the_tables_are_those_computed_by_hand(capsys):
    """tables.txt has what one computes from the few figures in results/.

    `hf compile graph` is the strongest: in its turns ours takes 0.94 of its time. That it took longer than
    `sdpa compile graph` of another day does not count. The newest result is not complete, and another one is of
    another batch. At medium, ours takes 0.75 of the peer's time and 0.78 of its time with our AdamW, which is thus
    0.75 / 0.78 = 0.962 of the peer's: our AdamW saves 3.8 % of it, and the kernels 0.962 - 0.75 = 21 %.
    """
    assert publish.main(["--check", "--pages", str(PAGE), "--results", str(RESULTS)]) == 0, capsys.readouterr().out


def with_other_figures(node):
    """Return a result with other measured numbers, and other ratios of them; sizes and counts are integers."""
    if isinstance(node, dict):
        return {name: with_other_figures(value) for name, value in node.items()}
    if isinstance(node, list):
        return [with_other_figures(value) for value in node]
    return node * node + 1 if isinstance(node, float) else node


def test_what_was_measured_again_is_not_shown_from_before(tmp_path):
    """An older copy of each result, with other figures, changes no section."""
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
        result = json.loads(path.read_text())
        if "date" in result and "_2" in path.name:
            older = with_other_figures(result) | {"date": "1" + result["date"][1:]}
            (tmp_path / path.name.replace("_2", "_1")).write_text(json.dumps(older))
    assert len([*tmp_path.iterdir()]) > 1.5 * len([*RESULTS.glob("*.json")])
    for name, section in publish.SECTIONS.items():
        assert section(tmp_path) == section(RESULTS), name


@pytest.mark.parametrize("changes", [dict(precision="bf16"), dict(config={"seq_len": 256}), dict(baseline=None)])
def test_what_was_published_stands_beside_a_replay_of_its_setting(tmp_path, changes):
    replay = json.loads((RESULTS / "stages_some-gpu_20300102.json").read_text())
    newer = replay | {"date": "2030-02-02"} | changes
    for name, each in (("stages_a", replay), ("stages_b", newer | {"config": replay["config"] | newer["config"]})):
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    text = publish.SECTIONS["published"](tmp_path)
    assert "stages_a.json" in text and "stages_b.json" not in text


def test_a_replay_of_one_run_keeps_its_rows(tmp_path):
    """Rows in which all columns agree are left out, and a single column agrees with itself."""
    replay = json.loads((RESULTS / "stages_some-gpu_20300102.json").read_text())
    alone = replay | {"baseline": None, "stages": replay["stages"][:1]}
    (tmp_path / "stages_a.json").write_text(json.dumps(alone))
    assert "| final loss | 6.90 |" in publish.SECTIONS["stages"](tmp_path)


def test_a_training_run_without_a_peer_or_transformers_is_shown(tmp_path):
    whole = json.loads((RESULTS / "training_some-gpu_20300102.json").read_text())
    ours, peer = whole["rows"].items()
    path = tmp_path / "training_a.json"
    path.write_text(json.dumps(whole | {"rows": dict([ours]), "loss_difference": None, "transformers": None}))
    text = publish.SECTIONS["training"](tmp_path)
    assert "| loss at step 1,000 |" in text and "sdpa" not in text and "nats apart" not in text
    assert "transformers has not loaded the saved model." in text and "```" not in text
    failed = {**peer[1], "error": "ArithmeticError: the run diverged"}  # with what it had measured by then
    path.write_text(json.dumps(whole | {"rows": dict([ours, (peer[0], failed)])}))
    text = publish.SECTIONS["training"](tmp_path)
    assert "| sdpa compile graph | ArithmeticError: the run diverged |  |" in text and "at step 1,000" in text


def test_comparisons_in_fp8_are_not_below_a_table_in_bf16():
    pairs = [("triton graph", "sdpa compile graph"), ("triton fp8 graph", "triton graph")]
    found = [dict(zip(("ours", "peer"), pair, strict=True)) for pair in pairs]
    rows = {"row": pairs[0], "ms median": [1.0, 2.0], "strongest_peer": pairs[0][1], "comparisons": [found] * 2}
    assert list(training_steps.comparisons(pd.DataFrame(rows | {"file": "a.json"}))) == pairs[:1]


def test_the_front_page_has_what_was_measured_of_one_device(tmp_path):
    copied = ["steps_some-gpu_20290102", "steps_some-gpu_20300205", "stages_some-gpu_20300102"]
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in copied}

    def shown(names):
        for name in names:
            (tmp_path / f"{name}.json").write_text(json.dumps(results[name]))
        return publish.SECTIONS["front"](tmp_path)

    assert shown(copied[:1]).endswith("(docs/measured.md#training-steps).")
    assert shown(copied[:2]).endswith("0.85 in the median.")
    for name in copied[1:]:
        results[name]["environment"]["device"] = "Another GPU"
    assert shown(copied).endswith("(docs/measured.md#training-steps).")


@pytest.mark.parametrize("ratio, between", [(0.75, None), (None, 0.78)])
def test_savings_are_split_only_where_ours_is_compared_with_both_rows(ratio, between):
    assert front.savings(0.75, 0.9375) == "5.0 % + 20 %"
    assert front.savings(ratio, between) == front.MISSING


def test_without_times_no_picture_is_drawn(tmp_path):
    for path in RESULTS.glob("learning_*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    publish.PICTURES["front_page.png"](tmp_path, tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize("name", publish.SECTIONS)
def test_without_results_a_section_says_so(tmp_path, name):
    assert publish.SECTIONS[name](tmp_path) == NOT_MEASURED


def test_the_device_with_the_most_results_comes_first(tmp_path):
    """Or else the one with the oldest result; of each device the newest is first."""
    for day, name, device in (
        (2, "steps_a", "A"), (3, "steps_b", "A"), (1, "steps_c", "B"),
        (6, "gpt_d", "A"), (5, "gpt_e", "A"), (4, "gpt_f", "B"), (9, "gpt_g", "B"),
    ):  # fmt: skip
        environment = {"device": device, "torch": "2.11", "triton": None, "commit": "c0ffee-dirty"}
        result = {"date": f"2026-01-0{day}T10:00:00", "environment": environment}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    files = {name: list(long_table(tmp_path, name)["file"].str.removesuffix(".json")) for name in ("steps", "gpt")}
    assert files == {"steps": ["steps_b", "steps_a", "steps_c"], "gpt": ["gpt_g", "gpt_f", "gpt_d", "gpt_e"]}
    first = long_table(tmp_path, "gpt").iloc[0]
    assert first["source"] == "B, PyTorch 2.11" and first["commit"] == " at commit c0ffee with changes"


def test_a_tiny_model_is_in_no_table(tmp_path):
    """Its times mean nothing."""
    result = json.loads((RESULTS / "steps_some-gpu_20300102.json").read_text())
    result["sizes"]["tiny"] = result["sizes"].pop("small")
    (tmp_path / "steps_a.json").write_text(json.dumps(result))
    assert "tiny" not in {*long_table(tmp_path, *training_steps.STEPS)["size"]}


def test_columns_are_the_fields_of_the_results(tmp_path):
    """A benchmark that is new needs no list of them, and what has failed has those of the recorded results."""
    result = {"environment": {"device": "A", "torch": "2.11", "triton": None}}
    for name, rows in (
        ("new", {"ours": {"joules": {"median": 2.0}}}),
        ("gpt", {"ours": {"error": "OutOfMemoryError"}}),
    ):
        (tmp_path / f"{name}_a.json").write_text(json.dumps(result | {"rows": rows}))
    new, gpt = (long_table(tmp_path, name, "rows {row}") for name in ("new", "gpt"))
    assert list(new) == [*OF_FILE, "environment", "rows", "row", "joules", "error", "joules median"]
    assert new["joules median"].tolist() == [2.0]
    assert gpt["ms median"].isna().all() and {*gpt} == {*long_table(RESULTS / "none", "gpt", "rows {row}")}
