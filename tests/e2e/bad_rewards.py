"""Reward functions that go wrong, for the tests of what is then said."""

import asyncio
import math
import time


def raises(completions: list[str], **kwargs: object) -> list[float]:
    """As a user's own mistake would."""
    return [len(text) / 0 for text in completions]


def not_a_number(completions: list[str], **kwargs: object) -> list[float]:
    """One of them is."""
    return [math.nan, *(1.0 for _ in completions[1:])]


def hangs(completions: list[str], **kwargs: object) -> list[float]:
    """As one that waits for a server."""
    time.sleep(3600)
    return []


async def awaits_for_ever(completions: list[str], **kwargs: object) -> list[float]:
    """As one that waits for a server beside others."""
    await asyncio.sleep(3600)
    return []


def by_place(prompts: list[str], responses: list[str]) -> list[float]:
    """As functions were written before they were called by keyword."""
    return [float(len(text)) for text in responses]
