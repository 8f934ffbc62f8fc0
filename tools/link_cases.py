"""Cases of ``bench_links.py``: what crosses the link between two hosts, and its counted bytes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - traffic beside the runtime's
from bench_cases import SHAPES, make_loader, random_pairs
from bench_reshard import PAIRS, Models, Moves, llama
from dpo_steps import random_model
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.refit import reshard_model_weights
from one_model import accumulate_gradients

from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan, Topology
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.layout.weights import num_parameters
from puzzle_align.resharding.routing import RoutingTable
from puzzle_align.runtime.batches import DataBatches, data_view
from puzzle_align.runtime.context import Context, make_trainable
from puzzle_align.runtime.executor import schedule
from puzzle_align.runtime.groups.collectives import gather_everywhere
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.actions import Program, edge_of
from puzzle_align.stages.engine import resolve_engine

BYTES = 4  # of a number: all is in fp32
RANKS_PER_HOST = 2
Directions = tuple[int, int]  # bytes from the first host to the second, and back
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """Work that is done at every rate. All its functions are collective over the world.

    Args:
        counted: bytes that have to cross the link, asked after ``run``.
        before: what is done before each ``run``, unmeasured.
        is_right: whether ``run`` did what it should; asked after the unmeasured first turn.
        figures: more figures of the latest ``run``.
        has_first_turn: whether it is run once unmeasured, at the greatest rate.
        repeats: how often it is run at a rate; the shortest counts.
    """

    part: str
    name: str
    run: Callable[[], None]
    counted: Callable[[], Directions]
    before: Callable[[], None] = lambda: None
    is_right: Callable[[], bool] = lambda: True
    figures: Callable[[], dict[str, Any]] = dict
    has_first_turn: bool = True
    repeats: int = 1


def crossing(sizes: Mapping[tuple[int, int], int]) -> Directions:
    """Sum of what crosses the link, of sizes by (source, destination)."""
    by_host: Counter[tuple[int, int]] = Counter()
    for (source, destination), size in sizes.items():
        by_host[source // RANKS_PER_HOST, destination // RANKS_PER_HOST] += size
    return by_host[0, 1], by_host[1, 0]


def options_of_engine() -> ModelOptions:
    """Options of models on a CPU."""
    return resolve_engine(EngineConfig(device="cpu", attention="segments")).options


def open_rows(
    context: Context, dataset: ExampleDataset, row_tokens: int, pairs: int
) -> DataBatches:
    """Batches of ``pairs`` pairs in shared, packed rows."""
    loader = make_loader(dataset, "shared", True, row_tokens, pairs, data_view(context))
    return DataBatches(loader, "segments", context.device)


def pairs_of_rows(
    num_rows: int, num_steps: int, row_tokens: int, vocab_size: int
) -> ExampleDataset:
    """Pairs of equal lengths, two of which fill a row; ``num_rows`` rows a step."""
    half = row_tokens // 2
    lengths = half * 3 // 4, half // 8
    return random_pairs(num_steps, 2 * num_rows, lengths, 0.0, vocab_size)


class Training:
    """A model that is trained on random rows, a step at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        world: World,
        num_rows: int,
        row_tokens: int,
        *,
        sharded: bool = False,
    ) -> None:
        """Build the model. Collective over the world.

        Args:
            num_rows: microbatches of a step on every rank.
            sharded: whether the optimizer's state is (``use_distributed_optimizer``).
        """
        config = OptimizerConfig(use_distributed_optimizer=sharded)
        options = options_of_engine()
        self.context = random_model("actor", spec, options, plan, world, trained=True)
        make_trainable(self.context, config)
        self.optimizer = Optimizer(self.context, config)
        self.num_rows, self.row_tokens = num_rows, row_tokens
        dataset = pairs_of_rows(num_rows * plan.data, 1, row_tokens, spec.vocab_size)
        rows = open_rows(self.context, dataset, row_tokens, len(dataset)).rows(0)
        self.rows = rows
        assert len(rows) == num_rows

    def accumulate(self) -> None:
        """Compute the gradients of a step anew, without their sum over replicas."""
        self.optimizer.zero_grad()
        accumulate_gradients(self.context, self.rows, _mean)

    def update(self) -> None:
        """Update the weights by reduced gradients."""
        updated, _ = self.optimizer.step(1e-6)
        assert updated, "gradients of a fresh model are finite"

    def step(self) -> None:
        """Run a whole training step."""
        self.accumulate()
        self.optimizer.reduce_gradients()
        self.update()


def _mean(_row: RowInput, outputs: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def neighbours(world: World, _options: Options) -> Iterator[Case]:
    """Megabytes from one rank to the other of its host, which should not take the link."""
    values = torch.zeros(2**22)

    def run() -> None:
        if world.rank % RANKS_PER_HOST:
            dist.recv(values, world.rank - 1)
        else:
            dist.send(values, world.rank + 1)

    name = f"{values.nbytes / 1e6:.0f} MB to the other rank of the host"
    yield Case("one host", name, run, lambda: (0, 0))


def gradients(world: World, options: Options) -> Iterator[Case]:
    """Sums of gradients over replicas, and what a sharded optimizer gathers after its update."""
    spec = llama(options["hidden"] // 2, options["layers"])
    number = f"{num_parameters(spec) / 1e6:.0f}M"
    for (p, d, t), sharded in (((1, 4, 1), False), ((1, 4, 1), True), ((1, 2, 2), False)):
        plan = ParallelPlan(pipeline=p, data=d, tensor=t)
        training = Training(spec, plan, world, 1, options["row_tokens"], sharded=sharded)
        name = f"{number}, {_named(plan)}"
        whole, share = _rings(training.context, 2), _rings(training.context, 1)
        reduce = training.optimizer.reduce_gradients
        if not sharded:
            yield Case(
                "gradients",
                f"all-reduce, {name}",
                reduce,
                lambda whole=whole: whole,
                training.accumulate,
            )
            continue
        yield Case(
            "gradients",
            f"reduce-scatter, {name}",
            reduce,
            lambda share=share: share,
            training.accumulate,
        )
        yield Case(
            "gradients",
            f"all-gather of weights, {name}",
            training.update,
            lambda share=share: share,
            partial(_until_update, training),
        )


def _until_update(training: Training) -> None:
    training.accumulate()
    training.optimizer.reduce_gradients()


def _rings(context: Context, rounds: int) -> Directions:
    """Bytes of a ring's rounds over the replicas' buffers: 2 for an all-reduce."""
    wrappers: list[Any] = [*context.wrappers]
    own = sum(buffer.grad_data.nbytes for wrapper in wrappers for buffer in wrapper.buffers)
    sizes = gather_everywhere(own)
    on_edges: Counter[tuple[int, int]] = Counter()
    for group in Topology(context.plan, None).data_groups():
        for source, destination in zip(group, [*group[1:], group[0]], strict=True):
            on_edges[source, destination] += rounds * sizes[source] * (len(group) - 1) // len(group)
    return crossing(on_edges)


def pipelines(world: World, options: Options) -> Iterator[Case]:
    """Whole training steps of pipelines over the link."""
    spec = SHAPES["tiny"].spec
    for p, d, t in ((2, 2, 1), (2, 1, 2), (4, 1, 1)):
        plan = ParallelPlan(pipeline=p, data=d, tensor=t)
        training = Training(spec, plan, world, options["rows"], options["row_tokens"])
        name = f"{_named(plan)}, {options['rows']} rows of {options['row_tokens']}"
        sent = _by_lists(training)
        yield Case("pipeline", name, training.step, lambda sent=sent: sent, repeats=3)


def _by_lists(training: Training) -> Directions:
    """Bytes that the action lists of all pipelines send in a step."""
    context = training.context
    program = Program(context.role, training.num_rows, schedule=context.plan.schedule)
    size = BYTES * torch.Size(context.activation_shape(training.row_tokens)).numel()
    lists = schedule((program,), context.plan.pipeline)
    sent: Counter[tuple[int, int]] = Counter()
    for pipeline in Topology(context.plan, None).pipeline_groups():
        for place, actions in enumerate(lists):
            for action in actions:
                if action.kind.is_send:
                    edge = edge_of(action, place, len(lists))
                    sent[pipeline[edge.source], pipeline[edge.destination]] += size
    return crossing(sent)


def switches(world: World, options: Options) -> Iterator[Case]:
    """Switches of plans by routing table, Megatron's refit, all-gather and rank 0."""
    model = llama(options["hidden"], options["layers"])
    ranks = tuple(range(world.size))
    for pair in PAIRS[world.size]:
        before, after = (ParallelPlan(pipeline=p, data=d, tensor=t) for p, d, t in pair)
        source = Holdings(model, before, ranks)
        destination = Holdings(model, after, ordered_ranks(source, after, ranks, RANKS_PER_HOST))
        bucket = options["bucket"] * 2**20 // BYTES
        models = Models(source, destination, world, bucket, RANKS_PER_HOST)
        name = f"{num_parameters(model) / 1e6:.0f}M, {_named(before)} to {_named(after)}"
        for way, (run, counted) in _ways(models, world.rank).items():
            if way == "rank 0" and pair is not PAIRS[world.size][1]:
                continue  # the slowest by far, and the same for all pairs
            yield Case("switch", f"{name}, {way}", run, counted, models.clear, models.is_right)


class _HostCopies(GlooCopyService):
    """Megatron's transfers by gloo, without the CUDA stream that it makes for its copies."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gloo_pg = dist.group.WORLD
        self.send_ops, self.recv_ops = [], []
        self._copy_stream: Any = None


def _ways(
    models: Models, rank: int
) -> dict[str, tuple[Callable[[], None], Callable[[], Directions]]]:
    """Ways to make a switch, by name, and what each has to bring over the link."""
    moves, service = Moves(models), _HostCopies()
    broadcast = BYTES * num_parameters(models.source.model)  # once to the second host
    return {
        "routing table": (moves.by_table, lambda: _count(moves.by_table.table)),
        "Megatron's refit": (
            partial(reshard_model_weights, models.given, models.taken, service),
            partial(_refit_count, models, rank),
        ),
        "all-gather": (moves.by_all, lambda: _count(moves.to_all.table, moves.to_shard.table)),
        "rank 0": (
            moves.by_rank_zero,
            lambda: _count(moves.to_first.table, moves.to_shard.table, there=broadcast),
        ),
    }


def _count(*tables: RoutingTable, there: int = 0) -> Directions:
    """Bytes that the tables' routes bring over the link, and ``there`` more to the second host."""
    numbers: Counter[tuple[int, int]] = Counter()
    for table in tables:
        numbers += table.links
    first, second = crossing(numbers)
    return BYTES * first + there, BYTES * second


def _refit_count(models: Models, rank: int) -> Directions:
    """Bytes over the link by Megatron's plan, which its first switch has made."""
    plan: Any = vars(models.taken)["_cached_reshard_plan"]
    parameters = dict(models.taken.named_parameters())
    received: Counter[tuple[int, int]] = Counter()
    for receive in plan.recv_ops:
        box = parameters[receive.param_name].data[receive.my_slice]
        received[receive.peer_rank, rank] += box.nbytes
    return crossing(sum(gather_everywhere(received), Counter()))


def _named(plan: ParallelPlan) -> str:
    sizes = (("P", plan.pipeline), ("D", plan.data), ("T", plan.tensor))
    return " ".join(f"{letter}{size}" for letter, size in sizes if size > 1)


MAKERS = (neighbours, gradients, pipelines, switches)
