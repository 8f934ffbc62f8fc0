"""Prompts in columns: one flat token array, and what reward functions are told about each prompt.

Texts, messages and other columns are kept as JSON lines in one byte array, and parsed one by one
when asked for: the array may be as large as the disk.

Shapes: n prompts.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from puzzle_align.data.records import Part


@dataclass(frozen=True)
class PromptDataset:
    """Prompts as tokens and as given, and their other columns. Arrays may be memory-mapped."""

    tokens: np.ndarray  # int32 [total]
    prompt_starts: np.ndarray  # int64 [n], index into tokens
    prompt_lengths: np.ndarray  # int32 [n]
    # uint8 [bytes], JSON: [text, columns] for every prompt, of messages [text, columns, messages]
    lines: np.ndarray
    line_starts: np.ndarray  # int64 [n], index into lines
    line_lengths: np.ndarray  # int64 [n]
    column_names: tuple[str, ...]  # of all records
    pad_id: int
    fingerprint: str  # hash of the content, the same wherever it was built

    def __len__(self) -> int:
        return len(self.prompt_starts)

    def prompt(self, index: int) -> np.ndarray:
        """Tokens of prompt ``index``, int32."""
        start = self.prompt_starts[index]
        return self.tokens[start : start + self.prompt_lengths[index]]

    def text(self, index: int) -> str:
        """Prompt ``index`` as text, chat template included; whole, even if its tokens were cut."""
        return self._line(index)[0]

    def as_given(self, index: int) -> Part:
        """Prompt ``index`` as its record has it: text, or a list of messages."""
        text, _, *messages = self._line(index)
        return messages[0] if messages else text

    def columns(self, indices: Sequence[int] | np.ndarray) -> dict[str, list[Any]]:
        """The other columns of prompts, in order; None where a record lacks one."""
        values = [self._line(index)[1] for index in indices]
        return {name: [value.get(name) for value in values] for name in self.column_names}

    def _line(self, index: int) -> list[Any]:
        start = self.line_starts[index]
        return json.loads(self.lines[start : start + self.line_lengths[index]].tobytes())


def contiguous_prompts(
    tokens: np.ndarray,
    prompt_lengths: np.ndarray,
    lines: np.ndarray,
    line_lengths: np.ndarray,
    column_names: tuple[str, ...],
    pad_id: int,
    fingerprint: str,
) -> PromptDataset:
    """A dataset whose prompts, and whose lines, follow each other."""
    return PromptDataset(
        tokens,
        np.cumsum(prompt_lengths, dtype=np.int64) - prompt_lengths,
        prompt_lengths,
        lines,
        np.cumsum(line_lengths) - line_lengths,
        line_lengths,
        column_names,
        pad_id,
        fingerprint,
    )


def prompts_fingerprint(number: int, pad_id: int, content: Iterable[bytes | memoryview]) -> str:
    """The hash of a dataset: ``content`` is its prompts' lengths, then tokens, then lines."""
    digest = hashlib.sha256(f"prompts {number} {pad_id}".encode())
    for block in content:
        digest.update(block)
    return digest.hexdigest()


def prompt_indices(
    num_prompts: int, batch_size: int, step: int, seed: int, shuffle: bool
) -> np.ndarray:
    """Prompts of iteration ``step`` >= 0, int64 [batch_size], each below ``num_prompts``.

    Epochs follow each other without a gap: every iteration is full and every prompt comes once an
    epoch, in a new order each (``shuffle``), or always in the data's.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(places, num_prompts)
    if not shuffle:
        return offsets
    indices = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        order = np.random.default_rng([seed, epoch]).permutation(num_prompts)
        indices[epochs == epoch] = order[offsets[epochs == epoch]]
    return indices
