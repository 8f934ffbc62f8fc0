"""Synthetic tasks to test training: generated preference pairs, and a dense reward function.

A prompt is distinct letters, one of them a capital, and a colon: ``kdRbq:``. The chosen response is
the capital's letter (``r``), the rejected one another letter of the prompt. Every letter is chosen
as often as rejected, so that without the prompt the accuracy is one half.

To test a job's speed and memory, texts can be padded with dashes to the length of real ones; their
lengths are log-normal, about like those of real texts.
"""

import string

import numpy as np

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS

NUM_LETTERS = 5
VOWELS = frozenset("aeiou")
# For prompts and responses: median lengths as shares of the longest text, and log-normal sigmas.
_SHARES, _SPREADS = (0.05, 0.15), (1.0, 0.7)
_DATA_SET_SPREADS = (0.45, 0.45)  # the paper gives medians alone


def generate(
    num_pairs: int, seed: int, longest: int | None = None, lengths: str = "lognormal"
) -> list[tuple[str, str, str]]:
    """Generate ``(prompt, chosen, rejected)`` with distinct prompts, decided by the seed.

    Args:
        longest: most characters of a prompt with a response.
        lengths: a name in ``SYNTHETIC_LENGTHS`` (one character per token). Otherwise medians are
            shares of ``longest``; if that is None, texts are not padded.

    Raises:
        ValueError: if there are fewer distinct prompts.
    """
    letters = np.array(list(string.ascii_lowercase))
    available = NUM_LETTERS * int(np.prod(np.arange(26, 26 - NUM_LETTERS, -1, dtype=np.int64)))
    if not 0 < num_pairs <= available // 2:
        raise ValueError(
            f"data.num_synthetic={num_pairs} is out of range: choose 1 to {available // 2} pairs"
        )
    generator = np.random.default_rng([seed, 0x5E17])
    pairs: dict[str, tuple[str, str]] = {}
    while len(pairs) < num_pairs:
        word = generator.choice(letters, NUM_LETTERS, replace=False).tolist()
        marked, other = generator.choice(NUM_LETTERS, 2, replace=False).tolist()
        chosen, rejected = word[marked], word[other]
        word[marked] = chosen.upper()
        pairs.setdefault("".join(word) + ":", (chosen, rejected))
    short = [(prompt, chosen, rejected) for prompt, (chosen, rejected) in pairs.items()]
    if longest is None and lengths not in SYNTHETIC_LENGTHS:
        return short
    drawn = draw_lengths(generator, num_pairs, longest, lengths)
    return [
        (prompt.rjust(size[0], "-"), chosen.ljust(size[1], "-"), rejected.ljust(size[2], "-"))
        for (prompt, chosen, rejected), size in zip(short, drawn.tolist(), strict=True)
    ]


def draw_lengths(
    generator: np.random.Generator, num_pairs: int, longest: int | None, lengths: str = "lognormal"
) -> np.ndarray:
    """Draw lengths of prompts, chosen and rejected responses: int64 [num_pairs, 3].

    A data set's median overall length is taken for that of a pair with its prompt once: prompt,
    chosen and rejected response. The paper does not define it; this is the unit that it packs. So
    a response's median is ``overall / (ratio + 2)``, and the prompt's ``ratio`` times as long.

    Args:
        longest: every part is at most half of it; None (with a data set's lengths): no bound.
        lengths: see ``generate``.
    """
    if lengths in SYNTHETIC_LENGTHS:
        overall, ratio = SYNTHETIC_LENGTHS[lengths]
        response = overall / (ratio + 2)
        medians, spreads = (ratio * response, response), _DATA_SET_SPREADS
    else:
        assert longest is not None, "the medians are shares of it"
        medians, spreads = (_SHARES[0] * longest, _SHARES[1] * longest), _SPREADS
    prompts, responses = (
        generator.lognormal(np.log(median), spread, (num_pairs, number))
        for median, spread, number in zip(medians, spreads, (1, 2), strict=True)
    )
    drawn = np.concatenate([prompts, responses], axis=1)
    return (drawn if longest is None else np.minimum(drawn, longest // 2)).astype(np.int64)


def vowel_share(completions: list[str], **kwargs: object) -> list[float]:
    """Share of lowercase vowels in each completion's characters: 0 to 1, 0 for an empty text.

    A reward function to test stage ppo. It is dense, since every vowel counts, so that a model with
    random weights gets a learning signal at once.
    """
    return [
        sum(character in VOWELS for character in text) / len(text) if text else 0.0
        for text in completions
    ]
