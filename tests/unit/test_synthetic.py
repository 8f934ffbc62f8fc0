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


# Table 1 of the prefix-sharing paper: median overall length, median ratio of prompt to completion.
PAPER_TABLE = {
    "capybara": (1160, 1.59),
    "hh_rlhf": (186, 2.15),
    "metamath_dpo": (872, 3.91),
    "tldr": (416, 11.14),
    "helpsteer": (775, 6.34),
    "ultrafeedback": (409, 0.42),
}


def test_every_named_data_set_is_in_the_paper() -> None:
    assert SYNTHETIC_LENGTHS.keys() == PAPER_TABLE.keys()


@pytest.mark.parametrize("name", PAPER_TABLE)
def test_medians_of_drawn_lengths_are_the_paper_s(name: str) -> None:
    """Overall is a prompt with both responses.

    Its median is up to 6% over the paper's: that of a sum is over the sum of its parts' medians.
    """
    prompts, chosen, rejected = draw_lengths(np.random.default_rng(0), 40_000, None, name).T
    overall, ratio = PAPER_TABLE[name]
    pairs = prompts + chosen + rejected
    assert np.median(pairs) == pytest.approx(overall, rel=0.065)
    for response in (chosen, rejected):
        assert np.median(prompts / response) == pytest.approx(ratio, rel=0.025)
    # A log-normal mean is exp(sigma^2 / 2) of the median: 1.11. Means decide pairs a second.
    assert pairs.mean() == pytest.approx(overall * np.exp(0.45**2 / 2), rel=0.01)


@pytest.mark.parametrize("name", SYNTHETIC_LENGTHS)
def test_generated_texts_have_a_data_set_s_lengths(name: str) -> None:
    pairs = generate(6000, 5, lengths=name)
    assert [tuple(part.strip("-") for part in pair) for pair in pairs] == generate(6000, 5)
    overall, ratio = SYNTHETIC_LENGTHS[name]
    lengths = np.array([[len(part) for part in pair] for pair in pairs])
    assert np.median(lengths.sum(axis=1)) == pytest.approx(overall, rel=0.08)
    assert np.median(lengths[:, 0] / lengths[:, 1]) == pytest.approx(ratio, rel=0.04)
    bounded = generate(500, 5, longest=300, lengths=name)
    assert max(len(prompt) + max(map(len, two)) for prompt, *two in bounded) <= 300
