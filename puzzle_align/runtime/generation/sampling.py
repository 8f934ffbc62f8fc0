"""Requests to generate, their sampling options and responses, and the sampler of tokens.

Tokens are sampled from the last chunk's logits, bitwise the same on all tensor ranks.

Shapes: B sequences, V tokens of the vocabulary, T tensor ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from puzzle_align.layout.model import ModelSpec
from puzzle_align.models.host_copy import copied

if TYPE_CHECKING:
    from puzzle_align.runtime.context import Context


@dataclass(frozen=True)
class Sampling:
    """Sampling options, the same for every response."""

    temperature: float  # logits are divided by it; 0: greedy
    top_k: int  # among the k likeliest tokens; 0: among all
    top_p: float  # among the likeliest tokens that together have p; 1: among all
    min_new_tokens: int  # tokens before any stop token
    max_new_tokens: int  # a stop token included
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Request:
    """A prompt to answer. Random draws depend only on the seed, ``id`` and a token's place."""

    id: int
    prompt: np.ndarray  # int [n]


@dataclass(frozen=True)
class Response:
    """Response to the request with the same ``id``.

    Log-probabilities come from the logits divided by the temperature (greedy: the plain logits),
    over the whole vocabulary, regardless of top-k, top-p and the least length.
    """

    id: int
    tokens: np.ndarray  # int64 [n], a stop token included
    log_probs: np.ndarray  # float32 [n]
    stopped: bool  # by a stop token, not by max_new_tokens


def check_requests(spec: ModelSpec, requests: Sequence[Request], sampling: Sampling) -> None:
    """Raise a one-line ValueError for a request that the model cannot answer."""
    limit = min(spec.max_position_embeddings, spec.sliding_window or spec.max_position_embeddings)
    new, vocabulary = sampling.max_new_tokens, spec.vocab_size
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"generation.stop_token_ids: {token} is no token of the model, which has"
                f" {vocabulary}; give ids below that"
            )
    for request in requests:
        length = len(request.prompt)
        if length == 0:
            raise ValueError(f"the prompt of request {request.id} is empty; give it a token")
        if length + new > limit:
            raise ValueError(
                f"the prompt of request {request.id} has {length} tokens, and with"
                f" generation.max_new_tokens={new} more it passes the model's {limit} positions;"
                " shorten the prompt, or lower generation.max_new_tokens"
            )
        if not 0 <= request.prompt.min() <= request.prompt.max() < vocabulary:
            raise ValueError(
                f"the prompt of request {request.id} has tokens from {request.prompt.min()} to"
                f" {request.prompt.max()}, but the model's are 0 to {vocabulary - 1}; tokenize it"
                " with the model's own tokenizer"
            )


def whole_vocabulary(logits: torch.Tensor, context: "Context") -> torch.Tensor:
    """Gather logits [B, V], without padding, from all tensor ranks' [B, V/T]. Collective."""
    group = context.groups.tp
    if group.size() > 1:
        parts = logits.new_empty(group.size() * len(logits), logits.size(1))
        dist.all_gather_into_tensor(parts, logits.contiguous(), group=group)
        logits = torch.cat(parts.chunk(group.size()), dim=-1)
    return logits[:, : context.spec.vocab_size]


@dataclass(frozen=True)
class Draws:
    """Inputs of a step's sampling, except the logits."""

    numbers: torch.Tensor | None  # float64 [B] in [0, 1); None: greedy
    too_short: torch.Tensor | None  # bool [B], sequences that must not stop yet; None: all may


class Sampler:
    """Samples with the options of ``Sampling``; never makes the host wait for the device."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._device = device
        self._stop_tokens = copied(np.array(sampling.stop_token_ids, dtype=np.int64), device)

    def draws(self, ids: np.ndarray, places: np.ndarray, num_steps: int) -> list[Draws]:
        """Make the draws of ``num_steps`` steps on the host, and copy them to the device at once.

        Args:
            ids: request ids, int [B].
            places: places of the first step's tokens in their responses, int [B].
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
