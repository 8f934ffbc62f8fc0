"""Reward functions of the tests.

``half_of_even`` and ``of_odd`` are the share of vowels together: of texts of even, and of odd
length. Where one does not apply it says so.
"""

from puzzle_align.data.synthetic import vowel_share


def half_of_even(completions, log_metric, **kwargs):
    """Half of the share, to be weighed with 2."""
    log_metric("num_characters", sum(map(len, completions)) / len(completions))
    shares = zip(completions, vowel_share(completions), strict=True)
    return [None if len(text) % 2 else share / 2 for text, share in shares]


async def of_odd(completions, **kwargs):
    shares = zip(completions, vowel_share(completions), strict=True)
    return [share if len(text) % 2 else None for text, share in shares]


def mean_code(completions, **kwargs):
    """Mean code point over 256: another number for almost every text."""
    return [sum(map(ord, text)) / 256 / max(len(text), 1) for text in completions]


def is_even(completions, **kwargs):
    """Whether a text has an even length."""
    return [float(len(text) % 2 == 0) for text in completions]


def always(completions, **kwargs):
    return [1.0] * len(completions)
