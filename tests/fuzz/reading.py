"""What preparation makes of a source of records, beside what its records say, read by hand."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.prepare import prepare_data
from puzzle_align.data.prepare_prompts import prepare_prompts
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.records import ReadReport
from puzzle_align.data.tokenize import ByteTokenizer

_Item = tuple[tuple[Any, ...], Any]  # its texts, None where they cannot be told, and what else

BYTE = ByteTokenizer()
LONGEST = 2**26  # tokens: nothing is cut
USER, BLUE = {"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}
RED = {"role": "assistant", "content": "Réd."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

# What differs from use to use: how records are read, and what becomes of bad ones.
USES = ("pairs", "margins", "unpaired", "prompts")
GOOD: dict[str, list[dict[str, Any]]] = {
    "texts": [
        {"prompt": f"Sky {number}?", "chosen": " blue ☁", "rejected": " red", "margin": number / 4}
        for number in range(4)
    ],
    "implicit": [
        {"chosen": f"Sky {number}? blue", "rejected": f"Sky {number}? red"} for number in range(3)
    ],
    "transcripts": [
        {
            "chosen": f"\n\nHuman: Sky {number}?\n\nAssistant: blue",
            "rejected": f"\n\nHuman: Sky {number}?\n\nAssistant: red",
        }
        for number in range(3)
    ],
    "messages": [
        {
            "prompt": [USER],
            "chosen": [BLUE],
            "rejected": [RED],
            "tools": [TOOL],
            "chat_template_kwargs": {"thinks": True},
            "margin": 0.5,
        },
        {"chosen": [USER, BLUE], "rejected": [USER, RED], "tools": json.dumps([TOOL])},
    ],
    "unpaired": [
        {"prompt": "Sky?", "completion": " blue", "label": True},
        {"prompt": "Sea?", "completion": " red", "label": False},
        {"prompt": [USER], "completion": [BLUE], "label": True},
    ],
    "prompts": [
        {"prompt": "2+2?", "answer": 4, "unit": None, "steps": [{"do": "add", "to": 4}]},
        {"prompt": [USER], "answer": "blue"},
    ],
}
FORMS = {
    "texts": ("pairs", "margins", "unpaired", "prompts"),
    "implicit": ("pairs", "unpaired"),
    "transcripts": ("pairs", "prompts"),
    "messages": ("pairs", "margins", "unpaired", "prompts"),
    "unpaired": ("unpaired",),
    "prompts": ("prompts",),
}


@dataclass(frozen=True)
class Use:
    """A way to prepare a source."""

    name: str  # of ``USES``
    skips: bool  # bad records

    @classmethod
    def drawn(cls, draw: random.Random, form: str) -> "Use":
        """One that takes records of a form of ``GOOD``."""
        return cls(draw.choice(FORMS[form]), draw.random() < 0.7)

    def prepare(self, source: str) -> tuple[ExampleDataset | PromptDataset, ReadReport]:
        """Read, render and tokenize, as a stage does; AssertionError if an error names no file."""
        try:
            return self._prepare(source)
        except ValueError as error:
            assert source.partition("#")[0] in str(error), f"the source is not named: {error}"
            raise

    def _prepare(self, source: str) -> tuple[ExampleDataset | PromptDataset, ReadReport]:
        config = DataConfig(
            train=source, max_length=LONGEST, on_error="skip" if self.skips else "raise"
        )
        given: dict[str, Any] = {"seed": 0, "cache_dir": None}
        if self.name == "prompts":
            prompts = prepare_prompts(config, BYTE, max_new_tokens=1, **given)
            return prompts.train, prompts.report
        named: dict[str, Any] = {
            "margins": self.name == "margins",
            "unpaired": self.name == "unpaired",
        }
        packing = PackingConfig(row_tokens=4 * LONGEST)
        data = prepare_data(config, packing, BYTE, add_eos="auto", **given, **named)
        return data.train, data.report

    def wrong(
        self,
        found: tuple[ExampleDataset | PromptDataset, ReadReport],
        raws: Sequence[Any],
        good: Sequence[Any],
    ) -> str | None:
        """What is not as the records say.

        Args:
            found: what ``prepare`` gave.
            raws: every record, read some other way; None where that cannot be.
            good: those that nothing is wrong with, which must have been taken.
        """
        dataset, report = found
        number = sum(report.skipped.values()) + report.num_used + report.num_dropped
        most = len(raws) * (2 if self.name == "unpaired" else 1)
        if not len(raws) <= number <= most or report.num_used != len(dataset):
            return f"{number} records counted of {len(raws)}, {len(dataset)} taken"
        if not self.skips and number != report.num_used:
            return "a bad record is left out"
        if isinstance(dataset, PromptDataset):
            items = [_prompt(dataset, index) for index in range(len(dataset))]
        else:
            items = [_example(dataset, index) for index in range(len(dataset))]
        said = self._candidates(raws)
        if (odd := _first_not_in_order(items, said)) is not None:
            return f"{str(items[odd])[:200]} is not what record says"
        sure = self._candidates(good)
        missed = _first_not_in_order(sure, items)
        return None if missed is None else f"{str(sure[missed])[:200]} was left out"

    def _candidates(self, raws: Sequence[Any]) -> list[_Item]:
        """What there may be in the data set, in order."""
        known = [raw for raw in raws if isinstance(raw, dict)]
        if self.name == "prompts":
            return [_said_prompt(raw) for raw in known]
        if self.name != "unpaired":
            return [_said_pair(raw, self.name == "margins") for raw in known]
        firsts, seconds = [], []
        for raw in known:
            if raw.get("completion") is not None:
                firsts.append(((_whole(raw, "completion"),), _number(raw.get("label"))))
            else:
                firsts.append(((_whole(raw, "chosen"),), 1.0))
                seconds.append(((_whole(raw, "rejected"),), 0.0))
        return firsts + seconds


def _first_not_in_order(items: Sequence[_Item], among: Sequence[_Item]) -> int | None:
    """The first item that does not come in ``among`` after where the one before it came."""
    rest = iter(among)
    for number, item in enumerate(items):
        if not any(_same(item, other) for other in rest):
            return number
    return None


def _same(one: _Item, other: _Item) -> bool:
    both = zip(one[0], other[0], strict=True)
    return one[1] == other[1] and all(None in pair or pair[0] == pair[1] for pair in both)


def _example(dataset: ExampleDataset, index: int) -> tuple[tuple[bytes, ...], float]:
    """The whole texts of an example, and its label."""
    wholes = []
    for branch in range(dataset.num_responses):
        tokens = [*dataset.prompt(index).tolist(), *dataset.response(index, branch).tolist()]
        if tokens[0] == BYTE.bos_id:
            tokens = tokens[1:]
        ended = tokens[-1] == BYTE.eos_id
        wholes.append(bytes(tokens[:-1]) if ended and max(tokens[:-1], default=0) < 256 else b"?")
    return tuple(wholes), float(dataset.labels_of(np.array([index]))[0])


def _said_pair(raw: dict[str, Any], has_margin: bool) -> _Item:
    margin = _number(raw.get("margin") or 0.0) if has_margin else 0.0
    return (_whole(raw, "chosen"), _whole(raw, "rejected")), margin


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _whole(raw: dict[str, Any], name: str) -> bytes | None:
    """Prompt and response as a text; None where it is the template's business."""
    response, prompt = raw.get(name), raw.get("prompt", "")
    if isinstance(response, str):
        return _bytes(prompt + response) if isinstance(prompt, str) else b"impossible"
    if not isinstance(response, list) or not _is_plain(raw):
        return None
    try:
        messages = [*(prompt if isinstance(prompt, list) else []), *response]
        return _bytes("".join(_turn(message) for message in messages))
    except (TypeError, LookupError, AttributeError):
        return b"impossible"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def _is_plain(raw: dict[str, Any]) -> bool:
    own = raw.get("chat_template_kwargs")
    return not (isinstance(own, dict) and "chat_template" in own)


def _turn(message: dict[str, Any]) -> str:
    role = message["role"]
    name = {"user": "Human", "assistant": "Assistant"}.get(role, role.capitalize())
    return f"\n\n{name}: {message['content']}"


def _prompt(dataset: PromptDataset, index: int) -> tuple[tuple[str], str]:
    """A prompt as its record has it, and the other columns that have a value, as text."""
    columns = {name: values[0] for name, values in dataset.columns([index]).items()}
    return (_as_text(dataset.as_given(index)),), _as_text(columns)


def _said_prompt(raw: dict[str, Any]) -> tuple[tuple[str | None], str]:
    columns = {name: value for name, value in raw.items() if name != "prompt"}
    return (_as_text(raw["prompt"]) if "prompt" in raw else None,), _as_text(columns)


def _as_text(value: Any) -> str:
    """Prompt or columns as JSON, without the null keys of messages, and null columns."""
    if isinstance(value, list):
        value = [_filled(message, "content") for message in value]
    try:
        return json.dumps(_filled(value), sort_keys=True, default=str)
    except (RecursionError, TypeError):
        return "cannot be told"


def _filled(value: Any, *kept: str) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None or key in kept}
