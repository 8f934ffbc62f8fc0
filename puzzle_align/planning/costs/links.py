"""Links between ranks: times of messages on measured links, and declared links for the others.

A group of ranks communicates within a node if all its ranks are on one, else between nodes. If no
group of its size was measured, the nearest size is taken, scaled by the bytes that a ring sends: a
ring of n ranks moves, on every rank, 2(n-1)/n of an all-reduce's bytes in 2(n-1) steps, and (n-1)/n
of an all-gather's result in n-1 steps. Links that were not measured can be declared from data
sheets; real collectives reach a share of these, which a user's file (``declared_wires``) can state.

Groups that reach from one node to others at the same time may share its adapter. So links between
nodes are measured with a group of every local rank at once, and with one alone; times of numbers
between these lie on a line.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from puzzle_align.config.yaml_tree import read_yaml
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import real, record
from puzzle_align.planning.costs.interpolate import Line
from puzzle_align.planning.costs.profile import Link, LinkPoint, Place, Time, Transport

_DEPENDS_ON_RANKS = ("all_reduce", "all_gather")
_ALL = 2**20  # groups at once: as many as were measured


class LinkCosts:
    """Seconds of messages; ``beyond`` collects the numbers of ranks that were not measured."""

    def __init__(self, links: Sequence[Link], ranks_per_node: int) -> None:
        self._lines: dict[tuple[Transport, Place], dict[tuple[int, int], Line]] = {}
        for link in links:
            line = Line((point.size, point.time.median) for point in link.points)
            lines = self._lines.setdefault((link.transport, link.place), {})
            lines[link.ranks, link.at_once or _ALL] = line
        self.ranks_per_node = ranks_per_node
        self.beyond: set[str] = set()
        self._seconds = cache(self._estimated)
        self.by_place = cache(self._by_place)

    def place(self, ranks: Sequence[int]) -> Place:
        """Whether a group of global ranks communicates within a node or between nodes."""
        size = self.ranks_per_node
        return "node" if min(ranks) // size == max(ranks) // size else "network"

    def at_once(self, group: Sequence[int], groups: Iterable[Sequence[int]]) -> int:
        """Number of ``groups`` that reach from the node of a group's first rank to others."""
        node = group[0] // self.ranks_per_node
        across = (each for each in groups if self.place(each) == "network")
        return sum(any(rank // self.ranks_per_node == node for rank in each) for each in across)

    def _by_place(
        self, groups: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[tuple[int, ...], int], ...]:
        """One of the groups in each place, and how many communicate between nodes as it does."""
        chosen = {self.place(group): group for group in groups}.values()
        return tuple((group, self.at_once(group, groups)) for group in chosen)

    def p2p(self, source: int, destination: int, size: float, at_once: float = _ALL) -> float:
        """Seconds of ``size`` bytes from a rank to another."""
        return self._seconds("p2p", self.place((source, destination)), 2, size, at_once)

    def exchange(self, place: Place, size: float, at_once: float = _ALL) -> float:
        """Seconds in which two ranks send one another ``size`` bytes, into new memory."""
        return self._seconds("exchange", place, 2, size, at_once) if size > 0 else 0.0

    def least_exchange(self, place: Place) -> float:
        """Lower bound of the seconds per byte of an exchange, for any size."""
        return min(line.least_each for line in self._of("exchange", place).values())

    def copy(self, size: float) -> float:
        """Seconds of a copy of ``size`` bytes within a rank's memory, into new memory."""
        return self._seconds("copy", "node", 1, size, _ALL) if size > 0 else 0.0

    def all_reduce(self, ranks: Sequence[int], size: float, at_once: float = _ALL) -> float:
        """Seconds of an all-reduce of ``size`` bytes; 0 for one rank."""
        return self._collective("all_reduce", ranks, size, at_once)

    def all_gather(self, ranks: Sequence[int], size: float, at_once: float = _ALL) -> float:
        """Seconds of an all-gather whose result has ``size`` bytes, or of a reduce-scatter."""
        return self._collective("all_gather", ranks, size, at_once)

    def _collective(
        self, transport: Transport, ranks: Sequence[int], size: float, at_once: float
    ) -> float:
        if len(ranks) < 2 or size <= 0:
            return 0.0
        return self._seconds(transport, self.place(ranks), len(ranks), size, at_once)

    def _estimated(
        self, transport: Transport, place: Place, ranks: int, size: float, at_once: float
    ) -> float:
        lines = self._of(transport, place)
        nearest = min({number for number, _ in lines}, key=lambda n: (abs(n - ranks), n))
        measured = {
            n: line.at(size).value for (number, n), line in lines.items() if number == nearest
        }
        value = _between(measured, at_once)
        scale = 1.0
        if nearest != ranks and transport in _DEPENDS_ON_RANKS:
            scale = _ring(ranks) / _ring(nearest)
            self.beyond.add(f"{transport} of {ranks} ranks, from that of {nearest}")
        return value * scale

    def _of(self, transport: Transport, place: Place) -> dict[tuple[int, int], Line]:
        """Seconds by message size, for every measured number of ranks, and of groups at once."""
        lines = self._lines.get((transport, place))
        if not lines:
            where = "between nodes" if place == "network" else "within a node"
            raise ValueError(
                f"the profile has no {transport} {where}: measure it there, or declare it with "
                "puzzle-align profile --links"
            )
        return lines


class FastestLinks(LinkCosts):
    """Links on which every message takes the time of the faster place, alone or not."""

    def _estimated(
        self, transport: Transport, place: Place, ranks: int, size: float, at_once: float
    ) -> float:
        places: list[Place] = [
            measured_place for kind, measured_place in self._lines if kind == transport
        ] or [place]
        estimated = super()._estimated
        return min(estimated(transport, p, ranks, size, n) for p in places for n in (1, _ALL))


def _between(measured: Mapping[int, float], at_once: float) -> float:
    """Seconds for a number of groups at once, from those of the least and the greatest number."""
    least, most = min(measured), max(measured)
    if least == most:
        return measured[least]
    share = min(max((at_once - least) / (most - least), 0.0), 1.0)
    return measured[least] + share * (measured[most] - measured[least])


def _ring(ranks: int) -> float:
    """Share of a message that each rank of a ring sends."""
    return (ranks - 1) / ranks


PLACES: tuple[Place, ...] = ("node", "network")
TRANSPORTS: tuple[Transport, ...] = ("p2p", "exchange", "all_reduce", "all_gather")
BETWEEN_TWO: tuple[Transport, ...] = ("p2p", "exchange")  # the others are among more ranks, too
DECLARED_RANKS = tuple(2**power for power in range(1, 10))  # 2 to 512
DECLARED_SIZES = tuple(2**power for power in range(12, 31, 3))  # 4 KiB to 1 GiB


@dataclass(frozen=True)
class Wire:
    """A rank's link to others: bytes per second in each direction, seconds per message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Wires:
    """Wires within a node, and between nodes (a rank's share of its node's adapters)."""

    node: Wire
    network: Wire


# Latencies are 3 us of NVLink, 6 us of PCIe, 5 us of InfiniBand.
_HOPPER = Wires(node=Wire(450e9, 3e-6), network=Wire(50e9, 5e-6))
KNOWN_WIRES = {
    # NVLink 3, 12 links of 25 GB/s; an HDR InfiniBand adapter of 200 Gb/s for every GPU.
    "a100-sxm": Wires(node=Wire(300e9, 3e-6), network=Wire(25e9, 5e-6)),
    # PCIe 4.0 x16; one adapter of 100 Gb/s, which the eight GPUs of a node share.
    "a100-pcie": Wires(node=Wire(32e9, 6e-6), network=Wire(12.5e9 / 8, 5e-6)),
    # NVLink 4, 18 links of 25 GB/s; an NDR InfiniBand adapter of 400 Gb/s for every GPU. The two
    # differ in memory.
    "h100": _HOPPER,
    "h200": _HOPPER,
}

_POSITIVE = real(1e-12, 1e18)  # plausible latencies and bandwidths


def declared_wires(name: str) -> Wires:
    """Wires by a known name, or from a YAML (or JSON) file of bandwidths and latencies.

    Raises:
        ValueError: one line with ``--links``, if the name is unknown or the file is invalid.
    """
    if name in KNOWN_WIRES:
        return KNOWN_WIRES[name]
    names = ", ".join(KNOWN_WIRES)
    try:
        data = read_yaml(Path(name).read_text(encoding="utf-8"), lambda line: f"line {line}")
    except FileNotFoundError:
        raise ValueError(f"--links {name}: neither {names}, nor a file; give one of them") from None
    except (OSError, ValueError) as error:
        reason = shown(str(error))
        raise ValueError(f"--links {name}: cannot be read: {reason}; give {names}") from error
    cure = "; give node and network, each with bandwidth and latency"
    wires: Wires = record(Wires).read(data, f"--links {name}", cure)
    for place in PLACES:
        for key, value in vars(getattr(wires, place)).items():
            _POSITIVE.read(value, f"--links {name}.{place}.{key}", cure)
    return wires


def declared_links(name: str, wires: Wires) -> tuple[Link, ...]:
    """Every transport among 2 to 512 ranks in both places, marked as ``declared`` by ``name``."""
    wire_of: dict[Place, Wire] = {"node": wires.node, "network": wires.network}

    def link(transport: Transport, place: Place, ranks: int) -> Link:
        times = [ring_time(transport, wire_of[place], ranks, size) for size in DECLARED_SIZES]
        points = tuple(
            LinkPoint(size=size, time=Time(median=time))
            for size, time in zip(DECLARED_SIZES, times, strict=True)
        )
        return Link(transport=transport, place=place, ranks=ranks, points=points, declared=name)

    return tuple(
        link(transport, place, ranks)
        for place in PLACES
        for transport in TRANSPORTS
        for ranks in (DECLARED_RANKS if transport not in BETWEEN_TWO else (2,))
    )


def ring_time(transport: Transport, wire: Wire, ranks: int, size: int) -> float:
    """Seconds of a message of ``size`` bytes (of an all-gather: of its result) among ``ranks``.

    A wire has its bandwidth in each direction, so an exchange takes no longer than a message.
    """
    if transport in BETWEEN_TWO:
        return size / wire.bandwidth + wire.latency
    steps = ranks - 1
    once = steps / ranks * size / wire.bandwidth + steps * wire.latency
    return 2 * once if transport == "all_reduce" else once


def with_declared(measured: Iterable[Link], declared: Iterable[Link]) -> tuple[Link, ...]:
    """The measured links, and declared ones for those not measured."""
    measured = tuple(measured)
    known = {(link.transport, link.place, link.ranks) for link in measured}
    left = (each for each in declared if (each.transport, each.place, each.ranks) not in known)
    return tuple(sorted((*measured, *left), key=_order))


def link_groups(num_nodes: int, ranks_per_node: int) -> list[tuple[Place, list[tuple[int, ...]]]]:
    """Groups of ranks that communicate at the same time, for each measurement.

    As in a job, all ranks take part: within every node neighbours in groups of 2, 4, ... and all;
    between nodes, ranks of one local number in 2, 4, ... and all nodes, and of the first local
    number alone, then whole nodes together.
    """
    groups: list[tuple[Place, list[tuple[int, ...]]]] = []
    nodes = [range(n * ranks_per_node, (n + 1) * ranks_per_node) for n in range(num_nodes)]
    for size in _sizes(ranks_per_node):
        starts = range(0, ranks_per_node - size + 1, size)
        groups.append(("node", [tuple(n[s : s + size]) for n in nodes for s in starts]))
    across = _sizes(num_nodes)
    for size in across:
        firsts = range(0, num_nodes - size + 1, size)
        lines = [
            tuple(node[local] for node in nodes[first : first + size])
            for first in firsts
            for local in range(ranks_per_node)
        ]
        groups.append(("network", lines))
        if ranks_per_node > 1:
            groups.append(("network", lines[::ranks_per_node]))
    for size in across:
        if size * ranks_per_node not in across and ranks_per_node > 1:
            firsts = range(0, num_nodes - size + 1, size)
            whole = [tuple(r for n in nodes[first : first + size] for r in n) for first in firsts]
            groups.append(("network", whole))
    return groups


def _sizes(number: int) -> Sequence[int]:
    """2, 4, ... up to ``number``, and ``number`` itself; nothing below 2."""
    powers = [2**power for power in range(1, number.bit_length()) if 2**power <= number]
    return powers if number < 2 or number in powers else [*powers, number]


def _order(link: Link) -> tuple[int, int, int, int]:
    transport = (*TRANSPORTS, "copy").index(link.transport)
    return PLACES.index(link.place), transport, link.ranks, link.at_once or 0
