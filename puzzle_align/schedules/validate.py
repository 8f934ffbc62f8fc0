"""Validation: prove a schedule before it runs.

Proven properties of the lowered lists of any number of models:
- every rank has every action of its programs exactly once, and no other (for a lookahead model,
  the actions of its windows; no rank uses an input that no list has received);
- on every rank a forward comes before its backward, a receive before the action that uses the
  tensor, a send after the action that makes it;
- on every edge the k-th receive matches the k-th send;
- on the last rank a forward that reads another model's output comes after it;
- no transfer waits for a later action of its rank: all ranks reach their end even if every send
  and receive, one at a time, blocks until its other end is posted.

The executor posts transfers and goes on. With NCCL each then occupies its device until it is
matched, and anything that waits for the whole device (an allocator that frees, a kernel's first
load) waits for all of them. An execution with fewer waits than proven ends, too: waits are edges of
an acyclic graph, and a subgraph of it is acyclic.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from puzzle_align.schedules.actions import Action, Edge, Kind, Program, edge_of
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.lowering import receive_for, receive_of, send_after


def validate(lists: Sequence[Sequence[Action]], programs: Sequence[Program]) -> None:
    """Raise ValueError, naming rank and action, if lowered lists lack one of these properties."""
    by_model = {program.model: program for program in programs}
    assert len(by_model) == len(programs), "two programs of one model"
    for program in programs:
        _check_windows(program, len(lists))
    for rank, actions in enumerate(lists):
        _check_complete(actions, rank, len(lists), programs)
        _check_order(actions, rank, len(lists), by_model)
    _check_reads(lists, by_model)
    _check_edges(lists)
    _check_progress(lists, by_model)


def _check_windows(program: Program, num_ranks: int) -> None:
    if program.windows is None:
        return
    assert not program.backward and len(program.windows) == num_ranks * program.num_chunks
    for position, (before, window) in enumerate(itertools.pairwise(program.windows), start=1):
        if window.start > before.start or window.stop > before.stop:
            number = window.start if window.start > before.start else window.stop - 1
            action = Action(program.model, Kind.FORWARD, number, position // num_ranks)
            raise ValueError(
                f"rank {position % num_ranks} has the window {_shown(window)}, which does not fit"
                f" {_shown(before)} of the position before: {action} is out of step"
            )


def _shown(window: range) -> str:
    return f"{window.start}..{window.stop - 1}"


def _expected(rank: int, num_ranks: int, program: Program) -> Iterator[Action]:
    kinds = [Kind.FORWARD, Kind.BACKWARD] if program.backward else [Kind.FORWARD]
    for chunk in range(program.num_chunks):
        position = chunk * num_ranks + rank
        for kind in kinds:
            for microbatch in program.microbatches(position):
                action = Action(program.model, kind, microbatch, chunk)
                yield action
                send = send_after(action, rank, num_ranks, program.num_chunks)
                if send is not None:
                    yield send
            source = position - 1 if kind is Kind.FORWARD else position + 1
            if num_ranks > 1 and 0 <= source < num_ranks * program.num_chunks:
                receive = Kind.RECV_FORWARD if kind is Kind.FORWARD else Kind.RECV_BACKWARD
                for microbatch in program.microbatches(source):
                    yield Action(program.model, receive, microbatch, chunk)


def _check_complete(
    actions: Sequence[Action], rank: int, num_ranks: int, programs: Sequence[Program]
) -> None:
    counts = Counter(actions)
    expected = [action for program in programs for action in _expected(rank, num_ranks, program)]
    for action in expected:
        if counts[action] != 1:
            raise ValueError(f"rank {rank} has {action} {counts[action]} times; it must be once")
    for action in counts.keys() - set(expected):
        raise ValueError(f"rank {rank} has {action}, which is in none of its programs")


def _check_order(
    actions: Sequence[Action], rank: int, num_ranks: int, programs: dict[str, Program]
) -> None:
    index = {action: at for at, action in enumerate(actions)}
    for action in actions:
        if not action.kind.is_compute:
            continue
        program = programs[action.model]
        receive = receive_for(action, rank, num_ranks, program)
        send = send_after(action, rank, num_ranks, program.num_chunks)
        orders = [(receive, action), (action, send)]
        if action.kind is Kind.BACKWARD:
            orders.append((replace(action, kind=Kind.FORWARD), action))
        for earlier, later in orders:
            if earlier is not None and later is not None and index[earlier] > index[later]:
                raise ValueError(f"rank {rank} has {later} before {earlier}; it must come after")


def _check_reads(lists: Sequence[Sequence[Action]], programs: dict[str, Program]) -> None:
    rank, last = len(lists) - 1, lists[-1]
    index = {action: at for at, action in enumerate(last)}
    for reader in programs.values():
        if reader.reads is None:
            continue
        read = programs[reader.reads]
        window = read.microbatches(read.num_chunks * len(lists) - 1)
        for microbatch in reader.microbatches(reader.num_chunks * len(lists) - 1):
            if microbatch < window.start:
                continue  # it ran in an earlier list
            before = Action(read.model, Kind.FORWARD, microbatch, read.num_chunks - 1)
            after = Action(reader.model, Kind.FORWARD, microbatch, reader.num_chunks - 1)
            if before not in index or index[before] > index[after]:
                raise ValueError(f"rank {rank} has {after} without {before} before it")


def _check_edges(lists: Sequence[Sequence[Action]]) -> None:
    sends: dict[Edge, list[Action]] = {}
    receives: dict[Edge, list[Action]] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if action.kind.is_compute:
                continue
            edge = edge_of(action, rank, len(lists))
            side = sends if action.kind.is_send else receives
            side.setdefault(edge, []).append(action)
    for edge, sent in sends.items():
        for send, receive in zip(sent, receives[edge], strict=True):
            if receive != receive_of(send, edge):
                raise ValueError(
                    f"rank {edge.destination} has {receive} where rank {edge.source} has {send};"
                    " receives must be in the order of the sends"
                )


def _check_progress(lists: Sequence[Sequence[Action]], programs: dict[str, Program]) -> None:
    """Run every rank as far as it gets, repeatedly, until all are done or none moves."""
    num_ranks = len(lists)
    at = [0] * num_ranks
    waiting: dict[Edge, int] = {}  # the rank that is blocked at a transfer of an edge
    graph = Dependencies(programs.values(), num_ranks)
    done: set[Event] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind.is_compute:
                    if not done.issuperset(graph.of(action, rank)):
                        break
                    done.add(graph.event(action, rank))
                else:
                    edge = edge_of(action, rank, num_ranks)
                    other = waiting.setdefault(edge, rank)
                    if other == rank:
                        break
                    at[other] += 1
                    del waiting[edge]
                at[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[at[rank]]}"
        for rank, actions in enumerate(lists)
        if at[rank] < len(actions)
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks: these wait for ever: {', '.join(stuck)}")
