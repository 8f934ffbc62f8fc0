"""Drawn times, and the order that a pipeline would take by itself."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, quantiles

import pytest
from hypothesis import given, settings

from puzzle_align.schedules import timeshare
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.dispatch import dispatch
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.noise import MeanMakespan
from puzzle_align.schedules.registry import one_f_one_b
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import timeline_of
from puzzle_align.schedules.validate import validate
from tests.costs import uniform
from tests.unit.schedule_strategies import NOISES, Workload, workloads

ROOT = Path(__file__).parents[2]
HARDLY_ANY = 1e-9  # a factor of it is 1


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0])
def test_noise_is_half_the_interquartile_range_over_the_median(noise: float) -> None:
    program = Program("m", 1, backward=False)
    measure = MeanMakespan({"m": uniform(1, 2.0, noise=noise)}, 1, num_draws=999)
    drawn = measure.all_of(one_after_the_other([program], 1), Dependencies([program], 1))
    assert drawn is not None
    low, middle, high = quantiles(drawn, n=4)
    assert middle == pytest.approx(2.0)
    assert (high - low) / 2 / middle == pytest.approx(noise, rel=0.01)


def test_every_action_has_the_same_times_in_another_order() -> None:
    """So one rank, which never waits, takes as long in the mean as one action, each."""
    program, costs = Program("m", 7), {"m": uniform(1, 2.0, 3.0, noise=0.3)}
    graph, measure = Dependencies([program], 1), MeanMakespan(costs, 1)
    one = Dependencies([Program("m", 1, backward=False)], 1)
    alone = measure.all_of(one_after_the_other([Program("m", 1, backward=False)], 1), one)
    whole = measure.all_of(one_after_the_other([program], 1), graph)
    assert alone is not None and whole is not None
    assert fmean(whole) == pytest.approx(fmean(alone) / 2.0 * 7 * (2.0 + 3.0))
    assert len(set(whole)) == len(whole)


@settings(max_examples=40)
@given(workloads(4, 8, 3, noises=NOISES))
def test_the_mean_makespan_is_never_below_that_of_medians(workload: Workload) -> None:
    """Waiting for the latest is convex; where the times do not vary, every draw is the timeline."""
    num_ranks, programs, costs = workload
    graph = Dependencies(programs, num_ranks)
    lists = time_share(programs, num_ranks, costs)
    timeline = timeline_of(lists, graph, costs)
    mean = MeanMakespan(costs, num_ranks).of(lists, graph)
    assert timeline is not None and mean is not None
    assert mean >= timeline.makespan * (1 - 1e-6)
    exact = {model: replace(own, noise=HARDLY_ANY) for model, own in costs.items()}
    drawn = MeanMakespan(exact, num_ranks).all_of(lists, graph)
    assert drawn is not None and set(drawn) == {timeline.makespan}


def test_lists_that_deadlock_have_no_makespan() -> None:
    program = Program("m", 2)
    first, last = one_f_one_b("m", 2, 2)
    for noise in (0.0, 0.1):
        measure = MeanMakespan({"m": uniform(2, 1, 2, noise=noise)}, 2)
        assert measure.of([first, last[::-1]], Dependencies([program], 2)) is None


@settings(max_examples=30)
@given(workloads(4, 6, 3))
def test_without_noise_nothing_is_drawn_and_nothing_more_proposed(workload: Workload) -> None:
    num_ranks, programs, costs = workload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeanMakespan, "all_of", None)
        patch.setattr(timeshare, "dispatch", None)
        lists = time_share(programs, num_ranks, costs)
    assert lists == time_share(programs, num_ranks, costs)


LISTS = """
from puzzle_align.schedules.actions import Program
from tests.costs import uniform
from puzzle_align.schedules.lookahead import lookahead_step
from puzzle_align.schedules.timeshare import time_share
from tests.unit.schedule_csv import to_csv

costs = {"actor": uniform(4, 2, 4, 2, 0.2), "critic": uniform(4, 1, 2, 1, 0.3)}
print(to_csv(time_share([Program("actor", 9), Program("critic", 7)], 4, costs)))
costs = {"actor": uniform(4, 1, 2, noise=0.2), "reference": uniform(4, 1, noise=0.1)}
done = ()
for _ in range(3):
    step = lookahead_step(Program("actor", 6), "reference", 6, num_ranks=4, costs=costs, done=done)
    done = step.done
    print(to_csv(step.lists), done, step.makespan)
"""


def test_every_process_makes_the_same_lists() -> None:
    """Also where texts have other hashes, and random numbers another state."""
    made = set()
    for number in ("1", "2"):
        started = f"import random; random.seed({number})\n{LISTS}"
        environment = os.environ | {"PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", started]
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
