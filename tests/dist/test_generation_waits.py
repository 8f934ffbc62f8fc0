"""Generation never stands still, whenever its ranks wait for their devices.

A graph's capture waits for all that its rank has posted, and so may any call of CUDA: one that
loads a kernel, or takes memory. A transfer of NCCL may not end before both ends have begun it.
Ranks note what their hosts issue. Then hosts and devices run again, as far as they get: a stream's
work in its order, a communicator's transfers in theirs.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime import p2p
from puzzle_align.runtime.generation import engine
from puzzle_align.runtime.generation.sampling import Sampling
from puzzle_align.runtime.groups.world import World
from puzzle_align.schedules.actions import edge_of
from tests.dist.chunk_runs import VARIANTS, save_model
from tests.dist.spawn import run_ranks
from tests.dist.test_generation import context_of
from tests.dist.test_generation_steps import FEW, STOPS, answers

SAMPLING = Sampling(0.0, 0, 1.0, 0, 9, STOPS, seed=0)
Transfer = tuple[Any, ...]  # its communicator, and its number there
Operation = tuple[str, Transfer]  # post, wait, forward or fetch; the latter two of no transfer


class _Noted:
    """The work of a transfer, whose waits are noted."""

    def __init__(self, work: Any, wait: Callable[[], None]) -> None:
        self._work, self._wait = work, wait

    def wait(self) -> None:
        self._wait()
        self._work.wait()


def _operations(rank: int, world_size: int, folder: Path, plan: ParallelPlan) -> list[Operation]:
    """What the rank's host issues in a generation."""
    context = context_of(folder, plan, World(rank, world_size, torch.device("cpu")))
    noted: list[Operation] = []
    numbers: dict[Transfer, int] = defaultdict(int)

    def posted(*communicator: object, work: Any) -> Any:
        transfer = *communicator, numbers[communicator]
        numbers[communicator] += 1
        noted.append(("post", transfer))
        return _Noted(work, lambda: noted.append(("wait", transfer)))

    def start(*args: Any) -> p2p.Transfer:
        action, _, links, place = args
        edge = edge_of(action, place, len(links.ranks))
        made = begin(*args)
        return replace(made, work=posted(edge.source, edge.destination, work=made.work))

    def broadcast(*args: Any, **named: Any) -> Any:
        return posted("outcomes", work=share(*args, **named))

    def before(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            noted.append((kind, ()))
            return method(*args)

        return noting

    begin, share, plain = p2p.start, dist.broadcast, engine._Generation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "start", start)
        patch.setattr(dist, "broadcast", broadcast)
        patch.setattr(plain, "_forward", before("forward", plain._forward))
        patch.setattr(plain, "_collect", before("fetch", plain._collect))
        answers(context, SAMPLING, FEW, 3)
    return noted


class _Rank:
    """A rank's host and device."""

    def __init__(self, program: list[Operation], waits: Callable[[], bool]) -> None:
        self._program = deque((*operation, waits()) for operation in program)
        self._stream: deque[Transfer] = deque()  # transfers to wait for; (): a computation
        self._num_issued = self._num_done = 0  # in the stream
        self._posted: dict[Transfer, deque[tuple[Transfer, int]]] = defaultdict(deque)

    @property
    def left(self) -> list[Operation]:
        return [(kind, transfer) for kind, transfer, _ in self._program]

    def issue(self) -> bool:
        """Let the host go on; return whether it has."""
        before = len(self._program)
        while self._program:
            kind, transfer, waits = self._program[0]
            if self._stream and (kind == "fetch" or waits):
                break
            if waits and any(self._posted.values()):
                break
            if kind == "post":
                self._posted[transfer[:-1]].append((transfer, self._num_issued))
            elif kind != "fetch":
                self._stream.append(transfer)
                self._num_issued += 1
            self._program.popleft()
        return len(self._program) < before

    def work(self, ends: dict[Transfer, set["_Rank"]], num_ends: Callable[[Transfer], int]) -> bool:
        """Let the device go on; return whether it has."""
        went_on = False
        while self._stream and (
            not self._stream[0] or len(ends[self._stream[0]]) == num_ends(self._stream[0])
        ):
            self._stream.popleft()
            self._num_done += 1
            went_on = True
        for posted in self._posted.values():
            while posted and posted[0][1] <= self._num_done:
                transfer = posted[0][0]
                went_on |= self not in ends[transfer]
                ends[transfer].add(self)
                if len(ends[transfer]) < num_ends(transfer):
                    break
                posted.popleft()
                went_on = True
        return went_on


def _left(programs: list[list[Operation]], waits: Callable[[], bool]) -> list[list[Operation]]:
    """What every rank's host has not issued when nothing goes on."""
    ranks = [_Rank(program, waits) for program in programs]
    ends: dict[Transfer, set[_Rank]] = defaultdict(set)

    def num_ends(transfer: Transfer) -> int:
        return len(ranks) if transfer[0] == "outcomes" else 2

    while any(rank.issue() | rank.work(ends, num_ends) for rank in ranks):
        pass
    return [rank.left for rank in ranks]


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(pipeline=3, virtual_pipeline=2),
        pytest.param(ParallelPlan(pipeline=2), marks=pytest.mark.slow),
        pytest.param(ParallelPlan(pipeline=3), marks=pytest.mark.slow),
        pytest.param(ParallelPlan(pipeline=2, virtual_pipeline=3), marks=pytest.mark.slow),
    ],
    ids=lambda plan: f"{plan.pipeline} ranks, {plan.virtual_pipeline} chunks",
)
def test_no_rank_waits_for_what_waits_for_it(plan: ParallelPlan, tmp_path: Path) -> None:
    family, changes = VARIANTS["llama grouped"]
    save_model(tmp_path, family, {**changes, "num_hidden_layers": 6}, seed=1)
    programs = run_ranks(_operations, plan.world_size, tmp_path, plan)
    assert min(len(program) for program in programs) > 100
    for program in programs:  # what a transfer uses may be used again once it is waited for
        posted, waited = ([t for kind, t in program if kind == own] for own in ("post", "wait"))
        assert len(posted) == len(waited) and {*posted} == {*waited}
    some = random.Random(0)
    often, rarely = lambda: some.random() < 0.5, lambda: some.random() < 0.05
    for waits in (lambda: True, lambda: False, *[often] * 20, *[rarely] * 20):
        assert _left(programs, waits) == [[]] * plan.world_size


def test_ranks_that_wait_for_one_another_are_found() -> None:
    there, back = ("post", (0, 1, 0)), ("post", (1, 0, 0))
    forward: Operation = ("forward", ())
    programs = [[there, forward, back], [back, forward, there]]
    assert _left(programs, lambda: True) == [[forward, back], [forward, there]]
    assert _left(programs, lambda: False) == [[], []]
