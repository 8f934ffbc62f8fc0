"""What the decode batches of a slot group take and give, on the device, at addresses that stay.

A batch's last tokens and positions are put there once. Every step reads them, writes its outcome
and moves them on: the host builds nothing and learns nothing until the batch's last step is done.

Shapes: R rows, the group's capacity rounded up as rows are; B sequences of a batch, S tokens of its
row, B <= S <= R.
"""

from collections.abc import Sequence

import numpy as np
import torch

from puzzle_align.models.attention import CachedTokens
from puzzle_align.models.build import Predictions
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.batch_input import BatchInput
from puzzle_align.runtime.generation.sampler import Draws


class DecodeState:
    """The tensors of one slot group on this rank.

    ``outcome``, int64 [2, R], are a step's tokens and log-probabilities' bits, ``outcomes``
    [num_steps, 2, R] those of every step: what is shared between the ranks, and what the host
    fetches. A prefill batch has one step.
    """

    def __init__(self, context: Context, capacity: int, multiple: int, num_steps: int) -> None:
        """Of a group with ``capacity`` slots, whose rows have a multiple of ``multiple`` tokens."""
        device = context.device
        rows = -(-capacity // multiple) * multiple
        self._tokens, self._positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, device=device)
        self._numbers = torch.zeros(rows, dtype=torch.float64, device=device)
        self._too_short = torch.zeros(rows, dtype=torch.bool, device=device)
        self.outcome = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.outcomes = torch.zeros(num_steps, 2, rows, dtype=torch.int64, device=device)
        shape = context.activation_shape(rows)

        def hidden() -> torch.Tensor:
            return torch.zeros(shape, dtype=context.dtype, device=device)

        self._received = [None if chunk.is_first else hidden() for chunk in context.chunks]
        self._sent = [None if chunk.is_last else hidden() for chunk in context.chunks]

    def begin(self, last_tokens: Sequence[int], cached: Sequence[int], num_tokens: int) -> None:
        """Take up a batch: its sequences' last tokens, which stand behind ``cached`` ones.

        Padding of the row to ``num_tokens`` is a token 0 at position 0, and stays there.
        """
        row = np.zeros((2, num_tokens), dtype=np.int64)
        row[:, : len(cached)] = last_tokens, cached
        tokens, positions = copied(row, self._tokens.device)
        self._tokens[:num_tokens].copy_(tokens)
        self._positions[:num_tokens].copy_(positions)

    def advance(self, num_sequences: int, step: int) -> None:
        """Go on to the step after ``step``, whose outcome is there."""
        self._tokens[:num_sequences].copy_(self.outcomes[step, 0, :num_sequences])
        self._positions[:num_sequences].add_(1)

    def row(self, num_sequences: int, num_tokens: int, length: int) -> BatchInput:
        """The row of a step, S = ``num_tokens``, which reads ``length`` tokens of each slot.

        What is beyond ``num_sequences`` is padding, and not cached.
        """
        slots, positions = self._slots[:num_sequences], self._positions[:num_tokens]
        return BatchInput(
            tokens=self._tokens[:num_tokens][None],
            position_ids=positions[None],
            predictions=Predictions(slots, None),
            cached=CachedTokens(slice(num_sequences), slots, positions[:num_sequences]),
            within=None,
            cache_length=length,
        )

    def received(self, chunk: int, shape: Sequence[int]) -> torch.Tensor:
        """Where the hidden states that a chunk takes belong."""
        return _first(self._received[chunk], shape)

    def sent(self, chunk: int, shape: Sequence[int]) -> torch.Tensor:
        """Where the hidden states that a chunk gives belong."""
        return _first(self._sent[chunk], shape)

    def draws(self, draws: Draws, num_sequences: int) -> Draws:
        """A step's draws in their place, and those of padding up to ``num_sequences``."""
        numbers = too_short = None
        if draws.numbers is not None:
            numbers = self._numbers[:num_sequences]
            numbers[: len(draws.numbers)].copy_(draws.numbers)
        if draws.too_short is not None:
            too_short = self._too_short[:num_sequences]
            too_short[: len(draws.too_short)].copy_(draws.too_short)
        return Draws(numbers, too_short)


def _first(buffer: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    assert buffer is not None, "this end of the chunk has no neighbour"
    return buffer[: shape[0]]
