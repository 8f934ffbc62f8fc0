"""List scheduling: lists are whole, within their limits, and the same in every process."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from puzzle_align.schedules import timeshare
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.dispatch import dispatch
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import one_f_one_b
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import makespan_of
from puzzle_align.schedules.validate import validate
from tests.costs import uniform
from tests.unit.schedule_strategies import Workload, workloads

ROOT = Path(__file__).parents[2]

LISTS = """
from puzzle_align.schedules.actions import Program
from tests.costs import uniform
from puzzle_align.schedules.lookahead import lookahead_step
from puzzle_align.schedules.timeshare import time_share
from tests.unit.schedule_csv import to_csv

costs = {"actor": uniform(4, 2, 4, 2), "critic": uniform(4, 1, 2)}
print(to_csv(time_share([Program("actor", 9), Program("critic", 7)], 4, costs)))
costs = {"actor": uniform(4, 1, 2), "reference": uniform(4, 1)}
done = ()
for _ in range(3):
    step = lookahead_step(Program("actor", 6), "reference", 6, num_ranks=4, costs=costs, done=done)
    done = step.done
    print(to_csv(step.lists), done, step.makespan)
"""


def test_every_process_makes_the_same_lists() -> None:
    """Also where texts have other hashes."""
    made = set()
    for number in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", LISTS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        made.add(done.stdout)
    assert len(made) == 1 and "critic:B6.0" in made.pop()


@settings(max_examples=60)
@given(workloads(6, 12, 3))
def test_dispatched_lists_are_whole_and_within_their_limits(workload: Workload) -> None:
    num_ranks, programs, costs = workload
    programs = [replace(program, num_chunks=1, schedule=None) for program in programs]
    graph, sequential = Dependencies(programs, num_ranks), one_after_the_other(programs, num_ranks)
    limits = graph.peaks(sequential, costs)
    lists = dispatch(sequential, graph, costs, limits)
    if lists is None:  # every rank is full of what another has no room for
        assert len({program.model for program in programs if program.backward}) > 1
        return
    validate(lower(lists, programs), programs)
    peaks = graph.peaks(lists, costs)
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_dispatched_1f1b_is_1f1b() -> None:
    """A rank has room for no more than 1F1B takes, and the times are even."""
    program, costs = Program("m", 8), {"m": uniform(4, 1, 2)}
    lists = one_f_one_b("m", 4, 8)
    graph = Dependencies([program], 4)
    assert dispatch(lists, graph, costs, [4, 3, 2, 1]) == lists
    assert dispatch(lists, graph, costs, [4, 3, 2, 0]) is None  # rank 3 never has room


def test_a_rank_waits_for_what_is_urgent_and_nearly_there() -> None:
    """The actor's backward, if the reference's forward would put it off by more than half of it."""
    programs = [Program("actor", 1), Program("reference", 4, backward=False)]
    for backward, third in ((3.0, "actor:B0.0"), (4.0, "reference:F1.0")):
        # On rank 0 the first two end at 1 and 4, on rank 1 the backward at 2 + ``backward``.
        costs = {
            "actor": ModelCosts((1.0, 1.0), (9.0, backward)),
            "reference": ModelCosts((3.0, 0.1)),
        }
        lists = dispatch(one_after_the_other(programs, 2), Dependencies(programs, 2), costs, [1, 1])
        assert lists is not None
        assert list(map(str, lists[0][:3])) == ["actor:F0.0", "reference:F0.0", third]


def test_two_trainings_are_shorter_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [Program("actor", 8), Program("critic", 8)]
    costs, graph = (
        {"actor": uniform(4, 2, 4, 2), "critic": uniform(4, 1, 2, 1)},
        Dependencies(programs, 4),
    )
    now = makespan_of(time_share(programs, 4, costs), graph, costs)
    monkeypatch.setattr(timeshare, "dispatch", lambda *_: None)
    before = makespan_of(time_share(programs, 4, costs), graph, costs)
    assert now < 0.96 * before
