"""What a model cannot answer is refused in one line before anything runs."""

from dataclasses import replace

import numpy as np
import pytest

from puzzle_align.runtime.generation.sampling import Request, Sampling, check_requests
from tests.specs import LLAMA

SPEC = replace(LLAMA, vocab_size=50, max_position_embeddings=20)


def check(prompt: list[int], stop_token: int = 0, sliding_window: int | None = None) -> None:
    spec = replace(SPEC, sliding_window=sliding_window)
    sampling = Sampling(1.0, 0, 1.0, 0, 8, (stop_token,), seed=0)
    requests = [Request(1, np.array([3])), Request(7, np.array(prompt, dtype=np.int32))]
    check_requests(spec, requests, sampling)


def test_the_longest_prompt_is_answered() -> None:
    check([49] * 12)
    check([0] * 7, sliding_window=15)


@pytest.mark.parametrize(
    ("prompt", "stop_token", "window", "message"),
    [
        ([], 0, None, "the prompt of request 7 is empty"),
        ([1] * 13, 0, None, "request 7 has 13 tokens.*max_new_tokens=8 .*20 positions"),
        ([1] * 8, 0, 15, "15 positions"),
        ([1, 50], 0, None, "tokens from 1 to 50, but the model's are 0 to 49"),
        ([-1], 0, None, "tokens from -1"),
        ([1], 50, None, "stop_token_ids: 50 is no token"),
    ],
)
def test_others_are_refused(
    prompt: list[int], stop_token: int, window: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        check(prompt, stop_token, window)
    assert "\n" not in str(raised.value)
