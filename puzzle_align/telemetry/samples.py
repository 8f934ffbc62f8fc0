"""Samples of an iteration's responses with their scores, for people to read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from puzzle_align.telemetry import text

_PROMPT_WIDTH, _RESPONSE_WIDTH = 32, 64  # characters shown


@dataclass(frozen=True)
class Sample:
    """One response."""

    prompt: str
    response: str
    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)  # JSON logged by reward functions

    def columns(self) -> dict[str, Any]:
        """All columns by name; extra columns with a built-in column's name are left out."""
        columns = {"prompt": self.prompt, "response": self.response, "score": self.score}
        taken = {"step", *columns}
        return columns | {name: value for name, value in self.extra.items() if name not in taken}


def samples_table(step: int, samples: Sequence[Sample]) -> str:
    """A table of scores, prompts' ends and responses' beginnings, both quoted."""
    lines = [
        (
            f"{sample.score:.4f}",
            f"{_end(repr(sample.prompt)):<{_PROMPT_WIDTH}}  {_beginning(repr(sample.response))}",
        )
        for sample in samples
    ]
    return text.table(lines, f"samples at step {step}: score, prompt, response")


def samples_markdown(samples: Sequence[Sample]) -> str:
    """Markdown of whole samples, with texts as code blocks."""
    shown = []
    for sample in samples:
        texts = {name: value for name, value in sample.columns().items() if name != "score"}
        blocks = (f"{name}:\n\n{_block(str(value))}" for name, value in texts.items())
        shown.append(f"**score {sample.score:.4f}**, " + "\n\n".join(blocks))
    return "\n\n".join(shown)


def _beginning(quoted: str) -> str:
    if len(quoted) <= _RESPONSE_WIDTH:
        return quoted
    return f"{quoted[: _RESPONSE_WIDTH - 3]}..."


def _end(quoted: str) -> str:
    return quoted if len(quoted) <= _PROMPT_WIDTH else f"...{quoted[3 - _PROMPT_WIDTH :]}"


def _block(content: str) -> str:
    """Indent the text as a code block, so that nothing in it is markup."""
    return "\n".join(f"    {line}" for line in content.splitlines()) or "    "
