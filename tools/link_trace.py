"""Traced DPO steps over a link: which transfers lie under computations of the rank they go to.

A transfer lasts from when both ends have posted it until it has arrived. All ranks are processes of
one machine and read one clock. It is *hidden* while its receiver computes.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist  # noqa: TID251 - the type of work that is timed
from bench_cases import SHAPES
from dpo_steps import make_bench
from link_cases import (
    RANKS_PER_HOST,
    Case,
    Directions,
    Options,
    crossing,
    open_rows,
    options_of_engine,
    pairs_of_rows,
)

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.flops import flop_costs
from puzzle_align.runtime import executor, p2p
from puzzle_align.runtime.columns import REFERENCE
from puzzle_align.runtime.executor import ModelRun, action_list, execute
from puzzle_align.runtime.groups.collectives import gather_everywhere
from puzzle_align.runtime.groups.world import PipelineLinks, World
from puzzle_align.runtime.lookahead import Lookahead
from puzzle_align.runtime.row_input import RowInput, sum_responses
from puzzle_align.schedules.actions import Action, edge_of
from puzzle_align.schedules.timeline import Span

BETA = 0.1
WARM, STEPS = 1, 3  # steps before the measured ones, and these
Interval = tuple[float, float]


class Posted(NamedTuple):
    """One end of a transfer: ``key`` is equal on both; ``arrived`` is a receive's."""

    key: tuple[int, str, bool, int, int, int]  # step, model, direction, microbatch, ends
    size: int  # bytes
    at: float
    arrived: list[float]


class _Timed:
    """A receive whose arrival is noted by a thread, as nothing else tells when it was."""

    def __init__(self, work: dist.Work, arrived: list[float]) -> None:
        self._work, self._arrived, self._over = work, arrived, threading.Event()
        threading.Thread(target=self._note, daemon=True).start()

    def _note(self) -> None:
        self._work.wait()
        self._arrived.append(time.perf_counter())
        self._over.set()

    def wait(self) -> bool:
        """Wait for the arrival."""
        return self._over.wait()

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return self._over.is_set()


@dataclass
class Trace:
    """This rank's transfers and computations of some steps, on the machine's clock."""

    step: int = 0
    posted: list[Posted] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in the block."""
        start = p2p.start

        def noted(
            action: Action, tensor: torch.Tensor, links: PipelineLinks, rank: int
        ) -> p2p.Transfer:
            edge = edge_of(action, rank, len(links.ranks))
            ends = links.ranks[edge.source], links.ranks[edge.destination]
            key = self.step, action.model, edge.forward, action.microbatch, *ends
            arrived: list[float] = []
            at = time.perf_counter()
            transfer = start(action, tensor, links, rank)
            self.posted.append(Posted(key, tensor.nbytes, at, arrived))
            if action.kind.is_send:
                return transfer
            work = cast(dist.Work, _Timed(transfer.work, arrived))
            return p2p.Transfer(transfer.action, work, transfer.tensor)

        with (
            mock.patch.object(p2p, "start", noted),
            # Spans on the machine's clock, not relative to an execution's start.
            mock.patch.object(executor, "between", lambda _start, end: end),
        ):
            yield


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Disjoint intervals with the same points, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Sequence[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Total length of what two unions have in common."""
    both = (
        min(end, other_end) - max(start, other_start)
        for start, end in some
        for other_start, other_end in others
    )
    return sum(part for part in both if part > 0)


def figures_of(traces: Sequence[Trace], names: Sequence[str]) -> dict[str, Any]:
    """Seconds of transfers over the link by model, summed over ranks, and of these the hidden."""
    posts: dict[Any, list[Posted]] = {}
    for trace in traces:
        for post in trace.posted:
            posts.setdefault(post.key, []).append(post)
    figures: dict[str, Any] = {}
    for name in names:
        seconds = hidden = 0.0
        for trace in traces:
            windows = union(
                [
                    (max(end.at for end in posts[post.key]), post.arrived[0])
                    for post in trace.posted
                    if post.arrived and post.key[1] == name and _crosses(post)
                ]
            )
            seconds += length(windows)
            hidden += common(windows, union([(s.start, s.end) for s in trace.spans]))
        figures[name] = {"transfer_seconds": seconds, "hidden_seconds": hidden}
    return figures


def _crosses(post: Posted) -> bool:
    source, destination = post.key[4:]
    return source // RANKS_PER_HOST != destination // RANKS_PER_HOST


class Steps:
    """DPO steps of a policy and a reference on one pipeline, in one of three orders."""

    def __init__(self, world: World, options: Options, plan: ParallelPlan) -> None:
        """Build both models. Collective over the world."""
        spec, settings = SHAPES["tiny"].spec, options_of_engine()
        self.bench = make_bench(spec, settings, plan, world)
        self.trace = Trace()
        num_rows, tokens = options["rows"], options["row_tokens"]
        self.num_steps = WARM + STEPS + 1
        self.num_pairs = 2 * num_rows * plan.data
        dataset = pairs_of_rows(num_rows * plan.data, self.num_steps, tokens, spec.vocab_size)
        self.batches = open_rows(self.bench.policy, dataset, tokens, self.num_pairs)
        self.kept = [self.batches.rows(step) for step in range(self.num_steps)]
        roles = ((self.bench.reference.role, False), (self.bench.policy.role, True))
        self.costs = {
            role: flop_costs(spec, plan, settings, row_tokens=tokens, train=train)
            for role, train in roles
        }
        self.sums: dict[int, torch.Tensor] = {}  # the reference's, by the step's row
        self.lookahead = self._lookahead()
        self.seconds: list[float] = []

    def _lookahead(self) -> Lookahead:
        return Lookahead(
            self.bench.policy,
            self.bench.reference,
            self.costs,
            lambda step: self.kept[step],
            lambda step: len(self.kept[0]) if step < self.num_steps else 0,
        )

    def loss(
        self, row: RowInput, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Compute a row's share of DPO's loss."""
        margins = sum_responses(row, outputs) - columns[REFERENCE]
        logits = BETA * (margins[:, 0] - margins[:, 1])
        return -torch.nn.functional.logsigmoid(logits).sum() / self.num_pairs

    def _policy(self, step: int) -> ModelRun:
        rows, sums = self.kept[step], self.sums

        def finish(microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
            return self.loss(rows[microbatch], outputs, {REFERENCE: sums[microbatch]})

        return ModelRun(self.bench.policy, rows, finish, train=True)

    def _reference(self, step: int, made: dict[int, torch.Tensor]) -> ModelRun:
        rows = self.kept[step]

        def keep(microbatch: int, outputs: torch.Tensor) -> None:
            made[microbatch] = sum_responses(rows[microbatch], outputs)

        return ModelRun(self.bench.reference, rows, keep, train=False)

    def sequential(self, step: int) -> None:
        """Run the reference's pass, then the policy's."""
        self.sums = {}
        for run in (self._reference(step, self.sums), self._policy(step)):
            runs = {run.context.role: run}
            execute(action_list(runs), runs, self.trace.spans)

    def one_list(self, step: int) -> None:
        """Run the reference over the next batch, in the bubbles of the policy's pass."""
        coming: dict[int, torch.Tensor] = {}
        both = (self._reference(step + 1, coming), self._policy(step))
        runs = {run.context.role: run for run in both}
        execute(action_list(runs, self.costs), runs, self.trace.spans)
        self.sums = coming

    def ahead(self, step: int) -> None:
        """Run the policy's pass, and the reference as far ahead of it as it gets."""
        self.lookahead.train(step, self.loss, (0, step), self.trace.spans)
        self.lookahead.prepare(step + 1)

    def warm_up(self, order: Callable[[int], None]) -> None:
        """Run the steps before the measured ones."""
        self.lookahead = self._lookahead()
        if order == self.one_list:
            made: dict[int, torch.Tensor] = {}
            runs = {"reference": self._reference(0, made)}
            execute(action_list(runs), runs)
            self.sums = made
        for step in range(WARM):
            self.step(order, step)

    def step(self, order: Callable[[int], None], step: int) -> None:
        """Run one whole step."""
        optimizer = self.bench.optimizer
        optimizer.zero_grad()
        order(step)
        optimizer.reduce_gradients()
        self.bench.update()

    def measured(self, order: Callable[[int], None]) -> None:
        """Run the measured steps, traced."""
        self.trace, self.seconds = Trace(), []
        with self.trace.recording():
            for step in range(WARM, WARM + STEPS):
                self.trace.step = step
                started = time.perf_counter()
                self.step(order, step)
                self.seconds.append(time.perf_counter() - started)

    def counted(self) -> Directions:
        """Bytes that the lists sent over the link."""
        sent: dict[tuple[int, int], int] = {}
        for trace in gather_everywhere(self.trace):
            for post in trace.posted:
                if not post.arrived:  # a send
                    ends = post.key[4:]
                    sent[ends] = sent.get(ends, 0) + post.size
        return crossing(sent)

    def figures(self) -> dict[str, Any]:
        """Transfers of both models, and of these what was hidden."""
        slowest = map(max, zip(*gather_everywhere(self.seconds), strict=True))
        return {
            "steps": STEPS,
            "step_seconds": min(slowest),  # what else the machine does only adds
            **figures_of(gather_everywhere(self.trace), [*self.costs]),
        }


def hidden(world: World, options: Options) -> Iterator[Case]:
    """DPO steps: the reference before the policy, in its bubbles, and ahead of it."""
    for p, d in ((2, 2), (4, 1)):
        plan = ParallelPlan(pipeline=p, data=d)
        steps = Steps(world, options, plan)
        orders = {
            "reference first": steps.sequential,
            "in the bubbles": steps.one_list,
            "lookahead": steps.ahead,
        }
        sizes = f"P{p}" + (f" D{d}" if d > 1 else "")
        for name, order in orders.items():
            yield Case(
                "hidden",
                f"{sizes}, {name}",
                partial(steps.measured, order),
                steps.counted,
                partial(steps.warm_up, order),
                figures=steps.figures,
                has_first_turn=False,
            )
