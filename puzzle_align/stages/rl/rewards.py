"""The rewards of responses: a reward model's number, functions' numbers, or all, summed.

Shapes: n samples of an owner, F reward functions.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.records import Part
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.files.typed import LARGEST_FP32
from puzzle_align.runtime.generation import Response
from puzzle_align.runtime.groups.collectives import gather_everywhere, sum_on_host
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl.reward_calls import Completions, Judged, TrainerState
from puzzle_align.stages.rl.reward_function import short
from puzzle_align.stages.rl.reward_functions import RewardFunctions
from puzzle_align.stages.rl.rollout import Rollout
from puzzle_align.telemetry.ppo_metrics import function_metrics, logged_metrics

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewarded:
    """An owner's samples, rewarded."""

    samples: Sequence[int]
    scores: np.ndarray  # float64 [n]; NaN: nothing that could reward the sample applies to it
    judged: Judged  # by the functions


class Rewards:
    """Gives the samples of one owner their scores."""

    def __init__(
        self,
        config: JobConfig,
        prompts: PromptDataset,
        tokenizer: Tokenizer,
        num_iterations: int,
        functions: RewardFunctions,
    ) -> None:
        """ValueError, one line, for a function that needs what the prompts do not have."""
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._batch_size = config.global_batch_size
        self._num_iterations = num_iterations
        self._functions = functions
        self._functions.check_columns(prompts.column_names)
        self._has_warned = False

    def prompt_text(self, rollout: Rollout, sample: int) -> str:
        """A sample's prompt as text, chat template included."""
        return self._prompts.text(rollout.prompt_of(sample))

    def response_text(self, rollout: Rollout, sample: int, response: Response) -> str:
        """A sample's response as text, without its stop token."""
        ids = response.tokens.tolist()
        return self._tokenizer.decode(ids[:-1] if rollout.stopped[sample] else ids)

    def scores(
        self,
        rollout: Rollout,
        samples: Sequence[int],
        sampled: Mapping[int, Response],
        rewards: Mapping[int, np.ndarray] | None,
    ) -> Rewarded:
        """The samples' scores: the reward model's, if there is one, plus the functions'.

        Args:
            sampled: the samples, and maybe others.
            rewards: the reward model's, [1, 1] each; None without one.

        Raises:
            CannotGoOn: if a function fails, or for a number that float32 cannot hold.
        """
        total = np.zeros(len(samples))
        if rewards is not None:
            total += np.array([rewards[sample][0, 0] for sample in samples])
            said = "reward.model: its reward", "check its weights and engine.dtype"
            _check(rollout, samples, total, *said)
        if not self._functions:
            return Rewarded(samples, total, Judged(np.zeros((len(samples), 0))))
        completions = self._completions(rollout, samples, sampled)
        judged = self._functions(completions, self._state(rollout))
        found = self._functions.weighed(judged.rewards)
        total += found if rewards is None else np.nan_to_num(found)
        said = "reward.weights: the weighed sum", "lower them, or what the functions return"
        _check(rollout, samples, np.where(np.isnan(found), 0.0, total), *said)
        self._warn(completions, total)
        return Rewarded(samples, total, judged)

    def metrics(self, rollout: Rollout, rewarded: Rewarded) -> dict[str, float]:
        """What functions gave of all responses, where there are several, and what they logged.

        Collective over the world, of ranks that are in step.
        """
        found: dict[str, float] = {}
        if len(self._functions) > 1:
            table = torch.zeros(len(rollout.lengths), len(self._functions), dtype=torch.float64)
            table[list(rewarded.samples)] = torch.from_numpy(rewarded.judged.rewards)
            found |= function_metrics(self._functions.names, sum_on_host(table))
        if self._functions.take("log_metric"):
            found |= logged_metrics(gather_everywhere(rewarded.judged.metrics))
        return found

    def _completions(
        self, rollout: Rollout, samples: Sequence[int], sampled: Mapping[int, Response]
    ) -> Completions:
        indices = [rollout.prompt_of(sample) for sample in samples]
        prompts = [self._prompts.as_given(index) for index in indices]
        texts = [self.response_text(rollout, s, sampled[s]) for s in samples]
        return Completions(
            prompts=prompts,
            completions=[_answer(p, text) for p, text in zip(prompts, texts, strict=True)],
            completion_ids=[sampled[sample].tokens.tolist() for sample in samples],
            columns=self._prompts.columns(indices),
        )

    def _state(self, rollout: Rollout) -> TrainerState:
        done = rollout.iteration
        epoch = done * self._batch_size / len(self._prompts)
        return TrainerState(global_step=done, max_steps=self._num_iterations, epoch=epoch)

    def _warn(self, completions: Completions, scores: np.ndarray) -> None:
        """Say once that some responses have no score."""
        missing = np.flatnonzero(np.isnan(scores)).tolist()
        if not missing or self._has_warned:
            return
        self._has_warned = True
        first = missing[0]
        _logger.warning(
            "reward.function: all functions returned None for %d of %d completions, first of all "
            "%s (prompt %s): nothing is learnt from such; let one function apply (told once)",
            len(missing),
            len(scores),
            short(completions.completions[first]),
            short(completions.prompts[first]),
        )


def _check(
    rollout: Rollout, samples: Sequence[int], rewards: np.ndarray, what: str, cure: str
) -> None:
    """CannotGoOn where one of the samples' rewards [n] is none that float32 can hold."""
    for place in np.flatnonzero(~(np.abs(rewards) <= LARGEST_FP32))[:1].tolist():
        prompt, branch = divmod(samples[place], rollout.num_generations)
        raise CannotGoOn(
            f"{what} of response {branch} to prompt {rollout.prompts[prompt]} of data.train is "
            f"{rewards[place]}: {cure}"
        )


def _answer(prompt: Part, text: str) -> Part:
    """A response in the form of its prompt."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return text if isinstance(prompt, str) else [message]
