"""Tasks to try training on: generated preference pairs, and a reward that any response can earn.

Right and wrong of the pairs can be told only by reading the prompt.

A prompt is distinct letters, one of them a capital, and a colon: ``kdRbq:``. The chosen response is
the capital's letter (``r``), the rejected one another letter of the prompt. Over the task, every
letter is chosen as often as rejected: without the prompt the accuracy is one half.
"""

import string

import numpy as np

NUM_LETTERS = 5
VOWELS = frozenset("aeiou")


def generate(num_pairs: int, seed: int) -> list[tuple[str, str, str]]:
    """``(prompt, chosen, rejected)``, all prompts distinct; the same for the same seed.

    ValueError where there are not so many distinct prompts.
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
    return [(prompt, chosen, rejected) for prompt, (chosen, rejected) in pairs.items()]


def vowel_share(completions: list[str], **kwargs: object) -> list[float]:
    """The share of each completion's characters that are lowercase vowels: 0 to 1, empty text 0.

    A reward function for trying stage ppo. It is dense: every vowel counts, so that a model with
    random weights has something to learn from at once.
    """
    return [
        sum(character in VOWELS for character in text) / len(text) if text else 0.0
        for text in completions
    ]
