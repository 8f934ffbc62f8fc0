"""Generated pairs: the task is the same however long the texts are."""

import numpy as np
import pytest

from puzzle_align.data.synthetic import generate


def test_short_texts_are_what_the_task_needs() -> None:
    for prompt, chosen, rejected in generate(50, seed=3):
        capital = next(letter for letter in prompt if letter.isupper())
        assert len(prompt) == 6 and chosen == capital.lower()
        assert rejected != chosen and rejected in prompt


@pytest.mark.parametrize("longest", [64, 4000])
def test_long_texts_are_the_same_task_at_lengths_of_a_wide_spread(longest: int) -> None:
    pairs = generate(2000, 3, longest)
    assert [tuple(part.strip("-") for part in pair) for pair in pairs] == generate(2000, 3)
    lengths = np.array([[len(part) for part in pair] for pair in pairs])
    assert lengths.max() == longest // 2  # a prompt with a response: the longest at most
    if longest == 4000:  # medians as said, and a ninth decile of twice that and more
        assert np.median(lengths[:, 0]) == pytest.approx(0.05 * longest, rel=0.1)
        assert np.median(lengths[:, 1:]) == pytest.approx(0.15 * longest, rel=0.1)
        assert (np.quantile(lengths, 0.9, axis=0) > 2 * np.median(lengths, axis=0)).all()
