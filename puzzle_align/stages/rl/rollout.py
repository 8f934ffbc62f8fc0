"""Sampled responses of an iteration, their distribution over ranks, and their rows.

Shapes: B prompts, K responses each; sample ``s = b * K + k`` is response k of prompt b. A sample's
length and owner are known on all ranks. Values by token (tokens, log-probabilities) are on its
owner, the output rank of the replica that sampled it, and are sent from there to other ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.data import PackingConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import DataView, ExampleLoader, plan_view
from puzzle_align.data.packing import example_lengths
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.plan import divisors
from puzzle_align.runtime.columns import Responses
from puzzle_align.runtime.generation.sampling import Response

if TYPE_CHECKING:
    from puzzle_align.runtime.context import Context


@dataclass(frozen=True)
class Rollout:
    """An iteration's responses; all fields but ``sampled`` are equal on all ranks."""

    iteration: int  # from 0
    batch: int  # of prompts: with ppo.filter_groups an iteration samples several
    prompts: np.ndarray  # int64 [B], indices in the data set of prompts
    prompt_lengths: np.ndarray  # int64 [B]
    stopped: np.ndarray  # bool [B * K], whether it ends with a stop token
    responses: Responses  # lengths and owners of the B * K samples
    num_generations: int  # K
    sampled: Mapping[int, Response] = field(default_factory=dict)  # samples that this rank owns

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every response, int64 [B * K]."""
        return self.responses.lengths

    def prompt_of(self, sample: int) -> int:
        """Index of a sample's prompt in the data set of prompts."""
        return int(self.prompts[sample // self.num_generations])


def samples_of(loader: ExampleLoader, examples: np.ndarray) -> np.ndarray:
    """Samples of an iteration's examples, in order: int64."""
    number = loader.dataset.num_responses
    return (examples[:, None] * number + np.arange(number)).ravel()


def sample_sources(loader: ExampleLoader, planned: ContextPlan) -> np.ndarray:
    """Rank with a model's output for each sample of a loader's only batch: int64 [B * K]."""
    examples, replicas = loader.seen_by(plan_view(planned.plan)).data_ranks(0)
    output_ranks = np.array([planned.output_rank(d) for d in range(planned.plan.data)])
    number = loader.dataset.num_responses
    sources = np.zeros(len(examples) * number, dtype=np.int64)
    sources[samples_of(loader, examples)] = output_ranks[replicas].repeat(number)
    return sources


def dataset_of(
    rollout: Rollout,
    prompts: PromptDataset,
    tokens: Mapping[int, np.ndarray],
    packing: PackingConfig,
) -> ExampleDataset:
    """Make a data set of prompts with responses, for packing and collation.

    An example is a prompt with all of its responses, if a row can hold these; else every prompt is
    repeated, each time with the same number of its responses.

    Args:
        tokens: int64 [n] of the samples whose rows this rank collates; of all others the data set
            has only lengths.
    """
    k, num_prompts = rollout.num_generations, len(rollout.prompts)
    together = responses_together(
        rollout.prompt_lengths, rollout.lengths.reshape(num_prompts, k), packing
    )
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
        prompt_starts=prompt_starts.repeat(k // together),
        prompt_lengths=rollout.prompt_lengths.repeat(k // together).astype(np.int32),
        response_starts=response_starts.reshape(-1, together),
        response_lengths=rollout.lengths.reshape(-1, together).astype(np.int32),
        pad_id=prompts.pad_id,
        fingerprint=f"iteration {rollout.iteration}",
    )


def responses_together(
    prompt_lengths: np.ndarray, response_lengths: np.ndarray, packing: PackingConfig
) -> int:
    """Number of responses that share a prompt in a row: as many as fit, a divisor of K.

    Args:
        prompt_lengths: int [B].
        response_lengths: int [B, K].
    """
    k = response_lengths.shape[1]
    for number in reversed(divisors(k)[1:]):
        prompts, lengths = prompt_lengths.repeat(k // number), response_lengths.reshape(-1, number)
        if example_lengths(prompts, lengths, packing.row_layout).max() <= packing.row_tokens:
            return number
    return 1


def loader_of(
    config: JobConfig, dataset: ExampleDataset, num_generations: int, *, batches: int
) -> ExampleLoader:
    """Load the iteration's rows in ``batches`` batches, as seen by a model on one rank.

    With several batches, each epoch draws other prompts for a batch; the split of a prompt's
    responses does not change the draw.
    """
    times = num_generations // dataset.num_responses  # copies of a prompt
    return ExampleLoader(
        dataset,
        global_batch_size=len(dataset) // times // batches * times,
        examples_together=times,
        row_tokens=config.packing.row_tokens,
        layout=config.packing.row_layout,
        packed=config.packing.is_packed,
        scope="batch",
        seed=config.seed,
        shuffle=batches > 1,
        view=DataView(),
    )


def samples_of_rank(
    loader: ExampleLoader, steps: Iterable[int], contexts: Sequence["Context"]
) -> list[int]:
    """Samples of this rank's rows in the given steps, for any of the contexts; in order."""
    samples: set[int] = set()
    for step in steps:
        for context in contexts:
            examples, replicas = loader.seen_by(plan_view(context.plan)).data_ranks(step)
            rank_examples = examples[replicas == context.data_rank]
            samples.update(samples_of(loader, rank_examples).tolist())
    return sorted(samples)
