"""Reward functions that meet each other, fail, or ask for what there is not."""

import asyncio

_MET: dict[str, asyncio.Event] = {}
LOOPS: list[asyncio.AbstractEventLoop] = []
ENDED: list[str] = []


def right(completions, **kwargs):
    return [1.0] * len(completions)


async def _meet(own: str, other: str) -> None:
    """Set an event, and wait for the other's."""
    LOOPS.append(asyncio.get_running_loop())
    for name in (own, other):
        _MET.setdefault(name, asyncio.Event())
    _MET[own].set()
    await asyncio.wait_for(_MET[other].wait(), timeout=10)


async def first(completions, **kwargs):
    await _meet("first", "second")
    return [1.0] * len(completions)


async def second(completions, **kwargs):
    await _meet("second", "first")
    return [2.0] * len(completions)


async def fails(completions, **kwargs):
    await asyncio.sleep(0)
    return {}["no such"]


async def waits(completions, **kwargs):
    try:
        await asyncio.sleep(3600)
    finally:
        ENDED.append("waits")


def logs_too_little(completions, log_extra):
    log_extra("x", [1])
    return [0.0] * len(completions)


def asks_for_history(completions, trainer_state):
    return [len(trainer_state.log_history)] * len(completions)
