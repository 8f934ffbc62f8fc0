"""A job's reward functions: called together as TRL's GRPOTrainer calls them, weighed and summed.

A function that does not apply to a completion (None) is left out of its sum. Asynchronous functions
run at once, after the others, in one event loop for the whole job: what one keeps between calls (a
client's connections) stays usable.

Shapes: n completions, F functions.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.data.records import Part
from puzzle_align.runtime.failure import timeout
from puzzle_align.stages.rl.reward_function import RewardFunction, load_reward_function


@dataclass(frozen=True)
class TrainerState:
    """What is known here of TRL's ``trainer_state``; a step is an iteration."""

    global_step: int  # iterations done
    max_steps: int  # iterations of the job
    epoch: float  # passes over the prompts done


@dataclass(frozen=True)
class Completions:
    """What there is to tell functions of responses: lists of n."""

    prompts: list[Part]
    completions: list[Part]  # to a list of messages: a list of one, the assistant's
    completion_ids: list[list[int]]  # a stop token included
    columns: Mapping[str, list[Any]]


@dataclass(frozen=True)
class Judged:
    """What functions made of completions."""

    rewards: np.ndarray  # float64 [n, F]; NaN where a function does not apply
    extra: dict[str, list[Any]] = field(default_factory=dict)  # by ``log_extra``: n values each
    metrics: dict[str, list[float]] = field(default_factory=dict)  # by ``log_metric``


class RewardFunctions:
    """Those that ``reward.function`` names; there may be none."""

    def __init__(self, config: RewardConfig) -> None:
        """ValueError, one line, for a function that cannot be found or called."""
        self.functions = [load_reward_function(name) for name in config.functions]
        self.names = _short_names(self.functions)
        given = config.weights
        self._weights = np.ones(len(self.functions)) if given is None else np.array(given)
        self._timeout = config.timeout
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self.functions)

    def check_columns(self, columns: Sequence[str]) -> None:
        """ValueError, one line, if a function needs what is neither given nor a column."""
        for function in self.functions:
            function.check_columns(columns)

    def __call__(self, completions: Completions, state: TrainerState) -> Judged:
        """Call every function; none without completions.

        Raises:
            ValueError: one line, if a function fails or returns anything but n rewards.
        """
        n = len(completions.completions)
        judged = Judged(np.zeros((n, len(self))))
        if n == 0:
            return judged
        given = {
            "prompts": completions.prompts,
            "completions": completions.completions,
            "completion_ids": completions.completion_ids,
            "trainer_state": state,
            "log_extra": _Extra(judged.extra, n),
            "log_metric": _Metrics(judged.metrics),
        }
        later = []
        for number, function in enumerate(self.functions):
            if function.is_async:
                later.append(number)
                continue
            with timeout(self._timeout, self._too_late(function)):
                judged.rewards[:, number] = function(given, completions.columns)
        if later:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            together = self._together(later, given, completions.columns)
            judged.rewards[:, later] = self._loop.run_until_complete(together)
        return judged

    def weighed(self, rewards: np.ndarray) -> np.ndarray:
        """The weighed sums [n] of rewards [n, F]; NaN where no function applies."""
        sums = np.nansum(rewards * self._weights, axis=1)
        return np.where(np.isnan(rewards).all(axis=1), np.nan, sums)

    async def _together(
        self, numbers: Sequence[int], given: Mapping[str, Any], columns: Mapping[str, list[Any]]
    ) -> np.ndarray:
        """The rewards of asynchronous functions, float64 [n, functions]."""

        async def timed(function: RewardFunction) -> np.ndarray:
            with timeout(self._timeout, self._too_late(function)):
                return await function.later(given, columns)

        tasks = [asyncio.ensure_future(timed(self.functions[number])) for number in numbers]
        try:
            return np.stack(await asyncio.gather(*tasks), axis=1)
        finally:  # where one fails the others end here
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _too_late(self, function: RewardFunction) -> str:
        return (
            f"reward.function={function.name}: no answer within {self._timeout} s;"
            " mend it, or raise reward.timeout"
        )


class _Extra:
    """``log_extra(column, values)``: a column to show beside the completions."""

    def __init__(self, columns: dict[str, list[Any]], num_completions: int) -> None:
        self._columns, self._num_completions = columns, num_completions

    def __call__(self, column: str, values: Sequence[Any]) -> None:
        found = [*values]
        if len(found) != self._num_completions:
            raise ValueError(
                f"log_extra was given {len(found)} values of '{column}' for"
                f" {self._num_completions} completions"
            )
        self._columns[column] = found


class _Metrics:
    """``log_metric(name, value)``: a number of this batch."""

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        self._metrics = metrics

    def __call__(self, name: str, value: float) -> None:
        self._metrics.setdefault(name, []).append(float(value))


def _short_names(functions: Sequence[RewardFunction]) -> list[str]:
    """A name for every function's metrics: its own, or with its module where two share that."""
    counts = Counter(function.own_name for function in functions)
    return [f.own_name if counts[f.own_name] == 1 else f.name for f in functions]
