"""Choice of the next token of every sequence from its logits: greedy, or drawn.

A draw depends only on the sequence's logits and a random number, which depends only on the seed,
the sequence and the token's place: the same prompt gives the same tokens in any batch. Tokens are
looked up in the cumulative distribution in order of ids, not of likelihood: then logits that differ
in the last bits change the bounds of a draw only in the last bits.

Shapes: B sequences, V tokens of the vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_numbers(seed: int, sequences: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Random numbers in [0, 1), float64 [B], from the numbers and places of sequences, int [B].

    Each is number ``place`` of the SplitMix64 generator (Steele et al. 2014) whose state is a hash
    of the seed and the sequence.
    """
    start = _mixed(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    state = _mixed(start + _GOLDEN * (sequences.astype(np.uint64) + np.uint64(1)))
    bits = _mixed(state + _GOLDEN * (places.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)) * 2.0**-53


def forbid_tokens(logits: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Set ``logits`` [B, V] of ``tokens`` int64 [n] to -inf in ``rows`` bool [B], in a copy."""
    forbidden = logits.index_select(1, tokens).masked_fill(rows[:, None], -torch.inf)
    return logits.index_copy(1, tokens, forbidden)


def choose_likeliest(logits: Tensor) -> Tensor:
    """The likeliest token int64 [B] of ``logits`` [B, V]; of equal ones, that of the lowest id."""
    return logits.argmax(dim=-1)


def draw(
    logits: Tensor, numbers: Tensor, *, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Draw tokens int64 [B] from ``softmax(logits / temperature)``, cut to top-k, then top-p.

    As in transformers, top-p applies to the distribution after top-k. A cut also keeps tokens that
    are as likely as the least likely one it keeps. Probabilities and their sums are float64; tokens
    are ranked by their logits, since a GPU's radix sort passes twice as often over float64.

    Args:
        logits: [B, V]; -inf for tokens that must not be drawn.
        numbers: float64 [B] in [0, 1).
        temperature: above 0.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the fewest likeliest that together have at least this probability; 1 keeps all.
    """
    weights = torch.softmax(_scaled(logits, temperature), dim=-1)
    if 0 < top_k < weights.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(logits < least, 0.0)
    if top_p < 1:
        descending = weights.gather(-1, logits.argsort(dim=-1, descending=True))
        most = top_p * descending.sum(dim=-1, keepdim=True)
        kept = descending.cumsum(dim=-1).sub_(descending) < most  # by the sum before a token
        kept[:, 0] = True
        last_kept = kept.sum(dim=-1, keepdim=True) - 1
        weights = weights.masked_fill(weights < descending.gather(-1, last_kept), 0.0)
    cumulative = weights.cumsum(dim=-1)
    wanted = numbers[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return tokens.clamp_(max=weights.size(-1) - 1)  # past the end only if logits are NaN


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities float64 [B] of ``tokens`` under ``softmax(logits / temperature)``."""
    scaled = _scaled(logits, temperature)
    return scaled.gather(-1, tokens[:, None])[:, 0] - torch.logsumexp(scaled, dim=-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, float64; without a division by 1, which moves as many bytes."""
    return logits.double() if temperature == 1 else logits.double() / temperature


def _mixed(state: np.ndarray) -> np.ndarray:
    """SplitMix64's output of a state, uint64 [n]; products wrap around."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
