"""Reward functions that go wrong, for the tests of what is then said."""

import math
import time


def raises(prompts: list[str], responses: list[str]) -> list[float]:
    """As a user's own mistake would."""
    return [len(response) / 0 for response in responses]


def not_a_number(prompts: list[str], responses: list[str]) -> list[float]:
    """One of them is."""
    return [math.nan, *(1.0 for _ in responses[1:])]


def hangs(prompts: list[str], responses: list[str]) -> list[float]:
    """As one that waits for a server."""
    time.sleep(3600)
    return []
