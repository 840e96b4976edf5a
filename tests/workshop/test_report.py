"""report.html: cards and pictures carry the summary's own numbers, and read on any screen and on paper."""

import contextlib
import functools
import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

import tiny_llama_v3 as llama
from benchmarks.pages.replays import Replay
from exercises.performance_debugging import cards, measured, pictures, report
from measure import drawing
from measure.work import kernel_work
from profilers.kernel_names import operation_of, readable_name
from tests.workshop.summaries import NAIVE, RECORDED, SIGNS, cpu_summary, gpu_summary, laptop_summary

SCRIPT = Path(llama.__file__).read_text().splitlines()


def page_of(summary):
    return report.page(summary, cards.cards(summary))


def whole_summary(**fields):
    return gpu_summary(SIGNS, **fields)


@functools.cache
def whole_page():
    return page_of(whole_summary())


def around(ms, spread=0.05, seed=0):
    """Return twenty times, not further from ms than this share."""
    draw = random.Random(seed)
    return [ms * (1 + draw.uniform(-spread, spread)) for _ in range(20)]


@contextlib.contextmanager
def drawn(function, summary):
    """Yield the figure with a picture of a summary, and the Picture."""
    with drawing.style():
        figure = drawing.new_figure(300)
        yield figure, function(figure, Replay(summary))


# --- the pictures

SHOWN = {  # words and numbers that the picture itself must carry, from SIGNS
    1: ["first loss, stage 1: 470", "hidden size: 512", "ln 1000, of guessing: 6.91", "first loss, stage 2: 7.00"],
    2: ["128", "4096", "tokens a sequence", "us a call, fp32"],
    3: ["stage 3: phases 6.30 of 21.0 ms, 30 %", "stage 4: phases 19.5 of 21.0 ms, 100 %", "backward"],
    4: ["SwiGLU matrix product, naive: 80 %; stage 5: 0.0 %", "matrix product: 20 %; stage 5: 77 %"],
    5: ["plain PyTorch: 10.0 ms (10.0 – 10.0)", "stage 5: 5.00 ms (5.00 – 5.00)", "forward"],
    6: ["embedding: 512,000 of 512,000 weights", "attention: 0 of 6,291,456 weights", "norms: 0 of 8,704 weights"],
    7: ["stage 7: first step 7,340 ms, median 5.06 ms", "stage 5: first step 5.00 ms, median 5.00 ms"],
    8: ["stage 5: 40 kernels, busy 25 % of 6.00 ms", "stage 8: 40 kernels, busy 94 % of 1.60 ms",
        "stage 8: 1.25 ms without the profiler"],
}  # fmt: skip


def test_pictures_carry_the_summary_s_numbers_and_suit_any_page():
    page = ""
    for stage, function in pictures.STAGES.items():
        svg = cards.picture_of(Replay(whole_summary()), function, f"p{stage}")["svg"]
        root = ElementTree.fromstring(svg)
        assert {*SHOWN[stage]} <= {text.text for text in root.findall(".//{*}text")}
        assert root.get("role") == "img" and float(root.get("width")) == 340
        title, words = (root.find(f"{{*}}{tag}") for tag in ("title", "desc"))
        assert root.get("aria-labelledby").split() == [title.get("id"), words.get("id")]
        assert title.text and re.search(r"\d", words.text)
        page += svg
    assert not re.search(r"#[0-9a-f]{6}|DejaVu|DOCTYPE|<metadata|<!--", page)
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))  # of several pictures on a page
    used = {a or b for a, b in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)}
    assert used and used <= set(names)
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= set(re.findall(r"(--[\w-]+):", drawing.css()))
    assert min(map(float, re.findall(r"font-size: ([\d.]+)px", page))) >= 11


def test_bars_are_as_long_as_their_numbers_and_lines_run_through_the_medians():
    with drawn(pictures.first_loss, whole_summary()) as (figure, _):
        widths = [bar.get_width() for bar in figure.axes[0].patches]
        assert widths == [470.0, 512, 7.0, pytest.approx(6.9078, abs=1e-4)]
    with drawn(pictures.gradients_by_module, whole_summary()) as (figure, _):
        assert [bar.get_width() for bar in figure.axes[0].patches[::2]] == [100, 0, 0, 0]  # between their outlines
    rows = whole_summary()["attention_layouts"]["lengths"]
    with drawn(pictures.attention_lengths, whole_summary()) as (figure, _):
        for container, layout in zip(figure.axes[0].containers, ("contiguous", "strided"), strict=True):
            line, _, (whiskers,) = container.lines
            for row, y, (low, high) in zip(rows, line.get_ydata(), whiskers.get_segments(), strict=True):
                assert (low[1], y, high[1]) == pytest.approx(np.percentile(row[layout], [20, 50, 80]))


def test_a_timeline_has_its_kernels_in_their_places():
    timelines = whole_summary()["timelines"]
    timelines["5"] = {"step_us": 8000.0, "start_us": [0.0, 3200.0], "length_us": [3000.0, 100.0]}
    with drawn(pictures.gaps, whole_summary(timelines=timelines)) as (figure, picture):
        whole, part = (axes.lines[0].get_xdata() for axes in figure.axes)
        assert whole[[0, 1, 3, 4]].tolist() == pytest.approx([0, 3, 3.2, 3.3])
        assert part[[3, 4]].tolist() == pytest.approx([0, 100])  # from 40 % of the step on
        assert figure.axes[1].get_xlim() == pytest.approx((0, 400))
        assert figure.axes[1].lines[1].get_xdata()[0] == pytest.approx(-640)  # of its own step, of 1,600 us
    assert picture.words[0] == "stage 5: 2 kernels, busy 39 % of 8.00 ms"


def test_gradients_are_counted_by_module():
    config = llama.Config(seq_len=128)
    shares = pictures.gradient_shares(config, {"norm.weight", "layers.0.attention.o_proj.weight"})
    without = {name: total - received for name, (received, total) in shares.items()}
    assert without == {"embedding": 0, "norms": 512, "attention": 512 * 512, "feed-forward": 0}
    model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    assert sum(total for _, total in shares.values()) == llama.count_weights(model.parameters())


@pytest.mark.parametrize("peak", [66.9, None])
def test_the_roofline_has_its_ceilings_and_points(peak):
    ceilings = {"bytes_per_second": 4e12, "flop_per_second": 5e13, "peak_tflops": peak}
    work = kernel_work(llama.Config(seq_len=128))["flash_attention_kernel"]
    with drawn(pictures.roofline, gpu_summary(ceilings=ceilings)) as (figure, picture):
        lines = {line.get_label().split(":")[0]: line for line in figure.axes[0].lines}
        assert ("by the datasheet" in lines) is bool(peak) and "nvjet_gemm" not in lines
        assert lines["reached"].get_ydata()[1:].tolist() == [50, 50] and lines["reached"].get_xdata()[1] == 12.5
        x, y = (values[0] for values in lines["flash_attention_kernel"].get_data())
        assert (x, y) == pytest.approx((work.flop / work.bytes, work.flop / 5e-6 / 1e12))


# --- drawing


def luminance(color):
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(color, ground):
    """As WCAG 2 defines it."""
    darker, lighter = sorted(map(luminance, (color, ground)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("shade", [0, 1])
def test_colours_stand_out_from_their_ground(shade):
    colors = {name: pair[shade] for name, pair in drawing.COLORS.items()}
    assert contrast("#ffffff", "#000000") == 21 and contrast(colors["ink"], colors["ground"]) > 7
    for name, color in colors.items():
        if name.startswith("tint"):
            assert contrast(colors["ink"], color) > 4.5
        elif name not in ("line", "ground"):
            assert contrast(color, colors["ground"]) > 4.5


def test_fillings_differ_without_their_colour():
    assert len({filling.hatch for filling in pictures.PHASES.values()}) == len(pictures.PHASES)
    assert pictures.WRONG.hatch != pictures.RIGHT.hatch


def test_a_colour_that_has_no_dark_one_is_refused():
    with drawing.style(), pytest.raises(KeyError, match="#123456"):
        figure = drawing.new_figure(100)
        figure.subplots().plot([1, 2], color="#123456")
        drawing.svg(figure, "one", "title", "text")


# --- the cards


def card_of(summary, stage):
    return cards.card(summary, stage)


@pytest.mark.parametrize("stage, lacking, told", [
    (1, {"first_loss": None}, "the first loss is not a number"), (4, {"kernels": None}, "stage 4 was not profiled"),
    (3, {"phases_share": None}, "--timing step does not time phases"),
    (6, {"without_gradient": None}, "which weights receive a gradient was not recorded"),
])  # fmt: skip
def test_a_figure_that_is_missing_says_so_on_its_card(stage, lacking, told):
    stages = whole_summary()["stages"]
    stages[stage - 1] |= lacking
    summary = whole_summary(stages=stages)
    assert told in card_of(summary, stage)["no_picture"] and told in html.unescape(page_of(summary))


@pytest.mark.parametrize("stage", [1, 2, 3, 4, 5, 6, 7])
def test_a_stage_that_was_replayed_alone_is_drawn(stage):
    card = card_of(whole_summary(stages=whole_summary()["stages"][stage - 1 : stage]), stage)
    assert card["pictures"] and bool(card["changes"]) is (stage == 5)


@pytest.mark.parametrize("flag", [name for name, bug in llama.BUGS.items() if bug.stages])
def test_an_excerpt_is_the_script_s_own_lines(flag):
    found = list(cards.excerpts(f"BUG {flag}:"))
    marks = [n for n, line in enumerate(SCRIPT, 1) if f"BUG {flag}:" in line]
    for (where, first, lines), mark in zip(found, marks, strict=True):
        assert where and first <= mark < first + len(lines) > 1
        assert [line.strip() for line in SCRIPT[first - 1 : first - 1 + len(lines)]] == [line.strip() for line in lines]
        compile("\n".join(lines), where, "exec", flags=0x400)  # a whole statement, for ast alone


def test_an_excerpt_of_a_mark_in_a_docstring_is_the_function():
    (where, _, lines), (chooser, _, choice) = cards.excerpts("BUG triton_matmul_swiglu:")
    assert where == "swiglu_kernel" and lines[0] == "@jit" and "store(hidden_ptr" in lines[-1]
    assert chooser == "gated" and choice[-1].strip() == "return swiglu_naive_matmul(x, gate_up_weight)"
    page = html.unescape(re.sub(r"<[^>]+>", "", whole_page()))
    for line in ("k, v = badly_strided(k), badly_strided(v)", "graph = torch.cuda.CUDAGraph()"):
        (at,) = [n for n, text in enumerate(SCRIPT, 1) if text.strip() == line]
        assert re.search(rf"{at} *{re.escape(line)}", page)


@pytest.mark.parametrize("before, after, between, expected", [
    (around(5.0, 0.2), around(5.1, 0.2, 4), 1.0, "no difference beyond the spread"),
    (around(5.0, 0.2), around(1.0, 0.2, 5), 1.0, r"5\.\d times as fast"),
    (around(1.0, 0.2, 5), around(5.0, 0.2), 1.0, r"5\.\d times as slow"),
    ([5.0, 5.0], [1.0, 1.0], 1.0, "too few steps to tell"),
    (around(5.5, 0.01, 1), around(5.0, 0.01), 1.0, r"1\.1 times as fast"),
    (around(5.5, 0.01, 1), around(5.0, 0.01), 1.2, "no difference beyond the spread"),  # as between processes
])  # fmt: skip
def test_a_difference_of_times_is_one_only_beyond_their_spread(before, after, between, expected):
    assert re.fullmatch(expected, cards.verdict(before, after, between))


def test_what_changed_is_said_with_the_spread_of_processes():
    labels, rows = card_of(whole_summary(), 4)["changes"]
    assert labels == ["4 slow kernels", "5 optimized"]
    assert rows == [
        ("forward, ms", "16.0", "1.50", "too few steps to tell"),
        ("step, median, ms", "21.0", "5.00", "4.2 times as fast"),
    ]
    stages = whole_summary()["stages"]
    stages[2]["step_ms"] = around(99.0, 0.01)  # stage 3 does the work of stage 4
    assert card_of(whole_summary(stages=stages), 4)["changes"][1][-1][-1] == "no difference beyond the spread"
    assert card_of(whole_summary(), 3)["changes"][1] == [
        ("phases / step, %", "30", "100", ""), ("step, median, ms", "21.0", "21.0", "the same work: noise"),
    ]  # fmt: skip
    assert card_of(whole_summary(), 5)["changes"][0] == ["baseline", "5 optimized"]


def test_each_mistake_alone_stands_beside_stage_5():
    assert "--isolate" in card_of(whole_summary(), 2)["alone"][1]
    summary = whole_summary(isolated=RECORDED["isolated"])
    (labels, rows), _ = card_of(summary, 2)["alone"]
    assert labels == ["--noncontiguous-kv", "5 optimized"] and rows[-1][-1] == "no difference beyond the spread"
    assert card_of(summary, 4)["alone"] is None  # stage 4 is its mistake alone


@pytest.mark.parametrize("implementation, expected", [("torch", {1}), ("triton", {1, 6})])
def test_the_report_of_a_cpu_claims_and_draws_nothing_that_a_cpu_cannot_show(monkeypatch, implementation, expected):
    monkeypatch.setattr(llama, "INTERPRETED", implementation == "triton")
    summary = cpu_summary(implementation, SIGNS)
    made = cards.cards(summary)
    assert {card["number"] for card in made if card["pictures"]} == expected
    for card in made:
        assert card["pictures"] or card["no_picture"]
        assert card["best"].mark == "shows" or not card["changes"]
    assert not re.search(r"times as (fast|slow)", html.unescape(page_of(summary)))


def test_a_laptop_s_cards_say_what_was_recorded_and_where(monkeypatch):
    monkeypatch.setattr(llama, "INTERPRETED", True)
    recorded = whole_summary(file="some.json", date="2025-12-24T10:00:00")
    other = whole_summary(file="other.json", precision="bf16")
    summary = laptop_summary(recorded, other, changes={6: SIGNS[6]})
    made, there = cards.cards(summary), "Recorded on NVIDIA H200, 2025-12-24 (8 x 128 tokens, fp32)"
    places = [[place for _, place in card["pictures"]] for card in made]
    counted = cards.INTERPRETER
    assert places == [[None], [counted, there], [there], [counted, there], [there], [None], [there], [there]]
    assert [len(card["evidence"]) for card in made] == [3, 3, 2, 3, 3, 3, 2, 2]  # both recordings are told
    assert made[6]["source"] == there and made[5]["source"] is None
    assert "badly strided, stage 2: 4,800 lines; contiguous, stage 3: 200" in made[1]["pictures"][0][0]["svg"]
    assert "swiglu_kernel, stage 4: 22 times" in made[3]["pictures"][0][0]["svg"]
    page = html.unescape(page_of(summary))
    assert "recorded on a GPU says so" in page and "<h3>Recorded: 8 x 128 tokens, bf16</h3>" in page


@pytest.mark.parametrize("files, drawn", [("quiet shows", "fp32)"), ("quiet quiet", "bf16)"), ("short shows", "fp32)")])
def test_of_several_recordings_the_first_that_shows_a_stage_is_drawn(files, drawn):
    recorded = {"quiet": gpu_summary(file="a.json", precision="bf16"), "shows": whole_summary(file="b.json")}
    recorded["short"] = recorded["quiet"] | {"stages": recorded["quiet"]["stages"][4:5]}
    summary = laptop_summary(*map(recorded.get, files.split()))
    assert card_of(summary, 7)["pictures"][0][1].endswith(drawn)


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


# --- what the replay measures for the pictures


def test_a_layout_keeps_the_values_and_moves_the_neighbours_apart():
    bench = SimpleNamespace(randn=lambda *shape, dtype: llama.torch.randn(*shape, dtype=dtype))
    config = llama.Config(hidden_dim=32, num_heads=4, batch_size=3)
    even, strided = measured.layouts(config, bench, 8).values()
    assert all(map(llama.torch.equal, even, strided))
    assert [[x.stride(-1) for x in tensors] for tensors in (even, strided)] == [[1, 1, 1], [1, 3 * 2, 3 * 2]]


@pytest.mark.parametrize("argv, told", [
    (["attention_layouts", "--device", "cpu"], "needs a GPU"), (["kernel_timeline", "--device", "cpu"], "needs a GPU"),
    (["ceiling"], "ceiling is no measurement"), ([], "nothing is no measurement: give one of ceilings, "),
])  # fmt: skip
def test_what_cannot_be_measured_is_one_line(capsys, argv, told):
    assert measured.main(argv) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_timeline_holds_the_kernels_of_the_step_with_the_median_length(monkeypatch):
    gpu, cpu = llama.torch.autograd.DeviceType.CUDA, llama.torch.autograd.DeviceType.CPU
    lengths = iter([3.0, 1.0, 2.0, 5.0, 4.0])

    def profile(activities, **options):
        assert activities == [llama.torch.profiler.ProfilerActivity.CUDA]  # the host's would slow the host
        spans = [(gpu, 1010.0, 1010.0 + next(lengths)), (cpu, 900.0, 1100.0), (gpu, 1000.0, 1002.5)]
        events = [SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=a, end=b)) for kind, a, b in spans]
        return contextlib.nullcontext(SimpleNamespace(events=lambda: events))

    monkeypatch.setattr(llama.torch.profiler, "profile", profile)
    tiny = llama.Config(hidden_dim=16, num_layers=1, num_heads=2, ffn_dim=16, vocab_size=16, batch_size=1, seq_len=4,
                        warmup_steps=1, device="cpu")  # fmt: skip
    recorded = measured.timeline(tiny, llama.get_device("cpu"))
    assert recorded == {"step_us": 13.0, "start_us": [0.0, 10.0], "length_us": [2.5, 3.0]}


def test_ceilings_by_hand(monkeypatch):
    monkeypatch.setattr(measured, "Timer", lambda *statement, **options: SimpleNamespace(
        blocked_autorange=lambda min_run_time: SimpleNamespace(median=0.5)))  # fmt: skip
    reached = measured.ceilings(llama.Config(), llama.get_device("cpu"))
    assert reached["bytes_per_second"] == 2 * 4 * 2**24 / 0.5  # read and written
    assert reached["flop_per_second"] == 2 * 1024**3 / 0.5


# --- the page


def test_the_report_is_one_page_without_network_or_script_whose_structure_can_be_heard():
    page = whole_page()
    links = re.sub(r'xmlns(:xlink)?="[^"]+"', "", page)
    assert not re.search(r"https?://|<script|@import|<img|url\((?!#)|src=|javascript:|<[^>]*\son\w+=", links)
    assert "default-src 'none'" in page and len(page) < 1_000_000
    assert {seen["text"] in html.unescape(page) for seen in whole_summary()["observations"]} == {True}
    assert re.findall(r'id="(\w+)-title"', page) == [*(f"picture{n}" for n in llama.STAGES), "steps", "roofline"]
    levels = [int(level) for level in re.findall(r"<h(\d)[ >]", page)]
    assert levels[0] == 1 and max(map(int.__sub__, levels[1:], levels)) == 1
    assert all('scope="' in head for head in re.findall(r"<th\b[^>]*>", page)) and '<html lang="en">' in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and {f"stage{n}" for n in llama.STAGES} < {*ids}
    assert set(re.findall(r"@media (\w+) and \(prefers-color-scheme: dark\)", page)) == {"screen"}  # paper stays white
    row = re.search(r'<th scope="row">first loss</th>(.*?)</tr>', page[page.index("Every figure") :])[1]
    assert re.findall(r">([\d.,]+)</td>", row)[:2] == ["7.00", "470"]
    assert page.count(f'<span title="{NAIVE[1]["name"]}">cuBLAS product, tile 128 x 96, split</span>') == 1


def test_the_report_of_an_interrupted_replay_says_so():
    left_out = {"stage": 2, "title": "slow performance", "obstacle": None, "error": None}
    stages = [gpu_summary()["stages"][0], left_out]
    page = page_of(gpu_summary(interrupted=True, ceilings=None, stages=stages))
    assert "was interrupted" in page and "The replay was interrupted before it was done" in page
    assert 'id="roofline-title"' not in page and "No picture: stage 2 was not measured" in page


def test_the_files_of_a_report(tmp_path):
    report.write(whole_summary(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "summary.md", "summary.json", "stages.png"}
    height, width, _ = drawing.plt.imread(tmp_path / "stages.png").shape
    assert width > 4 * drawing.WIDTH and height > 2 * 200
    assert json.loads((tmp_path / "summary.json").read_text()) == whole_summary()


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
    shown = [(name, width) for name, widths in WIDTHS.items() for width in widths]
    frame = '<iframe src="{}.html" style="border: 0; width: {}px; height: 800px"></iframe>'
    (tmp_path / "harness.html").write_text(HARNESS + "".join(frame.format(*each) for each in shown))
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files --dump-dom"
    command = [CHROMIUM, *flags.split(), "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, (tmp_path / "harness.html").as_uri()], capture_output=True, text=True, timeout=100)
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    seen = json.loads(html.unescape(re.search(r'<pre id="result">(.+?)</pre>', done.stdout)[1]))
    for (name, width), each in zip(shown, seen, strict=True):
        assert each["width"] == width >= each["scroll"] and not each["cut"] and not each["outside"], each
        assert each["pictures"] == len(llama.STAGES) + 2 and each["smallest"] >= 11, each
        assert (each["ground"] in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")) is (name != "dark")
