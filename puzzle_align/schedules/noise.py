"""Mean makespan of lists over random times.

Lists keep their order whatever the times are, so the lists that are shortest with exact times may
pass on every delay. Each action's time is drawn: its median times a log-normal factor of median 1
whose half interquartile range is the model's ``noise``, independent of all other actions. Causes
that slow several actions down together (a slow rank, a long microbatch) are not modelled.

Invariants (the tests assert them):
- the draws depend on model, kind, microbatch, position and number of the draw alone: all lists that
  are compared get the same times, in every process;
- every action takes each of ``num_draws`` equally likely factors in one draw, so that its mean
  time is not left to chance (Latin hypercube sampling);
- without noise the mean makespan is the makespan.

The gain of choosing by the mean, measured over fresh draws (2 to 8 ranks, noise 0.05 to 0.3), is
small beside that of time-sharing. A lookahead's steps become 0.5 % shorter in the mean and 3 % at
best, more with more noise. Two trainings become 0.8 % and 5 % shorter, but nearly all of that comes
from the proposal of ``dispatch``, which is shorter without noise too; choosing by draws adds 0.1 %.
A training beside another model's forwards mostly stays the same. Cases that become longer do so by
less than 0.2 %.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from math import asinh, exp
from operator import add
from statistics import NormalDist

from puzzle_align.schedules.actions import Action
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.timing import in_one_order, makespan_of

NUM_DRAWS = 32  # 64 hardly improve the choice


class MeanMakespan:
    """Mean makespan of lists over draws, which are kept for the next lists."""

    def __init__(
        self, costs: Costs, num_ranks: int, *, num_draws: int = NUM_DRAWS, seed: int = 0
    ) -> None:
        """``seed``: another one gives fresh draws, to check a choice."""
        self.costs = costs
        self.is_noisy = any(model_costs.noise > 0 for model_costs in costs.values())
        self._num_ranks = num_ranks
        self._num_draws = num_draws
        self._seed = seed
        self._times: dict[Event, tuple[float, ...]] = {}

    def of(self, lists: Sequence[Sequence[Action]], graph: Dependencies) -> float | None:
        """Mean makespan of compute lists; None if they deadlock."""
        if not self.is_noisy:
            return makespan_of(lists, graph, self.costs)
        makespans = self.all_of(lists, graph)
        return None if makespans is None else sum(makespans) / self._num_draws

    def all_of(self, lists: Sequence[Sequence[Action]], graph: Dependencies) -> list[float] | None:
        """Makespans of compute lists, one per draw; None if they deadlock."""
        order = in_one_order(lists, graph)
        if order is None:
            return None
        at_start: Sequence[float] = (0.0,) * self._num_draws
        free: list[Sequence[float]] = [at_start] * len(lists)  # times by rank, in every draw
        ends: dict[Event, Sequence[float]] = {}
        for action, rank in order:
            event = graph.event(action, rank)
            inputs = [ends[before] for before in graph.of(action, rank)]
            starts = map(max, free[rank], *inputs) if inputs else free[rank]
            free[rank] = ends[event] = list(map(add, starts, self._drawn(action, rank, event)))
        return list(map(max, at_start, *free))

    def _drawn(self, action: Action, rank: int, event: Event) -> tuple[float, ...]:
        if event not in self._times:
            model_costs = self.costs[action.model]
            model, kind, microbatch, position = event
            name = f"{self._seed} {model} {kind.value} {microbatch} {position}"
            median = model_costs.of(action, rank, self._num_ranks)
            factors = list(_factors(model_costs.noise, self._num_draws))
            random.Random(name).shuffle(factors)  # seeded by the text, not by its hash
            self._times[event] = tuple(median * factor for factor in factors)
        return self._times[event]


@lru_cache(maxsize=64)
def _factors(noise: float, num_draws: int) -> tuple[float, ...]:
    """Equally likely factors of a median.

    Rounded, so that ranks whose math libraries differ in a last bit have the same factors.
    """
    quantile = NormalDist().inv_cdf
    sigma = asinh(noise) / quantile(0.75)  # (exp(z sigma) - exp(-z sigma)) / 2 is the noise
    shares = ((number + 0.5) / num_draws for number in range(num_draws))
    return tuple(round(exp(sigma * quantile(share)), 6) for share in shares)
