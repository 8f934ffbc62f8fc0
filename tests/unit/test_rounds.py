"""Rounds of a routing table: all of it, and never more than a bucket on a rank."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.holdings import Holdings
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import routing_table
from tests.unit.test_routing import moves


@given(moves(), st.sampled_from([64, 200, 5000]))
@settings(max_examples=40)
def test_every_route_is_in_one_round_with_room_for_it(
    move: tuple[Holdings, Holdings], bucket_size: int
) -> None:
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
            sent[message.source] += message.size
            received.update(dict.fromkeys(message.destinations, message.size))
        assert max((*sent.values(), *received.values())) <= bucket_size
        assert len({(m.source, m.destinations) for m in messages}) == len(messages)


@given(moves())
@settings(max_examples=20)
def test_with_room_for_all_there_is_one_round_and_one_for_relays(
    move: tuple[Holdings, Holdings],
) -> None:
    routes = routing_table(*move).routes
    relays = any(route.relayed for route in routes)
    assert len(rounds(routes, 1 + sum(route.size for route in routes))) == bool(routes) + relays
