"""A model on paper: how fast a step is on 8 to 1,024 GPUs, and whether the network or the card binds.

    python -m benchmarks.scaling_model                                   every size, on nodes of 8 H200
    python -m benchmarks.scaling_model --machine mi250x --sizes large --gpus 64 512
    python -m benchmarks.scaling_model --nic 25 --batch-factor 4         half the network, four times the batch

It takes the phases of one GPU and the speed of its links from the newest result of benchmarks.scaling, and computes the
step of tiny_llama_v3.py with a sharded optimizer, the batch of a process held constant. What it assumes:

- Layers take time in proportion to their weights. A bucket of gradients leaves when the backward pass is done with all
  of its layers, buckets go one after the other, and AdamW follows the last one, on 1/N of the weights. Then weights are
  gathered, the first layers first and one bucket ahead; a bucket's layers begin when its weights are there.
- A collective of S bytes is NCCL's ring: (N-1)/N S bytes leave each GPU, over the slowest link of the ring. Within a
  node that is a GPU's links; between nodes, there are as many rings as a node has GPUs, each over a network card of its
  own. The shortest takes LATENCY_US, or what was measured, and each further hop of the N-1 adds to it. Hops and the
  three protocols are those of NCCL's own tuning (src/graph/tuning.cc), which takes the fastest; RCCL's as well.
- A collective gets LINK_REACH of the datasheet's bandwidth of the links, or what was measured, and NIC_REACH of the
  network's. Nobody else uses the network, and its switches are not oversubscribed.
- Beside computation, a collective gets LINK_BESIDE of the bandwidth that it reaches alone within a node, and takes
  CARD_BESIDE of the card's speed from the layers. No process is slower than another.
- Forward and backward grow in proportion to the batch (--batch-factor).
- On another card, forward and backward take the H200's time by the ratio of the bf16 peaks, and AdamW by that of the
  memory's bandwidths. Nothing was measured there.

Exit codes: 0 done, 2 the request cannot be met.
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import tiny_llama_v3 as llama
from measure.options import positive
from measure.results import RESULTS, newest_first
from measure.tables import markdown_table, number
from measure.work import SIZES as WORK_SIZES
from tiny_llama_v3 import exit_code_of

OURS = "triton graph"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
LINK_REACH = 0.8  # of 450 GB/s, NCCL's collectives reach about 360 on 8 H100 or H200
NIC_REACH = 0.9  # 16 MI300X on two nodes with 8 x 400 Gb/s: 361 of 400 GB/s (ROCm/rccl, pull request 2078)
# Read off recordings of the captured step at large on two H200: collectives took 3.4 to 5.3 times as long as alone, and
# what ran beside them lost a fifth of its speed. Not captured, they take less from each other.
LINK_BESIDE = 0.25
CARD_BESIDE = 0.2
LATENCY_US = 20.0
TINY = 1e-9  # ms
GOOD = 0.9  # an efficiency that is worth the GPUs


class Machine(NamedTuple):
    """Nodes of one kind. Bandwidths in GB/s, of one GPU in one direction, by the datasheet."""

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
        """The same weights at so many times the batch."""
        return self._replace(
            forward=self.forward * factor, backward=self.backward * factor, tokens=self.tokens * factor
        )

    def on(self, machine):
        """The same step on another card, by the ratio of the peaks."""
        compute, memory = MEASURED_ON.tflops / machine.tflops, MEASURED_ON.memory / machine.memory
        phases = self.forward * compute, self.backward * compute, self.optimizer * memory
        return Work(*phases, self.buckets, self.tokens)


def sent_bytes(size, gpus):
    """What leaves each GPU when size bytes are reduce-scattered, or gathered, over all."""
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
    """The time of a step on so many GPUs, in the steady state: layers, and beside them messages, each in order."""
    alone, beside = (
        [collective_ms(size, gpus, machine, latency, is_beside) for size in work.buckets] for is_beside in (False, True)
    )
    if math.isinf(sum(beside)):
        return math.inf
    shares = [size / sum(work.buckets) for size in work.buckets]
    layers = [share * work.forward for share in shares] + [share * work.backward for share in reversed(shares)]
    messages = list(zip(alone + alone[::-1], beside + beside[::-1], strict=True))
    forward, total = len(shares), len(layers)
    now, computed, sent = 0.0, 0, 0  # how many are done, and what is left of the next ones, in ms at full speed
    layer, message = layers[0], messages[0][0]
    while computed < total or sent < total:
        # In the forward pass layers wait for their weights, which are asked for one bucket ahead; in the backward pass
        # gradients wait for their layers.
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
    """Of one step on so many GPUs."""

    gpus: int
    ms: float
    tokens_per_second: float
    efficiency: float  # of so many times one GPU
    binds: str


def predict(work, gpus, machine):
    """The Prediction for so many GPUs of this machine, whose link and nic are what a collective reaches."""
    ms = step_ms(work, gpus, machine)
    tokens = gpus * work.tokens / ms * 1e3
    # What binds is what would shorten the step the most if it were twice as fast.
    card = Work(work.forward / 2, work.backward / 2, work.optimizer / 2, work.buckets, work.tokens)
    twice = {
        "card": step_ms(card, gpus, machine),
        "network": step_ms(work, gpus, machine._replace(link=2 * machine.link, nic=2 * machine.nic)),
        "latency": step_ms(work, gpus, machine, latency=0.5),
    }
    return Prediction(gpus, ms, tokens, work.alone / ms, min(twice, key=twice.get))


def least_batch(work, gpus, machine):
    """The least factor on the batch, a power of two, that brings the efficiency to GOOD; None if 1,024 does not."""
    factors = (2**power for power in range(11))
    return next((f for f in factors if predict(work.with_batch(f), gpus, machine).efficiency >= GOOD), None)


# ----------------------------------------------------------------------------------------------------------------------
# From a result of benchmarks.scaling


class Measured(NamedTuple):
    """A size in a result."""

    source: str  # the name of the result's file
    result: dict
    work: Work
    collectives: dict  # "bandwidth" in GB/s that leave a GPU within the node, "latency_us"
    processes: int
    ms: float  # of a step on so many processes


def bucket_bytes(config):
    """Of each bucket that the processes exchange, in the order of the forward pass."""
    with torch.device("meta"):
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["torch"])
    buckets = llama.make_buckets(model, llama.World(size=2))
    itemsize = 2 if config.use_amp else 4
    return tuple(itemsize * llama.count_weights(bucket.parameters) for bucket in buckets)


def measured_of(source, result, size):
    """The Measured of a size of a result, or None if it does not have all of it."""
    row = size.get("weak", {"rows": {}})["rows"].get(OURS)
    if not row or row["error"] or "phases_ms" not in size:
        return None
    config, phases = llama.Config(**size["config"]), size["phases_ms"]
    # Phases are three graphs and a step is one, which is a little faster.
    scale = row["ms"]["alone"] / sum(phases.values())
    phases = [scale * phases[name] for name in ("forward", "backward", "optimizer")]
    work = Work(*phases, bucket_bytes(config), config.tokens_per_step)
    return Measured(source, result, work, result["collectives"], result["processes"], row["ms"]["exchanging"])


def newest_measured(folder):
    """{size: Measured} of the newest result of each, and of those of one day the one with the most processes."""
    newest = {}
    results = newest_first(folder, "scaling")
    for source, result in sorted(results, key=lambda item: (item[1]["date"][:10], item[1]["processes"]), reverse=True):
        for name, size in result["sizes"].items():
            measured = None if name in newest else measured_of(source, result, size)
            if measured:
                newest[name] = measured
    return {name: newest[name] for name in WORK_SIZES if name in newest}


def reached(machine, collectives):
    """The machine with what a collective reaches of its bandwidths: within a node as measured, or as assumed."""
    machine = machine._replace(nic=machine.nic * NIC_REACH)
    if (machine.title, machine.link) != (MEASURED_ON.title, MEASURED_ON.link):
        return machine._replace(link=machine.link * LINK_REACH)
    return machine._replace(link=collectives["bandwidth"], latency=collectives["latency_us"])


def cell(prediction):
    return f"{prediction.tokens_per_second / 1e6:,.2f} M, {100 * prediction.efficiency:.0f} %, {prediction.binds}"


def table(sizes, gpus, machine, factor=1):
    """Markdown: a line for each number of GPUs, a column for each of {name: Measured}; the batch that would do last."""
    works = {name: measured.work.on(machine).with_batch(factor) for name, measured in sizes.items()}
    machines = {name: reached(machine, measured.collectives) for name, measured in sizes.items()}
    rows = [[f"{n:,}", *(cell(predict(works[name], n, machines[name])) for name in sizes)] for n in gpus]
    batches = [least_batch(works[name], gpus[-1], machines[name]) for name in sizes]
    last = [f"{batch} x" if batch else "none" for batch in batches]
    rows.append([f"batch for {100 * GOOD:.0f} % on {gpus[-1]:,}", *last])
    return markdown_table(["GPUs", *sizes], rows)


def check_table(sizes):
    """Markdown: the model beside the measurement, at the number of GPUs that was measured."""
    rows = []
    for name, measured in sizes.items():
        ms = step_ms(measured.work, measured.processes, reached(MEASURED_ON, measured.collectives))
        difference = f"{100 * (ms / measured.ms - 1):+.1f} %"
        rows.append([name, f"{measured.processes}", number(ms), number(measured.ms), difference])
    return markdown_table(["", "GPUs", "model, ms a step", "measured", "difference"], rows)


def run(argv):
    parser = llama.Parser("scaling_model.py", __doc__)
    parser.add_argument("--machine", choices=list(MACHINES), default="h200", help="kind of node (default: h200)")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="of the result (default: all)")
    parser.add_argument("--gpus", type=positive, nargs="+", default=GPUS, metavar="N", help="(default: 8 to 1024)")
    parser.add_argument("--link", type=float, metavar="GB/s", help="of a GPU to those of its node, in one direction")
    parser.add_argument("--nic", type=float, metavar="GB/s", help="of a GPU's share of its node's network cards")
    parser.add_argument("--batch-factor", type=positive, default=1, metavar="N", help="times the measured batch")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="(default: benchmarks/results)")
    options = parser.parse_args(argv)
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


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(argv), "scaling_model.py")


if __name__ == "__main__":
    sys.exit(main())
