"""A job's reward functions as a rank has them: what they take, their calls, their weighed sum.

A function that does not apply to a completion (None) is left out of its sum.

Shapes: n completions, F functions.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.runtime.groups.collectives import gather_everywhere
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl.reward_calls import Completions, Judged, TrainerState
from puzzle_align.stages.rl.reward_function import Signature
from puzzle_align.stages.rl.reward_process import RewardProcess


class RewardFunctions:
    """Those that ``reward.function`` names; there may be none."""

    def __init__(
        self,
        config: RewardConfig,
        signatures: Sequence[Signature],
        call: Callable[[Completions, TrainerState], Judged] | None,
    ) -> None:
        """``call`` None: on a rank that never has completions."""
        self._signatures = signatures
        self._call = call
        self.names = _short_names(signatures)
        given = config.weights
        self._weights = np.ones(len(signatures)) if given is None else np.array(given)

    def __len__(self) -> int:
        return len(self._signatures)

    def take(self, name: str) -> bool:
        """Whether one of them is passed an argument, or a column, of that name."""
        return any(signature.takes(name) for signature in self._signatures)

    def check_columns(self, columns: Sequence[str]) -> None:
        """ValueError, one line, if a function needs what is neither given nor a column."""
        for signature in self._signatures:
            signature.check_columns(columns)

    def __call__(self, completions: Completions, state: TrainerState) -> Judged:
        """Call every function; none without completions.

        Raises:
            CannotGoOn: one line, if a function fails or returns anything but n rewards.
        """
        if not completions.completions or not self._signatures:
            return Judged(np.zeros((len(completions.completions), len(self))))
        assert self._call is not None, "this rank has no completions"
        return self._call(completions, state)

    def weighed(self, rewards: np.ndarray) -> np.ndarray:
        """The weighed sums [n] of rewards [n, F]; NaN where no function applies."""
        sums = np.nansum(rewards * self._weights, axis=1)
        return np.where(np.isnan(rewards).all(axis=1), np.nan, sums)


def open_functions(config: RewardConfig, has_completions: bool) -> RewardFunctions:
    """The job's functions, in a process of this rank's if it will have completions.

    Collective over the world.

    Raises:
        CannotGoOn: one line, on all ranks, for a function that cannot be found or called.
    """
    if not config.functions:
        return RewardFunctions(config, (), None)
    process = None
    found: Sequence[Signature | CannotGoOn] = ()
    if has_completions:
        try:
            process = RewardProcess(config.functions, config.timeout)
            found = process.loaded
        except CannotGoOn as error:
            found = [error]
    everyone = gather_everywhere(found)
    for fault in (each for loaded in everyone for each in loaded if isinstance(each, CannotGoOn)):
        raise fault
    signatures = next(loaded for loaded in everyone if loaded)
    return RewardFunctions(config, signatures, process)  # type: ignore[arg-type]


def _short_names(signatures: Sequence[Signature]) -> list[str]:
    """A name for every function's metrics: its own, or with its module where two share that."""
    counts = Counter(signature.own_name for signature in signatures)
    return [s.own_name if counts[s.own_name] == 1 else s.name for s in signatures]
