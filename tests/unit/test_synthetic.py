"""Generated pairs: the task is the same however long the texts are."""

import numpy as np
import pytest

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS
from puzzle_align.data.synthetic import draw_lengths, generate


def test_only_the_prompt_says_which_task_it_is() -> None:
    pairs = generate(4096, seed=0)
    assert pairs == generate(4096, seed=0) != generate(4096, seed=1)
    assert len({prompt for prompt, _, _ in pairs}) == 4096  # so any split has disjoint prompts
    for prompt, chosen, rejected in pairs:
        (marked,) = [letter for letter in prompt if letter.isupper()]
        assert len(prompt) == 6 and chosen == marked.lower() != rejected and rejected in prompt
    # The same marginals: each letter is chosen as often as rejected, within four deviations.
    for letter in "abcdefghijklmnopqrstuvwxyz":
        counts = [sum(pair[i] == letter for pair in pairs) for i in (1, 2)]
        assert abs(counts[0] - counts[1]) < 4 * np.sqrt(sum(counts))
    with pytest.raises(ValueError, match="data.num_synthetic=0 is out of range"):
        generate(0, seed=0)


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


@pytest.mark.parametrize("name", SYNTHETIC_LENGTHS)
def test_lengths_are_those_of_a_data_set(name: str) -> None:
    """The paper's medians, of a prompt with a response and of their ratio."""
    pairs = generate(6000, 5, lengths=name)
    assert [tuple(part.strip("-") for part in pair) for pair in pairs] == generate(6000, 5)
    prompts, chosen, rejected = np.array([[len(part) for part in pair] for pair in pairs]).T
    whole, ratio = SYNTHETIC_LENGTHS[name]
    for response in (chosen, rejected):
        assert np.median(prompts / response) == pytest.approx(ratio, rel=0.08)
        # The median of a sum of two is a little over that of the parts' medians.
        assert whole * 0.95 < np.median(prompts + response) < whole * 1.3
    assert draw_lengths(np.random.default_rng(0), 7, None, name).shape == (7, 3)
    bounded = generate(500, 5, longest=300, lengths=name)
    assert max(len(prompt) + max(map(len, two)) for prompt, *two in bounded) <= 300
