"""FLOPs of a preference batch, for MFU."""

import numpy as np

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import Batch
from puzzle_align.layout.flops import attention_flops, flops_per_token, head_flops_per_token
from puzzle_align.layout.model import ModelSpec


def forward_flops(spec: ModelSpec, dataset: ExampleDataset, layout: str, batch: Batch) -> float:
    """FLOPs of one forward over the batch's used tokens; a backward costs twice as much.

    Attention counts (query, key) pairs that attend, the head counts predicted tokens.
    """
    prompts = dataset.prompt_lengths[batch.example_indices].astype(np.int64)[:, None]
    responses = dataset.response_lengths[batch.example_indices].astype(np.int64)
    copies = 1 if layout == "shared" else responses.shape[1]
    seen = copies * (prompts * (prompts + 1) // 2).sum()
    seen += (responses * prompts + responses * (responses + 1) // 2).sum()
    predicted = dataset.num_predicted(batch.example_indices)
    num_predicted = predicted.size if spec.head == "scalar" else int(predicted.sum())
    return float(
        batch.num_tokens * flops_per_token(spec)
        + num_predicted * head_flops_per_token(spec)
        + attention_flops(spec, int(seen))
    )
