"""The model on paper: bounds that hold whatever the machine, one GPU as measured, and the pages as the code says."""

import itertools
import json
import math

import pytest

import tiny_llama_v3 as llama
from benchmarks.pages import scaling_model as model
from measure.tables import number
from measure.work import SIZES
from tests.benchmarks.test_scaling import result_of
from tiny_llama import hardware

MACHINE = model.MACHINES["h200"]
LARGE = model.Work(30.0, 60.0, 6.0, (100e6, 300e6, 800e6, 800e6), 8192)
SMALL = model.Work(0.4, 0.6, 0.2, (10e6, 50e6), 1024)
CASES = list(itertools.product((LARGE, SMALL), (1, 2, 4, 8, 16, 64, 1024), model.MACHINES.values()))


def test_a_ring_sends_all_but_one_part():
    """2 (N-1)/N S: a reduce-scatter and an all-gather, together an all-reduce."""
    assert [2 * model.sent_bytes(600, n) for n in (1, 2, 3)] == [0, 600, 800]
    only_bytes = MACHINE._replace(link=450e-6, nic=math.inf)  # slow enough for no latency to show
    assert model.collective_ms(8e3, 8, only_bytes) == pytest.approx(7 / 8 * 8e3 / 450e-6 / 1e6, rel=1e-2)


def test_bandwidth_is_that_of_the_slowest_link_of_the_ring():
    size, one_node, two_nodes = 10e9, *(model.collective_ms(10e9, n, MACHINE) for n in (8, 16))
    assert size * 7 / 8 / one_node / 1e6 == pytest.approx(450, rel=0.01)  # links within the node
    assert size * 15 / 16 / two_nodes / 1e6 == pytest.approx(400, rel=0.01)  # 8 network cards of 50
    single = MACHINE._replace(gpus_per_node=1)
    assert size / 2 / model.collective_ms(size, 2, single) / 1e6 == pytest.approx(50, rel=0.01)


def test_latency_grows_with_the_ring_and_small_messages_take_another_protocol():
    times = [model.collective_ms(1, n, MACHINE) for n in (2, 8, 16, 128, 1024)]
    assert times == sorted(times) and times[-1] > 30 * times[0]
    assert times[0] == pytest.approx(model.LATENCY_US / 1e3, rel=1e-3)
    # 1,022 hops more, of which 127 leave a node, by the protocol with the least latency
    assert times[-1] == pytest.approx((model.LATENCY_US + 895 * 0.47 + 127 * 2.7) / 1e3, rel=1e-3)


@pytest.mark.parametrize("work, gpus, machine", CASES)
def test_never_faster_than_linear(work, gpus, machine):
    """Linear in the passes: of the optimizer each process does only its part."""
    prediction = model.predict(work, gpus, machine)
    assert prediction.ms >= work.forward + work.backward + work.optimizer / gpus
    assert prediction.tokens_per_second == pytest.approx(gpus * work.tokens / prediction.ms * 1e3)
    faster = machine._replace(link=10 * machine.link, nic=10 * machine.nic)
    assert model.step_ms(work, gpus, faster) <= prediction.ms


@pytest.mark.parametrize("work", [LARGE, SMALL])
def test_one_gpu_is_what_was_measured(work):
    prediction = model.predict(work, 1, MACHINE._replace(link=0.0, nic=0.0))
    assert prediction.ms == work.alone and prediction.efficiency == 1 and prediction.binds == "card"


def test_without_a_network_it_binds():
    for nic in (1e-3, 1e-6):
        prediction = model.predict(LARGE, 16, MACHINE._replace(nic=nic))
        assert prediction.binds == "network" and prediction.efficiency < 1e-3
    assert model.predict(LARGE, 16, MACHINE._replace(nic=0.0)).efficiency == 0
    assert model.predict(LARGE, 16, MACHINE).binds == "card"


def test_with_many_gpus_and_a_short_step_the_latency_binds():
    assert model.predict(SMALL, 1024, MACHINE._replace(link=1e6, nic=1e6)).binds == "latency"


def test_what_is_hidden_is_hidden():
    """By a network that is fast enough: what is left is the first bucket, gathered first and reduced last."""
    fast = MACHINE._replace(link=4500.0)
    first, *_ = (model.collective_ms(size, 8, fast) for size in LARGE.buckets)
    beside = 2 * sum(model.collective_ms(size, 8, fast, beside=True) for size in LARGE.buckets[1:])
    computing = LARGE.forward + LARGE.backward + LARGE.optimizer / 8
    assert model.step_ms(LARGE, 8, fast) == pytest.approx(computing + 2 * first + model.CARD_BESIDE * beside)
    one_bucket = LARGE._replace(buckets=(sum(LARGE.buckets),))
    all_of_it = 2 * model.collective_ms(sum(LARGE.buckets), 8, fast)
    assert model.step_ms(one_bucket, 8, fast) == pytest.approx(computing + all_of_it)


def test_a_message_that_computation_does_not_outlast_ends_at_full_speed():
    short = LARGE._replace(backward=1e-6, forward=1e-6)
    all_of_it = 2 * sum(model.collective_ms(size, 8, MACHINE) for size in short.buckets)
    assert model.step_ms(short, 8, MACHINE) == pytest.approx(all_of_it + short.optimizer / 8, rel=1e-3)


def test_a_larger_batch_hides_the_network():
    slow = MACHINE._replace(nic=2.0)
    factor = model.least_batch(LARGE, 64, slow)
    assert factor > 1
    assert model.predict(LARGE.with_batch(factor), 64, slow).efficiency >= model.GOOD
    assert model.predict(LARGE.with_batch(factor // 2), 64, slow).efficiency < model.GOOD
    assert model.least_batch(LARGE, 8, MACHINE) == 1
    assert model.least_batch(LARGE, 64, slow._replace(nic=0.0)) is None


@pytest.mark.parametrize("name", SIZES)
def test_the_buckets_hold_all_weights(name):
    config = llama.Config(**SIZES[name], use_amp=True)
    buckets = model.bucket_bytes(config)
    norms = (2 * config.num_layers + 1) * config.hidden_dim
    assert sum(buckets) == 2 * (hardware.count_matrix_weights(config) + norms)


# --- the program


RESULT = result_of(processes=2, day=2)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scaling_some-gpu_20300102_030405.json").write_text(json.dumps(RESULT))
    return tmp_path


def test_it_prints_a_table_and_the_measurement_beside_the_model(folder, capsys):
    assert model.main(["--results", str(folder), "--gpus", "64", "8"]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[:5]] == ["| GPUs", "| ---", "| 8", "| 64", "| batch for 90 % on 64"]
    work = model.measured_of("", RESULT, RESULT["sizes"]["large"]).work
    assert work.alone == pytest.approx(100)  # the step of one graph, not the sum of the three
    prediction = model.predict(work, 2, MACHINE._replace(link=300.0, nic=45.0, latency=20.0))
    assert f"| large | 2 | {number(prediction.ms)} | 101 |" in text
    assert "450 GB/s within a node, 50 between; NVIDIA" in text


def test_other_machines_and_batches(folder, capsys):
    outputs = []
    for flags in ([], ["--machine", "mi250x"], ["--nic", "1"], ["--batch-factor", "4"], ["--link", "10"]):
        assert model.main(["--results", str(folder), *flags]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 5 and "network" in outputs[2] and "Slingshot" in outputs[1]


def test_wrong_requests_end_in_one_line(folder, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "scaling_gpu.json").write_text(json.dumps(RESULT | {"sizes": 5}))
    for flags, reason in (
        (["--results", str(empty)], "measure first"),
        (["--results", str(damaged)], f"--results {damaged}: a result of scaling is damaged"),
        (["--results", str(folder), "--sizes", "small"], "--sizes small was not measured"),
        (["--results", str(folder), "--nic", "-1"], "--nic"),
        (["--results", str(folder), "--link", "nan"], "--link"),
        (["--gpus", "0"], "--gpus"),
    ):
        assert model.main(flags) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and reason in error
