"""Prompts of a sampling stage, its number of iterations and its options of sampling."""

from functools import partial

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.data.build import Preparation
from puzzle_align.data.prepare import Prepared, prepare_prompts
from puzzle_align.data.prompts import PromptDataset, prompt_indices
from puzzle_align.data.tokenize import Tokenizer, generation_stops
from puzzle_align.layout.model import ModelSpec
from puzzle_align.runtime.generation.sampling import Sampling
from puzzle_align.stages.data import open_everywhere, preparation


def open_prompts(job: Job, tokenizer: Tokenizer) -> PromptDataset:
    """Tokenize on rank 0, open on every rank (``open_everywhere``). Collective."""
    return open_everywhere(job, tokenizer, partial(job_prompts, job.config, tokenizer)).train


def job_prompts(
    config: JobConfig, tokenizer: Tokenizer, how: Preparation | None = None
) -> Prepared[PromptDataset]:
    """Open the job's prompts; tokenize them if they are not cached. ValueError if bad."""
    return prepare_prompts(
        config.data,
        tokenizer,
        how or preparation(config),
        max_new_tokens=config.generation.max_new_tokens,
        seed=config.seed,
    )


def batch_of(config: JobConfig, prompts: PromptDataset, number: int) -> np.ndarray:
    """Prompts of the job's batch ``number`` (from 0): indices in the data set, int64."""
    size, shuffle = config.global_batch_size, config.data.shuffle
    return prompt_indices(len(prompts), size, number, seed=config.seed, shuffle=shuffle)


def num_iterations(config: JobConfig, num_prompts: int) -> int:
    """Iterations of the whole job: ``max_steps``, else from epochs over the prompts.

    ValueError, one line, if the critic's warm-up takes them all.
    """
    number, key = config.max_steps, "max_steps"
    if number <= 0:
        key = "num_train_epochs"
        number = -(-config.num_train_epochs * num_prompts // config.global_batch_size)
    if config.ppo.critic_warmup >= number:
        raise ValueError(
            f"ppo.critic_warmup: {config.ppo.critic_warmup} leaves none of the job's {number} "
            f"iterations to the actor; lower it, or raise {key}"
        )
    return number


def sampling_of(config: JobConfig, tokenizer: Tokenizer, model: ModelSpec) -> Sampling:
    """Make the options of sampling from the config.

    A response ends with the tokenizer's end of a sequence, and the tokens that
    ``generation_config.json`` names, or without that the ``model``'s ``config.json``.

    Raises:
        ValueError: if no token would end a response.
    """
    generation = config.generation
    stop_ids = generation.stop_token_ids
    if stop_ids is None:
        folders = (tokenizer.path, config.actor.model.path)
        stops = [token for folder in dict.fromkeys(folders) for token in generation_stops(folder)]
        if not stops:
            ids = model.eos_token_id
            stops = [] if ids is None else [ids] if isinstance(ids, int) else [*ids]
        # The tokenizer may name tokens that the model lacks, and the other way around.
        known = (token for token in stops if token < tokenizer.vocab_size)
        eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        stop_ids = [*dict.fromkeys([*eos, *known])]
        if not stop_ids:
            raise ValueError(
                "generation.stop_token_ids: null, and the tokenizer has no end-of-sequence token; "
                "name the tokens that end a response ([] for none)"
            )
    return Sampling(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        min_new_tokens=generation.min_new_tokens,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(stop_ids),
        seed=config.seed,
    )
