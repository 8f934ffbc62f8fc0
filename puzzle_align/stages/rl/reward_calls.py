"""The calls of a job's reward functions, as TRL's GRPOTrainer makes them, in one process.

Asynchronous functions run at once, after the others, in one event loop for the whole job: what one
keeps between calls (a client's connections) stays usable.

Shapes: n completions, F functions.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from puzzle_align.data.records import Part
from puzzle_align.stages.rl.reward_function import RewardFunction


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


class CalledFunctions:
    """Functions that have been found; one at least."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = functions
        self.signatures = tuple(function.signature for function in functions)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(
        self,
        completions: Completions,
        state: TrainerState,
        note: Callable[[int, bool], None] = lambda number, running: None,
    ) -> Judged:
        """Call every function.

        Args:
            completions: one at least.
            note: told of a function's number when it begins, and when it has ended.

        Raises:
            ValueError: one line, if a function fails or returns anything but n rewards.
        """
        n = len(completions.completions)
        judged = Judged(np.zeros((n, len(self._functions))))
        given = {
            "prompts": completions.prompts,
            "completions": completions.completions,
            "completion_ids": completions.completion_ids,
            "trainer_state": state,
            "log_extra": _Extra(judged.extra, n),
            "log_metric": _Metrics(judged.metrics),
        }
        later = []
        for number, function in enumerate(self._functions):
            if function.signature.is_async:
                later.append(number)
                continue
            note(number, True)
            judged.rewards[:, number] = function(given, completions.columns)
            note(number, False)
        if later:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            together = self._together(later, given, completions.columns, note)
            judged.rewards[:, later] = self._loop.run_until_complete(together)
        return judged

    async def _together(
        self,
        numbers: Sequence[int],
        given: Mapping[str, Any],
        columns: Mapping[str, list[Any]],
        note: Callable[[int, bool], None],
    ) -> np.ndarray:
        """The rewards of asynchronous functions, float64 [n, functions]."""

        async def noted(number: int) -> np.ndarray:
            note(number, True)
            rewards = await self._functions[number].later(given, columns)
            note(number, False)
            return rewards

        tasks = [asyncio.ensure_future(noted(number)) for number in numbers]
        try:
            return np.stack(await asyncio.gather(*tasks), axis=1)
        finally:  # where one fails the others end here
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def json_value(value: Any) -> Any:
    """The value, or its text where JSON has no form for it."""
    if hasattr(value, "tolist"):  # an array's
        value = value.tolist()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


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
        self._columns[str(column)] = [json_value(value) for value in found]


class _Metrics:
    """``log_metric(name, value)``: a number of this batch."""

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        self._metrics = metrics

    def __call__(self, name: str, value: float) -> None:
        self._metrics.setdefault(str(name), []).append(float(value))
