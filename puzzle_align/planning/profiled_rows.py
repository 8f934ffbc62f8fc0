"""Rows on which models are measured: the lengths of their examples.

Invariants (the tests assert them):
- a row is full: it has no padding;
- in a packed row, prompts and responses have the proportions of the given example.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

Lengths = tuple[int, tuple[int, ...]]  # tokens of a prompt, and of each of its responses


@dataclass(frozen=True, kw_only=True)
class ExampleSize:
    """Sizes of a job's examples, in tokens."""

    prompt: int
    responses: tuple[int, ...]
    longest: int  # tokens of the longest example in a row

    @property
    def halved(self) -> "ExampleSize":
        """An example with a prompt and responses half as long."""
        responses = tuple(max(1, length // 2) for length in self.responses)
        return replace(self, prompt=max(1, self.prompt // 2), responses=responses)

    def tokens(self, row_layout: str) -> int:
        """Tokens of the example in a row."""
        copies = 1 if row_layout == "shared" else len(self.responses)
        return copies * self.prompt + sum(self.responses)


def packed_row(row_tokens: int, example: ExampleSize, row_layout: str) -> list[Lengths]:
    """A row of as many examples as fit, at least one, with lengths scaled to fill it."""
    each = example.tokens(row_layout)
    count = max(1, row_tokens // each)
    least, more = divmod(row_tokens, count)
    sizes = [least + (number < more) for number in range(count)]
    return [_stretched(size, example, row_layout) for size in sizes]


def causal_row(row_tokens: int, num_responses: int, predictions: int) -> list[Lengths]:
    """One example that fills the row with nearly full causal attention.

    All responses but the first have one token, so few pairs of tokens are masked between them.
    """
    others = num_responses - 1
    first = min(max(1, predictions - others), row_tokens - num_responses)
    return [(row_tokens - others - first, (first,) + (1,) * others)]


def num_predictions(row: Sequence[Lengths]) -> int:
    """Tokens of the row's responses."""
    return sum(sum(responses) for _, responses in row)


def _stretched(size: int, example: ExampleSize, row_layout: str) -> Lengths:
    """An example of ``size`` tokens in the row, in the proportions of ``example``."""
    number = len(example.responses)
    copies = 1 if row_layout == "shared" else number
    share = example.prompt / example.tokens(row_layout)
    prompt = min(max(1, round(share * size)), (size - number) // copies)
    left = size - copies * prompt
    total = sum(example.responses)
    responses = [max(1, left * length // total) for length in example.responses]
    for place in range(left - sum(responses)):
        responses[place % number] += 1
    while sum(responses) > left:
        responses[responses.index(max(responses))] -= 1
    return prompt, tuple(responses)
