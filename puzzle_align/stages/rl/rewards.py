"""Scores of responses: the sum of a reward model's and reward functions' values.

A function that does not apply to a response (None) is left out of its sum.

Shapes: n samples of an owner, F reward functions.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.data import DataConfig
from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.records import Content
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.files.typed import LARGEST_FP32
from puzzle_align.runtime.groups.collectives import gather_everywhere, sum_on_host
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rewards.functions import (
    Completions,
    Result,
    Signature,
    TrainerState,
    short,
)
from puzzle_align.stages.rewards.worker import RewardWorker
from puzzle_align.stages.rl.rollout import Rollout
from puzzle_align.telemetry.ppo_metrics import function_metrics, logged_metrics

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Functions:
    """A job's reward functions, known on every rank; there may be none."""

    signatures: Sequence[Signature] = ()
    call: Callable[[Completions, TrainerState], list[Result]] | None = None  # on owners only

    @property
    def names(self) -> list[str]:
        """Names for the functions' metrics: short ones if unique, else the config's."""
        counts = Counter(signature.short_name for signature in self.signatures)
        return [s.short_name if counts[s.short_name] == 1 else s.name for s in self.signatures]


@dataclass(frozen=True)
class Rewarded:
    """Rewards of an owner's samples, in the order of the rollout's."""

    scores: np.ndarray  # float64 [n]; NaN if no reward applies to the sample
    by_function: np.ndarray  # float64 [n, F]; NaN where a function does not apply
    extra: dict[str, list[Any]] = field(default_factory=dict)  # by ``log_extra``: n values each
    metrics: dict[str, list[float]] = field(default_factory=dict)  # by ``log_metric``
    baselines: np.ndarray | None = None  # float64 [n], rewards of the prompts' greedy responses


class Rewards:
    """Scoring of one owner's samples."""

    def __init__(
        self,
        config: JobConfig,
        prompts: PromptDataset,
        tokenizer: Tokenizer,
        num_iterations: int,
        functions: Functions,
    ) -> None:
        """Raise CannotGoOn, one line, if a function needs a column that the prompts lack."""
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._batch_size = config.global_batch_size
        self._num_iterations = num_iterations
        self._functions = functions
        self._prompt_names = prompt_names(config.data)
        for signature in functions.signatures:
            signature.check_columns((*prompts.column_names, *self._prompt_names))
        weights = config.reward.weights
        self._weights = np.ones(len(functions.signatures)) if weights is None else np.array(weights)
        self._has_warned = False

    def response_text(self, rollout: Rollout, sample: int) -> str:
        """A sample's response as text, without its stop token."""
        ids = rollout.sampled[sample].tokens.tolist()
        return self._tokenizer.decode(ids[:-1] if rollout.stopped[sample] else ids)

    def scores(self, rollout: Rollout, rewards: Mapping[int, np.ndarray] | None) -> Rewarded:
        """Score this rank's samples: the reward model's output plus the functions' weighted sum.

        Args:
            rewards: the reward model's outputs by sample, [1] each; None without one.

        Raises:
            CannotGoOn: if a function fails, or a number is not finite in float32.
        """
        samples = [*rollout.sampled]
        total = np.zeros(len(samples))
        if rewards is not None:
            total += np.array([rewards[sample][0] for sample in samples])
            blame = "reward.model: its reward", "check its weights and engine.dtype"
            _check(rollout, samples, total, *blame)
        by_function = np.zeros((len(samples), len(self._functions.signatures)))
        if not self._functions.signatures or not samples:
            return Rewarded(total, by_function)
        assert self._functions.call is not None, "this rank has no completions"
        completions = self._completions(rollout)
        results = self._functions.call(completions, self._state(rollout))
        extra: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}
        for number, result in enumerate(results):
            by_function[:, number] = result.rewards
            extra |= result.extra
            for name, values in result.metrics.items():
                metrics.setdefault(name, []).extend(values)
        sums = np.nansum(by_function * self._weights, axis=1)
        sums[np.isnan(by_function).all(axis=1)] = np.nan
        total += sums if rewards is None else np.nan_to_num(sums)
        blame = "reward.weights: the weighted sum", "lower them, or what the functions return"
        _check(rollout, samples, np.where(np.isnan(sums), 0.0, total), *blame)
        self._warn(completions, total)
        return Rewarded(total, by_function, extra, metrics)

    def metrics(self, rollout: Rollout, rewarded: Rewarded) -> dict[str, float]:
        """Statistics of each function's rewards, if there are several, and logged metrics.

        Collective over the world.
        """
        metrics: dict[str, float] = {}
        signatures = self._functions.signatures
        if any(signature.takes("log_metric") for signature in signatures):
            metrics = logged_metrics(gather_everywhere(rewarded.metrics))
        if len(signatures) > 1:
            table = torch.zeros(len(rollout.lengths), len(signatures), dtype=torch.float64)
            table[[*rollout.sampled]] = torch.from_numpy(rewarded.by_function)
            metrics |= function_metrics(self._functions.names, sum_on_host(table))
        return metrics

    def _completions(self, rollout: Rollout) -> Completions:
        indices = [rollout.prompt_of(sample) for sample in rollout.sampled]
        prompts = [self._prompts.as_given(index) for index in indices]
        texts = [self.response_text(rollout, sample) for sample in rollout.sampled]
        return Completions(
            prompts=prompts,
            completions=[_answer(p, text) for p, text in zip(prompts, texts, strict=True)],
            completion_ids=[response.tokens.tolist() for response in rollout.sampled.values()],
            columns=dict.fromkeys(self._prompt_names, prompts) | self._prompts.columns(indices),
        )

    def _state(self, rollout: Rollout) -> TrainerState:
        epoch = rollout.batch * self._batch_size / len(self._prompts)
        return TrainerState(rollout.iteration, max_steps=self._num_iterations, epoch=epoch)

    def _warn(self, completions: Completions, scores: np.ndarray) -> None:
        """Warn, once, that some responses have no score."""
        missing = np.flatnonzero(np.isnan(scores)).tolist()
        if not missing or self._has_warned:
            return
        self._has_warned = True
        first = missing[0]
        _logger.warning(
            "reward: no score for %d of %d completions, first of all %s (prompt %s): these have an "
            "advantage of 0; let one function apply (logged once)",
            len(missing),
            len(scores),
            short(completions.completions[first]),
            short(completions.prompts[first]),
        )


def prompt_names(config: DataConfig) -> tuple[str, ...]:
    """The prompts' name in the data, if it is another: functions get them under it, too."""
    name = (config.columns or {}).get("prompt", "prompt")
    return () if name == "prompt" else (name,)


def open_functions(config: RewardConfig, has_completions: bool) -> Functions:
    """Start a worker with the job's functions on ranks with completions. Collective over the world.

    Raises:
        CannotGoOn: one line, on all ranks, if a function cannot be imported or called.
    """
    if not config.functions:
        return Functions()
    worker = None
    fault = None
    if has_completions:
        try:
            worker = RewardWorker(config.functions, config.timeout)
        except CannotGoOn as error:
            fault = error
    known = gather_everywhere((fault, [] if worker is None else worker.signatures))
    for fault in (fault for fault, _ in known if fault is not None):
        raise fault
    return Functions(next(signatures for _, signatures in known if signatures), worker)


def _check(
    rollout: Rollout, samples: Sequence[int], rewards: np.ndarray, what: str, cure: str
) -> None:
    """Raise CannotGoOn if one of the samples' rewards [n] is not finite in float32."""
    for place in np.flatnonzero(~(np.abs(rewards) <= LARGEST_FP32))[:1].tolist():
        prompt, branch = divmod(samples[place], rollout.num_generations)
        raise CannotGoOn(
            f"{what} of response {branch} to prompt {rollout.prompts[prompt]} of data.train is "
            f"{rewards[place]}: {cure}"
        )


def _answer(prompt: Content, text: str) -> Content:
    """Convert a response to the form of its prompt: text or messages."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return text if isinstance(prompt, str) else [message]
