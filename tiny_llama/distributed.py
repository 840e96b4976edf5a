"""Several processes, one a device, started by torchrun: data parallel, each with its own batch.

With our kernels, each process keeps a share of the optimizer's state and updates its share of the weights (ZeRO stage
1: Rajbhandari et al., arXiv:1910.02054). Plain PyTorch runs under DistributedDataParallel or, with --shard full, FSDP2.
All messages go through torch.distributed: weights and gradients over NCCL (RCCL on ROCm), or over gloo on a CPU; what
the hosts agree on, outside of what is timed, over gloo.
"""

import contextlib
import dataclasses
import functools
import gc
import os
import platform
import re
import signal
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

import tiny_llama_v3 as llama
from tiny_llama import hardware
from tiny_llama_v3 import UsageError

TORCHRUN = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT".split()  # what torchrun sets for its processes
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # by torchrun: how often it has started them again
FIND_SECONDS = llama.Config().comm_timeout  # how long processes wait until all have started
# Of a message: at least, because products for the gradients of few small layers leave multiprocessors idle, and at
# most; with a quarter of that, a large step takes 0.5 % longer on two H200.
FEWEST_ELEMENTS, MOST_ELEMENTS = 10_000_000, 256_000_000
LOST_PEER = "Connection (closed|reset|refused)|[Tt]imed? ?out|Broken pipe|NCCL"  # in errors of gloo and NCCL
# Renamed in PyTorch 2.13. A PyTorch without torch.distributed has neither.
reduce_scatter = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))
all_gather = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))


# ----------------------------------------------------------------------------------------------------------------------
# The processes


@dataclasses.dataclass(eq=False)
class World(llama.OneProcess):
    """This process's rank among those that train together, and how it communicates with the others."""

    capture_mode = "thread_local"  # NCCL's watchdog may query an event meanwhile, in its own thread

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: object = None  # the key-value store of torchrun, or else of rank 0
    backend: str = None  # of weights and gradients: "nccl" or "gloo"
    control: object = None  # the process group of the hosts
    has_copies: bool = False  # whether weights travel by the GPUs' copy engines
    stop_requested: int = None  # the signal that did, of Ctrl-C or SIGTERM

    def select_device(self, requested):
        """Return the torch.device of --device, of several GPUs this process's; UsageError if it is not there."""
        if requested != "cpu" and torch.cuda.is_available():
            count = torch.cuda.device_count()
            if self.local_rank >= count:
                raise UsageError(
                    f"there are {count} GPUs here, and this is process {self.local_rank + 1} of this node: "
                    "lower --nproc_per_node of torchrun, or give --device cpu"
                )
            torch.cuda.set_device(self.local_rank)
        return llama.select_device(requested)

    def find(self, seconds=FIND_SECONDS):
        """Connect to the store, where the processes find each other. UsageError if not all have within so long."""
        with finding_each_other():
            rendezvous = dist.rendezvous("env://", timeout=timedelta(seconds=seconds))
            # In a thread: if another program listens on the port, the handshake in C++ heeds no timeout and no signal.
            store, *_ = ThreadPoolExecutor(1).submit(next, rendezvous).result(seconds + 2)
            # With --max-restarts torchrun starts all again with one store, which has the dead processes' addresses.
            self.store = dist.PrefixStore(f"attempt {os.environ.get(ATTEMPT, 0)}", store)

    def join(self, device, timeout, backend=None):
        """Form process groups with the others; timeout in seconds. UsageError if they cannot be reached."""
        if self.size == 1:
            return
        self.backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        limit = timedelta(seconds=timeout)
        options = dict(store=self.store, rank=self.rank, world_size=self.size)
        if self.backend == "nccl":
            # NCCL's kernels go first: all processes wait for them, and they leave most multiprocessors free.
            nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            # Gathering needs no kernel on one host, since NCCL 2.28: the GPUs' copy engines move what make_weights()
            # has registered. RCCL was not tried.
            policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
            self.has_copies = policy is not None and is_one_host() and not torch.version.hip
            if self.has_copies:
                nccl.config.cta_policy = policy
            options |= dict(pg_options=nccl, device_id=torch.device("cuda", self.local_rank))
        with finding_each_other():
            dist.init_process_group(self.backend, timeout=limit, **options)
            self.control = dist.new_group(backend="gloo", timeout=limit)

    def require_same(self, config, flag_of=llama.flag_of):
        """Raise UsageError if a process was given another configuration, a dataclass."""
        first, *others = map(dataclasses.asdict, self.gather(config))
        for rank, flags in enumerate(others, 1):
            differing = [name for name in flags if flags[name] != first[name]]
            if differing:
                values = ", ".join(f"{flag_of(name)} {flags[name]} and not {first[name]}" for name in differing)
                raise UsageError(f"rank {rank} was given {values} as rank 0: start all with the same flags")

    def leave(self):
        """End what join() began, after all processes have done the same work."""
        if self.size > 1:
            self.gather(None)  # torchrun ends all processes when one ends: rank 0 must have written its files
            gc.collect()  # a communicator must outlive the graphs that have captured it
            dist.destroy_process_group()

    def gather(self, value):
        """Return [the value of each process], on all of them."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def mean(self, values):
        """Average a list of numbers over the processes, added in the order of their ranks."""
        return [statistics.fmean(column) for column in zip(*self.gather(values), strict=True)]

    def handle_signals(self):
        """From now on, Ctrl-C and SIGTERM only ask for all processes to stop, because they come in different steps."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.request_stop)

    @contextlib.contextmanager
    def deferring_signals(self, is_needed):
        """Handle signals from now on: no process may end before the others, whatever they do after the training."""
        self.handle_signals()
        yield

    def request_stop(self, number, frame):
        """Handle a signal. A launcher sends several."""
        self.stop_requested = number

    def must_stop(self):
        """Return whether a process was asked to stop. All must call this as often."""
        return any(self.gather(self.stop_requested))

    def is_first_to_fail(self):
        """Return whether no other process has called this before; True where there is no store, or it has ended."""
        with contextlib.suppress(UsageError), finding_each_other():
            return self.store.add("failures", 1) == 1
        return True

    # What a training step and its run ask for, as llama.OneProcess describes it.

    def find_device(self, config):
        """Return the torch.device of this process, connected to the others."""
        device = self.select_device(config.device)
        self.join(device, config.comm_timeout)
        self.require_same(config)
        llama.validate_on_device(config, device)
        is_triton = llama.select_operations(config, device)[0] == "triton"
        if config.shard == "full" and is_triton:
            raise UsageError("--shard full is for --impl torch and sdpa: --impl triton shards the optimizer's state")
        if config.shard == "optimizer" and not is_triton:
            raise UsageError("--shard optimizer is for --impl triton: leave it out, or give --shard full")
        if config.graph and not is_triton:
            raise UsageError("--graph with several processes is for --impl triton: drop --graph")
        return device

    def check(self, config, device):
        """Check the mean gradients that all processes train with."""
        reference = "fp32" if config.use_amp else "fp64"
        batch = next(self.batches(config))
        verdict, exact = llama.check_batch(config, device, batch)
        for tensor in exact.values():
            dist.all_reduce(tensor.div_(self.size))
        results = llama.loss_and_gradients(llama.TrainStep(config, device, self), batch)
        (results["loss"],) = self.mean([results["loss"].item()])
        # One verdict for all: what plain PyTorch allows depends on a process's rows.
        verdict = self.gather(verdict)[0]
        verdict = verdict._replace(errors=verdict.errors | llama.relative_errors(results, exact))
        llama.print_verdict(verdict, f"{reference}, the mean of {self.size} processes")
        return not verdict.failed

    def batches(self, config):
        """Yield this process's rows of the batches of all: N processes with b rows see what one does with N * b."""
        rows = slice(self.rank * config.sequences_per_step, (self.rank + 1) * config.sequences_per_step)
        for batch in llama.batches(dataclasses.replace(config, batch_size=self.size * config.batch_size)):
            yield [tensor[rows] for tensor in batch]

    def parallelize(self, step):
        """Return what gives the mean gradients of all processes where PyTorch's operators compute.

        It is DistributedDataParallel or, with --shard full, the model itself after FSDP2's fully_shard.
        """
        config, model, kind = step.config, step.model, step.device.type
        if step.implementation == "triton":
            return model
        if config.shard != "full":
            return nn.parallel.DistributedDataParallel(
                model,
                device_ids=[self.local_rank] if kind == "cuda" else None,
                gradient_as_bucket_view=True,
                # The compiler splits its graphs at DistributedDataParallel's buckets only where these may change. Of
                # several micro-batches only the last exchanges gradients.
                static_graph=not config.compile and config.accumulate == 1,
            )
        from torch.distributed.device_mesh import init_device_mesh  # takes a second to import
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = torch.bfloat16 if config.use_amp else None  # of weights and of gradients
        policy = MixedPrecisionPolicy(dtype, dtype, cast_forward_inputs=False)
        shard = functools.partial(fully_shard, mesh=init_device_mesh(kind, (self.size,)), mp_policy=policy)
        for layer in model.layers:
            shard(layer)
        return shard(model)

    def layers_by_bucket(self, model):
        """Return the layers of each bucket: the gradients of a group are there together."""
        return [bucket.layers for bucket in make_buckets(model)]

    def make_flat_adamw(self, config):
        """Return a ShardedAdamW."""
        # The compiler does not call hooks: no message is hidden then.
        return ShardedAdamW(**llama.optimizer_options(config), world=self, overlaps=not config.compile)

    def begin_forward(self, step, is_first=True, is_last=True):
        """Gather the weights of all processes, or begin to, and let only the last backward pass exchange gradients.

        All processes must call it.
        """
        if isinstance(step.optimizer, ShardedAdamW):
            step.optimizer.begin_forward(is_first, is_last)
        elif step.config.shard == "full":
            step.model.set_requires_gradient_sync(is_last)
        else:
            step.replica.require_backward_grad_sync = is_last  # as its no_sync() does

    def finish_backward(self, optimizer):
        """Wait until the gradients of all processes are added up."""
        if isinstance(optimizer, ShardedAdamW):
            optimizer.finish_reduction()

    def collect_gradients(self, optimizer):
        """Fill .grad with the mean gradients; all processes must call it, once a step."""
        if isinstance(optimizer, ShardedAdamW):
            optimizer.gather_gradients()

    def reset(self, optimizer, weights):
        """Start over from these weights; of those that FSDP2 shares out, each process copies its part."""
        with taking_parts(optimizer):
            super().reset(optimizer, weights)

    def load_state(self, optimizer, state):
        """Give an optimizer a state, as reset() does the weights."""
        with taking_parts(optimizer):
            super().load_state(optimizer, state)

    def report(self, summary):
        """Print and return what the processes did together, a dict for the JSON file."""
        world = summarize_processes(self, summary)
        print(f"Processes: {world['size']} over {world['backend']}; the figures above are those of rank 0")
        speed, slowest = world["tokens_per_second"], world["slowest"]
        print(f"Throughput of all: {speed:,.0f} tokens/sec, {speed / world['size']:,.0f} a process")
        if slowest:
            print(f"Communication that was not hidden: {world['exposed_communication_ms']:.3f} ms a step")
            print(f"Slowest process: rank {slowest['rank']}, {slowest['behind_ms']:.3f} ms a step behind the fastest")
        else:
            print("Communication that was not hidden: not measured")
        print(f"Peak memory of the fullest process: {world['peak_memory_mib']:.1f} MiB")
        return world


def is_one_host():
    """Return whether torchrun started all processes here."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def taking_parts(optimizer):
    """Return a context in which a whole tensor can be copied to one that FSDP2 shares out."""
    if not any(hasattr(p, "full_tensor") for p in optimizer.parameters):
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication  # as in parallelize()

    return implicit_replication()


def first_line(error):
    """Return the first line of an error's text; those of PyTorch go on with a stack trace."""
    return str(error).split("\n")[0]


@contextlib.contextmanager
def finding_each_other():
    """Raise UsageError for what keeps processes from finding each other: the environment, the network, the time.

    What PyTorch logs meanwhile is discarded: a stack trace in C++ for each attempt.
    """
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        yield
    except Exception as error:
        given = " ".join(f"{name}={os.environ.get(name, '')}" for name in TORCHRUN)
        raise UsageError(
            f"the processes do not find each other with {given} ({first_line(error) or 'no answer'}): "
            "start them with torchrun, or unset these for a single one"
        ) from error
    finally:
        os.dup2(stderr, 2)


def launched():
    """Return the World of torchrun's environment, not connected yet. UsageError if the environment is incomplete."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return World()
    with finding_each_other():
        size, rank, local_rank = int(size), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        if not 0 <= rank < size:
            raise ValueError("RANK is not below WORLD_SIZE")
    if rank:  # only rank 0 prints
        sys.stdout = open(os.devnull, "w", errors="replace")
    return World(rank, size, local_rank)


def exit_now(exit_code):
    """End this process at once: to tear down, or to free a graph that is running, would wait for the others."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(exit_code)


def reason_of(error):
    """Return what to say of an error in one line; None if it is a fault of the program."""
    if hasattr(error, "exit_code"):  # UsageError, for example
        return str(error)
    if re.search(LOST_PEER, str(error)):
        return f"another process has ended, or does not answer ({first_line(error)})"
    return str(error) if isinstance(error, OSError) else None


def run_together(job, program, seconds=FIND_SECONDS):
    """Call job(World of torchrun's processes), which find each other in so many seconds. Return its exit code.

    In one of several processes an error ends the process at once. The first process to fail prints it in one line, and
    not those that fail as a consequence; a fault of the program has its traceback.
    """
    world = launched()
    if world.size == 1:
        return job(world)
    try:
        world.find(seconds)
        exit_code = job(world)
        world.leave()
        return exit_code
    except KeyboardInterrupt:
        exit_now(130)
    except BrokenPipeError:
        exit_now(141)
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            traceback.print_exc()
            exit_now(1)
        if world.is_first_to_fail():
            print(f"{program}: error: rank {world.rank}: {reason}", file=sys.stderr, flush=True)
        if world.rank == 0:
            time.sleep(1)  # its store may end with it: the others can ask until then whether they are the first
        exit_now(getattr(error, "exit_code", 2))


# ----------------------------------------------------------------------------------------------------------------------
# AdamW, sharded


class Bucket:
    """Consecutive parameters whose gradients and weights travel in one message.

    Its parts of the optimizer's flat buffers: all_weights and all_grads (elements,); of this process own_weights and
    own_grads (elements / processes,).
    """

    gathering = None  # of the weights, while it is under way
    reduction = None  # of the gradients, while it is under way
    is_reduced = False  # or being reduced: since zero_grad()

    def __init__(self, parameters, layers):
        self.parameters, self.layers = parameters, layers


def make_buckets(model):
    """Return [Bucket] of all parameters, in their order. The embedding is in the first, an untied head in the last.

    No computation is left to hide the first bucket's messages behind, so it is short, of FEWEST_ELEMENTS or more. Each
    further one may be twice as large as all before it together, up to MOST_ELEMENTS; a larger layer has one of its own.
    """
    first, *layers = model.layers
    buckets = [Bucket([*model.embed_tokens.parameters(), *first.parameters()], [first])]
    before = 0  # elements in those before the last
    for layer in layers:
        parameters, last = list(layer.parameters()), buckets[-1]
        elements = llama.count_weights(last.parameters)
        longer = elements + llama.count_weights(parameters)
        if longer > min(2 * before, MOST_ELEMENTS) if before else elements >= FEWEST_ELEMENTS:
            before += elements
            last = Bucket([], [])
            buckets.append(last)
        last.parameters += parameters
        last.layers.append(layer)
    buckets[-1].parameters += [*model.norm.parameters(), *(model.lm_head.parameters() if model.lm_head else ())]
    return buckets


class ShardedAdamW(llama.FlatAdamW):
    """FlatAdamW of several processes. Each has the moments of its own slices of the buckets, and updates their weights.

    Gradients are added up and scattered while the backward pass runs, weights gathered while the next forward pass
    does, both in the model's precision. finish_reduction() comes before step().
    """

    def __init__(self, *args, world, overlaps=False, **options):
        self.world, self.overlaps = world, overlaps
        super().__init__(*args, **options)

    def own(self, model):
        """As FlatAdamW.own(). If it overlaps, messages travel beside the computation from now on, by hooks."""
        world, self.buckets = self.world, make_buckets(model)
        self.num_first = len(self.buckets)  # that are gathered before the forward pass, and not by hooks
        if self.overlaps:
            self.num_first = 1
            # A group is called in place of its layers.
            groups = {group.layers[0]: group for group in getattr(model.layers, "groups", ())}
            for index, bucket in enumerate(self.buckets[1:], 1):
                caller = groups.get(bucket.layers[0], bucket.layers[0])
                caller.register_forward_pre_hook(functools.partial(self._before_bucket, index))
        super().own(model, [bucket.parameters for bucket in self.buckets], (world.rank, world.size))
        for bucket, elements in zip(self.buckets, self.bucket_slices, strict=True):
            bucket.all_weights, bucket.all_grads = both = self.param[elements], self.grad[elements]
            bucket.own_weights, bucket.own_grads = (flat.chunk(world.size)[world.rank] for flat in both)

    def make_weights(self, *size, **options):
        """As FlatAdamW.make_weights(); registered, if copy engines move them: then all processes must call it."""
        if not self.world.has_copies:
            return super().make_weights(*size, **options)
        backend = dist.group.WORLD._get_backend(options["device"])
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self.pool):
            weights = super().make_weights(*size, **options)
        backend.register_mem_pool(self.pool, symm=True)
        return weights

    def each_weight(self):
        """Yield the weights as FlatAdamW.each_weight(); all processes must call it."""
        # Asynchronous also here: copy engines refuse the default stream, on which synchronous messages are.
        self.gather_weights(self.buckets)
        for bucket in self.buckets:
            self.wait_for_weights(bucket)
        yield from super().each_weight()

    def gather(self, flat):
        """Return the blocks of all processes in one buffer; all must call it."""
        size = self.world.size
        # Integers of 16 bits are called bf16 here, as messages have none.
        flat, dtype = flat.view(torch.bfloat16) if flat.dtype == torch.int16 else flat, flat.dtype
        everything = flat.new_empty(size * len(flat))
        for elements in self.bucket_slices:  # whose own parts lie one after the other
            all_gather(everything[elements], flat[elements.start // size : elements.stop // size])
        return everything.view(dtype)

    def zero_grad(self):
        """Let the next backward pass overwrite the gradients, and reduce them."""
        super().zero_grad()
        for bucket in self.buckets:
            bucket.is_reduced = False

    def gather_weights(self, buckets):
        """Begin to gather the weights of these buckets that other processes have updated."""
        for bucket in buckets:
            bucket.gathering = all_gather(bucket.all_weights, bucket.own_weights, async_op=True)

    def wait_for_weights(self, bucket):
        """Wait until those of a bucket are there."""
        if bucket.gathering:
            bucket.gathering.wait()
            bucket.gathering = None

    def reduce_gradients(self, bucket):
        """Begin to add up the gradients of a bucket, which all must have been computed."""
        self.collect_gradients(bucket.parameters)
        if bucket.is_reduced:
            raise RuntimeError("a second backward pass would add to reduced gradients: call zero_grad() before it")
        bucket.is_reduced = True
        bucket.reduction = reduce_scatter(bucket.own_grads, bucket.all_grads, async_op=True)

    @torch.no_grad()
    def finish_reduction(self):
        """At the end of the backward pass: reduce what was not reduced during it, and wait for all of it."""
        for bucket in reversed(self.buckets):
            if not bucket.is_reduced:
                self.reduce_gradients(bucket)
        for bucket in reversed(self.buckets):
            bucket.reduction.wait()
            bucket.reduction = None

    @torch.no_grad()
    def gather_gradients(self):
        """After step(): fill .grad, which is a view of all_grads, with the mean gradients of all processes."""
        for bucket in self.buckets:
            bucket.own_grads.div_(self.gradient_count)
            all_gather(bucket.all_grads, bucket.own_grads)

    def sum_norm(self):
        """Return the norm of the sum of the gradients of all processes; all must call it."""
        square = llama.total_norm([bucket.own_grads for bucket in self.buckets]).square()
        dist.all_reduce(square)
        return square.sqrt()

    def begin_forward(self, is_first=True, is_last=True):
        """Gather the weights of all buckets or, if it overlaps, begin with the first two, and wait for the first.

        Do so for the first micro-batch of a step, and reduce the gradients in the backward pass of the last.
        """
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.gather_weights(self.buckets[: self.num_first + 1])
            for bucket in self.buckets[: self.num_first]:
                self.wait_for_weights(bucket)

    def _before_bucket(self, index, module, inputs):
        # A bucket is gathered while the one before is in use. If all were gathered at once, the host would issue the
        # first layer late, and the kernels that need all multiprocessors would have to wait.
        bucket = self.buckets[index]
        if self.is_first:
            self.wait_for_weights(bucket)
            self.gather_weights(self.buckets[index + 1 : index + 2])
        if self.is_last and inputs[0].requires_grad:  # its gradient comes after those of the module's weights
            inputs[0].register_hook(lambda grad: self.reduce_gradients(bucket))


# ----------------------------------------------------------------------------------------------------------------------
# A run


def summarize_processes(world, summary):
    """Return what the processes of a World did together, a dict for the JSON file, from the summary of each."""
    batch_ms, kernels = summary["batch_ms"], summary["kernels"]
    # Not known on a CPU, where no kernels are counted.
    exposed_ms = kernels.pop("exposed_communication_ms") if isinstance(kernels, dict) else None
    own = dict(
        rank=world.rank,
        host=platform.node(),
        batch_ms=batch_ms,
        exposed_communication_ms=exposed_ms,
        own_ms=None if exposed_ms is None else batch_ms["p50"] - exposed_ms,
        tokens_per_second=summary["tokens_per_second"],
        peak_memory_mib=summary["peak_memory_mib"],
        energy=summary["energy"],
    )
    processes = world.gather(own)
    columns = {name: [process[name] for process in processes] for name in own}
    slowest = exposed_ms = None
    own_ms = columns["own_ms"]
    # A step takes as long on all processes: the slowest one is that which waits least for the others.
    if None not in own_ms:
        slowest = {"rank": own_ms.index(max(own_ms)), "behind_ms": max(own_ms) - min(own_ms)}
        exposed_ms = max(columns["exposed_communication_ms"])
    return dict(
        size=world.size,
        backend=world.backend,
        exposed_communication_ms=exposed_ms,
        slowest=slowest,
        tokens_per_second=world.size * min(columns["tokens_per_second"]),
        peak_memory_mib=max(memory or 0 for memory in columns["peak_memory_mib"]),
        processes=processes,
    )


def main(argv, program):
    """Run a command line of the script in one of several processes, and return the exit code."""

    def job(world):
        return hardware.remedied(llama.parse_config(argv, program), llama.train_and_report, world)

    # Processes must find each other before the flags are read, so that only one complains about them.
    given = re.findall(r"--comm-timeout[ =](\d+)", " ".join(argv))
    return run_together(job, Path(program).name, *map(int, given[-1:]))
