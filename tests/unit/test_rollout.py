"""How many of a prompt's responses lie in a row with it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.config.sections.data import PackingConfig
from puzzle_align.stages.rl.rollout import responses_together


def together(prompts: list[int], responses: list[list[int]], row: int, layout: str) -> int:
    packing = PackingConfig(row_tokens=row, layout=layout)
    return responses_together(np.array(prompts), np.array(responses), packing)


def test_by_hand() -> None:
    """A prompt of 10 with four responses of 5: 30 tokens with all, 20 with two, 15 with one."""
    same = [[5, 5, 5, 5]]
    assert [together([10], same, row, "shared") for row in (30, 29, 20, 19, 15)] == [4, 2, 2, 1, 1]
    assert [together([10], same, row, "paired") for row in (60, 59, 30, 29)] == [4, 2, 2, 1]
    # The longest group decides, for all prompts alike; three of six are a divisor, four are none.
    assert together([10, 1], [[1] * 6, [9, 9, 9, 1, 1, 1]], 28, "shared") == 3


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(40, 200),
    st.sampled_from(["shared", "paired"]),
    st.randoms(use_true_random=False),
)
def test_every_group_fits_and_no_larger_ones_do(k, prompts, row, layout, random) -> None:
    responses = [[random.randint(1, 20) for _ in range(k)] for _ in prompts]

    def fit(number: int) -> bool:
        return all(
            (prompt if layout == "shared" else number * prompt) + sum(own[first : first + number])
            <= row
            for prompt, own in zip(prompts, responses, strict=True)
            for first in range(0, k, number)
        )

    found = together(prompts, responses, row, layout)
    assert k % found == 0 and fit(found)
    assert not any(fit(number) for number in range(found + 1, k + 1) if k % number == 0)
