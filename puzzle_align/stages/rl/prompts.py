"""Prompts of a sampling stage: tokenized once, opened on every rank."""

import logging
from collections.abc import Callable

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.data.prompts import PreparedPrompts, PromptDataset, prepare_prompts
from puzzle_align.data.sources import hash_source, hash_sources
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.runtime.generation import Sampling
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.inputs import cache_folder, check_same
from puzzle_align.stages.tokenizer import check_tokens, check_vocabulary, vocabularies

_logger = logging.getLogger(__name__)


def open_prompts(job: Job, tokenizer: Tokenizer, world: World) -> PromptDataset:
    """Tokenize (or find in the cache) on rank 0, then open on every rank. Collective.

    Warns of a tokenizer with more tokens than a model. If other nodes have caches of their own, one
    rank of each verifies that they are whole and equal to rank 0's.

    Raises:
        ValueError: one line, for bad data, tokens that a role's model does not have, or nodes whose
            data differ.
    """

    config, models = job.config, vocabularies(job.models.values())
    warnings = check_vocabulary(tokenizer, models)

    def read() -> tuple[str, dict[str, str], dict[str, str]]:
        hashes = hash_sources(config.data)
        progress = config.telemetry.progress
        prompts = job_prompts(config, tokenizer, progress=progress, hash_of=hashes.__getitem__)
        check_tokens([prompts.train], tokenizer, models)
        return prompts.summary, hashes, prompts.fingerprints()

    summary, hashes, fingerprints = from_rank_zero(read)
    if world.rank == 0:
        _logger.info("%s", summary)
        for line in warnings:
            _logger.warning("%s", line)

    def again(verify: bool) -> PreparedPrompts:
        return job_prompts(config, tokenizer, verify=verify, hash_of=hashes.__getitem__)

    on_other_nodes(lambda: check_same(again(verify=True).fingerprints(), fingerprints))
    return again(verify=False).train


def job_prompts(
    config: JobConfig,
    tokenizer: Tokenizer,
    *,
    progress: bool = False,
    verify: bool = True,
    hash_of: Callable[[str], str] = hash_source,
) -> PreparedPrompts:
    """Open the job's prompts; tokenize them if they are not cached. ValueError, one line, if bad.

    ``verify``: read the whole cache; ``hash_of``: computes or recalls a source's hash.
    """
    return prepare_prompts(
        config.data,
        tokenizer,
        max_new_tokens=config.generation.max_new_tokens,
        seed=config.seed,
        cache_dir=cache_folder(config),
        progress=progress,
        verify=verify,
        hash_of=hash_of,
    )


def num_iterations(config: JobConfig, num_prompts: int) -> int:
    """Iterations of the whole job: ``max_steps``, else from epochs over the prompts."""
    if config.max_steps > 0:
        return config.max_steps
    return -(-config.num_train_epochs * num_prompts // config.global_batch_size)


def sampling_of(config: JobConfig, tokenizer: Tokenizer) -> Sampling:
    """Make the options of sampling from the config.

    Raises:
        ValueError: if no token would end a response.
    """
    generation = config.generation
    stop_ids = generation.stop_token_ids
    if stop_ids is None:
        if tokenizer.eos_id is None:
            raise ValueError(
                "generation.stop_token_ids: null, and the tokenizer has no end-of-sequence token; "
                "name the tokens that end a response ([] for none)"
            )
        stop_ids = [tokenizer.eos_id]
    return Sampling(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        min_new_tokens=generation.min_new_tokens,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(stop_ids),
        seed=config.seed,
    )
