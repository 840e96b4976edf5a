"""A performance model: the time of a step on 8 to 1,024 GPUs, and whether the network or the GPU limits it.

    python -m benchmarks.pages.scaling_model                                   every size, on nodes of 8 H200
    python -m benchmarks.pages.scaling_model --machine mi250x --sizes large --gpus 64 512
    python -m benchmarks.pages.scaling_model --nic 25 --batch-factor 4         half the network, four times the batch

The phases of one GPU and the speed of its links are taken from the newest result of benchmarks.scaling. The model is of
the step of tiny_llama_v3.py with a sharded optimizer and a constant batch for each process. It assumes:

- The time of layers is proportional to their weights. A bucket of gradients is sent when the backward pass of all its
  layers is done, one bucket after the other, and AdamW follows the last one, on 1/N of the weights. Then weights are
  gathered, beginning with the first layers and one bucket ahead; the layers of a bucket wait for its weights.
- A collective of S bytes is NCCL's ring: (N-1)/N S bytes leave each GPU, over the slowest link of the ring. Within a
  node these are a GPU's links; between nodes, there are as many rings as a node has GPUs, each over its own network
  card. The shortest takes LATENCY_US, or the measured latency, and each further hop of the N-1 adds to it. Hops and the
  three protocols are from NCCL's tuning (src/graph/tuning.cc), which chooses the fastest; RCCL has the same.
- A collective reaches LINK_REACH of the datasheet's bandwidth of the links, or the measured bandwidth, and NIC_REACH of
  the network's. The network has no other users, and its switches are not oversubscribed.
- Beside computation, a collective reaches LINK_BESIDE of the bandwidth that it has alone within a node, and slows the
  layers by CARD_BESIDE. All processes have the same speed.
- The times of forward and backward are proportional to the batch (--batch-factor). - For another GPU, the H200's times
are scaled: forward and backward by the ratio of the bf16 peaks, AdamW by that of the
  memory bandwidths. These GPUs were not measured.

Exit codes: 0 done, 2 the request cannot be met.
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

if not __package__:
    print("run it from the root as python -m benchmarks.pages.scaling_model", file=sys.stderr)
    sys.exit(2)

import tiny_llama_v3 as llama
from measure.command_line import Parser, positive, program
from measure.results import RESULTS, damage_reported, newest_first
from measure.tables import markdown_table, number
from measure.work import SIZES as WORK_SIZES
from tiny_llama import distributed

OURS = "triton graph"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
LINK_REACH = 0.8  # of 450 GB/s, NCCL's collectives reach about 360 on 8 H100 or H200
NIC_REACH = 0.9  # 16 MI300X on two nodes with 8 x 400 Gb/s: 361 of 400 GB/s (ROCm/rccl, pull request 2078)
# From recordings of the captured step at large on two H200: collectives took 3.4 to 5.3 times as long as alone, and the
# kernels beside them lost a fifth of their speed. The effect is smaller if the step is not captured.
LINK_BESIDE = 0.25
CARD_BESIDE = 0.2
LATENCY_US = 20.0
TINY = 1e-9  # ms
GOOD = 0.9  # a good efficiency


class Machine(NamedTuple):
    """A kind of node. Bandwidths are in GB/s, of one GPU in one direction, from the datasheet."""

    title: str
    gpus_per_node: int
    link: float  # all links of a GPU to the others of its node
    nic: float
    tflops: float  # bf16, of the matrix units
    memory: float  # TB/s
    source: str
    latency: float = LATENCY_US  # of the shortest collective of two GPUs


MACHINES = {
    "h200": Machine(
        "H200, NVLink, 400 Gb/s a GPU", 8, 450.0, 50.0, 989.4, 4.8,
        "NVIDIA's datasheets of H200 and DGX H200: 18 NVLinks of 25 GB/s; a ConnectX-7 for each GPU",
    ),
    "mi300x": Machine(
        "MI300X, xGMI, 400 Gb/s a GPU", 8, 448.0, 50.0, 1307.4, 5.3,
        "AMD's datasheet of MI300X: 7 links of 64 GB/s; a network card of 400 Gb/s for each GPU, as it is usual",
    ),
    "mi250x": Machine(
        "MI250X (a die), Slingshot, 200 Gb/s a card", 8, 100.0, 12.5, 191.5, 1.6,
        "OLCF's guide to Frontier: 50 to 100 GB/s between cards; a network card of 25 GB/s for the two dies of a card",
    ),
}  # fmt: skip
MEASURED_ON = MACHINES["h200"]


class Protocol(NamedTuple):
    """A ring of NCCL 2.10 (src/graph/tuning.cc). Times in us, bandwidth as a share of the links'."""

    link_hop: float
    nic_hop: float
    bandwidth: float


PROTOCOLS = (Protocol(3.4, 9.6, 1.0), Protocol(1.9, 4.0, 0.92), Protocol(0.47, 2.7, 0.25))


class Work(NamedTuple):
    """A step on one GPU: phases in ms, the bytes of each bucket in the order of the forward pass, and its tokens."""

    forward: float
    backward: float
    optimizer: float
    buckets: tuple
    tokens: int

    @property
    def alone(self):
        """The step of one process, in ms."""
        return self.forward + self.backward + self.optimizer

    def with_batch(self, factor):
        """The same weights with so many times the batch."""
        return self._replace(
            forward=self.forward * factor, backward=self.backward * factor, tokens=self.tokens * factor
        )

    def on(self, machine):
        """The same step on another GPU, scaled by the ratio of the peaks."""
        compute, memory = MEASURED_ON.tflops / machine.tflops, MEASURED_ON.memory / machine.memory
        phases = self.forward * compute, self.backward * compute, self.optimizer * memory
        return Work(*phases, self.buckets, self.tokens)


def sent_bytes(size, gpus):
    """The bytes that leave each GPU in a reduce-scatter or an all-gather of size bytes."""
    return (gpus - 1) / gpus * size


def collective_ms(size, gpus, machine, latency=1.0, beside=False):
    """The time of a reduce-scatter or an all-gather of size bytes, alone or beside computation.

    latency: a factor on that of each hop.
    """
    if gpus == 1:
        return 0.0
    nodes = math.ceil(gpus / machine.gpus_per_node)
    bandwidth = machine.link * (LINK_BESIDE if beside else 1.0)
    if nodes > 1:
        bandwidth = min(bandwidth, machine.gpus_per_node * machine.nic)
    if bandwidth == 0:
        return math.inf

    def us(protocol):
        hops = max(gpus - nodes - 1, 0) * protocol.link_hop + (nodes - 1) * protocol.nic_hop
        return latency * (machine.latency + hops) + sent_bytes(size, gpus) / (bandwidth * protocol.bandwidth) / 1e3

    return min(map(us, PROTOCOLS)) / 1e3


def step_ms(work, gpus, machine, latency=1.0):
    """The time of a step on so many GPUs in the steady state: layers in order, and beside them messages in order."""
    alone, beside = (
        [collective_ms(size, gpus, machine, latency, is_beside) for size in work.buckets] for is_beside in (False, True)
    )
    if math.isinf(sum(beside)):
        return math.inf
    shares = [size / sum(work.buckets) for size in work.buckets]
    layers = [share * work.forward for share in shares] + [share * work.backward for share in reversed(shares)]
    messages = list(zip(alone + alone[::-1], beside + beside[::-1], strict=True))
    forward, total = len(shares), len(layers)
    now, computed, sent = 0.0, 0, 0  # how many are done; below, the rest of the next ones, in ms at full speed
    layer, message = layers[0], messages[0][0]
    while computed < total or sent < total:
        # In the forward pass layers wait for their weights, which are requested one bucket ahead; in the backward
        # pass gradients wait for their layers.
        is_computing = computed < total and (computed >= forward or computed < sent)
        is_sending = sent < total and (computed >= sent - 1 if sent < forward else computed > sent)
        speed = 1 - CARD_BESIDE * is_sending
        rate = messages[sent][0] / messages[sent][1] if is_sending and is_computing and messages[sent][1] else 1.0
        passed = min([layer / speed] * is_computing + [message / rate] * is_sending)
        now, layer, message = now + passed, layer - passed * speed * is_computing, message - passed * rate * is_sending
        if is_computing and layer <= TINY:
            computed += 1
            layer = layers[computed] if computed < total else 0.0
        if is_sending and message <= TINY:
            sent += 1
            message = messages[sent][0] if sent < total else 0.0
    return now + work.optimizer / gpus


class Prediction(NamedTuple):
    """The prediction of a step on so many GPUs."""

    gpus: int
    ms: float
    tokens_per_second: float
    efficiency: float  # relative to so many times one GPU
    binds: str


def predict(work, gpus, machine):
    """The Prediction for so many GPUs of a machine of reached()."""
    ms = step_ms(work, gpus, machine)
    tokens = gpus * work.tokens / ms * 1e3
    # The limit is the part that would shorten the step most if it were twice as fast.
    card = Work(work.forward / 2, work.backward / 2, work.optimizer / 2, work.buckets, work.tokens)
    twice = {
        "card": step_ms(card, gpus, machine),
        "network": step_ms(work, gpus, machine._replace(link=2 * machine.link, nic=2 * machine.nic)),
        "latency": step_ms(work, gpus, machine, latency=0.5),
    }
    return Prediction(gpus, ms, tokens, work.alone / ms, min(twice, key=twice.get))


def least_batch(work, gpus, machine):
    """The least power of two by which a larger batch reaches the efficiency GOOD; None if 1,024 does not."""
    factors = (2**power for power in range(11))
    return next((f for f in factors if predict(work.with_batch(f), gpus, machine).efficiency >= GOOD), None)


# ----------------------------------------------------------------------------------------------------------------------
# From a result of benchmarks.scaling


class Measured(NamedTuple):
    """A size of a result."""

    source: str  # the name of the result's file
    result: dict
    work: Work
    collectives: dict  # "bandwidth" in GB/s that leave a GPU within the node, "latency_us"
    processes: int
    ms: float  # of a step on so many processes


def bucket_bytes(config):
    """The bytes of each bucket that the processes exchange, in the order of the forward pass."""
    with torch.device("meta"):
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    buckets = distributed.make_buckets(model)
    itemsize = 2 if config.use_amp else 4
    return tuple(itemsize * llama.count_weights(bucket.parameters) for bucket in buckets)


def measured_of(source, result, size):
    """The Measured of a size of a result, or None if the result is incomplete."""
    row = size.get("weak", {"rows": {}})["rows"].get(OURS)
    if not row or row["error"] or "phases_ms" not in size:
        return None
    config, phases = llama.Config(**size["config"]), size["phases_ms"]
    # Phases are three graphs and a step is one graph, which is a little faster.
    scale = row["ms"]["alone"] / sum(phases.values())
    phases = [scale * phases[name] for name in ("forward", "backward", "optimizer")]
    work = Work(*phases, bucket_bytes(config), config.tokens_per_step)
    return Measured(source, result, work, result["collectives"], result["processes"], row["ms"]["exchanging"])


def newest_measured(folder):
    """{size: Measured} of the newest result of each; among those of a day, the one with the most processes."""
    newest = {}
    results = newest_first(folder, "scaling")
    for source, result in sorted(results, key=lambda item: (item[1]["date"][:10], item[1]["processes"]), reverse=True):
        for name, size in result["sizes"].items():
            measured = None if name in newest else measured_of(source, result, size)
            if measured:
                newest[name] = measured
    return {name: newest[name] for name in WORK_SIZES if name in newest}


def reached(machine, collectives):
    """The machine with the bandwidths that a collective reaches, measured or assumed."""
    machine = machine._replace(nic=machine.nic * NIC_REACH)
    if (machine.title, machine.link) != (MEASURED_ON.title, MEASURED_ON.link):
        return machine._replace(link=machine.link * LINK_REACH)
    return machine._replace(link=collectives["bandwidth"], latency=collectives["latency_us"])


def cell(prediction):
    return f"{prediction.tokens_per_second / 1e6:,.2f} M, {100 * prediction.efficiency:.0f} %, {prediction.binds}"


def table(sizes, gpus, machine, factor=1):
    """Markdown with a line for each number of GPUs and a column for each of {name: Measured}, and the least batches."""
    works = {name: measured.work.on(machine).with_batch(factor) for name, measured in sizes.items()}
    machines = {name: reached(machine, measured.collectives) for name, measured in sizes.items()}
    rows = [[f"{n:,}", *(cell(predict(works[name], n, machines[name])) for name in sizes)] for n in gpus]
    batches = [least_batch(works[name], gpus[-1], machines[name]) for name in sizes]
    last = [f"{batch} x" if batch else "none" for batch in batches]
    rows.append([f"batch for {100 * GOOD:.0f} % on {gpus[-1]:,}", *last])
    return markdown_table(["GPUs", *sizes], rows)


def check_table(sizes):
    """Markdown that compares the model with the measurement, at the measured number of GPUs."""
    rows = []
    for name, measured in sizes.items():
        ms = step_ms(measured.work, measured.processes, reached(MEASURED_ON, measured.collectives))
        difference = f"{100 * (ms / measured.ms - 1):+.1f} %"
        rows.append([name, f"{measured.processes}", number(ms), number(measured.ms), difference])
    return markdown_table(["", "GPUs", "model, ms a step", "measured", "difference"], rows)


@program("scaling_model.py")
def main(argv):
    parser = Parser("scaling_model.py", __doc__)
    parser.add_argument("--machine", choices=list(MACHINES), default="h200", help="kind of node (default: h200)")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="of the result (default: all)")
    parser.add_argument("--gpus", type=positive, nargs="+", default=GPUS, metavar="N", help="(default: 8 to 1024)")
    parser.add_argument("--link", type=float, metavar="GB/s", help="of a GPU to those of its node, in one direction")
    parser.add_argument("--nic", type=float, metavar="GB/s", help="of a GPU's share of its node's network cards")
    parser.add_argument("--batch-factor", type=positive, default=1, metavar="N", help="times the measured batch")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
    with damage_reported(options.results, "scaling"):
        newest = newest_measured(options.results)
    if not newest:
        raise llama.UsageError(f"--results {options.results} has no result of benchmarks.scaling: measure first")
    unknown = set(options.sizes or ()) - newest.keys()
    if unknown:
        raise llama.UsageError(f"--sizes {min(unknown)} was not measured: choose from {', '.join(newest)}")
    given = {name: getattr(options, name) for name in ("link", "nic") if getattr(options, name) is not None}
    for name, value in given.items():
        if not value >= 0:
            raise llama.UsageError(f"--{name} {value} is no bandwidth: give a number of GB/s")
    machine = MACHINES[options.machine]
    if given:
        machine = machine._replace(**given)
    sizes = {name: measured for name, measured in newest.items() if name in (options.sizes or newest)}
    print(f"{machine.title}: {machine.link:g} GB/s within a node, {machine.nic:g} between; {machine.source}.\n")
    print(table(sizes, sorted(options.gpus), machine, options.batch_factor))
    print(f"\nThe model beside what was measured:\n\n{check_table(sizes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
