"""A box that many ranks miss: who sends it how often, when, and in rounds of a bucket at most."""

from collections import Counter
from dataclasses import replace
from math import ceil, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import LORA_TARGETS, Dtype, LoraSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Box, extents, overlap
from puzzle_align.layout.weights import adapter_shapes, num_parameters, tensor_shapes
from puzzle_align.resharding.rounds import Message, rounds
from puzzle_align.resharding.routing import MIN_PART, Route, RoutingTable, routing_table
from puzzle_align.resharding.switch import plan_switch, trained_part
from tests.specs import LLAMA_2_7B
from tests.unit.job_plans import context
from tests.unit.test_routing import Move, index, masks, moves

BUCKET = 2**24
M = num_parameters(LLAMA_2_7B)


def busiest_straight(source: Holdings, destination: Holdings) -> int:
    """Numbers that the busiest holder sends, if each box goes straight to all who miss it.

    Largest boxes first, each time from the holder with the least to send, on one node.
    """
    boxes = [
        (prod(extents(common)), holders, [rank for rank in wanting if rank not in holders])
        for tensor, wanted in destination.holders.items()
        for box, wanting in wanted.items()
        for held, holders in source.holders[tensor].items()
        if (common := overlap(box, held)) is not None
    ]
    load: Counter[int] = Counter()
    for size, holders, missing in sorted(boxes, key=lambda box: -box[0]):
        for _ in missing:
            load[min(holders, key=lambda rank: (load[rank], rank))] += size
    return max(load.values(), default=0)


@given(moves(), st.sampled_from([2, 4, 8]), st.sampled_from([1, MIN_PART]))
@settings(max_examples=15)
def test_a_box_crosses_once(move: Move, ranks_per_node: int, min_part: int) -> None:
    """To each node without it, and never to a node that has it."""
    source, destination = move
    table = routing_table(*move, ranks_per_node=ranks_per_node, min_part=min_part)
    before, after = masks(source), masks(destination)
    nodes = {rank // ranks_per_node for rank in (*source.ranks, *destination.ranks)}
    for tensor, shape in tensor_shapes(source.model).items():
        crosses = {node: np.zeros(shape, dtype=int) for node in nodes}
        for route in table.routes:
            for rank in route.destinations if route.tensor == tensor else ():
                if route.source // ranks_per_node != rank // ranks_per_node:
                    crosses[rank // ranks_per_node][index(route.box)] += 1
        for node in nodes:
            held, wanted = (
                np.any([m for r, m in by_rank.items() if r // ranks_per_node == node], axis=0)
                for by_rank in (before[tensor], after[tensor])
            )
            assert (crosses[node] == (wanted & ~held)).all()


@given(
    moves(),
    st.sampled_from([200, 1000, 5000]),
    st.sampled_from([None, 2, 4]),
    st.sampled_from([1, MIN_PART]),
)
@settings(max_examples=15)
def test_what_is_relayed_came_in_an_earlier_round(
    move: Move, bucket: int, ranks_per_node: int | None, min_part: int
) -> None:
    table = routing_table(*move, ranks_per_node=ranks_per_node, max_size=bucket, min_part=min_part)
    arrived: set[tuple[str, Box, int]] = set()
    for messages in rounds(table.routes, bucket):
        routes = [route for message in messages for route in message.routes]
        for route in routes:
            assert not route.relayed or (route.tensor, route.box, route.source) in arrived
        arrived |= {(r.tensor, r.box, to) for r in routes for to in r.destinations}


def ends(before: ParallelPlan, after: ParallelPlan, first: int) -> Move:
    """A 7B model on the first ranks, and to be from rank ``first`` on."""
    return (
        Holdings(LLAMA_2_7B, before, tuple(range(before.world_size))),
        Holdings(LLAMA_2_7B, after, tuple(range(first, first + after.world_size))),
    )


def loads(
    source: Holdings, destination: Holdings, *, ranks_per_node: int | None = None
) -> tuple[RoutingTable, list[float], list[float]]:
    """The table, and what every rank sends and receives, in models."""
    table = routing_table(
        source, destination, ranks_per_node=ranks_per_node, max_size=BUCKET, min_part=1
    )
    sent, received = table.sent, table.received
    ranks = range(1 + max(destination.ranks))
    return table, [sent[r] / M for r in ranks], [received[r] / M for r in ranks]


def test_one_holder_sends_to_four_ranks_what_it_would_send_to_one() -> None:
    """Each of the four gets a quarter of every box, and passes it on to three."""
    table, sent, received = loads(*ends(ParallelPlan(), ParallelPlan(data=4), 1))
    assert sent == [1, 0.75, 0.75, 0.75, 0.75] and received == [0, 1, 1, 1, 1]
    assert {link: size / M for link, size in table.links.items()} == {
        (0, to): 0.25 for to in (1, 2, 3, 4)
    } | {(a, b): 0.25 for a in (1, 2, 3, 4) for b in (1, 2, 3, 4) if a != b}


def test_a_broadcast_is_a_pipeline_of_rounds() -> None:
    """It takes about as many rounds as one model, not two; a tenth is for odd sizes."""
    table, _, _ = loads(*ends(ParallelPlan(), ParallelPlan(data=4), 1))
    schedule = rounds(table.routes, BUCKET)
    assert len(schedule) <= 1.1 * ceil(M / BUCKET)
    for messages in schedule[1:-1]:
        assert {route.relayed for m in messages for route in m.routes} == {False, True}


@pytest.mark.parametrize(
    ("first", "busiest", "straight"),
    [
        (2, 3 / 4, 2),  # its half to four ranks: these pass 3 / 4 of two halves on
        (0, 3 / 4, 3 / 2),  # its half to three; all four share what is to send, three models
    ],
)
def test_two_halves_to_four_replicas(first: int, busiest: float, straight: float) -> None:
    move = ends(ParallelPlan(tensor=2), ParallelPlan(data=4), first)
    _, sent, received = loads(*move)
    assert max(sent) == pytest.approx(busiest, rel=2e-3)
    assert busiest_straight(*move) / M == pytest.approx(straight, rel=2e-3)
    assert max(received) == pytest.approx(1, rel=1e-3)


def test_two_nodes_get_a_model_each_and_pass_it_from_one_to_the_other() -> None:
    """Eight ranks on two nodes, and the holder on a third: straight, it would send eight models."""
    table, sent, received = loads(*ends(ParallelPlan(), ParallelPlan(data=8), 4), ranks_per_node=4)
    assert sent[0] == 1 and received[4:] == [1] * 8
    between: Counter[tuple[int, int]] = Counter()
    for (one, other), size in table.links.items():
        between[one // 4, other // 4] += size
    assert between[0, 1] + between[0, 2] == between[0, 1] + between[2, 1] == M
    assert between[0, 2] + between[1, 2] == M
    # Of eight models the holder sends one, so that seven are left for eight ranks.
    assert max(sent[4:]) == pytest.approx(7 / 8, rel=1e-2)


def test_replicas_share_what_goes_to_another_node() -> None:
    """Each sends half of it, and half of what stays on their node."""
    source = Holdings(LLAMA_2_7B, ParallelPlan(data=2), (0, 1))
    near_and_far = Holdings(LLAMA_2_7B, ParallelPlan(data=2), (2, 4))
    table, _, _ = loads(source, near_and_far, ranks_per_node=4)
    assert {link: size / M for link, size in table.links.items()} == {
        (one, other): pytest.approx(0.5, rel=1e-2) for one in (0, 1) for other in (2, 4)
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelPlan(tensor=8), ParallelPlan(data=4, tensor=2)),
        (ParallelPlan(tensor=4), ParallelPlan(data=4)),
        (ParallelPlan(data=2, tensor=2), ParallelPlan(data=4)),
    ],
)
def test_where_all_send_alike_none_relays(before: ParallelPlan, after: ParallelPlan) -> None:
    table, sent, received = loads(*ends(before, after, 0))
    assert not any(route.relayed for route in table.routes)
    assert 0 < max(sent) <= 1.01 * max(received)


@pytest.mark.parametrize(
    ("before", "after", "busiest"),
    [
        # The second sends each quarter of its half to one rank: of norms alone is there a relay.
        (ParallelPlan(tensor=2), ParallelPlan(tensor=4), 2),
        (ParallelPlan(tensor=4), ParallelPlan(pipeline=2, data=3), 1.25),  # relayed, 0.92
    ],
)
def test_a_busy_sender_is_not_relieved_for_nothing_or_for_little(
    before: ParallelPlan, after: ParallelPlan, busiest: float
) -> None:
    table, sent, received = loads(*ends(before, after, 0))
    assert max(sent) == pytest.approx(busiest * max(received), rel=1e-3)
    assert not any(route.relayed for route in table.routes)


def test_busy_senders_alone_are_relieved() -> None:
    """The first has 30 layers and sends them once, the second has two and sends them to all."""
    before = ParallelPlan(pipeline=2, pipeline_layers=(30, 2))
    _, sent, _ = loads(*ends(before, ParallelPlan(data=4), 2))
    assert sent[0] + sent[1] / 4 == pytest.approx(1)


def test_a_small_box_goes_whole_to_one_rank_which_relays_it() -> None:
    table = routing_table(*ends(ParallelPlan(), ParallelPlan(data=4), 1))
    norm = [r for r in table.routes if r.tensor == "model.norm.weight"]
    assert [(r.box, r.relayed, len(r.destinations)) for r in norm] == [
        (((0, 4096),), False, 1),
        (((0, 4096),), True, 3),
    ]
    most = max(table.sent[rank] for rank in (1, 2, 3, 4))
    assert table.sent[0] == M and most == pytest.approx(0.75 * M, rel=1e-3)


@given(moves(), st.sampled_from([1, MIN_PART]))
@settings(max_examples=15)
def test_relays_spare_the_busiest_sender_or_are_not_there(move: Move, min_part: int) -> None:
    table = routing_table(*move, min_part=min_part)
    busiest, straight = max(table.sent.values(), default=0), busiest_straight(*move)
    if any(route.relayed for route in table.routes):
        assert busiest < straight
    else:
        assert busiest == straight


@given(moves(), st.sampled_from([64, 200, 5000]))
@settings(max_examples=10)
def test_every_route_is_in_one_round_with_room_for_it(move: Move, bucket_size: int) -> None:
    routes = routing_table(*move, max_size=bucket_size).routes
    schedule = rounds(routes, bucket_size)
    placed = [route for messages in schedule for m in messages for route in m.routes]
    assert Counter(placed) == Counter(routes)
    for messages in schedule:
        assert messages
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for message in messages:
            assert all(
                (route.source, route.destinations) == (message.source, message.destinations)
                for route in message.routes
            )
            size = sum(route.size for route in message.routes)
            sent[message.source] += size
            received.update(dict.fromkeys(message.destinations, size))
        assert max((*sent.values(), *received.values())) <= bucket_size
        assert len({(m.source, m.destinations) for m in messages}) == len(messages)


def test_a_route_is_in_the_earliest_round_with_room_for_it() -> None:
    """Rank 1 gets a box of 8 and passes it on to 2 and 4, which pass it on to 3 and 5."""
    large, small = ((0, 4), (0, 2)), ((0, 4),)
    routes = [
        Route("matrix", large, 0, (1,)),
        Route("matrix", large, 1, (2, 4), relayed=True),
        Route("matrix", large, 2, (3,), relayed=True),
        Route("matrix", large, 4, (5,), relayed=True),
        Route("norm", small, 0, (3,)),
        Route("bias", small, 0, (3,)),
    ]
    assert rounds(routes, 12) == [
        [Message(0, (1,), (routes[0],)), Message(0, (3,), (routes[4],))],
        [Message(0, (3,), (routes[5],)), Message(1, (2, 4), (routes[1],))],
        [Message(2, (3,), (routes[2],)), Message(4, (5,), (routes[3],))],
    ]


def check_rounds(table: RoutingTable, schedule: list[list[Message]], size: int) -> None:
    """Assert that all routes move, numbers of ``size`` bytes, in few rounds of 64 MiB at most."""
    assert Counter(r for ms in schedule for m in ms for r in m.routes) == Counter(table.routes)
    for messages in schedule:
        sent: Counter[int] = Counter()
        for message in messages:
            sent[message.source] += size * sum(route.size for route in message.routes)
        assert max(sent.values()) <= 2**26
    # A tenth is for odd sizes, and a round for the last relays.
    assert len(schedule) <= 1.1 * ceil(size * max(table.received.values()) / 2**26) + 1


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_switch_is_in_rounds_of_64_mib_and_knows_its_nodes(dtype: Dtype, size: int) -> None:
    source = Holdings(LLAMA_2_7B, ParallelPlan(data=2), (0, 1))
    other_node = Holdings(LLAMA_2_7B, ParallelPlan(data=2), (2, 3))
    table, schedule = plan_switch(source, other_node, dtype, 2)
    check_rounds(table, schedule, size)
    assert sum(table.links[one, other] for one in (0, 1) for other in (2, 3)) == M
    # Of adapters later switches move these alone.
    lora = LoraSpec(r=64, lora_alpha=64.0, target_modules=LORA_TARGETS)
    copy = context(
        "actor", other_node.plan, "generate", model=replace(LLAMA_2_7B, lora=lora), dtype=dtype
    )
    before, after = (Holdings(copy.model, end.plan, end.ranks) for end in (source, other_node))
    part, schedule = trained_part(plan_switch(before, after, dtype, 2)[0], copy)
    assert {route.tensor for route in part.routes} == {*adapter_shapes(copy.model)}
    check_rounds(part, schedule, size)


@given(moves())
@settings(max_examples=10)
def test_with_room_for_all_there_is_one_round_and_one_for_relays(move: Move) -> None:
    routes = routing_table(*move).routes
    relays = any(route.relayed for route in routes)
    assert len(rounds(routes, 1 + sum(route.size for route in routes))) == bool(routes) + relays
