"""Sample tokens from the last chunk's logits, bitwise the same on all tensor ranks.

Shapes: B sequences, V tokens of the vocabulary, T tensor ranks.
"""

from dataclasses import dataclass

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
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.request import Sampling


def whole_vocabulary(logits: torch.Tensor, context: Context) -> torch.Tensor:
    """Gather logits [B, V], without padding, from all tensor ranks' [B, V/T]. Collective."""
    group = context.groups.tp
    if group.size() > 1:
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits.contiguous(), group=group)
        logits = torch.cat(parts, dim=-1)
    return logits[:, : context.spec.vocab_size]


@dataclass(frozen=True)
class Draws:
    """Inputs of a step's sampling beside the logits."""

    numbers: torch.Tensor | None  # float64 [B] in [0, 1); None: greedy
    too_short: torch.Tensor | None  # bool [B], sequences that must not stop yet; None: all may


class Sampler:
    """Samples with the options of ``Sampling``; never makes the host wait for the device."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._device = device
        self._stop_tokens = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)

    def draws(self, ids: np.ndarray, places: np.ndarray, num_steps: int) -> list[Draws]:
        """Make the draws of ``num_steps`` steps on the host, and copy them to the device at once.

        Args:
            ids: of the requests, int [B].
            places: of the first step's tokens in their responses, int [B].
        """
        sampling = self._sampling
        later = places + np.arange(num_steps)[:, None]
        numbers = too_short = None
        if sampling.temperature != 0:
            drawn = [uniform_numbers(sampling.seed, ids, at) for at in later]
            numbers = copied(np.stack(drawn), self._device)
        short = later < sampling.min_new_tokens
        if sampling.stop_token_ids and short.any():
            too_short = copied(short, self._device)
        return [
            Draws(
                None if numbers is None else numbers[step],
                too_short[step] if too_short is not None and short[step].any() else None,
            )
            for step in range(num_steps)
        ]

    def next_tokens(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample tokens, int64 [B], and log-probabilities, float64 [B], from ``logits`` [B, V]."""
        sampling, allowed = self._sampling, logits
        if draws.too_short is not None:
            allowed = forbid_tokens(logits, self._stop_tokens, draws.too_short)
        if draws.numbers is None:
            tokens = choose_likeliest(allowed)
        else:
            tokens = draw(
                allowed,
                draws.numbers,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
        return tokens, token_log_probs(logits, tokens, sampling.temperature or 1.0)
