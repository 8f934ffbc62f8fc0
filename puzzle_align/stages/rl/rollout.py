"""An iteration's sampled responses: what all ranks know of them, and the rows they make.

Shapes: B prompts, K responses each; sample ``s = b * K + k`` is response k of prompt b. Everything
of a sample that is longer than a number (tokens, log-probabilities) is on its owner, the output
rank of the replica that made it, and goes from there to the ranks that need it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import Context
from puzzle_align.stages.data_view import plan_view


@dataclass(frozen=True)
class Rollout:
    """An iteration's responses, as all ranks know them."""

    iteration: int  # from 0
    prompts: np.ndarray  # int64 [B], in the prompts' data set
    prompt_lengths: np.ndarray  # int64 [B]
    lengths: np.ndarray  # int64 [B * K], tokens of every response
    stopped: np.ndarray  # bool [B * K], whether it ends with a stop token
    owners: np.ndarray  # int64 [B * K], global ranks
    num_generations: int  # K

    def samples_of(self, prompts: Iterable[int]) -> list[int]:
        """The samples of prompts of this iteration (0 .. B - 1), in order."""
        k = self.num_generations
        return [prompt * k + branch for prompt in prompts for branch in range(k)]

    def prompt_of(self, sample: int) -> int:
        """A sample's prompt, in the prompts' data set."""
        return int(self.prompts[sample // self.num_generations])

    def at(self, rank: int) -> list[int]:
        """The samples that a rank owns, in order."""
        return np.flatnonzero(self.owners == rank).tolist()


def dataset_of(
    rollout: Rollout, prompts: PromptDataset, tokens: Mapping[int, np.ndarray]
) -> ExampleDataset:
    """The iteration as a data set of prompts with K responses, for packing and collation.

    Args:
        tokens: int64 [n] of the samples whose rows this rank collates; of all others the data set
            knows the lengths and nothing else.
    """
    k, num_prompts = rollout.num_generations, len(rollout.prompts)
    prompt_starts = np.zeros(num_prompts, dtype=np.int64)
    response_starts = np.zeros(num_prompts * k, dtype=np.int64)
    parts: list[np.ndarray] = []
    end = 0
    for prompt in sorted({sample // k for sample in tokens}):
        parts.append(prompts.prompt(int(rollout.prompts[prompt])))
        prompt_starts[prompt] = end
        end += len(parts[-1])
    for sample, response in tokens.items():
        parts.append(response)
        response_starts[sample] = end
        end += len(response)
    return ExampleDataset(
        tokens=np.concatenate([np.zeros(0, dtype=np.int32), *parts]).astype(np.int32),
        prompt_starts=prompt_starts,
        prompt_lengths=rollout.prompt_lengths.astype(np.int32),
        response_starts=response_starts.reshape(num_prompts, k),
        response_lengths=rollout.lengths.reshape(num_prompts, k).astype(np.int32),
        pad_id=prompts.pad_id,
        fingerprint=f"iteration {rollout.iteration}",
    )


def loader_of(config: JobConfig, dataset: ExampleDataset, *, batches: int) -> ExampleLoader:
    """The iteration's rows in so many batches, as a model on one rank would see them.

    Several batches hold other prompts in every epoch.
    """
    return ExampleLoader(
        dataset,
        global_batch_size=len(dataset) // batches,
        row_tokens=config.packing.row_tokens,
        layout=config.packing.row_layout,
        packed=config.packing.is_packed,
        scope="batch",
        seed=config.seed,
        shuffle=batches > 1,
        data_rank=0,
        data_size=1,
    )


def seen_by(loader: ExampleLoader, plan: ParallelPlan, data_rank: int = 0) -> ExampleLoader:
    """The same batches as a replica of a model sees them."""
    return loader.seen_by(**plan_view(plan, data_rank))


def own_samples(rollout: Rollout, loader: ExampleLoader, step: int, context: Context) -> list[int]:
    """The samples of a step's batch that a model's replica on this rank runs over."""
    prompts, owners = seen_by(loader, context.plan).data_ranks(step)
    return rollout.samples_of(prompts[owners == context.data_rank].tolist())


def own_samples_of_all(
    rollout: Rollout, loader: ExampleLoader, steps: Iterable[int], contexts: Iterable[Context]
) -> list[int]:
    """The samples that any of this rank's ``contexts`` runs over in any of the steps, in order."""
    steps = list(steps)
    found = {
        sample
        for context in contexts
        for step in steps
        for sample in own_samples(rollout, loader, step, context)
    }
    return sorted(found)


def policy_temperature(config: JobConfig) -> float:
    """What logits are divided by where log-probabilities are compared with the sampling ones.

    Greedy sampling has none: the plain distribution's count.
    """
    return config.generation.temperature or 1.0
