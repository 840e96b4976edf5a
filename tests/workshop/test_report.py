"""report.html: cards and pictures carry the summary's own numbers, and read on any screen and on paper."""

import ast
import contextlib
import functools
import html
import itertools
import json
import random
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

import tiny_llama_v3 as llama
from benchmarks.pages import replays
from benchmarks.pages.replays import Replay
from exercises.performance_debugging import (
    attention_layouts,
    bug_excerpts,
    kernel_timeline,
    pictures,
    replay,
    report,
    report_cards,
)
from measure import drawing
from measure.tables import number
from measure.timing import ratio_of_medians
from measure.work import kernel_work
from profilers.kernel_names import operation_of, readable_name
from tests.workshop.test_workshop import cpu_summary, gpu_summary, laptop_summary, taking

SVG = "{http://www.w3.org/2000/svg}"
SCRIPT = Path(llama.__file__).read_text().splitlines()


def steps_around(ms, spread=0.05, seed=0):
    draw = random.Random(seed)
    return [ms * (1 + draw.uniform(-spread, spread)) for _ in range(20)]


def timeline(step_us, kernels, share):
    """A step of kernels of one length at equal distances, which are busy for a share of it."""
    distance = step_us / kernels
    starts = [distance * index for index in range(kernels)]
    return {"step_us": step_us, "start_us": starts, "length_us": [share * distance] * kernels}


SEVERED = [name for name, _ in llama.TinyLlamaTriton(llama.Config(), llama.OPERATIONS["torch"]).named_parameters()][1:]
NAIVE = [
    {"name": "swiglu_kernel", "calls": 24, "average_us": 2000.0, "share": 0.8},
    {"name": "nvjet_sm90_tst_128x96_64x6_2x1_v_bz_splitK_NTT", "calls": 24, "average_us": 400.0, "share": 0.2},
]
CHANGES = {
    1: {"first_loss": 470.0, **taking(21.0)},
    2: {"attention_us": 25.0, **taking(21.0)},
    3: {"phases_share": 0.3, "phase_ms": {"forward": 3.0, "backward": 2.5, "optimizer": 0.8}, **taking(21.0)},
    4: {**taking(21.0), "kernels": NAIVE, "phase_ms": {"forward": 16.0, "backward": 3.0, "optimizer": 0.5}},
    5: {"step_ms": steps_around(5.0, seed=1)},
    6: {"gradient_share": 0.016, "without_gradient": SEVERED, "step_ms": steps_around(5.0, seed=2)},
    7: {"mean_over_median": 40.0, "step_ms": [7340.0, *steps_around(5.0, seed=3)]},
    8: taking(1.25),
}  # fmt: skip


def whole_summary():
    """A summary of a GPU that lacks nothing."""
    lengths = [
        {"seq_len": n, "contiguous": steps_around(23 * n / 128, 0.01), "strided": steps_around(35 * n / 128, 0.01, 1)}
        for n in (128, 256, 4096)
    ]
    timelines = {"5": timeline(6000, 40, 0.25), "8": timeline(1600, 40, 0.9375)}
    return gpu_summary(CHANGES) | {
        "timelines": timelines,
        "attention_layouts": {"precision": "fp32", "batch_size": 8, "lengths": lengths},
    }


@functools.cache
def whole_page():
    return report.render(whole_summary())


def parsed(svg):
    return ElementTree.fromstring(f'<page xmlns="{SVG[1:-1]}">{svg}</page>')[0]


# --- the picture of each stage


SHOWN = {  # words and numbers that the picture itself must carry, from CHANGES
    1: ["first loss, stage 1: 470", "hidden size: 512", "ln 1000, of guessing: 6.91"],
    2: ["128", "4k", "badly strided", "contiguous"],
    3: ["stage 3: phases 6.30 of 21.0 ms, 30 %", "stage 4: phases 19.5 of 21.0 ms, 100 %", "backward"],
    4: ["SwiGLU matrix product, naive: 80 %; stage 5: 0.0 %", "matrix product: 20 %; stage 5: 77 %"],
    5: ["plain PyTorch: 10.0 ms (10.0 – 10.0)", "stage 5: 5.00 ms (5.00 – 5.00)", "forward"],
    6: ["embedding: 512,000 of 512,000 weights", "attention: 0 of 6,291,456 weights", "norms: 0 of 8,704 weights"],
    7: ["first step: 7,340 ms", "median: 5.00 ms", "stage 5"],
    8: ["stage 5: 40 kernels, busy 25 % of 6.00 ms", "stage 8: 40 kernels, busy 94 % of 1.60 ms",
        "stage 8: 1.25 ms without the profiler"],
}  # fmt: skip


@pytest.mark.parametrize("stage", SHOWN)
def test_the_picture_of_a_stage_carries_the_summary_s_numbers(stage):
    svg = parsed(pictures.svg(pictures.STAGES[stage](Replay(whole_summary())), "one"))
    assert set(SHOWN[stage]) <= {element.text for element in svg.iter(f"{SVG}text")}


def test_a_picture_s_bars_are_as_long_as_its_numbers():
    figure = drawing.new_figure(200)
    pictures.first_loss(Replay(whole_summary())).draw(figure)
    drawn = [bar.get_width() for bar in figure.axes[0].patches]
    assert drawn == [470.0, 512, 7.0, pytest.approx(6.9078, abs=1e-4)]
    drawing.plt.close(figure)


def test_the_attention_picture_shows_the_medians_and_the_spread():
    summary = whole_summary()
    figure = drawing.new_figure(250)
    pictures.attention_lengths(Replay(summary)).draw(figure)
    for container in figure.axes[0].containers:
        line, _, (whiskers,) = container.lines
        layout = {"badly strided": "strided", "contiguous": "contiguous"}[container.get_label()]
        lengths = summary["attention_layouts"]["lengths"]
        for row, y, (low, high) in zip(lengths, line.get_ydata(), whiskers.get_segments(), strict=True):
            assert y == pytest.approx(statistics.median(row[layout]))
            assert min(row[layout]) <= low[1] < y < high[1] <= max(row[layout])
    drawing.plt.close(figure)


def test_the_part_of_a_step_that_is_enlarged_keeps_what_lies_in_it():
    spans = [(0, 10), (35, 10), (60, 10), (95, 10), (120, 5)]
    assert list(pictures.within(spans, 40, 60)) == [(0, 5), (20, 10), (55, 5)]


def test_gradients_are_counted_by_module():
    config = llama.Config(seq_len=128)
    model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    shares = pictures.gradient_shares(config, {"norm.weight", "layers.0.attention.o_proj.weight"})
    assert sum(total for _, total in shares.values()) == llama.count_weights(model.parameters())
    without = {name: total - received for name, (received, total) in shares.items()}
    assert without == {"embedding": 0, "norms": 512, "attention": 512 * 512, "feed-forward": 0}


def test_the_script_names_the_parameters_without_a_gradient():
    tiny = llama.Config(hidden_dim=16, num_layers=1, num_heads=2, ffn_dim=16, vocab_size=16, impl="torch")
    step = llama.TrainStep(tiny, llama.select_device("cpu"))
    step.forward()
    step.backward()
    model = step.model
    assert llama.without_gradient(model) == []
    model.norm.weight.grad.zero_()
    model.layers[0].attention.o_proj.weight.grad = None
    assert llama.without_gradient(model) == ["layers.0.attention.o_proj.weight", "norm.weight"]
    summary = llama.summarize(step, [llama.StepRecord(3.0, 1.0, 1.0, {}, None)])
    assert summary["parameters"] - summary["parameters_with_gradient"] == 16 + 16 * 16


@pytest.mark.parametrize("stage, lacking, told", [
    (1, {"first_loss": None}, "the first loss is not a number"),
    (3, {"phases_share": None}, "--timing step does not time phases"),
    (4, {"kernels": None}, "stage 4 was not profiled"),
    (6, {"without_gradient": None}, "which weights receive a gradient was not recorded"),
])  # fmt: skip
def test_a_figure_that_is_missing_says_so_on_its_card(stage, lacking, told):
    summary = whole_summary()
    summary["stages"][stage - 1] |= lacking
    (card,) = [card for card in report_cards.cards(summary) if card.number == stage]
    assert card.evidence[0].picture is None and told in card.evidence[0].no_picture


def test_a_recorded_replay_of_an_earlier_release_still_makes_a_report():
    summary = gpu_summary()  # without what came later
    for name in ("ceilings", "attention_layouts", "timelines", "laptop", "isolated", "counted", "recorded"):
        summary.pop(name, None)
    for stage in [*summary["stages"], summary["baseline"]]:
        for name in ("without_gradient", "phase_steps_ms", "planned", "over_previous", "over_baseline"):
            stage.pop(name, None)
    page = report.render(summary)
    for told in ("over the length of the sequence was not", "which weights receive a gradient was not", "one by one"):
        assert re.search(f'<p class="quiet">No picture: [^<]*{told}', page)
    assert page.count("No picture: ") == 3 and page.count("Not recorded: ") == 3


def test_of_several_recordings_the_first_that_shows_a_stage_is_drawn():
    recorded = whole_summary() | {"date": "2030-01-02", "file": "x.json"}
    summary = whole_summary() | {"recorded": [recorded, recorded, recorded]}
    for shown, drawn in ([False, True, True], [False, True, False]), ([False] * 3, [True, False, False]):
        seen = [{"source": "recorded on it", "shown": each, "text": "told"} for each in shown]
        evidence = [each for each, _ in report_cards.evidence_of(summary, 8, seen)]
        assert [each.picture is not None for each in evidence] == drawn


# --- pictures of the whole


def test_points_of_the_roofline_lie_where_time_and_work_put_them():
    points = {(name, stage): (x, y) for name, stage, x, y in pictures.kernel_points(gpu_summary())}
    work = kernel_work(llama.Config(seq_len=128))["flash_attention_kernel"]
    assert points["flash_attention_kernel", 5] == pytest.approx((work.flop / work.bytes, work.flop / 5e-6))
    assert ("nvjet_gemm", 5) not in points


@pytest.mark.parametrize("peak", [66.9, None])
def test_the_roofline_has_its_ceilings_and_keeps_its_text_clear_of_them(peak):
    summary = gpu_summary()
    summary["ceilings"] = summary["ceilings"] | {"peak_tflops": peak}
    with drawing.style():
        picture = pictures.roofline(Replay(summary))
        figure = drawing.new_figure(picture.height)
        picture.draw(figure)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        dotted = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"]
        assert dotted == [peak] * bool(peak)
        (note,) = axes.texts
        assert "50.0 TFLOP/s reached" in note.get_text()
        highest = max(max(line.get_ydata()) for line in axes.lines)
        assert note.get_window_extent().y0 > axes.transData.transform((1, highest))[1]
    drawing.plt.close(figure)


def test_losses_that_are_the_same_share_a_line_that_names_them():
    description = pictures.losses(Replay(whole_summary())).description
    assert description.startswith("stage 1, 2, 3, 4, 5, 6, 7, 8: 7.00 at first")
    summary = whole_summary()
    summary["stages"][0]["losses"] = [470.0, 40.0]
    assert "stage 2, 3, 4, 5, 6, 7, 8: " in pictures.losses(Replay(summary)).description
    with pytest.raises(pictures.NotMeasured, match="no stage has a finite loss"):
        pictures.losses(Replay(summary | {"stages": []}))


@pytest.mark.parametrize("entropy, floors", [(6.9, [6.9]), (None, []), (7.5, [])])  # the last above a loss
def test_losses_have_the_floor_of_the_data_where_it_is_known(entropy, floors):
    figure = drawing.plt.figure()
    pictures.losses(Replay(whole_summary() | {"entropy": entropy})).draw(figure)
    curve, *others = figure.axes[0].lines
    assert [line.get_ydata()[0] for line in others] == floors and figure.axes[0].get_yscale() == "linear"
    drawing.plt.close(figure)


# --- drawing


def luminance(color):
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(color, ground):
    """As WCAG 2 defines it."""
    darker, lighter = sorted(map(luminance, (color, ground)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_colours_stand_out_from_their_ground(shade):
    colors = {name: getattr(color, shade) for name, color in drawing.COLORS.items()}
    least = dict.fromkeys(colors, 4.5) | {"ink": 7, "line": 1.5, "ground": 1}
    assert not [name for name in colors if contrast(colors[name], colors["ground"]) < least[name]]


def test_fillings_differ_without_their_colour():
    for fillings in (pictures.PHASES.values(), (pictures.WRONG, pictures.RIGHT)):
        assert len({filling.hatch for filling in fillings}) == len(fillings)
    assert len({marks[2:] for marks in pictures.LAYOUTS.values()}) == len(pictures.LAYOUTS)


def test_svg_takes_colours_and_font_from_the_page_and_names_nothing_twice():
    measured = Replay(whole_summary())
    functions = {name: f for name, f in {**pictures.STAGES, **pictures.WHOLE}.items() if name != "alone"}
    drawn = [pictures.svg(function(measured), f"p{name}") for name, function in functions.items()]
    page = "".join(drawn)
    assert not re.search(r"#[0-9a-f]{6}|font-family|<style|DOCTYPE|<metadata", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = {a or b for a, b in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)}
    assert used and used <= set(ids)
    assert set(re.findall(r"var\((--\w+)\)", page)) <= set(re.findall(r"(--\w+):", drawing.css()))
    for svg in drawn:
        root = parsed(svg)
        assert root.get("role") == "img" and float(root.get("width")) <= 340
        title, description = (root.find(f"{SVG}{tag}") for tag in ("title", "desc"))
        assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
        assert title.text and re.search(r"\d", description.text)
        sizes = re.findall(r"font-size: ([\d.]+)px", svg)
        assert sizes and min(map(float, sizes)) >= 11


def test_a_colour_that_has_no_dark_one_is_refused():
    with drawing.style():
        figure = drawing.new_figure(100)
        figure.subplots().plot([1, 2], color="#123456")
        with pytest.raises(ValueError, match="#123456 is no colour"):
            drawing.svg(figure, "one", "title", "text")


# --- the lines of the script


@pytest.mark.parametrize("flag", [name for name, bug in llama.BUGS.items() if bug.stages])
def test_an_excerpt_is_the_script_s_own_lines(flag):
    excerpts = list(bug_excerpts.excerpts(flag))
    marks = [n for n, line in enumerate(SCRIPT, 1) if f"BUG {flag}" in line]
    assert len(excerpts) == len(marks) > 0
    for excerpt, mark in zip(excerpts, marks, strict=True):
        own = SCRIPT[excerpt.first - 1 : excerpt.first - 1 + len(excerpt.lines)]
        assert [line.strip() for line in own] == [line.strip() for line in excerpt.lines]
        assert excerpt.first <= mark < excerpt.first + len(excerpt.lines)
        assert len(excerpt.lines) > 1
        ast.parse("\n".join(excerpt.lines))  # a whole statement
    assert all(excerpt.where for excerpt in excerpts)


def test_an_excerpt_of_a_mark_in_a_docstring_is_the_function():
    kernel, choice = bug_excerpts.excerpts("triton_matmul_swiglu")
    assert kernel.where == "swiglu_kernel" and kernel.lines[0] == "@jit" and "store(hidden_ptr" in kernel.lines[-1]
    assert choice.where == "gated"
    assert choice.lines[-1].strip() == "return swiglu_naive_matmul(x, gate_up_weight)"


def test_a_card_s_flag_is_the_one_that_its_stage_is_the_last_to_have():
    for stage, lesson in report_cards.LESSONS.items():
        last = [name for name, bug in llama.BUGS.items() if stage in bug.stages[-1:]]
        assert [lesson.flag] == (last or [None])
    page = html.unescape(re.sub(r"<[^>]+>", "", whole_page()))
    for line in ("k, v = badly_strided(k), badly_strided(v)", "graph = torch.cuda.CUDAGraph()"):
        (at,) = [n for n, text in enumerate(SCRIPT, 1) if text.strip() == line]
        assert re.search(rf"{at} *{re.escape(line)}", page)


# --- what changed


def verdict(before, after, between=1.0):
    return report_cards.time_change("step", before, after, between=between).verdict


def test_a_difference_of_times_is_one_only_beyond_their_spread():
    noisy, same, fast = steps_around(5.0, 0.2), steps_around(5.1, 0.2, seed=4), steps_around(1.0, 0.2, seed=5)
    assert not ratio_of_medians(noisy, same).differs
    assert verdict(noisy, same) == "no difference beyond the spread"
    assert re.fullmatch(r"5\.\d times as fast", verdict(noisy, fast))
    assert re.fullmatch(r"5\.\d times as slow", verdict(fast, noisy))
    assert verdict([5.0, 5.0], [1.0, 1.0]) == "too few steps to tell"


def test_processes_that_did_the_same_work_widen_the_spread():
    fast, slow = steps_around(5.0, 0.01), steps_around(5.5, 0.01, seed=1)
    assert verdict(slow, fast) == "1.1 times as fast"
    assert verdict(slow, fast, between=1.2) == "no difference beyond the spread"
    summary = whole_summary()
    assert re.fullmatch(r"4\.\d times as fast", report_cards.changes_of(Replay(summary), 4).changes[-1].verdict)
    summary["stages"][2]["step_ms"] = steps_around(99.0, 0.01)  # stage 3 does the work of stage 4
    assert report_cards.changes_of(Replay(summary), 4).changes[-1].verdict == "no difference beyond the spread"


def test_each_mistake_alone_stands_beside_stage_5():
    summary = whole_summary()
    alone, reason = report_cards.alone_of(Replay(summary), 2)
    assert alone is None and "--isolate" in reason
    isolated = {"stage": 2, "mistake": "noncontiguous_kv", "run": "stage2_alone", "step_ms": steps_around(8.0)}
    summary["isolated"] = [summary["stages"][4] | isolated]
    alone, reason = report_cards.alone_of(Replay(summary), 2)
    assert alone.runs == ("--noncontiguous-kv alone", "stage 5") and reason is None
    assert re.fullmatch(r"1\.\d times as fast", alone.changes[-1].verdict)
    assert "--noncontiguous-kv alone" in report.render(summary)
    assert report_cards.alone_of(Replay(summary), 4) == (None, None)  # stage 4 is its mistake alone
    with_stage_5 = pictures.mistakes_alone(Replay(summary)).description
    assert with_stage_5.startswith("stage 5, none: 5.00 ms") and "--noncontiguous-kv: 5.00 ms" in with_stage_5


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_the_report_of_a_cpu_claims_and_draws_nothing_that_a_cpu_cannot_show(monkeypatch, implementation):
    monkeypatch.setattr(llama, "INTERPRETED", implementation == "triton")
    summary = cpu_summary(implementation, CHANGES)
    for stage in (1, 2, 3, 4, 5, 6, 7):
        assert not any(change.verdict for change in report_cards.changes_of(Replay(summary), stage).changes)
    drawn = {card.number for card in report_cards.cards(summary) if card.evidence[0].picture}
    assert drawn == ({1} if implementation == "torch" else {1, 6})
    for card in report_cards.cards(summary):
        assert card.mark == "shows" or not (card.changes or card.symptom)
        assert card.evidence[0].picture or card.evidence[0].no_picture
    page = html.unescape(report.render(summary))
    assert not re.search(r"times as (fast|slow)", page)


def test_a_laptop_s_cards_say_what_was_recorded_and_where(monkeypatch):
    monkeypatch.setattr(llama, "INTERPRETED", True)
    recorded = whole_summary() | {"file": "benchmarks/results/stages_some.json", "date": "2025-12-24T10:00:00"}
    summary = laptop_summary({6: CHANGES[6]}, measured=(5, 6))
    summary["recorded"] = [recorded, recorded | {"precision": "bf16"}]
    made = {card.number: card for card in report_cards.cards(summary)}
    for stage in (1, 2, 3, 4, 5, 7, 8):
        assert len(made[stage].evidence) >= 2  # of both recordings, of which the first is drawn
        source = made[stage].symptom_source
        assert re.match(r"Recorded on NVIDIA H200, 2025-12-24 \(8 x 128 tokens, fp32\)$", source), stage
        (drawn,) = [each for each in made[stage].evidence if each.picture and each.source == source]
        assert drawn.picture.description == pictures.STAGES[stage](Replay(recorded)).description
    assert made[6].symptom_source is None and made[6].evidence[0].source is None
    counted = [each for each in made[2].evidence if each.source == "Counted in Triton's interpreter"]
    assert counted[0].picture.description.startswith("badly strided, stage 2: 4,800 lines; contiguous, stage 3: 200")
    assert "swiglu_kernel, stage 4: 22 times" in made[4].evidence[0].picture.description
    page = html.unescape(report.render(summary))
    for card in re.findall(r"<article.*?</article>", page, re.S):
        captions = re.findall(r"<figcaption>(.*?)</figcaption>", card)
        marked = [text for text in captions if re.search("<strong>(Recorded on NVIDIA|Counted in)", text)]
        assert captions and len(captions) - len(marked) == ('id="stage6"' in card)
    assert "recorded on a GPU says so" in page and "<h3>Recorded: 8 x 128 tokens, bf16</h3>" in page


# --- names of kernels


@pytest.mark.parametrize("name, readable, operation", [
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "cuBLAS product, tile 128 x 256", "matrix product"),
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "cuBLAS product, tile 64 x 8, split", "matrix product"),
    ("ampere_sgemm_128x64_nn", "cuBLAS product, tile 128 x 64", "matrix product"),
    ("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_nt", "cuBLAS product, tile 256 x 128", "matrix product"),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize128x64x8_stage3_warpsize2x2x1_execute_kernel__5x_cublas",
     "cuBLAS f32 product, tile 128 x 64", "matrix product"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>"
     "(cutlass_80_simt_sgemm_256x128_8x4_nn_align1::Params)", "CUTLASS product, tile 256 x 128", "matrix product"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(cublasLt::cublasSplitKParams<float>)",
     "cuBLAS, sum of a split product", "matrix product"),
    ("Cijk_Ailk_Bljk_SB_MT128x96x16_MI16x16x4x1", "Tensile product, tile 128 x 96", "matrix product"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
     "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)", "PyTorch, fill", "copy or fill"),
    ("void at::native::vectorized_elementwise_kernel<2, at::native::BinaryFunctor<double, double, double, "
     "at::native::binary_internal::MulFunctor<double> >, std::array<char*, 3ul> >(int)", "PyTorch, mul", "elementwise"),
    ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
     "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}> >(int)", "PyTorch, direct copy", "copy or fill"),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)",
     "PyTorch, vectorized gather", "embedding"),
    ("swiglu_kernel", "swiglu_kernel", "SwiGLU matrix product, naive"),
])  # fmt: skip
def test_library_kernels_have_a_role_and_a_readable_name(name, readable, operation):
    assert (readable_name(name), operation_of(name)) == (readable, operation)


def test_the_table_of_kernels_keeps_the_full_name_aside():
    page = whole_page()
    full = NAIVE[1]["name"]
    assert f'<span title="{full}">cuBLAS product, tile 128 x 96, split</span>' in page
    assert page.count(full) == 1


# --- what the replay measures for the pictures


def test_a_layout_keeps_the_values_and_moves_the_neighbours_apart():
    bench = type("Bench", (), {"randn": staticmethod(lambda *shape, dtype: llama.torch.randn(*shape, dtype=dtype))})
    config = llama.Config(hidden_dim=32, num_heads=4, batch_size=3)
    tensors = attention_layouts.layouts(config, bench, 8)
    assert tensors.keys() == pictures.LAYOUTS.keys()
    for even, strided in zip(tensors["contiguous"], tensors["strided"], strict=True):
        assert llama.torch.equal(even, strided)
    assert [x.stride(-1) for x in tensors["contiguous"]] == [1, 1, 1]
    assert [x.stride(-1) for x in tensors["strided"]] == [1, 3 * 2, 3 * 2]


@pytest.mark.parametrize("program", [attention_layouts, kernel_timeline])
def test_what_is_measured_for_a_picture_needs_a_gpu(capsys, program):
    assert program.main(["--device", "cpu"]) == 2 and "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("options, expected", [
    (["--stages", "2,5"], ["ceilings", "attention_layouts"]), (["--stages", "4"], ["ceilings"]),
    (["--beyond"], ["ceilings", "attention_layouts", "kernel_timeline"]), (["--beyond", "--no-profile"], []),
])  # fmt: skip
def test_the_replay_measures_what_its_stages_pictures_need(monkeypatch, options, expected):
    def planned():
        _, runs = replay.plan(replay.parse(options))
        return [run.name for run in runs if run.name in replay.MEASUREMENTS]

    monkeypatch.setattr(llama.torch.cuda, "is_available", lambda: True)
    assert planned() == expected
    monkeypatch.setattr(llama.torch.cuda, "is_available", lambda: False)
    assert planned() == expected[:1]


def test_a_timeline_holds_the_kernels_of_one_step(monkeypatch):
    gpu, cpu = llama.torch.autograd.DeviceType.CUDA, llama.torch.autograd.DeviceType.CPU
    spans = [(gpu, 1010.0, 1014.0), (cpu, 900.0, 1100.0), (gpu, 1000.0, 1002.5)]
    events = [SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=a, end=b)) for kind, a, b in spans]
    profile = Mock(side_effect=lambda **options: contextlib.nullcontext(SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(llama.torch.profiler, "profile", profile)
    tiny = llama.Config(hidden_dim=16, num_layers=1, num_heads=2, ffn_dim=16, vocab_size=16, batch_size=1, seq_len=4,
                        warmup_steps=1, device="cpu")  # fmt: skip
    recorded = kernel_timeline.record(tiny, llama.get_device("cpu"))
    assert profile.call_count == kernel_timeline.STEPS
    activities = [llama.torch.profiler.ProfilerActivity.CUDA]  # the host's would slow the host
    assert all(call.kwargs["activities"] == activities for call in profile.call_args_list)
    assert recorded == {"step_us": 14.0, "start_us": [0.0, 10.0], "length_us": [2.5, 4.0]}


# --- the page


def test_the_report_is_one_page_without_network_or_script():
    page = whole_page()
    assert not re.search(r"https?://|<script|@import|<img|url\((?!#)|src=|javascript:|<[^>]*\son\w+=", page)
    assert "default-src 'none'" in page and len(page) < 1_000_000
    for seen in whole_summary()["observations"]:
        assert seen["text"] in html.unescape(page)
    names = [*(f"picture{n}" for n in llama.STAGES), "steps", "loss", "roofline"]  # no mistake alone
    assert re.findall(r'aria-labelledby="(\w+)-title \w+-text"', page) == names


def test_the_page_s_structure_can_be_heard():
    page = whole_page()
    assert '<html lang="en">' in page and page.count("<main>") == page.count("</main>") == 1
    levels = [int(level) for level in re.findall(r"<h(\d)[ >]", page)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(deeper - level <= 1 for level, deeper in itertools.pairwise(levels))
    assert all('scope="' in head for head in re.findall(r"<th\b[^>]*>", page))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert all(link in ids for link in re.findall(r'href="#(stage\d)"', page))


def test_the_page_has_styles_for_paper_and_for_the_dark():
    page = whole_page()
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    assert "@media print" in style and "prefers-color-scheme: dark" in style
    on_screen = re.findall(r"@media (\w+) and \(prefers-color-scheme: dark\)", style)
    assert on_screen and set(on_screen) == {"screen"}  # paper stays white


def test_the_full_table_comes_last():
    page = whole_page()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings[0] == "Stage by stage" and headings[-1] == "Every figure"
    row = re.search(r'<th scope="row">first loss</th>(.*?)</tr>', page[page.index("Every figure") :])[1]
    assert re.findall(r">([\d.,]+)</td>", row)[:2] == ["7.00", "470"]


def test_the_report_of_an_interrupted_replay_says_so():
    summary = gpu_summary() | {"interrupted": True, "ceilings": None}
    left_out = {"stage": 2, "title": "slow performance", "obstacle": None, "error": None}
    summary["stages"] = [*summary["stages"][:1], left_out]
    summary["observations"] = replays.observations(summary)
    page = report.render(summary)
    assert "was interrupted" in page and "The replay was interrupted before it was done" in page
    assert 'id="roofline-title"' not in page and "No picture: stage 2 was not measured" in page


def test_the_overview_holds_the_picture_of_every_stage(tmp_path):
    report.write_overview(whole_summary(), tmp_path / "stages.png")
    height, width, _ = drawing.plt.imread(tmp_path / "stages.png").shape
    assert width > 4 * drawing.WIDTH and height > 2 * 200
    assert [path.name for path in tmp_path.iterdir()] == ["stages.png"]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HARNESS = """<!DOCTYPE html><title>frames</title><pre id="result"></pre>
<script>
onload = () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, width = page.documentElement.clientWidth;
    const boxes = [...page.body.querySelectorAll("*")].filter(e => e.getClientRects().length && !e.closest("svg *"));
    const overflows = e => e.clientWidth && e.scrollWidth > e.clientWidth + 1;
    const cut = boxes.filter(e => e.getBoundingClientRect().right > width + 1 || overflows(e));
    const texts = [...page.querySelectorAll("svg text")];
    const size = t => parseFloat(frame.contentWindow.getComputedStyle(t).fontSize)
      * Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b);
    const outside = texts.filter(t => {
      const box = t.getBoundingClientRect(), around = t.ownerSVGElement.getBoundingClientRect();
      return box.left < around.left - 1 || box.right > around.right + 1;
    });
    return {width, scroll: page.documentElement.scrollWidth, cut: cut.map(e => e.outerHTML.slice(0, 80)),
            pictures: page.querySelectorAll("svg").length, smallest: Math.min(...texts.map(size)),
            outside: outside.map(t => t.textContent),
            ground: frame.contentWindow.getComputedStyle(page.body).backgroundColor};
  });
  document.getElementById("result").textContent = JSON.stringify(seen);
};
</script>
"""
WIDTHS = {"report": (360, 390, 1280), "dark": (390,), "print": (700,)}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
def test_the_report_in_a_browser(tmp_path):
    """On a phone, on a desk, in the dark and on A4 paper: nothing is cut off, text is readable, no complaint."""
    page = whole_page()
    dark = page.replace("and (prefers-color-scheme: dark)", "")
    printed = page.replace("@media print", "@media all").replace("@media screen", "@media speech")
    for name, text in (("report", page), ("dark", dark), ("print", printed)):
        (tmp_path / f"{name}.html").write_text(text)
    assert dark != page != printed
    shown = [(name, width) for name, widths in WIDTHS.items() for width in widths]
    frame = '<iframe src="{}.html" style="border: 0; width: {}px; height: 800px"></iframe>'
    (tmp_path / "harness.html").write_text(HARNESS + "".join(frame.format(*each) for each in shown))
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files --dump-dom"
    command = [CHROMIUM, *flags.split(), "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, (tmp_path / "harness.html").as_uri()], capture_output=True, text=True, timeout=100)
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    seen = json.loads(html.unescape(re.search(r'<pre id="result">(.+?)</pre>', done.stdout)[1]))
    assert [each["width"] for each in seen] == [width for _, width in shown]
    for (name, width), each in zip(shown, seen, strict=True):
        assert each["scroll"] <= width and not each["cut"] and not each["outside"], each
        assert each["pictures"] == len(llama.STAGES) + 3
        assert each["smallest"] >= 11, each
        light = each["ground"] in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")
        assert light is (name != "dark")
    assert number(470.0) in page
