"""What a stage tells of the rows that its models are measured on.

The module ``profiled`` of a stage's package has two functions:
- ``example_size(config)``: what the job's examples are like (ValueError, one line, for bad data);
- ``row_case(config, roles, head, microbatch, attention, device)``: a row as the stage's models take
  it, with the stage's own loss; ``roles`` are those of the model, which has this ``head``.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import collate_row
from puzzle_align.layout.model import AttentionBackend, Head
from puzzle_align.layout.rows import Microbatch
from puzzle_align.planning.profiled_rows import ExampleSize, Lengths
from puzzle_align.runtime.profiler import RowCase


class ProfiledStage(Protocol):
    """The module ``profiled`` of a stage."""

    example_size: Callable[[JobConfig], ExampleSize]
    row_case: Callable[
        [JobConfig, Sequence[str], Head, Microbatch, AttentionBackend, torch.device], RowCase
    ]


def microbatch_of(row: Sequence[Lengths], row_layout: str, vocab_size: int) -> Microbatch:
    """A row of random tokens below ``vocab_size``, without padding."""
    generator = np.random.default_rng(0)

    def tokens(number: int) -> list[int]:
        return generator.integers(0, vocab_size, number).tolist()

    dataset = from_examples(
        ((tokens(prompt), [tokens(length) for length in responses]) for prompt, responses in row),
        pad_id=0,
    )
    everyone = np.arange(len(dataset))
    copies = 1 if row_layout == "shared" else dataset.num_responses
    num_tokens = sum(copies * prompt + sum(responses) for prompt, responses in row)
    return collate_row(dataset, everyone, everyone, layout=row_layout, num_tokens=num_tokens)
