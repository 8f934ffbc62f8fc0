"""Reward functions as TRL's documentation has them, on GSM8K's columns ``question``, ``answer``."""

import re


def gold(answer):
    """The number after the mark of a GSM8K answer."""
    return answer.split("####")[-1].strip().replace(",", "")


def last_number(text):
    found = re.findall(r"-?\d+", text)
    return found[-1] if found else None


def correctness(completions, answer, **kwargs):
    """1 if the completion, a text, ends in the right number."""
    return [
        1.0 if last_number(content) == gold(right) else 0.0
        for content, right in zip(completions, answer, strict=True)
    ]


def correctness_of_messages(completions, answer, **kwargs):
    """The same of conversational completions."""
    contents = [completion[0]["content"] for completion in completions]
    return correctness(contents, answer)


def format_reward(completions, **kwargs):
    """1 if a number ends the completion; written for both forms."""
    contents = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [1.0 if re.search(r"\d$", content) else 0.0 for content in contents]


def long_questions(prompts, completions, question, **kwargs):
    """The completion's length, not applicable to short questions; ``question`` as in the data."""
    assert question == prompts
    texts = [q if isinstance(q, str) else q[-1]["content"] for q in question]
    contents = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        float(len(content)) if len(text) > 60 else None
        for text, content in zip(texts, contents, strict=True)
    ]


def progress(completion_ids, answer, trainer_state, log_extra=None, log_metric=None, **kwargs):
    """Fewer tokens are better, the more so the longer training goes on."""
    lengths = [len(ids) for ids in completion_ids]
    if log_extra:
        log_extra("golden_answer", [gold(right) for right in answer])
    if log_metric:
        log_metric("num_tokens", sum(lengths) / len(lengths))
    share = trainer_state.global_step / trainer_state.max_steps
    return [-share * length for length in lengths]


async def judge(prompts, completions, completion_ids, answer, **kwargs):
    """A judge that has no opinion on an even number of tokens."""
    assert len(prompts) == len(completions) == len(answer)
    return [0.5 if len(ids) % 2 else None for ids in completion_ids]
