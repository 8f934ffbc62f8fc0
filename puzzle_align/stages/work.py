"""Model FLOPs of a preference batch, for MFU."""

import numpy as np

from puzzle_align.data.dataset import PairDataset
from puzzle_align.data.loader import Batch
from puzzle_align.spec.model import (
    ModelSpec,
    attention_flops,
    flops_per_token,
    head_flops_per_token,
)


def forward_flops(spec: ModelSpec, dataset: PairDataset, layout: str, batch: Batch) -> float:
    """FLOPs of one forward over the batch's used tokens; a backward costs twice as much.

    Attention counts the (query, key) pairs that see each other, head FLOPs the predicted tokens.
    """
    prompts = dataset.prompt_lengths[batch.pair_indices].astype(np.int64)[:, None]
    responses = dataset.response_lengths[batch.pair_indices].astype(np.int64)
    copies = 1 if layout == "shared" else responses.shape[1]
    seen = copies * (prompts * (prompts + 1) // 2).sum()
    seen += (responses * prompts + responses * (responses + 1) // 2).sum()
    return float(
        batch.num_tokens * flops_per_token(spec)
        + int(responses.sum()) * head_flops_per_token(spec)
        + attention_flops(spec, int(seen))
    )
