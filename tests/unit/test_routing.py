"""Routing tables of random models, plans and ranks: what is missing, once, from who has it."""

import itertools
from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.layout.rules import Box, extents
from puzzle_align.layout.weights import tensor_shapes
from puzzle_align.resharding.routing import MIN_PART, RoutingTable, lower_bound, routing_table
from tests.specs import LLAMA_2_7B
from tests.unit.algorithm1 import get_index, get_rank, get_routing_table

MAX_RANKS = 16


def small_model(**changes: object) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 4,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "vocab_size": 150,  # of 256 rows: the last of four tensor ranks has none
        "max_position_embeddings": 64,
    }
    return from_hf_config({**config, **changes}, "")


Move = tuple[Holdings, Holdings]  # before and after
MODELS = (
    small_model(),
    small_model(model_type="qwen2", tie_word_embeddings=True),
    with_scalar_head(small_model(model_type="qwen3")),
    small_model(num_hidden_layers=5, num_key_value_heads=8, vocab_size=128),
)
# T 4 -> 6 needs heads, gate and up, and padded vocabulary that both divide.
TWELVE_HEADS = small_model(num_attention_heads=12, num_key_value_heads=12, vocab_size=300)


@st.composite
def splits(draw: st.DrawFn, num_layers: int, num_positions: int) -> tuple[int, ...]:
    """Layers by position, at least one at each; equal ones are left out where they are."""
    cuts = draw(
        st.lists(
            st.integers(1, num_layers - 1),
            min_size=num_positions - 1,
            max_size=num_positions - 1,
            unique=True,
        )
    )
    bounds = [0, *sorted(cuts), num_layers]
    sizes = tuple(end - start for start, end in itertools.pairwise(bounds))
    return sizes if len(set(sizes)) > 1 else ()


@st.composite
def held(draw: st.DrawFn, model: ModelSpec) -> Holdings:
    """The model under some plan, on up to 16 of 20 ranks, in any order."""
    tensor = draw(st.sampled_from([t for t in (1, 2, 4) if model.num_key_value_heads % t == 0]))
    pipeline = draw(st.integers(1, min(model.num_hidden_layers, MAX_RANKS // tensor)))
    chunks = draw(st.integers(1, model.num_hidden_layers // pipeline)) if pipeline > 1 else 1
    data = draw(st.integers(1, MAX_RANKS // (tensor * pipeline)))
    plan = ParallelPlan(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        virtual_pipeline=chunks,
        pipeline_layers=draw(splits(model.num_hidden_layers, pipeline * chunks)),
    )
    ranks = draw(st.permutations(range(MAX_RANKS + 4)))[: plan.world_size]
    return Holdings(model, plan, tuple(ranks))


@st.composite
def moves(draw: st.DrawFn) -> Move:
    model = draw(st.sampled_from(MODELS))
    return draw(held(model)), draw(held(model))


Masks = dict[str, dict[int, np.ndarray]]


def masks(holdings: Holdings) -> Masks:
    """Masks by tensor and rank of the numbers that the rank holds; replicas share arrays."""
    shapes, plan = tensor_shapes(holdings.model), holdings.plan
    found: Masks = {tensor: {} for tensor in shapes}
    for pipeline, tensor_rank in itertools.product(range(plan.pipeline), range(plan.tensor)):
        own = {tensor: np.zeros(shape, dtype=bool) for tensor, shape in shapes.items()}
        ranks = [holdings.topology.rank(pipeline, d, tensor_rank) for d in range(plan.data)]
        for parameters in holdings.parameters(ranks[0]):
            for piece in (p for parameter in parameters.values() for p in parameter.pieces):
                own[piece.tensor][index(piece.box)] = True
        for tensor, mask in own.items():
            found[tensor] |= dict.fromkeys(ranks, mask)
    return found


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in box)


@given(st.data())
@settings(max_examples=60)
def test_a_rank_s_pieces_of_a_tensor_are_one_box(data: st.DataObject) -> None:
    holdings = data.draw(held(data.draw(st.sampled_from(MODELS))))
    found = masks(holdings)
    for tensor, boxes in holdings.holders.items():
        by_rank = found[tensor]
        covered = np.zeros(tensor_shapes(holdings.model)[tensor], dtype=int)
        for box, ranks in boxes.items():
            covered[index(box)] += 1
            for rank in ranks:
                assert by_rank[rank][index(box)].all()
                assert by_rank[rank].sum() == prod(extents(box))
        assert (covered == 1).all()
        holding = {rank for ranks in boxes.values() for rank in ranks}
        assert holding == {rank for rank, mask in by_rank.items() if mask.any()}


def check(source: Holdings, destination: Holdings, table: RoutingTable) -> None:
    """Assert that missing numbers arrive once, nothing else does, and senders have theirs."""
    arrives: dict[str, dict[int, np.ndarray]] = {}
    for tensor, shape in tensor_shapes(source.model).items():
        arrives[tensor] = {r: np.zeros(shape, dtype=int) for r in destination.ranks}
    before, after = masks(source), masks(destination)
    for route in table.routes:
        has = (arrives if route.relayed else before)[route.tensor][route.source]
        assert has[index(route.box)].all()
        assert route.destinations and [*route.destinations] == sorted({*route.destinations})
        for rank in route.destinations:
            arrives[route.tensor][rank][index(route.box)] += 1
    kept: Counter[int] = Counter()
    for own in table.kept:
        assert own.ranks
        for rank in own.ranks:
            assert before[own.tensor][rank][index(own.box)].all()
            kept[rank] += prod(extents(own.box))
    for rank in destination.ranks:
        wanted = {tensor: after[tensor][rank] for tensor in arrives}
        nothing = np.zeros(1, dtype=bool)
        for tensor, mask in wanted.items():
            missing = mask & ~before[tensor].get(rank, nothing)
            assert (arrives[tensor][rank] == missing).all(), (tensor, rank)
        own = sum(int((m & before[t].get(rank, nothing)).sum()) for t, m in wanted.items())
        assert kept[rank] == own
        received = sum(int(arrives[tensor][rank].sum()) for tensor in arrives)
        assert received == table.received[rank] == lower_bound(source, destination)[rank]


@given(
    moves(),
    st.sampled_from([None, 1, 7, 64]),
    st.sampled_from([None, 2, 8]),
    st.sampled_from([1, 30, MIN_PART]),
)
@settings(max_examples=15)
def test_what_is_missing_arrives_once_from_who_has_it(
    move: Move, max_size: int | None, ranks_per_node: int | None, min_part: int
) -> None:
    table = routing_table(
        *move, ranks_per_node=ranks_per_node, max_size=max_size, min_part=min_part
    )
    check(*move, table)
    if max_size is not None:  # a row of the first dimension is the least that is sent
        for route in table.routes:
            assert route.size <= max(max_size, prod(extents(route.box)[1:]))


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        (MODELS[0], ParallelPlan(pipeline=3), ParallelPlan(pipeline=2)),
        (TWELVE_HEADS, ParallelPlan(tensor=4), ParallelPlan(tensor=6)),
        (MODELS[1], ParallelPlan(pipeline=2, data=2, tensor=2), ParallelPlan(data=2, tensor=4)),
    ],
)
def test_sizes_may_be_odd(model: ModelSpec, before: ParallelPlan, after: ParallelPlan) -> None:
    source, destination = (Holdings(model, p, tuple(range(p.world_size))) for p in (before, after))
    check(source, destination, routing_table(source, destination))


def test_a_part_of_a_table_has_the_boxes_of_its_tensors() -> None:
    plans = ParallelPlan(pipeline=2), ParallelPlan(tensor=2)
    table = routing_table(*(Holdings(MODELS[0], plan, (0, 1)) for plan in plans))
    norms = table.of(lambda tensor: "norm" in tensor)
    others = table.of(lambda tensor: "norm" not in tensor)
    assert all("norm" in box.tensor for box in (*norms.routes, *norms.kept))
    assert Counter(norms.routes + others.routes) == Counter(table.routes)
    assert Counter(norms.kept + others.kept) == Counter(table.kept)
    assert norms.routes and norms.kept and others.routes and others.kept


def test_a_plan_that_does_not_divide_the_model_is_one_line_with_the_dimension() -> None:
    with pytest.raises(ValueError, match="tensor size 6 does not divide num_attention_heads=8"):
        Holdings(MODELS[0], ParallelPlan(tensor=6), tuple(range(6)))
    with pytest.raises(ValueError, match="size 4 does not divide num_hidden_layers=6"):
        Holdings(MODELS[0], ParallelPlan(pipeline=4), tuple(range(4)))


@given(moves(), st.sampled_from([1, 4, 16]), st.sampled_from([1, MIN_PART]))
@settings(max_examples=30)
def test_senders_are_near_and_share_load(move: Move, ranks_per_node: int, min_part: int) -> None:
    source, destination = move
    table = routing_table(*move, ranks_per_node=ranks_per_node, min_part=min_part)
    node = {rank: rank // ranks_per_node for rank in range(MAX_RANKS + 4)}
    for route in table.routes:
        boxes = source.holders[route.tensor]
        (holders,) = (r for box, r in boxes.items() if _inside(route.box, box))
        assert (route.source in holders) is not route.relayed
        for rank in route.destinations:
            near = any(node[holder] == node[rank] for holder in holders)
            assert not near or node[route.source] == node[rank]
    # On one node replicas may share all they send. What they relay, nobody else could.
    alone = routing_table(source, destination, min_part=min_part)
    given: Counter[int] = Counter()
    for route in alone.routes:
        given[route.source] += route.size * len(route.destinations) * (not route.relayed)
    largest = max((route.size for route in alone.routes), default=0)
    for group in source.topology.data_groups():
        assert max(given[rank] for rank in group) - min(alone.sent[r] for r in group) <= largest


def _inside(inner: Box, outer: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelPlan(pipeline=4, data=2, tensor=2), ParallelPlan(data=4, tensor=4)),
        (ParallelPlan(pipeline=2, data=8), ParallelPlan(pipeline=2, data=2, tensor=4)),
        (ParallelPlan(data=4, tensor=4), ParallelPlan(pipeline=4, data=4)),
    ],
)
def test_senders_of_a_real_model_are_near_their_mean(
    before: ParallelPlan, after: ParallelPlan
) -> None:
    """To other ranks, so that every replica has to send, and in buckets of 32 MiB."""
    source = Holdings(LLAMA_2_7B, before, tuple(range(16)))
    destination = Holdings(LLAMA_2_7B, after, tuple(range(16, 32)))
    sent = routing_table(source, destination, max_size=2**24).sent
    for group in source.topology.data_groups():
        shares = [sent[rank] for rank in group]
        assert max(shares) <= 1.25 * sum(shares) / len(shares)


def edges(table: RoutingTable) -> set[tuple[int, int]]:
    """Who gives to whom of the matrices: tensor ranks share no norms, which come from anywhere."""
    kept = {(rank, rank) for own in table.kept for rank in own.ranks if len(own.box) == 2}
    sent = {(r.source, to) for r in table.routes for to in r.destinations if len(r.box) == 2}
    return kept | sent


SHRINKING = [
    (pipeline, tensor, factor)
    for pipeline in (2, 3, 4, 6)
    for tensor in (1, 2)
    for factor in (2, 4)
    if pipeline % factor == 0 and tensor * factor <= 4
]


@pytest.mark.parametrize(("pipeline", "tensor", "factor"), SHRINKING)
def test_the_paper_s_table_is_that_of_one_replica(pipeline: int, tensor: int, factor: int) -> None:
    before = ParallelPlan(pipeline=pipeline, tensor=tensor)
    after = ParallelPlan(pipeline=pipeline // factor, tensor=tensor * factor)
    layers = pipeline * 2
    model = small_model(num_hidden_layers=layers)
    ranks = tuple(range(before.world_size))
    table = routing_table(Holdings(model, before, ranks), Holdings(model, after, ranks))
    paper = {(rank, to) for rank in ranks for to in get_routing_table(rank, before, after)}
    assert edges(table) == paper


@pytest.mark.parametrize(("pipeline", "tensor", "factor"), SHRINKING)
@pytest.mark.parametrize("data", [2, 3])
def test_replicas_send_less_than_paper_s(
    pipeline: int, tensor: int, factor: int, data: int
) -> None:
    before = ParallelPlan(pipeline=pipeline, data=data, tensor=tensor)
    after = ParallelPlan(pipeline=pipeline // factor, data=data, tensor=tensor * factor)
    model = small_model(num_hidden_layers=pipeline * 2)
    ranks = tuple(range(before.world_size))
    source, destination = Holdings(model, before, ranks), Holdings(model, after, ranks)
    received = routing_table(source, destination).received
    own, volume = masks(destination), dict.fromkeys(ranks, 0)
    for name, by_rank in masks(source).items():
        for rank, mask in by_rank.items():
            for to in get_routing_table(rank, before, after):
                if to != rank:
                    volume[to] += int((mask & own[name][to]).sum())
    # A norm that several tensor ranks hold comes from each of them in the paper's table.
    assert all(received[rank] <= volume[rank] for rank in ranks)
    assert sum(received.values()) < sum(volume.values())


def test_the_paper_s_example_and_what_it_is_not_for() -> None:
    before, after = ParallelPlan(pipeline=4), ParallelPlan(pipeline=2, tensor=2)
    assert get_index(3, before) == (3, 0, 0) and get_index(3, after) == (1, 0, 1)
    assert get_rank((1, 0, 1), after) == 3
    tables = [get_routing_table(rank, before, after) for rank in range(4)]
    assert tables == [[0, 1], [0, 1], [2, 3], [2, 3]]  # Figure 7
    for other in (ParallelPlan(pipeline=3), ParallelPlan(pipeline=2, data=2), ParallelPlan()):
        with pytest.raises(ValueError, match="Algorithm 1 is not for"):
            get_routing_table(0, before, other)


@given(st.sampled_from(MODELS).flatmap(held), st.data())
@settings(max_examples=40)
def test_least_traffic_is_an_order_of_its_ranks(source: Holdings, data: st.DataObject) -> None:
    size = source.plan.world_size
    fits = [t for t in (1, 2, 4) if source.model.num_key_value_heads % t == size % t == 0]
    tensor = data.draw(st.sampled_from(fits))
    deep = [p for p in range(1, source.model.num_hidden_layers + 1) if size // tensor % p == 0]
    pipeline = data.draw(st.sampled_from(deep))
    layers = data.draw(splits(source.model.num_hidden_layers, pipeline))
    other = ParallelPlan(
        pipeline=pipeline, data=size // tensor // pipeline, tensor=tensor, pipeline_layers=layers
    )
    size = data.draw(st.sampled_from((2, 4, 8)))  # of a node
    assert sorted(ordered_ranks(source, other, source.ranks, size)) == sorted(source.ranks)
    ranks = ordered_ranks(source, source.plan, source.ranks, size)
    stays = Holdings(source.model, source.plan, ranks)
    assert not routing_table(source, stays).routes
