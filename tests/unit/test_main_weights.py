"""Shards of main weights of random models, plans and buckets: all there is, each number once."""

from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.main_weights import (
    Buckets,
    FlatBox,
    MainWeightHoldings,
    ShardRange,
    flat_boxes,
    shard_ranges,
)
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import EMBEDDING, Parameter, extents
from puzzle_align.layout.weights import parameter_boxes, tensor_shapes
from puzzle_align.resharding.routing import lower_bound, routing_table
from puzzle_align.resharding.switch import main_weights, plan_switch
from tests.specs import LLAMA_2_7B, MISTRAL_7B
from tests.unit.job_plans import context
from tests.unit.test_routing import MODELS, held, index
from tests.unit.test_routing import masks as model_masks

Masks = dict[str, dict[int, np.ndarray]]
DOWN = "model.layers.1.mlp.down_proj.weight"


@st.composite
def sharded(draw: st.DrawFn, model: ModelSpec) -> MainWeightHoldings:
    holdings = draw(held(model))
    size = draw(st.sampled_from([None, 1, 300, 5000]))
    return MainWeightHoldings(
        model,
        holdings.plan,
        holdings.ranks,
        buckets=Buckets(overlapped=draw(st.booleans()), size=size),
        fused_norms=draw(st.booleans()),
    )


random_shards = st.sampled_from(MODELS).flatmap(sharded)


@lru_cache(maxsize=10_000)
def numbered(model: ModelSpec, parameter: Parameter) -> dict[str, np.ndarray]:
    """Place in its tensor of every number of the parameter, by tensor; -1 where it is not."""
    shapes, found = tensor_shapes(model), {}
    for piece in parameter.pieces:
        shape = shapes[piece.tensor]
        own = found.setdefault(piece.tensor, np.full(parameter.shape, -1))
        own[index(piece.place)] = np.arange(prod(shape)).reshape(shape)[index(piece.box)]
    return {name: own.reshape(-1) for name, own in found.items()}


def masks(holdings: MainWeightHoldings) -> Masks:
    """Masks by tensor and rank of the numbers that the rank's flat shards have."""
    shapes = tensor_shapes(holdings.model)
    found = {
        name: {r: np.zeros(s, dtype=bool) for r in holdings.ranks} for name, s in shapes.items()
    }
    for rank in holdings.ranks:
        for shard in (shard for chunk in holdings.shards(rank) for shard in chunk):
            for name, places in numbered(holdings.model, shard.parameter).items():
                own = places[slice(*shard.numbers)]
                found[name][rank].reshape(-1)[own[own >= 0]] = True
    return found


@given(random_shards)
@settings(max_examples=15)
def test_data_ranks_share_every_parameter(holdings: MainWeightHoldings) -> None:
    model, plan, fused = holdings.model, holdings.plan, holdings.fused_norms
    for position in range(plan.num_positions):
        for tensor_rank in range(plan.tensor):
            parameters = parameter_boxes(model, plan, position, tensor_rank, fused_norms=fused)
            found: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
            for shards in shard_ranges(
                model, plan, holdings.buckets, position, tensor_rank, fused_norms=fused
            ):
                for shard in shards:
                    assert shard.parameter == parameters[shard.parameter.name]
                    found[shard.parameter.name].append(shard.numbers)
            for name, ranges in found.items():
                assert all(start < end for start, end in ranges)
                bounds = [0, *(end for _, end in ranges)]  # of rank after rank
                assert [start for start, _ in ranges] == bounds[:-1]
                assert bounds[-1] == prod(parameters[name].shape)


@given(random_shards)
@settings(max_examples=10)
def test_boxes_are_the_flat_shards_and_together_the_tensors(holdings: MainWeightHoldings) -> None:
    by_rank = masks(holdings)
    assert list(holdings.holders) == list(tensor_shapes(holdings.model))
    for tensor, boxes in holdings.holders.items():
        covered = np.zeros(tensor_shapes(holdings.model)[tensor], dtype=int)
        own = {rank: np.zeros(covered.shape, dtype=int) for rank in holdings.ranks}
        for box, ranks in boxes.items():
            covered[index(box)] += 1
            assert len(set(ranks)) == len(ranks)
            for rank in ranks:
                own[rank][index(box)] += 1
        assert (covered == 1).all(), tensor
        for rank, mask in own.items():
            assert (mask == by_rank[tensor][rank]).all(), (tensor, rank)


@given(random_shards)
@settings(max_examples=10)
def test_a_flat_box_lies_in_its_shard_without_a_gap(holdings: MainWeightHoldings) -> None:
    shapes = tensor_shapes(holdings.model)
    for rank in holdings.ranks:
        for shard in (shard for chunk in holdings.shards(rank) for shard in chunk):
            places = numbered(holdings.model, shard.parameter)
            num_held = 0
            for part in flat_boxes(shard):
                own = places[part.tensor][slice(*shard.numbers)]
                size = prod(extents(part.box))
                whole = np.arange(prod(shapes[part.tensor])).reshape(shapes[part.tensor])
                assert (own[part.start : part.start + size] == whole[index(part.box)].flat).all()
                num_held += size
            assert num_held == sum(
                int((own[slice(*shard.numbers)] >= 0).sum()) for own in places.values()
            )


@given(st.data(), st.sampled_from([None, 7, 64]), st.sampled_from([None, 4]))
@settings(max_examples=15)
def test_weights_arrive_once_from_who_has_them(
    data: st.DataObject, max_size: int | None, ranks_per_node: int | None
) -> None:
    source = data.draw(random_shards)
    destination = data.draw(held(source.model))
    table = routing_table(source, destination, ranks_per_node=ranks_per_node, max_size=max_size)
    before = masks(source)
    counts = {
        name: {rank: np.zeros(shape, dtype=int) for rank in destination.ranks}
        for name, shape in tensor_shapes(source.model).items()
    }
    for route in table.routes:
        assert route.relayed or before[route.tensor][route.source][index(route.box)].all()
        for rank in route.destinations:
            counts[route.tensor][rank][index(route.box)] += 1
    least = lower_bound(source, destination)
    for rank in destination.ranks:
        assert sum(int(own[rank].sum()) for own in counts.values()) == least[rank]
    for kept in table.kept:
        for rank in kept.ranks:
            assert before[kept.tensor][rank][index(kept.box)].all()
            counts[kept.tensor][rank][index(kept.box)] += 1
    for name, boxes in destination.holders.items():
        for box, ranks in boxes.items():
            for rank in ranks:
                assert (counts[name][rank][index(box)] == 1).all()
                assert counts[name][rank].sum() == prod(extents(box))


@given(st.data(), st.sampled_from([None, 7]))
@settings(max_examples=12)
def test_what_ranks_gather_anyway_is_not_sent(data: st.DataObject, max_size: int | None) -> None:
    """From shards, no more goes to a rank than from the model's weights, were they there."""
    shards = data.draw(random_shards)
    model = Holdings(shards.model, shards.plan, shards.ranks)
    destination = data.draw(held(shards.model))
    table = routing_table(shards, destination, max_size=max_size, resident=model)
    least = lower_bound(model, destination)
    assert table.received == {rank: size for rank, size in least.items() if size}
    senders = masks(shards)
    missing = {
        name: {r: ~has for r, has in own.items()} for name, own in model_masks(model).items()
    }
    seen: dict[tuple[str, int], np.ndarray] = {}
    for route in table.routes:
        assert route.relayed or senders[route.tensor][route.source][index(route.box)].all()
        for rank in route.destinations:
            shape = tensor_shapes(shards.model)[route.tensor]
            count = seen.setdefault((route.tensor, rank), np.zeros(shape, dtype=int))
            count[index(route.box)] += 1
            if rank in missing[route.tensor]:
                assert missing[route.tensor][rank][index(route.box)].all()
    assert all(count.max() == 1 for count in seen.values())


def test_a_switch_from_shards_sends_nothing_that_replicas_gather() -> None:
    before, after = (
        Holdings(MODELS[0], plan, (0, 1)) for plan in (ParallelPlan(data=2), ParallelPlan(tensor=2))
    )
    shards = MainWeightHoldings(MODELS[0], before.plan, before.ranks)
    assert routing_table(shards, after).routes
    table, schedule = plan_switch(before, after, "bf16", 2, shards)
    assert not table.routes and not schedule


def test_one_data_rank_has_what_the_model_has() -> None:
    plan = ParallelPlan(pipeline=2, tensor=2)
    for model in MODELS[:3]:
        ranks = tuple(range(4))
        assert (
            MainWeightHoldings(model, plan, ranks).holders == Holdings(model, plan, ranks).holders
        )


@pytest.mark.parametrize(
    ("numbers", "boxes"),
    [
        ((26, 30), [FlatBox(DOWN, ((1, 2), (2, 6)), 0)]),
        ((48, 72), [FlatBox(DOWN, ((2, 3), (0, 24)), 0)]),
        (
            (20, 80),
            [
                FlatBox(DOWN, ((0, 1), (20, 24)), 0),
                FlatBox(DOWN, ((1, 3), (0, 24)), 4),
                FlatBox(DOWN, ((3, 4), (0, 8)), 52),
            ],
        ),
    ],
)
def test_boxes_of_a_range_by_hand(numbers: tuple[int, int], boxes: list[FlatBox]) -> None:
    """Of a matrix of four rows of 24 numbers: within a row, a row, and over four rows."""
    parameters = parameter_boxes(MODELS[0], ParallelPlan(), 0, 0)
    shard = ShardRange(parameters["decoder.layers.1.mlp.linear_fc2.weight"], numbers)
    assert list(flat_boxes(shard)) == boxes


def test_buckets_by_hand() -> None:
    """Two data ranks, and layers of 96 (fc2), 192 (fc1), 4, 128 (qkv), 64 and 4 numbers.

    The head's 1024 fill a bucket. In the next, parameters begin at multiples of 64: the last norm
    at 0, fc2 at 64, fc1 at 192, its norm at 384, qkv at 448, the projection at 576, its norm at
    640, the layer before's fc2 at 704 and fc1 at 832 to 1024, where the bucket is full. The third
    has 1056, padded to 1152: its half cuts the fc1 that begins at 448.
    """
    plan, buckets = ParallelPlan(data=2), Buckets(overlapped=True, size=1024)
    last, before = "decoder.layers.5", "decoder.layers.4"
    first, second = (
        [(shard.parameter.name, shard.numbers) for shard in shards[:6]]
        for shards in shard_ranges(MODELS[0], plan, buckets, 0, 0)
    )
    assert first == [
        ("output_layer.weight", (0, 512)),
        ("decoder.final_layernorm.weight", (0, 4)),
        (f"{last}.mlp.linear_fc2.weight", (0, 96)),
        (f"{last}.mlp.linear_fc1.weight", (0, 192)),
        (f"{last}.pre_mlp_layernorm.weight", (0, 4)),
        (f"{last}.self_attention.linear_qkv.weight", (0, 64)),
    ]
    assert second == [
        ("output_layer.weight", (512, 1024)),
        (f"{last}.self_attention.linear_qkv.weight", (64, 128)),
        (f"{last}.self_attention.linear_proj.weight", (0, 64)),
        (f"{last}.input_layernorm.weight", (0, 4)),
        (f"{before}.mlp.linear_fc2.weight", (0, 96)),
        (f"{before}.mlp.linear_fc1.weight", (0, 192)),
    ]
    trained = context("actor", plan, "train", model=MODELS[0])
    fused = main_weights(
        replace(trained, options=replace(trained.options, transformer_impl="te")), buckets
    )
    by_rank = shard_ranges(MODELS[0], plan, buckets, 0, 0, fused_norms=True)
    assert [fused.shards(rank) for rank in (0, 1)] == [[shards] for shards in by_rank]
    numbers = [{s.parameter.name: s.numbers for s in shards} for shards in by_rank]
    third = "decoder.layers.3.mlp.linear_fc1.weight"
    assert [of_rank[third] for of_rank in numbers] == [(0, 128), (128, 192)]
    assert buckets.size_at(plan, 1) is None and Buckets(size=1000).size_at(plan, 0) is None
    assert Buckets(overlapped=True).size_at(ParallelPlan(data=64), 0) == 64_000_000


def test_a_tied_embedding_is_cut_alike_at_both_ends() -> None:
    """It has a bucket to itself, wherever it lies among a chunk's parameters."""
    plan, (tied,) = ParallelPlan(pipeline=2, data=2), EMBEDDING.hf
    for position in (0, 1):
        by_rank = shard_ranges(MODELS[1], plan, Buckets(), position, 0)
        cuts = [[s.numbers for s in of if s.parameter.tensors[0][0] == tied] for of in by_rank]
        assert cuts == [[(0, 512)], [(512, 1024)]]
    # Another one ends its chunk's only bucket, behind the 1920 numbers of three layers.
    first, second = shard_ranges(MODELS[0], plan, Buckets(), 0, 0)
    assert second[-1].parameter.tensors[0][0] == tied and second[-1].numbers == (0, 1024)
    assert first[-1].parameter.tensors[0][0] != tied


def test_a_real_model_has_few_boxes_more_than_tensors() -> None:
    """Two ranks that meet in a tensor make four boxes of one; key and value are cut, too."""
    for model in (LLAMA_2_7B, MISTRAL_7B):
        for data in (8, 64):
            plan = ParallelPlan(data=data)
            holders = MainWeightHoldings(model, plan, tuple(range(data))).holders
            assert sum(map(len, holders.values())) <= len(holders) + 5 * (data - 1)
