"""Main weights that a distributed optimizer shards, against Megatron-core's own on real ranks.

After a step, the layout's boxes of them are the whole model, and they move to another plan bitwise
as the whole main weights, rounded, would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.main_weights import Buckets, MainWeightHoldings
from puzzle_align.layout.model import Dtype, ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import extents
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import routing_table
from puzzle_align.runtime import context as contexts
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.world import Communicators, World, build_communicators
from puzzle_align.runtime.optimizer.main_shards import MainShards
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.reshard import Endpoints, reshard, reshard_beside
from tests.dist.random_models import plan, random_context, trainable
from tests.dist.spawn import run_ranks
from tests.dist.test_reshard import same, shards, values
from tests.specs import MANY_HEADS

TIED = replace(MANY_HEADS, tie_word_embeddings=True)
SCALAR = with_scalar_head(
    replace(MANY_HEADS, model_type="qwen3", attention_bias=False, qk_norm=True)
)
BUCKET = 2000  # numbers: a table needs several rounds


class Case(NamedTuple):
    before: ParallelPlan
    after: ParallelPlan
    model: ModelSpec = MANY_HEADS


ON_TWO, ON_FOUR, MORE_ON_FOUR = (
    (
        Case(plan(1, 2, 1), plan(2, 1, 1)),
        Case(plan(1, 2, 1), plan(1, 1, 2), TIED),
        Case(plan(1, 2, 1), plan(1, 2, 1), SCALAR),
        Case(plan(2, 1, 1), plan(1, 1, 2), TIED),
    ),
    (
        Case(replace(plan(1, 2, 2), sequence_parallel=True), plan(2, 2, 1), TIED),
        Case(plan(2, 2, 1, chunks=2), plan(2, 1, 2)),
        Case(plan(1, 3, 1), plan(2, 2, 1)),
    ),
    # Others have each part of them.
    (
        Case(plan(2, 2, 1), plan(1, 2, 2), TIED),
        Case(plan(2, 2, 1), plan(1, 1, 4), SCALAR),
        Case(plan(1, 2, 2), plan(4, 1, 1)),
        Case(plan(2, 2, 1, chunks=2), plan(1, 4, 1), TIED),
    ),
)
SMALL = Buckets(overlapped=True, size=500)


class Variant(NamedTuple):
    dtype: Dtype
    buckets: Buckets
    state_dtype: Dtype = "fp32"


VARIANTS = (
    Variant("fp32", Buckets()),
    Variant("bf16", SMALL),
    Variant("bf16", SMALL, "bf16"),
)
MORE_VARIANTS = (Variant("fp32", SMALL), Variant("bf16", Buckets(overlapped=True)))


def ready(context: Context, variant: Variant) -> Optimizer:
    """The model's optimizer, with reduced gradients: random ones, each rank's its own."""
    buckets = variant.buckets
    config = OptimizerConfig(
        lr=0.01,
        use_distributed_optimizer=True,
        overlap_grad_reduce=buckets.overlapped,
        state_dtype=variant.state_dtype,
    )
    sized = partial(DistributedDataParallelConfig, bucket_size=buckets.size)
    with mock.patch.object(contexts, "DistributedDataParallelConfig", sized):
        optimizer = trainable(context, config)
    for wrapper, chunk in zip(context.wrappers, context.chunks, strict=True):
        for name, value in chunk.named_parameters():
            seed = sum(name.encode()) * 100 + context.pipeline_rank * 10 + context.data_rank
            values = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
            value.main_grad.copy_(values)
        if buckets.overlapped:  # as the backward pass would have
            wrapper.start_grad_sync()
    optimizer.reduce_gradients()
    return optimizer


def stepped(context: Context, variant: Variant) -> Optimizer:
    optimizer = ready(context, variant)
    assert optimizer.step(0.01)[0]
    return optimizer


def main_parts(optimizer: Optimizer) -> Iterator[tuple[Tensor, tuple[int, int], Tensor]]:
    """Model parameter, range and main weights, as Megatron-core's optimizer has them here."""
    for part in optimizer.megatron.chained_optimizers:
        small = optimizer.config.state_dtype == "bf16"
        for models, mains in (
            (
                part.model_float16_groups,
                part.shard_float16_groups if small else part.shard_fp32_from_float16_groups,
            ),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for parameter, shard in zip(chain(*models), chain(*mains), strict=True):
                found = part._get_model_param_range_map(parameter)["param"]
                yield parameter, (found.start, found.end), shard.detach()


def check_ranges(optimizer: Optimizer, holdings: MainWeightHoldings, rank: int) -> None:
    expected = {id(parameter): numbers for parameter, numbers, _ in main_parts(optimizer)}
    for of_chunk, chunk in zip(holdings.shards(rank), optimizer.context.chunks, strict=True):
        named = {name: id(value) for name, value in chunk.named_parameters()}
        for shard in of_chunk:
            numbers = expected.pop(named[shard.parameter.name])
            assert numbers == shard.numbers, (shard.parameter.name, numbers, shard.numbers)
    assert not expected
    if holdings.buckets == SMALL and optimizer.context.pipeline_rank == 0:
        assert len(optimizer.megatron.chained_optimizers[0].buffers[0].buckets) > 2


def whole_main(optimizer: Optimizer) -> list[list[Tensor]]:
    """The main weights of every chunk's parameters, gathered by Megatron-core's ranges."""
    order = [id(value) for chunk in optimizer.context.chunks for value in chunk.parameters()]
    own = [(order.index(id(p)), span, main) for p, span, main in main_parts(optimizer)]
    group = optimizer.context.groups.dp
    gathered: list[list] = [[] for _ in range(group.size())]
    dist.all_gather_object(gathered, own, group=group)
    found = [
        [value.new_empty(value.shape, dtype=torch.float32) for value in c.parameters()]
        for c in optimizer.context.chunks
    ]
    flat = [value.view(-1) for chunk in found for value in chunk]
    counts = [torch.zeros(value.shape, dtype=torch.int) for value in flat]
    for number, (start, end), main in (part for parts in gathered for part in parts):
        flat[number][start:end] = main
        counts[number][start:end] += 1
    assert all((count == 1).all() for count in counts)
    return found


def leave_shards_alone(optimizer: Optimizer) -> None:
    """Make the model's weights what they are before they are gathered: others' shards unknown."""
    kept = [(main, main.clone()) for _, _, main in main_parts(optimizer)]
    for chunk in optimizer.context.chunks:
        for value in chunk.parameters():
            value.data.fill_(torch.nan)
    for main, before in kept:  # in fp32 a view of the model's weights
        main.copy_(before)


def move(
    before: Holdings, after: Holdings, source: Shards | None, to: Context | None, dtype: str
) -> list[Tensor]:
    """The destination's weights after they have come from the source."""
    table = routing_table(before, after, max_size=BUCKET)
    ends = Endpoints(source, shards(to), DTYPES[dtype], torch.device("cpu"))
    reshard(table, rounds(table.routes, BUCKET), ends)
    return values(to)


def built(
    case: Case,
    world: World,
    layout: ParallelPlan,
    groups: Communicators | None,
    dtype: str,
    seed: int,
) -> Context | None:
    if groups is None:
        return None
    return random_context(case.model, layout, world, seed=seed, communicators=groups, dtype=dtype)


def _prove(
    rank: int, world_size: int, cases: Sequence[Case], variants: Sequence[Variant]
) -> list[int]:
    """Boxes that this rank read, by case and variant."""
    world = World(rank, world_size, torch.device("cpu"))
    num_read = []
    for case in cases:
        before, after = (range(each.world_size) for each in (case.before, case.after))
        trained = build_communicators(case.before, world, before, trained=True)
        groups = build_communicators(case.after, world, after, trained=False)
        for variant in variants:
            num_read.append(_proved(case, world, trained, groups, variant))
    return num_read


def _proved(
    case: Case,
    world: World,
    trained: Communicators | None,
    groups: Communicators | None,
    variant: Variant,
) -> int:
    dtype, buckets, _ = variant
    ranks = tuple(range(case.before.world_size))
    model = Holdings(case.model, case.before, ranks)
    main = MainWeightHoldings(case.model, case.before, ranks, buckets=buckets)
    after = Holdings(case.model, case.after, tuple(range(case.after.world_size)))
    source = built(case, world, case.before, trained, dtype, seed=1)
    # The same model with the whole main weights for weights, in fp32.
    whole = built(case, world, case.before, trained, "fp32", seed=1)
    to = built(case, world, case.after, groups, dtype, seed=2)
    optimizer = own = None
    num_read = 0
    if source is not None and whole is not None:
        at_first = values(source)
        optimizer = stepped(source, variant)
        assert not same(at_first, values(source))
        check_ranges(optimizer, main, world.rank)
        for chunk, gathered in zip(whole.chunks, whole_main(optimizer), strict=True):
            for value, main_values in zip(chunk.parameters(), gathered, strict=True):
                value.data.copy_(main_values)
        own = MainShards(optimizer, main)
        num_read = _read(own, Shards(whole.chunks, case.model), main, world.rank)
    rounded = move(model, after, shards(whole), to, dtype)
    at_once = move(model, after, shards(source), to, dtype)
    if optimizer is not None:
        leave_shards_alone(optimizer)
    if to is not None:
        for chunk in to.chunks:
            for value in chunk.parameters():
                value.data.zero_()
    from_main = move(main, after, own, to, dtype)
    assert same(rounded, at_once) and same(rounded, from_main), (case, variant)
    assert not rounded or not all((value == 0).all() for value in rounded)
    return num_read


def _read(own: Shards, whole: Shards, main: MainWeightHoldings, rank: int) -> int:
    """How many of this rank's boxes there are; each is bitwise what the whole main weights have."""
    num_read = 0
    for tensor, boxes in main.holders.items():
        for box, ranks in boxes.items():
            if rank in ranks:
                found, expected = torch.empty(extents(box)), torch.empty(extents(box))
                own.read(tensor, box, found)
                whole.read(tensor, box, expected)
                assert torch.equal(found, expected), (tensor, box)
                num_read += 1
    return num_read


@pytest.mark.parametrize(
    ("world_size", "cases", "variants"),
    [
        (2, ON_TWO, VARIANTS),
        (4, ON_FOUR, VARIANTS[-1:]),
        # Others have the precision and the buckets; on two ranks each of VARIANTS is tested.
        pytest.param(2, ON_TWO, MORE_VARIANTS, marks=pytest.mark.slow),
        pytest.param(4, MORE_ON_FOUR, VARIANTS[-1:], marks=pytest.mark.slow),
        pytest.param(
            4,
            (*ON_FOUR, *MORE_ON_FOUR),
            (*VARIANTS[:-1], *MORE_VARIANTS),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_main_weights_are_as_megatron_shards_them_and_move_bitwise(
    world_size: int, cases: Sequence[Case], variants: Sequence[Variant]
) -> None:
    found = run_ranks(_prove, world_size, cases, variants)
    for number, read in enumerate(zip(*found, strict=True)):
        case = cases[number // len(variants)]
        assert sum(read) > 40 and all(read[: case.before.world_size])


def _gather(rank: int, world_size: int) -> list[bool]:
    """Tell for each variant whether a copy under one plan, in one storage, gathers the model."""
    world = World(rank, world_size, torch.device("cpu"))
    unpadded = replace(MANY_HEADS, vocab_size=256)  # what pads a vocabulary is no weight, and stays
    layout, ranks = plan(1, 2, 1), (0, 1)
    model = Holdings(unpadded, layout, ranks)
    right = []
    for variant in (VARIANTS[0], MORE_VARIANTS[1], VARIANTS[2]):
        dtype = variant.dtype
        main = MainWeightHoldings(unpadded, layout, ranks, buckets=variant.buckets)
        context = random_context(unpadded, layout, world, seed=1, dtype=dtype)
        copy = random_context(unpadded, layout, world, seed=2, dtype=dtype, trained=False)
        optimizer = stepped(context, variant)
        expected = values(context)
        own = Shards(context.chunks, unpadded)
        own.share(Shards(copy.chunks, unpadded))
        leave_shards_alone(optimizer)
        moved = move(main, model, MainShards(optimizer, main), copy, dtype)
        right.append(same(moved, expected) and same(values(context), expected))
    return right


def test_a_copy_on_the_model_s_own_storage_is_the_model_gathered() -> None:
    assert run_ranks(_gather, 2) == [[True] * 3] * 2


def _beside(
    rank: int, world_size: int, cases: Sequence[Case], variants: Sequence[Variant]
) -> list[bool]:
    """Tell by case and variant if main weights arrive beside a step as the model's after it."""
    world = World(rank, world_size, torch.device("cpu"))
    right = []
    for case in cases:
        ranks = tuple(range(world_size))
        trained = build_communicators(case.before, world, ranks, trained=True)
        groups = build_communicators(
            case.after, world, ranks[: case.after.world_size], trained=False
        )
        after = Holdings(case.model, case.after, ranks[: case.after.world_size])
        for variant in variants:
            dtype, buckets, _ = variant
            source = built(case, world, case.before, trained, dtype, seed=1)
            to = built(case, world, case.after, groups, dtype, seed=2)
            assert source is not None
            optimizer = ready(source, variant)
            main = MainWeightHoldings(case.model, case.before, ranks, buckets=buckets)
            table = routing_table(main, after, max_size=BUCKET)
            beside = partial(
                reshard_beside,
                table,
                rounds(table.routes, BUCKET),
                Endpoints(MainShards(optimizer, main), shards(to), DTYPES[dtype], world.device),
            )
            assert optimizer.step(0.01, beside)[0]
            early = values(to)
            late = move(Holdings(case.model, case.before, ranks), after, shards(source), to, dtype)
            right.append(same(early, late))
    return right


@pytest.mark.parametrize(
    ("world_size", "cases", "variants"),
    [
        (2, ON_TWO[:3], VARIANTS),
        # More ranks, and more of the same shards, which the test of moves above has.
        pytest.param(4, MORE_ON_FOUR[:3], (*VARIANTS, *MORE_VARIANTS), marks=pytest.mark.slow),
    ],
)
def test_shards_are_on_their_way_as_soon_as_they_are_updated(
    world_size: int, cases: Sequence[Case], variants: Sequence[Variant]
) -> None:
    found = run_ranks(_beside, world_size, cases, variants)
    assert found == [[True] * len(cases) * len(variants)] * world_size
