"""What an iteration of PPO has to do, from the prompts' lengths and how long responses get."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from puzzle_align.config.check_ppo import longest_prompt, longest_segment
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import tokenizer_config
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.data.prompts import PromptDataset, prompt_indices
from puzzle_align.planning.load import GenerationLoad, Load
from puzzle_align.runtime.columns import Responses
from puzzle_align.stages.load import NUM_SAMPLED_STEPS, rows_of
from puzzle_align.stages.ppo import num_iterations
from puzzle_align.stages.rl.prompts import job_prompts
from puzzle_align.stages.rl.rollout import Rollout, dataset_of, loader_of
from puzzle_align.stages.tokenizer import open_tokenizer


def job_load(config: JobConfig, response_tokens: float | None = None) -> Load:
    """The job's iterations, in the mean over some of its first.

    Args:
        response_tokens: of a response, in the mean; None: as long as it may be.

    Raises:
        ValueError: one line, for bad data.
    """
    tokenizer = open_tokenizer(tokenizer_config(config))
    prompts = job_prompts(config, tokenizer, progress=config.telemetry.progress).train
    generation, parts = config.generation, config.ppo.num_mini_batches
    longest = generation.max_new_tokens
    length = max(1, min(longest, round(response_tokens or longest)))
    number = num_iterations(config, len(prompts))
    iterations = range(min(number, max(1, NUM_SAMPLED_STEPS // parts)))
    lengths = np.concatenate([_prompt_lengths(config, prompts, i) for i in iterations])
    rollout = Rollout(
        iteration=0,
        prompts=np.arange(len(lengths)),
        prompt_lengths=lengths,
        responses=Responses(
            np.full(len(lengths) * generation.num_generations, length, dtype=np.int64),
            owners=np.zeros(0, dtype=np.int64),
        ),
        stopped=np.zeros(0, dtype=bool),
        num_generations=generation.num_generations,
    )

    def sampled(row_tokens: int, batches: int) -> tuple[ExampleLoader, Sequence[int]]:
        packing = replace(config.packing, row_tokens=row_tokens)
        together = batches * len(iterations)
        dataset = dataset_of(rollout, prompts, {}, packing)
        made = loader_of(replace(config, packing=packing), dataset, batches=together)
        return made, range(together)

    return Load(
        rows=rows_of(sampled),
        num_examples=config.global_batch_size * generation.num_generations,
        num_iterations=number,
        least_row_tokens=longest_segment(config, together=1),
        mini_batches=parts,
        epochs=config.ppo.ppo_epochs,
        generation=GenerationLoad(
            num_prompts=config.global_batch_size,
            num_generations=generation.num_generations,
            prompt_tokens=float(lengths.mean()),
            response_tokens=length,
            longest=longest_prompt(config) + longest,
        ),
    )


def _prompt_lengths(config: JobConfig, prompts: PromptDataset, iteration: int) -> np.ndarray:
    chosen = prompt_indices(
        len(prompts),
        config.global_batch_size,
        iteration,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    return prompts.prompt_lengths[chosen].astype(np.int64)
