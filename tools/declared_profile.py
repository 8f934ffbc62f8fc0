"""Declared profiles on links of any bandwidth, for the planner's cases and tests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from puzzle_align.layout.model import ModelSpec
from puzzle_align.planning.costs import declared
from puzzle_align.planning.costs.declared import Device, Sizes
from puzzle_align.planning.costs.profile import Link, LinkPoint, Place, Profile, Time, Transport

_SIZES = tuple(2**n for n in range(12, 33, 2))  # bytes of messages
A100 = Device(name="A100-80GB", flops=200e12, bandwidth=1.6e12, memory_bytes=80 * 10**9)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Bytes/s of a rank in each direction, and seconds of a message's first byte."""

    node_bandwidth: float
    network_bandwidth: float
    node_latency: float = 8e-6
    network_latency: float = 20e-6


def declared_profile(
    models: Iterable[ModelSpec],
    device: Device,
    network: Network,
    *,
    ranks_per_node: int = 8,
    sizes: Sizes | None = None,
) -> Profile:
    """Declare the profile of a device on such a network."""
    links = _links(network)
    return declared.declared_profile(
        models, device, links, ranks_per_node=ranks_per_node, sizes=sizes
    )


def _links(network: Network) -> Iterable[Link]:
    places: Sequence[tuple[Place, float, float]] = (
        ("node", network.node_bandwidth, network.node_latency),
        ("network", network.network_bandwidth, network.network_latency),
    )
    for place, bandwidth, latency in places:
        yield _link("p2p", place, 2, 1 / bandwidth, latency)
        yield _link("exchange", place, 2, 1 / bandwidth, latency)
        for ranks in (2, 4, 8, 16, 32, 64):
            ring, hops = (ranks - 1) / ranks / bandwidth, (ranks - 1) * latency
            yield _link("all_reduce", place, ranks, 2 * ring, 2 * hops)
            yield _link("all_gather", place, ranks, ring, hops)


def _link(transport: Transport, place: Place, ranks: int, each: float, latency: float) -> Link:
    points = [LinkPoint(size=size, time=Time(median=latency + size * each)) for size in _SIZES]
    return Link(
        transport=transport,
        place=place,
        ranks=ranks,
        points=tuple(points),
        declared="data sheet",
    )
