"""The rewards of responses: a reward model's number, a function's, or both, summed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.runtime.failure import timeout
from puzzle_align.runtime.generation import Response
from puzzle_align.stages.rl.reward_function import load_reward_function
from puzzle_align.stages.rl.rollout import Rollout


@dataclass(frozen=True)
class Texts:
    """Samples as text."""

    prompts: list[str]
    responses: list[str]  # without the stop token


class Rewards:
    """Gives the samples of one owner their scores."""

    def __init__(self, config: JobConfig, prompts: PromptDataset, tokenizer: Tokenizer) -> None:
        """ValueError, one line, for a function that cannot be found or called."""
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._timeout = config.reward.timeout
        name = config.reward.function
        self._function = None if name is None else load_reward_function(name)
        if self._function is not None:
            self._function.check_columns(prompts.column_names)

    def texts(
        self, rollout: Rollout, samples: Sequence[int], sampled: Mapping[int, Response]
    ) -> Texts:
        """Samples' prompts and responses."""
        found = Texts([], [])
        for sample in samples:
            index = int(rollout.prompts[sample // rollout.num_generations])
            found.prompts.append(self._prompts.text(index))
            ids = sampled[sample].tokens.tolist()
            without_stop = ids[:-1] if rollout.stopped[sample] else ids
            found.responses.append(self._tokenizer.decode(without_stop))
        return found

    def scores(
        self,
        rollout: Rollout,
        samples: Sequence[int],
        sampled: Mapping[int, Response],
        rewards: Mapping[int, np.ndarray] | None,
    ) -> np.ndarray:
        """The samples' scores, float64 [n].

        Args:
            sampled: the samples, and maybe others.
            rewards: the reward model's, [1, 1] each; None without one.

        Raises:
            ValueError: one line, if the function fails or a number is not finite.
        """
        total = np.zeros(len(samples))
        if rewards is not None:
            total += np.array([rewards[sample][0, 0] for sample in samples])
            if not np.isfinite(total).all():
                place = int(np.flatnonzero(~np.isfinite(total))[0])
                prompt, branch = divmod(samples[place], rollout.num_generations)
                raise ValueError(
                    f"reward.model: its reward of response {branch} to prompt "
                    f"{rollout.prompts[prompt]} of data.train is {total[place]}: check its weights "
                    "and engine.dtype"
                )
        if self._function is not None:
            texts = self.texts(rollout, samples, sampled)
            indices = rollout.prompts[[sample // rollout.num_generations for sample in samples]]
            columns = self._prompts.columns(indices)
            late = (
                f"reward.function={self._function.name}: no answer within {self._timeout} s;"
                " mend it, or raise reward.timeout"
            )
            with timeout(self._timeout, late):
                total += self._function(texts.prompts, texts.responses, columns)
        return total
