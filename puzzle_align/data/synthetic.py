"""Tasks to try training on: generated preference pairs, and a reward that any response can earn.

Only the prompt tells which response of a pair is right.

A prompt is distinct letters, one of them a capital, and a colon: ``kdRbq:``. The chosen response is
the capital's letter (``r``), the rejected one another letter of the prompt. Over the task, every
letter is chosen as often as rejected: without the prompt the accuracy is one half.

To try a job's speed and memory, texts can be as long as real ones, with dashes before the letters
and after the answer. Lengths are log-normal, about as those of real texts.
"""

import string

import numpy as np

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS

NUM_LETTERS = 5
VOWELS = frozenset("aeiou")
# Of prompts and responses: medians in relation to the longest text, and spreads of logarithms.
_SHARES, _SPREADS = (0.05, 0.15), (1.0, 0.7)


def generate(
    num_pairs: int, seed: int, longest: int | None = None, lengths: str = "lognormal"
) -> list[tuple[str, str, str]]:
    """``(prompt, chosen, rejected)``, all prompts distinct; the same for the same seed.

    Args:
        longest: characters of a prompt with a response at most.
        lengths: of ``SYNTHETIC_LENGTHS``, a character for every token; else medians are shares of
            ``longest``, or no more than the task needs where that is None.

    Raises:
        ValueError: if there are not so many distinct prompts.
    """
    letters = list(string.ascii_lowercase)
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
    """Lengths of prompts, chosen and rejected responses: int64 [num_pairs, 3].

    Args:
        longest: no part is over half of it; None: no bound, for lengths of a data set.
        lengths: see ``generate``.
    """
    if lengths in SYNTHETIC_LENGTHS:
        whole, ratio = SYNTHETIC_LENGTHS[lengths]
        medians = whole * ratio / (1 + ratio), whole / (1 + ratio)
    else:
        assert longest is not None, "the medians are shares of it"
        medians = _SHARES[0] * longest, _SHARES[1] * longest
    prompts, responses = (
        generator.lognormal(np.log(median), spread, (num_pairs, number))
        for median, spread, number in zip(medians, _SPREADS, (1, 2), strict=True)
    )
    drawn = np.concatenate([prompts, responses], axis=1)
    return (drawn if longest is None else np.minimum(drawn, longest // 2)).astype(np.int64)


def vowel_share(completions: list[str], **kwargs: object) -> list[float]:
    """The share of each completion's characters that are lowercase vowels: 0 to 1, empty text 0.

    A reward function for trying stage ppo. It is dense: every vowel counts, so that a model with
    random weights has something to learn from at once.
    """
    return [
        sum(character in VOWELS for character in text) / len(text) if text else 0.0
        for text in completions
    ]
