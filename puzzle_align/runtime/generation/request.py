"""Requests to generate, their sampling options, and responses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from puzzle_align.layout.model import ModelSpec


@dataclass(frozen=True)
class Sampling:
    """Options of sampling, the same for every response."""

    temperature: float  # logits are divided by it; 0: greedy
    top_k: int  # among the k likeliest tokens; 0: among all
    top_p: float  # among the likeliest tokens that together have p; 1: among all
    min_new_tokens: int  # tokens before any stop token
    max_new_tokens: int  # a stop token included
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Request:
    """A prompt to answer. Draws depend only on the seed, ``id`` and the places of tokens."""

    id: int
    prompt: np.ndarray  # int [n]


@dataclass(frozen=True)
class Response:
    """Response to the request with the same ``id``.

    Log-probabilities are of the logits divided by the temperature (greedy: of the plain logits),
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
