"""The readers: one table from the files of either ROCm release, a rocpd database, or torch.profiler."""

import csv
import gzip
import json
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tiny_llama_v3 as llama
from profiling import kernel_stats
from profiling.kernel_stats import COLUMNS, Unreadable, operation_of, read_kernel_stats, short_name
from tests.fakes import records

RUN = records.make_run(steps=3)
RELEASES = [(6, 4), (7, 0)]


def in_steps(dispatches):
    first, last = RUN.ranges[0].start, max(r.end for r in RUN.ranges)
    return [d for d in dispatches if first <= d.start <= last]


def expected(dispatches):
    """The table from its definition, in plain Python."""
    total = sum(d.duration for d in dispatches)
    rows = [
        (name, len(ns), sum(ns), sum(ns) / len(ns), 100 * sum(ns) / total, min(ns), max(ns), statistics.stdev(ns))
        if len(ns) > 1
        else (name, 1, ns[0], ns[0], 100 * ns[0] / total, ns[0], ns[0], 0.0)
        for name, ns in records.by_name(dispatches).items()
    ]
    return pd.DataFrame(sorted(rows, key=lambda row: -row[2]), columns=COLUMNS)


def assert_equal(table, reference, rtol=1e-9):
    assert list(table.columns) == COLUMNS
    assert list(table["Name"]) == list(reference["Name"])
    for column in COLUMNS[1:]:
        np.testing.assert_allclose(table[column].astype(float), reference[column].astype(float), rtol, err_msg=column)


@pytest.fixture(params=["6.4 table", "7.0 table", "6.4 trace", "7.0 trace", "rocpd"])
def profile(request, tmp_path):
    """A folder as rocprofv3 leaves it without -o: below the host's name, under the process id."""
    release, _, kind = request.param.partition(" ")
    prefix = tmp_path / "node01" / "10470"
    version = tuple(map(int, release.split("."))) if kind else (7, 0)
    if kind == "table":
        records.write_stats(Path(f"{prefix}_kernel_stats.csv"), RUN.dispatches)
    if kind:
        records.write_kernel_trace(Path(f"{prefix}_kernel_trace.csv"), version, RUN.dispatches)
        records.write_stats(Path(f"{prefix}_hip_api_stats.csv"), RUN.api_calls)
        records.write_api_trace(Path(f"{prefix}_marker_api_trace.csv"), "MARKER_CORE_API", RUN.ranges)
        records.write_agent_info(Path(f"{prefix}_agent_info.csv"))
    else:
        records.write_rocpd(Path(f"{prefix}_results.db"), RUN)
    return tmp_path


def test_every_kind_of_file_gives_the_same_table(profile, monkeypatch):
    assert_equal(read_kernel_stats(profile), expected(RUN.dispatches))
    monkeypatch.setattr(kernel_stats, "CHUNK_ROWS", 7)
    assert_equal(read_kernel_stats(profile), expected(RUN.dispatches))


def test_steps_alone(profile):
    window, steps = kernel_stats.step_window(profile)
    assert steps == 3
    table = read_kernel_stats(profile, window)
    assert_equal(table, expected(in_steps(RUN.dispatches)))
    assert records.WARM_UP_KERNEL not in set(table["Name"])


def test_dispatches_come_in_order(profile, monkeypatch):
    monkeypatch.setattr(kernel_stats, "CHUNK_ROWS", 11)
    dispatches = kernel_stats.read_dispatches(profile)
    assert list(dispatches.astype({"Name": str}).itertuples(index=False, name=None)) == [
        tuple(d) for d in RUN.dispatches
    ]


def test_processes_of_one_run_are_added_up(tmp_path):
    second = [records.Record(d.name, d.start, d.end + 1000 * i) for i, d in enumerate(RUN.dispatches)]
    records.write_stats(tmp_path / "1_kernel_stats.csv", RUN.dispatches)
    records.write_stats(tmp_path / "2_kernel_stats.csv", second)
    assert_equal(read_kernel_stats(tmp_path), expected(RUN.dispatches + second))


def test_passes_of_counters_are_no_timings(tmp_path):
    slowed = [records.Record(d.name, d.start, d.end + 10**6) for d in RUN.dispatches]
    records.write_kernel_trace(tmp_path / "k_kernel_trace.csv", (7, 0), RUN.dispatches)
    records.write_kernel_trace(tmp_path / "pass_1" / "k_kernel_trace.csv", (7, 0), slowed)
    assert_equal(read_kernel_stats(tmp_path), expected(RUN.dispatches))
    assert_equal(read_kernel_stats(tmp_path / "pass_1"), expected(slowed))


def test_summary_of_rocpd(tmp_path):
    reference = expected(RUN.dispatches)
    table = reference.rename(columns={new: old for old, new in kernel_stats.ROCPD_SUMMARY.items()})
    table.loc[table["Calls"] == 1, "STD_DEV"] = None  # SQL divides by zero
    table.to_csv(tmp_path / "out_kernels_summary.csv", index=False)
    assert_equal(read_kernel_stats(tmp_path), reference)


def test_durations_agree_with_the_view_in_microseconds(tmp_path):
    records.write_rocpd(tmp_path / "a.db", RUN)
    sql = "SELECT name, total_duration FROM top_kernels LIMIT 1"
    top = pd.concat(kernel_stats.query(tmp_path / "a.db", sql, ["name", "us"])).iloc[0]
    row = read_kernel_stats(tmp_path / "a.db").iloc[0]
    assert row["Name"] == top["name"] and row["TotalDurationNs"] == pytest.approx(1000 * top["us"])


def test_files_of_torch_profiler(tmp_path, capsys):
    flags = "--impl torch --device cpu --hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 32 --batch-size 2"
    flags = [
        *flags.split(),
        "--seq-len",
        "8",
        "--num-steps",
        "1",
        "--output-dir",
        str(tmp_path / "json"),
        "--profile",
        str(tmp_path / "p"),
    ]
    assert llama.main(flags) == 0
    capsys.readouterr()
    with open(tmp_path / "p" / "kernel_stats.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    table = read_kernel_stats(tmp_path / "p")
    assert list(table["Name"]) == [row["Name"] for row in rows]
    assert list(table["Calls"]) == [int(row["Calls"]) for row in rows]
    np.testing.assert_allclose(table["StdDev"], [float(row["StdDev"]) for row in rows], rtol=1e-6, atol=1e-6)
    # Not which comes first: a process that is interrupted inside a view makes that one the longest.
    assert {"matrix product", "optimizer", "softmax", "elementwise"} <= set(table["Name"].map(operation_of))
    window, steps = kernel_stats.step_window(tmp_path / "p")
    dispatches = kernel_stats.read_dispatches(tmp_path / "p", window)
    assert steps == 3 and "aten::mm" in set(dispatches["Name"])
    assert (dispatches["Start"].to_numpy()[1:] >= dispatches["End"].to_numpy()[:-1]).all()  # never two at once


def chrome_trace(events):
    return json.dumps({"traceEvents": [{"ph": "X", "tid": 1, **event} for event in events]})


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_gpu_trace_counts_kernels_and_copies_only(tmp_path, name):
    text = chrome_trace(
        [
            {"cat": "kernel", "name": "rmsnorm_kernel", "ts": 10.5, "dur": 2.25},
            {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 20, "dur": 1},
            {"cat": "gpu_user_annotation", "name": "step", "ts": 10, "dur": 20},
            {"cat": "user_annotation", "name": "step", "ts": 9, "dur": 30},
            {"cat": "cpu_op", "name": "aten::mm", "ts": 9, "dur": 5},
        ]
    )
    (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt").write(text)
    table = read_kernel_stats(tmp_path)
    assert list(zip(table["Name"], table["TotalDurationNs"], strict=True)) == [
        ("rmsnorm_kernel", 2250),
        ("Memcpy HtoD", 1000),
    ]
    assert kernel_stats.step_window(tmp_path) == ((9000, 39000), 1)


def test_a_memset_counts_as_a_copy_does(tmp_path):
    (tmp_path / "trace.json").write_text(
        chrome_trace([{"cat": "gpu_memset", "name": "Memset (Device)", "ts": 3, "dur": 2}])
    )
    assert list(read_kernel_stats(tmp_path)["TotalDurationNs"]) == [2000]


def test_a_kernel_belongs_to_the_step_in_which_it_starts():
    dispatches = kernel_stats.frame(
        [("before", 80, 120), ("inside", 110, 130), ("beyond", 190, 230), ("later", 210, 220)]
    )
    assert list(kernel_stats.within(dispatches, (100, 200))["Name"]) == ["inside", "beyond"]


# ----------------------------------------------------------------------------------------------------------------------
# Files that are not as they should be


def test_folder_without_a_profile(tmp_path):
    with pytest.raises(Unreadable, match="holds no kernel statistics"):
        read_kernel_stats(tmp_path)
    with pytest.raises(Unreadable, match="does not exist"):
        read_kernel_stats(tmp_path / "absent")


@pytest.mark.parametrize("name", ["a_kernel_stats.csv", "a_kernel_trace.csv", "a_results.db", "trace.json"])
def test_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(Unreadable, match=f"{name} .*profile|{name} is empty"):
        read_kernel_stats(tmp_path)


def test_a_table_without_kernels_is_empty(tmp_path):
    records.write_rows(tmp_path / "a_kernel_stats.csv", COLUMNS, [])
    records.write_kernel_trace(tmp_path / "b_kernel_trace.csv", (6, 4), [])
    records.write_rocpd(tmp_path / "c.db", records.Run([], [], [], []))
    for name in ("a_kernel_stats.csv", "b_kernel_trace.csv", "c.db"):
        table = read_kernel_stats(tmp_path / name)
        assert list(table.columns) == COLUMNS and len(table) == 0
    assert len(kernel_stats.read_dispatches(tmp_path / "c.db")) == 0


@pytest.mark.parametrize("cut", [1, 5, 30, 70, 200])
@pytest.mark.parametrize("name", ["a_kernel_stats.csv", "a_kernel_trace.csv", "trace.json", "a_results.db"])
def test_truncated_file(tmp_path, name, cut):
    path = tmp_path / name
    if name == "trace.json":
        path.write_text(
            chrome_trace([{"cat": "kernel", "name": d.name, "ts": d.start, "dur": 1} for d in RUN.dispatches])
        )
    elif name.endswith(".db"):
        records.write_rocpd(path, RUN)
        cut *= 100
    else:
        records.write_stats(tmp_path / "a_kernel_stats.csv", RUN.dispatches)
        records.write_kernel_trace(tmp_path / "a_kernel_trace.csv", (7, 0), RUN.dispatches)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Unreadable, match=name):
        read_kernel_stats(path)


@pytest.mark.parametrize("line", ["x,y", '"k",1,2', '"k","many",2,3,4,5,6,7', "\xff\xfe"])
def test_damaged_line(tmp_path, line):
    records.write_stats(tmp_path / "a_kernel_stats.csv", RUN.dispatches)
    with open(tmp_path / "a_kernel_stats.csv", "ab") as file:
        file.write(line.encode("latin1") + b"\n")
    with pytest.raises(Unreadable, match="a_kernel_stats.csv"):
        read_kernel_stats(tmp_path)


def test_another_table_under_the_name(tmp_path):
    records.write_agent_info(tmp_path / "a_kernel_stats.csv")
    with pytest.raises(Unreadable, match="no column"):
        read_kernel_stats(tmp_path)
    (tmp_path / "b.db").write_bytes(b"SQLite format 3\0" + bytes(4096))
    with pytest.raises(Unreadable, match="b.db"):
        read_kernel_stats(tmp_path / "b.db")


@pytest.mark.parametrize("kind", ["csv", "db"])
def test_a_million_dispatches(tmp_path, kind, monkeypatch):
    """In bounded memory: no more than a chunk at a time."""
    sizes = []
    statistics_of = kernel_stats.statistics_of
    monkeypatch.setattr(kernel_stats, "statistics_of", lambda chunk: sizes.append(len(chunk)) or statistics_of(chunk))
    dispatches = [
        records.Record(d.name, d.start + 10**9 * i, d.end + 10**9 * i) for i in range(20) for d in RUN.dispatches
    ]
    thousands = 1_000_000 // len(dispatches) + 1
    if kind == "csv":
        path = tmp_path / "a_kernel_trace.csv"
        records.write_kernel_trace(path, (7, 0), dispatches)
        header, _, body = path.read_text().partition("\n")
        with open(path, "w") as file:
            file.write(header + "\n")
            for _ in range(thousands):
                file.write(body)
    else:
        path = tmp_path / "a.db"
        records.write_rocpd(path, RUN._replace(dispatches=dispatches))
        connection = kernel_stats.sqlite3.connect(path)
        (table,) = connection.execute(
            "SELECT name FROM sqlite_master WHERE name LIKE 'rocpd_kernel_dispatch_%'"
        ).fetchone()
        columns = 'guid, pid, agent_id, kernel_id, dispatch_id, start, "end", event_id'
        with connection:
            connection.execute(
                f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {thousands - 1}) "
                f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}, n"
            )
        connection.close()
    table = read_kernel_stats(path)
    reference = expected(dispatches)
    assert table["Calls"].sum() == thousands * len(dispatches) >= 1_000_000
    assert list(table["Calls"]) == list(reference["Calls"] * thousands)
    assert list(table["TotalDurationNs"]) == list(reference["TotalDurationNs"] * thousands)
    assert len(sizes) >= 5 and max(sizes) <= kernel_stats.CHUNK_ROWS


# ----------------------------------------------------------------------------------------------------------------------
# Names


def test_every_kernel_of_the_script_belongs_to_an_operation():
    source = Path(llama.__file__).read_text()
    kernels = [line.split("(")[0][4:] for line in source.splitlines() if line.startswith("def ") and "_kernel(" in line]
    assert len(kernels) > 10
    assert [name for name in kernels if operation_of(name) == "other"] == []


@pytest.mark.parametrize(
    "name, operation",
    [
        ("rmsnorm_backward_kernel", "RMSNorm backward"),
        ("flash_attention_kernel", "attention"),
        ("flash_attention_backward_dkdv_kernel", "attention backward"),
        ("swiglu_kernel", "SwiGLU matrix product, naive"),
        ("swiglu_activation_kernel", "SwiGLU"),
        ("Cijk_Alik_Bljk_SB_MT64x64x32_MI16x16x4", "matrix product"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute", "matrix product"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(cutlass::Params)", "matrix product"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::Params)", "matrix product"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(pytorch_flash::Flash_fwd_params)",
            "attention",
        ),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<x>(y)", "attention backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_bf16_knob_6_64x128x64", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_bf16_knob_26_128x128", "attention backward"),
        ("triton_red_fused_add_mul_rsqrt_3", "fused by torch.compile"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1>>"
            "(int, at::native::FillFunctor<float>, std::array<char*, 1>)",
            "copy or fill",
        ),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>(int)", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>(x)", "reduction"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*)", "softmax"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "
            "FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>(x)",
            "optimizer",
        ),
        ("Memcpy DtoD (Device -> Device)", "copy or fill"),
        ("__amd_rocclr_fillBufferAligned", "copy or fill"),
        ("aten::mm", "matrix product"),
        ("my_own_thing", "other"),
    ],
)
def test_operation_of(name, operation):
    assert operation_of(name) == operation


def test_short_name():
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int, float)"
    assert short_name(name) == "vectorized_elementwise_kernel<4, FillFunctor<float>, 1>"
    # Two of cuBLAS's that differ in their layouts and tiles, far from either end.
    ends = "sm80_xmma_gemm_f32f32_f32f32_f32_", "_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas"
    for own in ("tn_n_tilesize64x256x8", "nt_n_tilesize128x64x8"):
        assert short_name(own.join(ends), 44) == f"sm80_xmma_gemm_f32_{own}"
    assert short_name(own.join(ends).replace("_kernel", "_split_k_kernel")) == f"sm80_xmma_gemm_f32_{own}_split_k"
    simt = "cutlass_80_simt_sgemm_256x128_8x4_nn_align1"
    assert short_name(f"void cutlass::Kernel2<{simt}>({simt}::Params)") == simt
    assert short_name("rmsnorm_kernel") == "rmsnorm_kernel"
    assert len(short_name("k" * 200, 30)) == 30
