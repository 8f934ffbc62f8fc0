"""Reward functions as they are written for TRL's GRPOTrainer, on GSM8K's columns."""

import asyncio
import re
from typing import Any


def text_of(completion: str | list[dict[str, Any]]) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def answer_of(text: str) -> str:
    return text.split("####")[1].strip().replace(",", "")


def right(completions, response, log_metric=None, log_extra=None, **kwargs):
    """1 where the last number is that of the data's response."""
    found = [(re.findall(r"-?[\d,]*\d", text_of(c)) or [""])[-1] for c in completions]
    rewards = [
        float(f.replace(",", "") == answer_of(r)) for f, r in zip(found, response, strict=True)
    ]
    if log_metric is not None:
        log_metric("accuracy", sum(rewards) / len(rewards))
    if log_extra is not None:
        log_extra("found", found)
    return rewards


def marked(completions, **kwargs):
    """Whether the answer is marked; not applicable to a completion without any."""
    rewards = []
    for completion in completions:
        has_number = re.search(r"\d", text_of(completion))
        rewards.append(float("####" in text_of(completion)) if has_number else None)
    return rewards


class Short:
    """Fewer tokens are better, the more so the longer training goes on."""

    def __call__(self, completion_ids, trainer_state, **kwargs):
        share = trainer_state.global_step / trainer_state.max_steps
        return [-share * len(ids) for ids in completion_ids]


short = Short()


async def judged(prompts, completions, **kwargs):
    """Judge like a function that asks a server; it has no opinion on an empty completion."""

    async def ask(prompt, completion):
        await asyncio.sleep(0)
        asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return len(asked) / 1000 if text_of(completion) else None

    pairs = zip(prompts, completions, strict=True)
    return await asyncio.gather(*(ask(prompt, completion) for prompt, completion in pairs))
