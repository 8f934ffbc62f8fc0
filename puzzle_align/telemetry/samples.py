"""Some of an iteration's responses with their scores, for people to read."""

from collections.abc import Sequence
from dataclasses import dataclass

from puzzle_align.telemetry import text

_PROMPT_WIDTH, _RESPONSE_WIDTH = 32, 64  # characters shown of each


@dataclass(frozen=True)
class Sample:
    """One response."""

    prompt: str
    response: str
    score: float


def samples_table(step: int, samples: Sequence[Sample]) -> str:
    """A line a sample: the score, the prompt's end and the response's beginning, both quoted."""
    lines = [
        (
            f"{sample.score:.4f}",
            f"{_end(repr(sample.prompt)):<{_PROMPT_WIDTH}}  {_beginning(repr(sample.response))}",
        )
        for sample in samples
    ]
    return text.table(lines, f"samples at step {step}: score, prompt, response")


def samples_markdown(samples: Sequence[Sample]) -> str:
    """The samples whole, prompts and responses as blocks of code."""
    return "\n\n".join(
        f"**score {sample.score:.4f}**, prompt:\n\n{_block(sample.prompt)}\n\nresponse:\n\n"
        f"{_block(sample.response)}"
        for sample in samples
    )


def _beginning(quoted: str) -> str:
    if len(quoted) <= _RESPONSE_WIDTH:
        return quoted
    return f"{quoted[: _RESPONSE_WIDTH - 3]}..."


def _end(quoted: str) -> str:
    return quoted if len(quoted) <= _PROMPT_WIDTH else f"...{quoted[3 - _PROMPT_WIDTH :]}"


def _block(content: str) -> str:
    """Indented, so that nothing in it is markup."""
    return "\n".join(f"    {line}" for line in content.splitlines()) or "    "
