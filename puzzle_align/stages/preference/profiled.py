"""The rows of a preference stage as its models are measured on them."""

import logging
from collections.abc import Sequence

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import tokenizer_config
from puzzle_align.data.packing import example_lengths
from puzzle_align.layout.model import AttentionBackend, Head
from puzzle_align.layout.rows import Microbatch
from puzzle_align.planning.profiled_rows import ExampleSize
from puzzle_align.runtime.passes import sum_responses
from puzzle_align.runtime.profiler import RowCase
from puzzle_align.runtime.row_input import to_device
from puzzle_align.stages.preference.data import job_pairs
from puzzle_align.stages.preference.objective import ExampleOutputs, num_responses, objective_of
from puzzle_align.stages.tokenizer import open_tokenizer

_logger = logging.getLogger(__name__)


def example_size(config: JobConfig) -> ExampleSize:
    """The mean of the training data; where there are none to be read, half and half of the longest
    that the config allows.
    """
    try:
        progress = config.telemetry.progress  # what is not in the cache yet is made here
        train = job_pairs(config, open_tokenizer(tokenizer_config(config)), progress=progress).train
    except (OSError, ValueError) as error:
        half = max(1, config.data.max_length // 2)
        size = ExampleSize(prompt=half, responses=(half,) * num_responses(config), longest=0)
        _logger.warning("the rows are of prompts and responses of %d tokens: %s", half, error)
        return ExampleSize(
            prompt=half, responses=size.responses, longest=size.tokens(config.packing.row_layout)
        )
    lengths = example_lengths(
        train.prompt_lengths, train.response_lengths, config.packing.row_layout
    )
    return ExampleSize(
        prompt=max(1, round(float(train.prompt_lengths.mean()))),
        responses=tuple(max(1, round(x)) for x in train.response_lengths.mean(axis=0).tolist()),
        longest=int(lengths.max()),
    )


def row_case(
    config: JobConfig,
    roles: Sequence[str],
    head: Head,
    microbatch: Microbatch,
    attention: AttentionBackend,
    device: torch.device,
) -> RowCase:
    """A row of examples: a frozen model sums up responses, a trained one learns from them.

    The reference's part is zeros: which numbers the loss is taken of makes no difference.
    """
    objective = objective_of(config)
    row = to_device(microbatch, attention, device, objective.reading)
    reference = torch.zeros(row.lengths.shape, dtype=torch.float64, device=device)

    def score(_microbatch: int, outputs: torch.Tensor) -> None:
        sum_responses(row, outputs)

    def learn(_microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
        sums = sum_responses(row, outputs)
        pairs = ExampleOutputs(sums, reference[row.examples], row.lengths, row.labels, 1.0)
        return objective.losses(pairs)[0].sum() / len(reference)

    return RowCase(row, score, row, learn, objective.statistics)
