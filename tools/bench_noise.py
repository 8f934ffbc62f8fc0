#!/usr/bin/env python3
"""Compare schedules composed for noisy times with those composed for exact ones; print JSON.

Lists are composed in three ways and meet the same fresh draws, by which none was chosen: for the
noise; for exact times; and for exact times from all that is proposed where there is noise.
"ratio" is the mean makespan of the first over the second's: below 1, knowing the noise helps.
"choice_ratio" is the first over the third's: what choosing by draws adds to proposing more.
"exact_ratio" is the first over the second's without noise: below 1, more proposals help in any
case; above 1, lists were taken that are shorter with noise alone. "standard_error" is the ratio's,
over draws. "composing" is the first's time over the second's.

"two_trainings" are two models of equal microbatches, "head" of them has a last rank that takes 1.4
times as long; "beside" is a training with another model's forwards; "dpo_lookahead" is a policy
with its reference a batch ahead, the mean of settled steps. Costs are ratios to a forward of the
smaller model.

    python tools/bench_noise.py
    python tools/bench_noise.py --pipeline 4 --noise 0.1 --draws 2000
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bench_timeshare import dpo_costs, positive_int, positive_number, trainings_costs
from timeshare_schedules import CRITIC, NUM_SETTLING, POLICY, REFERENCE, lookahead_steps

from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lookahead import LookaheadStep
from puzzle_align.schedules.noise import MeanMakespan
from puzzle_align.schedules.timeshare import time_share
from puzzle_align.schedules.timing import timeline_of

FRESH_SEED = 1000  # the composers draw with 0
HARDLY_ANY = 1e-9  # noise that proposes all and changes no time
NUM_STEADY = 4
HEAD = 1.4

# What was composed: lists that follow each other, with a barrier between, and what they need.
Composed = list[tuple[Sequence[Sequence[Action]], Dependencies]]
Compose = Callable[[Costs], Composed]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=raw)
    for name, kind, default, what in (
        ("--pipeline", positive_int, [2, 4, 8], "ranks"),
        ("--multiples", positive_int, [1, 2, 4], "microbatches for each pipeline rank"),
        ("--ratios", positive_number, [1.0, 1.5, 2.0, 4.0], "of two trainings: their costs'"),
        (
            "--references",
            positive_number,
            [0.5, 1.0],
            "reference's or other forward, of a policy's",
        ),
        ("--backwards", positive_number, [2.0, 3.0], "of DPO: backward over forward"),
        ("--noise", positive_number, [0.05, 0.1, 0.2, 0.3], "half interquartile range over median"),
    ):
        help_text = f"{what} ({default})"
        parser.add_argument(name, type=kind, nargs="+", default=default, help=help_text)
    parser.add_argument("--draws", type=positive_int, default=500, help="fresh draws (500)")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Costs, Compose]]:
    """What is composed: its name and sizes, its costs without noise, and how."""
    for num_ranks, multiple in product(options.pipeline, options.multiples):
        count = multiple * num_ranks
        sizes = {"pipeline": num_ranks, "microbatches": count}
        trainings = Program(POLICY, count), Program(CRITIC, count)
        beside = Program(POLICY, count), Program(REFERENCE, count, backward=False)
        for ratio in options.ratios:
            costs = trainings_costs(num_ranks, ratio)
            costs = {m: replace(c, activation=c.forward) for m, c in costs.items()}
            case = {"kind": "two_trainings", **sizes, "cost_ratio": ratio}
            yield case, costs, _time_shared(trainings, num_ranks)
            headed = {model: _with_head(own) for model, own in costs.items()}
            yield case | {"kind": "two_trainings_head"}, headed, _time_shared(trainings, num_ranks)
        for reference, backward in product(options.references, options.backwards):
            costs = dpo_costs(num_ranks, backward)
            forward = tuple(reference * own for own in costs[REFERENCE].forward)
            costs = {**costs, REFERENCE: replace(costs[REFERENCE], forward=forward)}
            case = {**sizes, "reference": reference, "backward_over_forward": backward}
            yield {"kind": "beside", **case}, costs, _time_shared(beside, num_ranks)
            yield {"kind": "dpo_lookahead", **case}, costs, _looking_ahead(count, num_ranks)
            headed = {model: _with_head(own) for model, own in costs.items()}
            yield (
                {"kind": "dpo_lookahead_head", **case},
                headed,
                _looking_ahead(count, num_ranks),
            )


def _with_head(costs: ModelCosts) -> ModelCosts:
    forward, backward = (
        (*times[:-1], HEAD * times[-1]) if times else ()
        for times in (costs.forward, costs.backward)
    )
    return replace(costs, forward=forward, backward=backward)


def _time_shared(programs: Sequence[Program], num_ranks: int) -> Compose:
    needs = Dependencies(programs, num_ranks)
    return lambda costs: [(time_share(programs, num_ranks, costs), needs)]


def _looking_ahead(num_microbatches: int, num_ranks: int) -> Compose:
    def compose(costs: Costs) -> Composed:
        count = NUM_SETTLING + NUM_STEADY
        steps = lookahead_steps(num_ranks, num_microbatches, costs, count)
        return [_step(step) for step in steps[NUM_SETTLING:]]

    return compose


def _step(step: LookaheadStep) -> tuple[list[list[Action]], Dependencies]:
    """A step's compute alone, as its schedule was timed."""
    needs = Dependencies(step.programs, len(step.lists), step.dependencies)
    return [[a for a in actions if a.kind.is_compute] for actions in step.lists], needs


@dataclass(frozen=True)
class Exact:
    """What is composed for exact times, of today's proposals and of all."""

    costs: Costs
    composed: Composed
    of_all: Composed
    seconds: float


def compose_for_exact(costs: Costs, compose: Compose) -> Exact:
    """Once for all noises."""
    start = time.perf_counter()
    composed = compose(costs)
    seconds = time.perf_counter() - start
    return Exact(costs, composed, compose(_with_noise(costs, HARDLY_ANY)), seconds)


def compare(exact: Exact, compose: Compose, noise: float, num_draws: int) -> dict[str, float]:
    """All ways of composing under the noise, and without."""
    noisy = _with_noise(exact.costs, noise)
    start = time.perf_counter()
    composed = compose(noisy)
    seconds = time.perf_counter() - start
    drawn = [[0.0] * num_draws for _ in range(3)]
    for number, made in enumerate(zip(composed, exact.composed, exact.of_all, strict=True)):
        num_ranks = len(made[0][0])
        fresh = MeanMakespan(noisy, num_ranks, num_draws=num_draws, seed=FRESH_SEED + number)
        drawn = [_added(total, fresh, own) for total, own in zip(drawn, made, strict=True)]
    mean, by_exact, of_all = map(statistics.fmean, drawn)
    ratio = mean / by_exact
    return {
        "mean": mean / len(composed),
        "ratio": ratio,
        "standard_error": _error([n - ratio * o for n, o, _ in zip(*drawn, strict=True)])
        / by_exact,
        "choice_ratio": mean / of_all,
        "exact_ratio": _without_noise(exact.costs, composed)
        / _without_noise(exact.costs, exact.composed),
        "composing": seconds / exact.seconds,
    }


def _with_noise(costs: Costs, noise: float) -> Costs:
    return {model: replace(own, noise=noise) for model, own in costs.items()}


def _without_noise(costs: Costs, composed: Composed) -> float:
    total = 0.0
    for lists, needs in composed:
        timeline = timeline_of(lists, needs, costs)
        assert timeline is not None
        total += timeline.makespan
    return total


def _added(
    total: Sequence[float],
    fresh: MeanMakespan,
    made: tuple[Sequence[Sequence[Action]], Dependencies],
) -> list[float]:
    makespans = fresh.all_of(*made)
    assert makespans is not None
    return [before + own for before, own in zip(total, makespans, strict=True)]


def _error(differences: Sequence[float]) -> float:
    """Standard error of a mean."""
    return statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0


def summary(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind and noise: how the ratios are spread."""
    rows = []
    for kind, noise in dict.fromkeys((case["kind"], case["noise"]) for case in found):
        own = [case for case in found if (case["kind"], case["noise"]) == (kind, noise)]
        ratios = [case["ratio"] for case in own]
        row = {
            "kind": kind,
            "noise": noise,
            "cases": len(own),
            "median": statistics.median(ratios),
            "mean": statistics.fmean(ratios),
            "best": min(ratios),
            "worst": max(ratios),
            "choice_mean": statistics.fmean(case["choice_ratio"] for case in own),
            "exact_mean": statistics.fmean(case["exact_ratio"] for case in own),
            "composing_median": statistics.median(case["composing"] for case in own),
        }
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the tool."""
    options = parse_arguments(arguments)
    found = []
    for case, costs, compose in cases(options):
        exact = compose_for_exact(costs, compose)
        for noise in options.noise:
            found.append(case | {"noise": noise} | compare(exact, compose, noise, options.draws))
    print(json.dumps({"summary": summary(found), "cases": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
