"""Declared links follow the formulas of rings; which ranks talk to each other when measured."""

from dataclasses import replace

import pytest

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.links import (
    BETWEEN_TWO,
    DECLARED_RANKS,
    KNOWN_WIRES,
    PLACES,
    TRANSPORTS,
    FastestLinks,
    LinkCosts,
    Wire,
    Wires,
    declared_links,
    declared_wires,
    link_groups,
    ring_time,
    with_declared,
)
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.costs.profile import Link, LinkPoint, Time
from tests.refusals import refusal
from tests.unit.job_plans import context
from tests.unit.planner_spaces import SMALL, measured_of

WIRE = Wire(bandwidth=100.0, latency=3.0)


@pytest.mark.parametrize(
    ("transport", "ranks", "seconds"),
    [
        ("p2p", 2, 4.0 + 3.0),  # 400 bytes at 100 a second
        ("exchange", 2, 4.0 + 3.0),  # as many each way
        ("all_gather", 2, 2.0 + 3.0),  # the half that the other has
        ("all_gather", 4, 3.0 + 9.0),  # three quarters, in three steps
        ("all_reduce", 2, 4.0 + 6.0),  # a half to and fro
        ("all_reduce", 4, 6.0 + 18.0),
    ],
)
def test_times_of_a_ring(transport, ranks, seconds) -> None:
    assert ring_time(transport, WIRE, ranks, 400) == pytest.approx(seconds)


def test_every_transport_is_declared_in_both_places() -> None:
    wires = Wires(node=WIRE, network=Wire(bandwidth=10.0, latency=3.0))
    links = declared_links("mine", wires)
    found = {(link.transport, link.place, link.ranks) for link in links}
    wanted = {
        (transport, place, ranks)
        for place in PLACES
        for transport in TRANSPORTS
        for ranks in (DECLARED_RANKS if transport not in BETWEEN_TWO else (2,))
    }
    assert found == wanted and len(links) == len(wanted)
    for link in links:
        wire = wires.node if link.place == "node" else wires.network
        assert link.declared == "mine"
        for point in link.points:
            assert point.time.median == ring_time(link.transport, wire, link.ranks, point.size)


def test_measured_links_win() -> None:
    points = (LinkPoint(size=4096, time=Time(median=1.0)),)
    measured = Link(transport="all_reduce", place="node", ranks=4, points=points)
    odd = Link(transport="all_reduce", place="node", ranks=3, points=points)
    declared = declared_links("h100", KNOWN_WIRES["h100"])
    links = with_declared([measured, odd], declared)
    assert measured in links and odd in links
    assert len(links) == len(declared) + 1
    assert [link.declared for link in links].count("") == 2


def test_links_that_were_measured_alone_and_together_win() -> None:
    declared = declared_links("h100", KNOWN_WIRES["h100"])
    points = (LinkPoint(size=4096, time=Time(median=1.0)),)
    pair = Link(transport="p2p", place="network", ranks=2, points=points, at_once=1)
    both = [pair, replace(pair, at_once=2)]
    links = with_declared(both, declared)
    assert [link for link in links if (link.transport, link.place) == ("p2p", "network")] == both


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 0.5), (3, 2 / 3), (4, 0.75), (8, 7 / 8)])
def test_other_numbers_of_ranks_send_a_ring_s_share_of_what_the_nearest_do(
    ranks: int, seconds: float
) -> None:
    """Four were measured, which send three quarters each, and two, which send half."""
    links = LinkCosts(
        [
            Link(transport=name, place="node", ranks=number, points=(point,))
            for name in ("all_reduce", "all_gather")
            for number, point in (
                (2, LinkPoint(size=1000, time=Time(median=0.5))),
                (4, LinkPoint(size=1000, time=Time(median=0.75))),
            )
        ],
        8,
    )
    for collective in (links.all_reduce, links.all_gather):
        assert collective(range(ranks), 1000) == pytest.approx(seconds)
    assert len(links.beyond) == (0 if ranks in (2, 4) else 2)


SHARED = [
    Link(
        transport="p2p",
        place="network",
        ranks=2,
        points=(LinkPoint(size=1000, time=Time(median=seconds)),),
        at_once=number,
    )
    for number, seconds in ((1, 2.0), (4, 5.0))
]


@pytest.mark.parametrize(
    ("at_once", "seconds"), [(0.5, 2.0), (1, 2.0), (2, 3.0), (3.5, 4.5), (4, 5.0), (9, 5.0)]
)
def test_groups_at_once_share_a_node_s_link(at_once: float, seconds: float) -> None:
    links = LinkCosts(SHARED, 4)
    assert links.p2p(0, 4, 1000, at_once) == pytest.approx(seconds)
    assert links.p2p(0, 4, 1000) == 5.0  # as many as were measured
    assert FastestLinks(SHARED, 4).p2p(0, 4, 1000, at_once) == 2.0


def test_groups_at_once_are_those_that_leave_the_node() -> None:
    links = LinkCosts(SHARED, 2)
    assert links.at_once((0, 2), [(0, 2), (1, 3)]) == 2
    assert links.at_once((1, 2), [(0, 1), (1, 2), (2, 3), (3, 5), (4, 6)]) == 1


def test_a_pipeline_of_all_ranks_has_the_link_to_itself() -> None:
    """Of (P4) on two nodes of two one transfer crosses, of (P2, D2) and (P2, T2) two at once."""
    profile = replace(measured_of(SMALL).profile, links=(SHARED[0], replace(SHARED[1], at_once=2)))
    measured = Measured(profile, 2)
    for plan, seconds in (((4, 1, 1), 2.0), ((2, 2, 1), 5.0), ((2, 1, 2), 5.0)):
        pipeline, data, tensor = plan
        grid = ParallelPlan(pipeline=pipeline, data=data, tensor=tensor)
        trained = context("actor", grid, "train", model=SMALL)
        last = pipeline // 2 - 1
        assert measured.hidden_transfer(trained, last, last + 1, 1000) == seconds


def test_wires_of_a_file(tmp_path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text(
        "node: {bandwidth: 300e9, latency: 3e-6}\nnetwork: {bandwidth: 25000000000, latency: 1e-5}"
    )
    assert declared_wires(str(path)) == Wires(
        node=Wire(bandwidth=300e9, latency=3e-6), network=Wire(bandwidth=25e9, latency=1e-5)
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("node: {bandwidth: 1, latency: 1}", "key 'network' is missing"),
        ("{node: 3, network: 4}", "node: expected a mapping, got 3"),
        (
            "{node: {bandwidth: 0, latency: 1}, network: {bandwidth: 1, latency: 1}}",
            "node.bandwidth: expected a number from 1e-12 to 1e+18, got 0",
        ),
        (
            "{node: {bandwidth: 1, latency: 1}, network: {bandwidth: 1, latency: fast}}",
            "network.latency: expected a number, got 'fast'",
        ),
        ("node: [", "cannot be read"),
        # no YAML, or none that is taken
        *(
            (text, "cannot be read: line 1")
            for text in (
                *("&a [*a]", "!!int ''", "[" * 900 + "]" * 900),
                *("node: !!python/name:os.system", "1: 2", "a\0b"),
            )
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, problem) -> None:
    path = tmp_path / "links.yaml"
    path.write_text(text)
    line = refusal(lambda: declared_wires(str(path)))
    assert line.startswith(f"--links {path}") and problem in line


def test_an_unknown_name_lists_those_known() -> None:
    with pytest.raises(ValueError, match=r"--links v100: neither a100-sxm, .*h200, nor a file"):
        declared_wires("v100")


def test_neighbours_talk_in_a_node_and_ranks_of_one_local_number_between_nodes() -> None:
    assert link_groups(1, 1) == []
    assert link_groups(1, 6) == [
        ("node", [(0, 1), (2, 3), (4, 5)]),
        ("node", [(0, 1, 2, 3)]),
        ("node", [(0, 1, 2, 3, 4, 5)]),
    ]
    assert link_groups(2, 2) == [
        ("node", [(0, 1), (2, 3)]),
        ("network", [(0, 2), (1, 3)]),
        ("network", [(0, 2)]),
        ("network", [(0, 1, 2, 3)]),
    ]
    assert link_groups(4, 1) == [("network", [(0, 1), (2, 3)]), ("network", [(0, 1, 2, 3)])]


@pytest.mark.parametrize("nodes", range(1, 6))
@pytest.mark.parametrize("local", range(1, 9))
def test_no_number_of_ranks_is_measured_twice_in_a_place(nodes, local) -> None:
    groups = link_groups(nodes, local)
    keys = [(p, len(own[0]), sum(min(g) < local for g in own)) for p, own in groups]
    assert len(set(keys)) == len(keys)
    for place, own in groups:
        assert len({len(group) for group in own}) == 1
        ranks = [rank for group in own for rank in group]
        assert len(set(ranks)) == len(ranks) and max(ranks) < nodes * local
        for group in own:
            assert (len({rank // local for rank in group}) > 1) == (place == "network")
