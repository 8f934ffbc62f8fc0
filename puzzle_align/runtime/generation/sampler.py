"""From the last chunk's logits to tokens: the same on all tensor ranks, bit for bit.

Shapes: B sequences, V tokens of the vocabulary, T tensor ranks.
"""

import numpy as np
import torch
import torch.distributed as dist

from puzzle_align.algos.sampling import (
    choose_likeliest,
    draw,
    forbid_tokens,
    token_log_probs,
    uniform_numbers,
)
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.request import Sampling


def whole_vocabulary(logits: torch.Tensor, context: Context) -> torch.Tensor:
    """Logits [B, V] without padding, of all tensor ranks' [B, V/T]. Collective over them."""
    group = context.groups.tp
    if group.size() > 1:
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits.contiguous(), group=group)
        logits = torch.cat(parts, dim=-1)
    return logits[:, : context.spec.vocab_size]


def next_tokens(
    logits: torch.Tensor, ids: np.ndarray, places: np.ndarray, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int64 [B], and log-probabilities, float64 [B], of sequences' ``logits`` [B, V].

    Args:
        ids: of the requests, int [B].
        places: of the tokens in their responses, int [B].
    """
    allowed = logits
    if sampling.stop_token_ids and places.min() < sampling.min_new_tokens:
        stop_tokens = torch.tensor(sampling.stop_token_ids, device=logits.device)
        too_short = torch.from_numpy(places < sampling.min_new_tokens).to(logits.device)
        allowed = forbid_tokens(logits, stop_tokens, too_short)
    if sampling.temperature == 0:
        tokens = choose_likeliest(allowed)
    else:
        numbers = torch.from_numpy(uniform_numbers(sampling.seed, ids, places))
        tokens = draw(
            allowed,
            numbers.to(logits.device),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
    return tokens, token_log_probs(logits, tokens, sampling.temperature or 1.0)
