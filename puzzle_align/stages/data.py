"""Data of a job: tokenized once, on rank 0, and opened on every rank."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.data.build import Preparation, show_nothing
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.prepare import Prepared
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.sources import hash_source
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.stages.inputs import cache_folder
from puzzle_align.stages.tokenizer import check_tokens, check_vocabulary, vocabularies
from puzzle_align.telemetry.progress import show_preparation

_logger = logging.getLogger(__name__)
D = TypeVar("D", ExampleDataset, PromptDataset)


def preparation(
    config: JobConfig,
    *,
    verify: bool = True,
    hashes: Mapping[str, str] | None = None,
    shown: bool = True,
) -> Preparation:
    """Options of making a job's data.

    Args:
        verify: whether to read the whole cache or packed files, or only their sizes.
        hashes: of the sources, if known.
        shown: whether progress may be shown.
    """
    display = show_preparation if shown and config.telemetry.progress else show_nothing
    folder, num_workers = cache_folder(config), config.data.num_proc
    return Preparation(folder, num_workers, display, verify, hashes or {})


def open_everywhere(
    job: Job,
    tokenizer: Tokenizer,
    read: Callable[[Preparation], Prepared[D]],
    warnings: Callable[[Prepared[D]], Iterable[str]] = lambda _: (),
) -> Prepared[D]:
    """Tokenize (or find in the cache) on rank 0, then open on every rank. Collective.

    If other nodes have local caches or packed files, one rank of each verifies that they are whole
    and equal to rank 0's.

    Args:
        read: makes the data, or finds them in the cache.
        warnings: lines about the data to log, on rank 0.

    Raises:
        ValueError: one line, for bad data, tokens that a role's model lacks, or data that differ
            between nodes.
    """
    config = job.config

    def make() -> tuple[dict[str, str], dict[str, str]]:
        sources = (config.data.train, config.data.eval) if config.data.format == "auto" else ()
        hashes = {source: hash_source(source) for source in sources if source is not None}
        models = vocabularies(job.models.values())
        lines = check_vocabulary(tokenizer, models)
        data = read(preparation(config, hashes=hashes))
        check_tokens(data.datasets().values(), tokenizer, models)
        _logger.info("%s", data.summary)
        for line in (*lines, *warnings(data)):
            _logger.warning("%s", line)
        return hashes, data.fingerprints()

    hashes, fingerprints = from_rank_zero(make)

    def check() -> None:
        on_this_node = read(preparation(config, hashes=hashes, shown=False)).fingerprints()
        for key, fingerprint in fingerprints.items():
            if on_this_node.get(key) != fingerprint:
                raise ValueError(
                    f"{key}: this node's data differ from rank 0's: copy data, tokenizer and"
                    " data.cache_dir from rank 0's node again"
                )

    on_other_nodes(check)
    return read(preparation(config, verify=False, hashes=hashes, shown=False))
