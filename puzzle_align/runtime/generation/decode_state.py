"""Inputs and outputs of a slot group's decode batches, at fixed addresses on the device.

A batch's last tokens and positions are copied there once. Every step reads them, writes its outcome
and advances them: the host builds and reads nothing until the batch's last step is done.

Shapes: R rows, the group's capacity rounded up like rows; B sequences of a batch, S tokens of its
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
    """Tensors of one slot group on this rank.

    ``outcome``, int64 [2, R], holds a step's tokens and the bits of log-probabilities, which ranks
    share; ``outcomes`` [num_steps, 2, R] holds those of every step, which the host fetches. A
    prefill batch has one step.
    """

    def __init__(self, context: Context, capacity: int, multiple: int, num_steps: int) -> None:
        """Allocate for ``capacity`` slots, with rows of a multiple of ``multiple`` tokens."""
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
        """Begin a batch: set its sequences' last tokens, each after ``cached`` tokens.

        Padding of the row to ``num_tokens`` is token 0 at position 0 in every step.
        """
        row = np.zeros((2, num_tokens), dtype=np.int64)
        row[:, : len(cached)] = last_tokens, cached
        tokens, positions = copied(row, self._tokens.device)
        self._tokens[:num_tokens].copy_(tokens)
        self._positions[:num_tokens].copy_(positions)

    def advance(self, num_sequences: int, step: int) -> None:
        """Advance to the step after ``step``, whose outcome is complete."""
        self._tokens[:num_sequences].copy_(self.outcomes[step, 0, :num_sequences])
        self._positions[:num_sequences].add_(1)

    def row(self, num_sequences: int, num_tokens: int, length: int) -> BatchInput:
        """Make the row of a step, S = ``num_tokens``, which reads ``length`` tokens of each slot.

        Tokens beyond ``num_sequences`` are padding, and not cached.
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
        """Return the buffer of the hidden states that a chunk receives."""
        return _first(self._received[chunk], shape)

    def sent(self, chunk: int, shape: Sequence[int]) -> torch.Tensor:
        """Return the buffer of the hidden states that a chunk sends."""
        return _first(self._sent[chunk], shape)

    def draws(self, draws: Draws, num_sequences: int) -> Draws:
        """Copy a step's draws into fixed tensors, padded up to ``num_sequences``."""
        numbers = too_short = None
        if draws.numbers is not None:
            numbers = self._numbers[:num_sequences]
            numbers[: len(draws.numbers)].copy_(draws.numbers)
        if draws.too_short is not None:
            too_short = self._too_short[:num_sequences]
            too_short[: len(draws.too_short)].copy_(draws.too_short)
        return Draws(numbers, too_short)


def _first(buffer: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    assert buffer is not None, "the chunk has no neighbour on this side"
    return buffer[: shape[0]]
