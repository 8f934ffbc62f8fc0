"""Models that move between plans on real ranks: bitwise what the new plan itself loads.

While their optimizer steps they move as if after it, only sooner.
"""

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Box, Shape, extents
from puzzle_align.layout.weights import tensor_shapes
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf.sources import RandomSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.shards import Shards, slices
from puzzle_align.resharding.rounds import Message, rounds
from puzzle_align.resharding.routing import RoutingTable, routing_table
from puzzle_align.runtime import reshard as reshard_module
from puzzle_align.runtime.context import Context, build_context
from puzzle_align.runtime.groups.world import Communicators, World, build_communicators
from puzzle_align.runtime.optimizer.optimizer import Optimizer, Update
from puzzle_align.runtime.reshard import Endpoints, reshard, reshard_beside
from tests.dist.random_models import plan as any_plan
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import MANY_HEADS, TINY

QWEN = replace(MANY_HEADS, num_hidden_layers=5)
TIED = replace(QWEN, tie_word_embeddings=True)
SCALAR = with_scalar_head(replace(QWEN, model_type="qwen3", attention_bias=False, qk_norm=True))
PHI3 = replace(QWEN, model_type="phi3", attention_bias=False)  # fused projections in its files
GEMMA = replace(TIED, model_type="gemma", attention_bias=False, norm_offset=1)
BUCKET = 1000  # numbers: most tensors need several
DIRECT = 128  # numbers: some boxes have as many, some more, some fewer, some have gaps
MIN_PART = 50  # numbers: norms go whole to one rank, all else is cut


class Move(NamedTuple):
    before: ParallelPlan
    after: ParallelPlan
    model: ModelSpec = QWEN
    ranks: tuple[int, ...] | None = None  # before; None: the first ones
    later: tuple[int, ...] | None = None  # after


def plan(
    pipeline: int, data: int, tensor: int, layers: tuple[int, ...] = (), chunks: int = 1
) -> ParallelPlan:
    """Five layers are not to be divided: as even as can be, the last ones shorter."""
    positions = pipeline * chunks
    if not layers and 5 % positions:
        layers = tuple(5 // positions + (n < 5 % positions) for n in range(positions))
    return any_plan(pipeline, data, tensor, chunks, layers=layers)


MOVES = {
    2: (
        Move(plan(2, 1, 1), plan(1, 1, 2)),
        Move(plan(1, 1, 2), plan(1, 2, 1)),
        Move(plan(1, 2, 1), plan(2, 1, 1), TIED),
        Move(plan(2, 1, 1), plan(1, 1, 2), TIED),
        Move(plan(2, 1, 1), plan(2, 1, 1, (2, 3)), SCALAR),
        Move(plan(2, 1, 1, chunks=2), plan(1, 1, 2), SCALAR),
        Move(plan(1, 1, 1), plan(1, 1, 1), TIED, (0,), (1,)),
        Move(plan(2, 1, 1), plan(1, 1, 2), PHI3),
        Move(plan(1, 1, 2), plan(2, 1, 1), GEMMA),
    ),
    4: (
        Move(plan(4, 1, 1), plan(2, 1, 2)),
        Move(plan(1, 2, 2), plan(4, 1, 1), SCALAR),
        Move(plan(2, 1, 1), plan(1, 1, 2), TIED, (0, 1), (2, 3)),
        Move(plan(1, 1, 2), plan(3, 1, 1), QWEN, (3, 0), (1, 0, 2)),
        Move(plan(2, 1, 2, chunks=2), plan(4, 1, 1, (1, 1, 1, 2)), TIED),
        Move(plan(1, 1, 1), plan(1, 3, 1), QWEN, (0,), (1, 2, 3)),  # broadcasts
    ),
}
# Others have each part of them: a cut of layers, of matrices, replicas, broadcasts to them.
MORE_MOVES = {
    4: (
        Move(plan(2, 1, 2), plan(1, 2, 2)),
        Move(plan(2, 2, 1), plan(1, 1, 4)),
        Move(plan(1, 1, 4), plan(2, 2, 1), TIED),
        Move(plan(1, 1, 1), plan(1, 2, 2), SCALAR, (0,), (0, 1, 2, 3)),
        Move(plan(1, 1, 2), plan(1, 4, 1), TIED),
        Move(plan(3, 1, 1), plan(2, 1, 1)),
    ),
    8: (
        Move(plan(1, 1, 8), plan(1, 4, 2)),
        Move(plan(2, 2, 2), plan(1, 8, 1), TIED),
        Move(plan(4, 2, 1), plan(1, 2, 4)),
        Move(plan(5, 1, 1), plan(1, 1, 8)),
        Move(plan(1, 1, 2), plan(1, 3, 2), TIED, (0, 1), (2, 3, 4, 5, 6, 7)),
    ),
}


class Distinct(RandomSource):
    """Weights of which no two are alike, norms and biases too."""

    def read(self, name: str, shape: Shape, box: Box) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values[slices(box)]


def placed(
    spec: ModelSpec,
    layout: ParallelPlan,
    world: World,
    communicators: Communicators | None,
    *,
    filled: bool,
    dtype: Dtype = "fp32",
) -> Context | None:
    """This rank's part, with its weights or with zeros; None on a rank that has none."""

    def fill(chunk: ModelChunk) -> None:
        if filled:
            load_weights(chunk, spec, Distinct(spec, 0))
        else:
            for parameter in chunk.parameters():
                parameter.data.zero_()

    if communicators is None:
        return None
    options = ModelOptions(dtype=dtype)
    return build_context(
        "actor", spec, options, layout, world, communicators=communicators, fill=fill
    )


def shards(context: Context | None) -> Shards | None:
    return None if context is None else Shards(context.chunks, context.spec)


def endpoints(source: Context | None, destination: Context | None, dtype: str) -> Endpoints:
    return Endpoints(shards(source), shards(destination), DTYPES[dtype], torch.device("cpu"))


def routing(before: Holdings, after: Holdings) -> RoutingTable:
    """In small buckets, and as if on nodes of two ranks, so that relays have relays behind them."""
    return routing_table(before, after, ranks_per_node=2, max_size=BUCKET, min_part=MIN_PART)


def move(
    before: Holdings,
    after: Holdings,
    source: Context | None,
    destination: Context | None,
    dtype: str = "fp32",
) -> None:
    table = routing(before, after)
    schedule = rounds(table.routes, BUCKET)
    with mock.patch.object(reshard_module, "DIRECT", DIRECT):
        reshard(table, schedule, endpoints(source, destination, dtype))


def values(context: Context | None) -> list[torch.Tensor]:
    chunks: Sequence[ModelChunk] = () if context is None else context.chunks
    return [value.detach().clone() for chunk in chunks for value in chunk.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _move_all(rank: int, world_size: int, moves: Sequence[Move]) -> list[bool]:
    world = World(rank, world_size, torch.device("cpu"))
    return [_moved(case, world, dtype) for case in moves for dtype in ("fp32", "bf16")]


def _holdings(case: Move) -> tuple[Holdings, Holdings]:
    ranks = case.ranks or tuple(range(case.before.world_size))
    later = case.later or tuple(range(case.after.world_size))
    return Holdings(case.model, case.before, ranks), Holdings(case.model, case.after, later)


def _moved(case: Move, world: World, dtype: Dtype) -> bool:
    before, after = _holdings(case)
    one, other = (
        build_communicators(each.plan, world, each.ranks, trained=False) for each in (before, after)
    )
    source = placed(case.model, case.before, world, one, filled=True)
    expected = values(placed(case.model, case.after, world, other, filled=True, dtype=dtype))
    destination = placed(case.model, case.after, world, other, filled=False, dtype=dtype)
    assert not expected or not same(values(destination), expected)
    move(before, after, source, destination, dtype)
    return same(values(destination), expected)


def _posted(rank: int, world_size: int) -> list[list[bool]]:
    """Of every batch of transfers in an exchange, whether they are sends, in order."""
    batches = []
    post = dist.batch_isend_irecv

    def noted(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append([operation.op is dist.isend for operation in operations])
        return post(operations)

    with mock.patch.object(dist, "batch_isend_irecv", noted):
        case = Move(plan(2, 1, 1), plan(1, 1, 2))
        assert _moved(case, World(rank, world_size, torch.device("cpu")), "fp32")
    return batches


def test_receives_are_posted_before_sends() -> None:
    """Gloo would let two ranks that exchange data take turns at sending."""
    for batches in run_ranks(_posted, 2):
        assert batches and all(sorted(batch) == batch for batch in batches)
        assert any(len({*batch}) == 2 for batch in batches)


@pytest.mark.parametrize("world_size", MOVES)
def test_a_moved_model_is_bitwise_the_loaded_one(world_size: int) -> None:
    for results in run_ranks(_move_all, world_size, MOVES[world_size]):
        assert results == [True] * 2 * len(MOVES[world_size])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MORE_MOVES)
def test_and_so_it_is_after_other_moves(world_size: int) -> None:
    for results in run_ranks(_move_all, world_size, MORE_MOVES[world_size]):
        assert results == [True] * 2 * len(MORE_MOVES[world_size])


def _read_all(rank: int, world_size: int) -> tuple[int, int]:
    """Boxes that this rank's parameters hold, each of them as the source has it; how many of them
    lie without a gap, so that they may be sent from there.
    """
    world = World(rank, world_size, torch.device("cpu"))
    num_read = num_direct = 0
    for case in MOVES[world_size] + MORE_MOVES[world_size]:
        before, _ = _holdings(case)
        groups = build_communicators(before.plan, world, before.ranks, trained=False)
        context = placed(case.model, before.plan, world, groups, filled=True)
        if context is None:
            continue
        own, shapes = Shards(context.chunks, context.spec), tensor_shapes(case.model)
        for tensor, boxes in before.holders.items():
            for box, ranks in boxes.items():
                if rank in ranks:
                    found = torch.empty(extents(box))
                    own.read(tensor, box, found)
                    expected = Distinct(case.model, 0).read(tensor, shapes[tensor], box)
                    assert torch.equal(found, expected), tensor
                    num_read += 1
                    direct = own.view(tensor, box, found.dtype)
                    if direct is not None:
                        assert direct.is_contiguous() and torch.equal(direct, found), tensor
                        num_direct += 1
                    assert own.view(tensor, box, torch.bfloat16) is None
    return num_read, num_direct


def test_boxes_are_what_megatron_s_parameters_hold() -> None:
    """That the boxes of all ranks are the whole model, tests/unit/test_routing.py shows."""
    for num_read, num_direct in run_ranks(_read_all, 4):
        assert num_read > 100 and num_read / 2 < num_direct < num_read


def _switch_often(rank: int, world_size: int, times: int) -> tuple[bool, int]:
    """Whether switches to and fro leave the weights as they were, and the bytes left behind."""
    world = World(rank, world_size, torch.device("cpu"))
    before, after = _holdings(Move(plan(2, 1, 1), plan(1, 1, 2), TIED))
    one, other = (
        build_communicators(each.plan, world, each.ranks, trained=False) for each in (before, after)
    )
    source = placed(TIED, before.plan, world, one, filled=True)
    assert source is not None
    at_first = values(source)
    held = 0
    for number in range(times):
        shadow = placed(TIED, after.plan, world, other, filled=False)
        assert shadow is not None
        move(before, after, source, shadow)
        for value in source.chunks[0].parameters():
            value.data.zero_()
        move(after, before, shadow, source)
        shadow.release()
        del shadow
        if number == 0:  # what is made once, at first
            held = _tensor_bytes()
    return same(values(source), at_first), _tensor_bytes() - held


def _shared(rank: int, world_size: int) -> tuple[bool, int, int]:
    """(2, 1, 2) to (1, 2, 2): a rank's layers of both plans are one storage, others their own."""
    world = World(rank, world_size, torch.device("cpu"))
    before, after = _holdings(Move(plan(2, 1, 2), plan(1, 2, 2)))
    one, other = (
        build_communicators(each.plan, world, each.ranks, trained=False) for each in (before, after)
    )
    source = placed(QWEN, before.plan, world, one, filled=True)
    expected = values(placed(QWEN, after.plan, world, other, filled=True))
    destination = placed(QWEN, after.plan, world, other, filled=False)
    assert source is not None and destination is not None
    at_first = values(source)
    Shards(source.chunks, QWEN).share(Shards(destination.chunks, QWEN))
    held = {value.data_ptr() for value in source.chunks[0].parameters()}
    shared = [value for value in destination.chunks[0].parameters() if value.data_ptr() in held]
    move(before, after, source, destination)
    right = same(values(destination), expected) and same(values(source), at_first)
    return right, len(shared), len(held)


def test_what_both_plans_have_in_one_form_is_not_copied() -> None:
    for right, shared, held in run_ranks(_shared, 4):
        assert right and shared > 0
        assert shared == held  # a rank's tensor shard is the same under both


def _tensor_bytes() -> int:
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


# The bytes are exact: what one more switch leaves is seen.
@pytest.mark.parametrize("times", [6, pytest.param(51, marks=pytest.mark.slow)])
def test_switches_leave_weights_as_they_were_and_nothing_behind(times: int) -> None:
    assert run_ranks(_switch_often, 2, times) == [(True, 0)] * 2


def test_the_same_plan_needs_no_transfer() -> None:
    for moves in (*MOVES.values(), *MORE_MOVES.values()):
        for case in moves:
            before, _ = _holdings(case)
            assert not routing_table(before, replace(before)).routes


SMALL_BUCKET = 500  # numbers
SWITCHES = (
    (
        Holdings(TINY, ParallelPlan(pipeline=2), (0, 1)),
        Holdings(TINY, ParallelPlan(tensor=2), (0, 1)),
    ),
    (Holdings(TINY, ParallelPlan(tensor=2), (0, 1)), Holdings(TINY, ParallelPlan(data=2), (1, 0))),
    (Holdings(TINY, ParallelPlan(), (0,)), Holdings(TINY, ParallelPlan(), (1,))),
)


@dataclass
class Ends:
    """A switch, and this rank's part of its two models."""

    source: Context | None
    destination: Context | None
    table: RoutingTable
    schedule: list[list[Message]]
    dtype: str

    def after(self) -> None:
        reshard(self.table, self.schedule, self._endpoints())

    def beside(self, update: Update) -> None:
        reshard_beside(self.table, self.schedule, self._endpoints(), update)

    def weights(self) -> list[torch.Tensor]:
        return values(self.destination)

    def _endpoints(self) -> Endpoints:
        return endpoints(self.source, self.destination, self.dtype)


def _open(world: World, before: Holdings, after: Holdings, dtype: str) -> Ends:
    models: list[Context | None] = []
    for number, each in enumerate((before, after)):
        communicators = build_communicators(each.plan, world, each.ranks, trained=number == 0)
        models.append(
            communicators
            and random_context(
                TINY, each.plan, world, seed=number, communicators=communicators, dtype=dtype
            )
        )
    table = routing_table(before, after, max_size=SMALL_BUCKET)
    return Ends(models[0], models[1], table, rounds(table.routes, SMALL_BUCKET), dtype)


def _optimizer(source: Context | None) -> Optimizer | None:
    if source is None:
        return None
    optimizer = trainable(source, OptimizerConfig(lr=0.01))
    for chunk in source.chunks:
        for number, parameter in enumerate(chunk.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    return optimizer


def _both_ways(rank: int, world_size: int) -> list[int]:
    """Rounds of every switch, each of which moved, bitwise, what it moves after the step."""
    world = World(rank, world_size, torch.device("cpu"))
    found = []
    for before, after in SWITCHES:
        for dtype in ("fp32", "bf16"):
            first, second = (_open(world, before, after, dtype) for _ in range(2))
            for ends, overlap in ((first, False), (second, True)):
                optimizer, at_first = _optimizer(ends.source), ends.weights()
                if optimizer is not None:
                    optimizer.step(0.01, ends.beside if overlap else None)
                elif overlap:
                    ends.beside(lambda _: None)
                if not overlap:
                    ends.after()
                moved = [
                    not torch.equal(*two) for two in zip(at_first, ends.weights(), strict=True)
                ]
                # All but embedding and head of a tensor rank whose part of them is padding.
                assert sum(moved) >= len(moved) - 2
            assert same(first.weights(), second.weights())
            found.append(len(second.schedule))
    return found


def test_a_switch_beside_the_step_is_bitwise_the_one_after_it() -> None:
    for found in run_ranks(_both_ways, 2):
        assert min(found) > 3


def _until(arrived: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not arrived():
        assert time.monotonic() < deadline, "not within 30 s"
        time.sleep(0.01)


def _first_before_last(rank: int, world_size: int) -> int:
    """Rank 0 goes on to its second part when rank 1 has said that something of the first is there.

    Returns the parts that this rank updated after that.
    """
    world = World(rank, world_size, torch.device("cpu"))
    ends = _open(world, *SWITCHES[-1], "fp32")
    optimizer, at_first = _optimizer(ends.source), ends.weights()
    store = dist.distributed_c10d._get_default_store()
    parts: list[int] = []  # parameters of each

    def step_when_there(update: Update) -> None:
        known: set[int] = set()

        def wait_and_update(parameters: Sequence[torch.Tensor] | None) -> None:
            new = {id(parameter) for parameter in parameters or ()} - known
            if new and known:
                _until(lambda: store.check(["arrived"]))
                parts.append(len(new))
            known.update(new)
            update(parameters)

        ends.beside(wait_and_update)

    def tell(_: object) -> None:
        _until(lambda: not all(map(torch.equal, at_first, ends.weights())))
        store.set("arrived", "")

    if optimizer is None:
        ends.beside(tell)
    else:
        optimizer.step(0.01, step_when_there)
    return sum(parts)


def test_weights_arrive_before_others_are_updated() -> None:
    after, _ = run_ranks(_first_before_last, 2)
    assert after > 5
