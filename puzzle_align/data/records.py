"""Parse raw records into typed ones, in TRL's formats of preference data.

A record's columns and their types decide its format:
- ``prompt``, ``chosen``, ``rejected`` as strings, or all three as lists of messages;
- ``chosen`` and ``rejected`` alone (or as lists of messages that repeat a ``prompt`` string): the
  prompt is their common prefix, in whole messages or characters, shortened if needed so that no
  response is empty (TRL's ``extract_prompt``);
- ``chosen`` and ``rejected`` as transcripts ``\\n\\nHuman: ... \\n\\nAssistant: ...``: the prompt
  is the shared prefix up to and including the last ``\\n\\nAssistant:`` before they differ.

A text and a message's content may be empty, as in TRL; a list of messages may not. Equal responses
are no error: their gradient is zero.

A record may have K >= 2 ``responses`` in place of ``chosen`` and ``rejected`` (texts, or messages),
with ``scores`` (higher is better) or ``ranks`` (1 is best), a number for each. UltraFeedback's
columns are read as such a record: ``instruction``, and ``completions`` that have a ``response`` and
an ``overall_score`` each.

A ShareGPT record has ``conversations`` (and ``system``, a text) in place of ``prompt``, and its
messages have ``from`` and ``value``; ``chosen`` and ``rejected`` may be one message each. Without
a response beside it, the assistant's last message is the ``completion``.

Unpaired data (KTO) has the columns ``prompt`` and ``completion``, both text or both messages, and
``label``, a boolean. A pair is two such records: the chosen response is desirable, the rejected one
is not.

For messages, the columns ``tools`` (JSON schemas, or the JSON text of their list) and
``chat_template_kwargs`` (a mapping) go to the chat template as in TRL: without null keys at any
depth, since columnar files give every record the keys of all records.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

from puzzle_align.config.sections.data import Comparisons
from puzzle_align.data.blocks import RawRecord
from puzzle_align.data.errors import DataError, NoComparison, value_or_error
from puzzle_align.files.messages import quoted, shown
from puzzle_align.files.typed import LARGEST_FP32

_SHOWN_NAMES = 200  # characters of a record's names in errors

Message = dict[str, Any]  # role, content and other variables of chat templates
Content = str | list[Message]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}  # of CSV files, in lower case
UNPAIRED_BLOCK = 1000  # pairs that TRL's ``unpair_preference_dataset`` splits together

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
# Arguments of transformers' apply_chat_template that are not template variables. A record cannot
# set them: the job does, or they change how the text is processed.
TEMPLATE_ARGUMENTS = {
    "conversation",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}


@dataclass(frozen=True)
class Record:
    """One prompt and its K >= 1 responses, best first, all text or all messages."""

    prompt: Content
    responses: tuple[Content, ...]
    origin: str  # file:line, or source:number
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for messages
    # Whether each response is as good as the one before; none: each is worse.
    tied: tuple[bool, ...] = ()


def renamed(record: RawRecord, columns: Mapping[str, str]) -> RawRecord:
    """A record with the columns under our names; ``columns`` has theirs, by ours.

    Its value is a DataError if one of them is missing.
    """
    origin, raw = record
    if not columns or isinstance(raw, DataError):
        return record
    for ours, theirs in columns.items():
        if theirs not in raw:
            what = f"column '{shown(theirs)}' is missing among {_names(raw)}"
            cure = f"correct data.columns.{shown(ours)}"
            return origin, DataError(origin, "missing field", what, cure)
    others = {name: value for name, value in raw.items() if name not in columns.values()}
    return origin, others | {ours: raw[theirs] for ours, theirs in columns.items()}


def _names(raw: Mapping[str, Any]) -> str:
    return shown(", ".join(raw), _SHOWN_NAMES) or "none"


def to_record(
    raw: Mapping[str, Any], origin: str, comparisons: Comparisons = "all", *, as_chat: bool = False
) -> Record:
    """Convert a raw pair or ranking; DataError if it has none of the formats.

    Args:
        comparisons: of a ranking, see ``data.comparisons``.
        as_chat: texts become messages; then they need a prompt, since no user has written what two
            answers begin with.
    """
    raw = _from_ultrafeedback(_from_sharegpt(raw, origin), origin)
    if raw.get("responses") is not None and raw.get("chosen") is None:
        return _to_ranking(raw, origin, comparisons)
    chosen, rejected = to_contents(raw, ("chosen", "rejected"), origin)
    variables = {} if isinstance(chosen, str) else template_kwargs(raw, origin)
    if "prompt" in raw:
        prompt = to_content(raw, "prompt", origin)
        if isinstance(prompt, str) == isinstance(chosen, str):
            return Record(prompt, (chosen, rejected), origin, variables)
        if isinstance(chosen, str):
            what = "'prompt' is a message list but 'chosen' and 'rejected' are strings"
            raise DataError(origin, "wrong type", what, "give all three the same form")
    elif as_chat and isinstance(chosen, str) and not chosen.startswith(HUMAN):
        to_content(raw, "prompt", origin)  # raises
    shared = _prompt_length(chosen, rejected, raw, origin)
    return Record(chosen[:shared], (chosen[shared:], rejected[shared:]), origin, variables)


def _from_ultrafeedback(raw: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """A record with UltraFeedback's columns under our names; another record as it is."""
    rated = raw.get("completions")
    if raw.get("instruction") is None or rated is None or raw.get("prompt") is not None:
        return raw
    if not isinstance(rated, list) or not all(isinstance(each, dict) for each in rated):
        what = "field 'completions' is not a list of objects"
        cure = "give {'response': ..., 'overall_score': ...}"
        raise DataError(origin, "wrong type", what, cure)
    return {
        **raw,
        "prompt": raw["instruction"],
        "responses": [each.get("response") for each in rated],
        "scores": [each.get("overall_score") for each in rated],
    }


def _to_ranking(raw: Mapping[str, Any], origin: str, comparisons: Comparisons) -> Record:
    """Convert a record with ``responses``: sorted, best first, in the given order where equal.

    With comparisons "best", the others count as tied, and those as good as the best are left out.

    Raises:
        NoComparison: there is none, since all are equally good or there is only one.
        DataError: a column has another type.
    """
    prompt, given = to_content(raw, "prompt", origin), raw["responses"]
    cure = "give a list of strings, or of messages or message lists"
    if not isinstance(given, list):
        raise DataError(origin, "wrong type", "field 'responses' is not a list", cure)
    given = [[each] if isinstance(each, dict) else each for each in given]
    named = {f"responses[{number}]": each for number, each in enumerate(given)}
    responses = [to_content(named, name, origin) for name in named]
    if any(isinstance(each, str) != isinstance(prompt, str) for each in responses):
        what = "'prompt' and 'responses' are not all strings or all message lists"
        raise DataError(origin, "wrong type", what, "give all the same form")
    scores = _scores(raw, len(responses), origin)
    order = sorted(range(len(responses)), key=lambda number: -scores[number])
    best = max(scores, default=0)
    if comparisons == "best":
        order = [number for number in order if number == order[0] or scores[number] < best]
    if min(scores, default=0) == best:
        what = f"none of its {len(responses)} responses is better than another"
        raise NoComparison(origin, "no comparison", what, "give them other scores")
    tied = [scores[number] == scores[after] for number, after in pairwise(order)]
    if comparisons == "best":
        tied = [False, *(True for _ in tied[1:])]
    variables = {} if isinstance(prompt, str) else template_kwargs(raw, origin)
    ranked = tuple(responses[number] for number in order)
    return Record(prompt, ranked, origin, variables, (False, *tied))


def _scores(raw: Mapping[str, Any], number: int, origin: str) -> list[float]:
    """Numbers that rise with better responses, from ``scores`` or ``ranks``."""
    names = [name for name in ("scores", "ranks") if raw.get(name) is not None]
    cure = "give one of scores (higher is better) and ranks (1 is best), a number a response"
    if len(names) != 1:
        what = "field 'scores' is missing" if not names else "it has both 'scores' and 'ranks'"
        raise DataError(origin, "bad scores", f"{what} beside 'responses'", cure)
    (name,) = names
    values = raw[name]
    if not isinstance(values, list) or len(values) != number:
        is_list = isinstance(values, list)
        kind = f"has {len(values)} numbers" if is_list else f"is {type(values).__name__}"
        what = f"field '{name}' {kind} for {number} responses"
        raise DataError(origin, "bad scores", what, cure)
    sign = 1 if name == "scores" else -1
    return [
        sign * _to_number(value, name, f"field '{name}', number {place},", origin, cure)
        for place, value in enumerate(values)
    ]


def template_kwargs(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Chat template variables of a record: ``tools`` and ``chat_template_kwargs``.

    DataError if these columns have other types.
    """
    tools, variables = _cell(raw, "tools"), _cell(raw, "chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            what = f"field 'tools' is not valid JSON ({shown(str(error))})"
            raise DataError(origin, "wrong type", what, "give a list of JSON schemas") from None
    is_schemas = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_schemas:
        what = "field 'tools' is not a list of JSON schemas, nor the JSON text of one"
        raise DataError(origin, "wrong type", what, "give one of these, or leave it out")
    if variables is not None and not isinstance(variables, dict):
        what = f"field 'chat_template_kwargs' is {type(variables).__name__}, not a mapping"
        raise DataError(origin, "wrong type", what, "give {'name': value}, or leave it out")
    for name in TEMPLATE_ARGUMENTS.intersection(variables or ()):
        what = f"field 'chat_template_kwargs' sets '{name}', which a record cannot set"
        raise DataError(origin, "wrong type", what, "leave it out")
    if not isinstance(raw.get("tools"), str):  # JSON text has only the nulls that its author wrote
        tools = _without_nulls(tools)
    return {"tools": tools, **_without_nulls(variables or {})}


def _without_nulls(value: Any) -> Any:
    """Remove null keys at any depth; lists keep their nulls (TRL's ``remove_none_values``)."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _cell(raw: Mapping[str, Any], name: str) -> Any:
    """An optional column's value; None for a blank cell of a CSV file."""
    value = raw.get(name)
    return None if value == "" else value


def to_prompt(raw: Mapping[str, Any], origin: str, *, as_chat: bool = False) -> Content:
    """The prompt of a raw record; DataError if there is none.

    The prompt of a pair without that column is extracted from its responses (see ``to_record``).
    """
    raw = _from_sharegpt(raw, origin)
    if "prompt" not in raw and "chosen" in raw and "rejected" in raw:
        return to_record(raw, origin, as_chat=as_chat).prompt
    return to_content(raw, "prompt", origin)


def to_margin(raw: Mapping[str, Any], origin: str) -> float:
    """The ``margin`` of a record, 0 if missing; DataError if it is not a finite number."""
    if _cell(raw, "margin") is None:
        return 0.0
    cure = "give by how much the chosen response is better, or leave it out"
    return _to_number(raw["margin"], "margin", "field 'margin'", origin, cure)


def _to_number(value: object, name: str, where: str, origin: str, cure: str) -> float:
    """A finite number of column ``name``, or the text of one; else a DataError."""
    if isinstance(value, str):  # of a CSV file
        with suppress(ValueError):
            value = float(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= LARGEST_FP32
    ):
        what = f"{where} is {quoted(value)}, not a finite number"
        raise DataError(origin, f"bad {name}", what, cure)
    return float(value)


def shared_length(first: Sequence[Any], *others: Sequence[Any]) -> int:
    """Length of the sequences' common prefix, by bisection, since slices compare fast."""
    low, high = 0, min(len(first), *map(len, others))
    middle = high  # usually it is all of the shortest
    while low < high:
        if all(other[low:middle] == first[low:middle] for other in others):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


def _prompt_length(chosen: Content, rejected: Content, raw: Mapping[str, Any], origin: str) -> int:
    """Length of the prompt that both texts begin with, in characters or messages."""
    shared = shared_length(chosen, rejected)
    shorter = min(len(chosen), len(rejected))
    if not isinstance(chosen, str):
        shared = min(shared, shorter - 1)
    elif chosen.startswith(HUMAN) and isinstance(rejected, str) and rejected.startswith(HUMAN):
        marker = chosen[:shared].rfind(ASSISTANT)
        shared = marker + len(ASSISTANT) if marker >= 0 else 0
    elif shared == shorter:
        return max(shared - 1, 0)
    else:  # may be 0; a trailing space belongs to the next word's token
        return len(chosen[:shared].removesuffix(" "))
    if shared == 0:
        shares = "share no beginning that leaves each a response"
        given = "'prompt' is a text" if "prompt" in raw else "no 'prompt'"
        what = f"{given}, and 'chosen' and 'rejected' {shares}"
        cure = "add a 'prompt' field of their form or start both with the same prompt"
        raise DataError(origin, "no shared prefix", what, cure)
    return shared


def to_contents(
    raw: Mapping[str, Any], names: tuple[str, str], origin: str
) -> tuple[Content, Content]:
    """Two checked fields, both texts or both lists of messages."""
    first, second = (to_content(raw, name, origin) for name in names)
    if isinstance(first, str) != isinstance(second, str):
        what = f"'{names[0]}' and '{names[1]}' are not both strings or both message lists"
        raise DataError(origin, "wrong type", what, "give both the same form")
    return first, second


def to_content(raw: Mapping[str, Any], name: str, origin: str) -> Content:
    """A checked field: text, or a list of messages."""
    value = raw.get(name)
    if name not in raw:
        what = f"field '{name}' is missing among {_names(raw)}"
        cure = f"add it (a string or a message list), or name its column in data.columns.{name}"
        raise DataError(origin, "missing field", what, cure)
    if value is None:
        what, cure = f"field '{name}' is missing", "add it (a string or a message list)"
        raise DataError(origin, "missing field", what, cure)
    if isinstance(value, dict) and "from" in value:
        value = [value]
    if not isinstance(value, (str, list)):
        what = f"field '{name}' is {type(value).__name__}, not a string or a message list"
        raise DataError(origin, "wrong type", what, "give one of these")
    if isinstance(value, str):
        return checked_text(value, f"field '{name}'", origin)
    if not value:
        raise DataError(origin, "empty field", f"field '{name}' is empty", "fill it in")
    return [_message(m, f"field '{name}', message {i}", origin) for i, m in enumerate(value)]


def _message(value: object, where: str, origin: str) -> Message:
    """Check a message, and drop the null keys that columnar files fill in."""
    cure = "give {'role': ..., 'content': ...}"
    if isinstance(value, dict) and "from" in value and "role" not in value:  # ShareGPT's
        sender = value["from"]
        role = SHAREGPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
        others = {key: item for key, item in value.items() if key not in ("from", "value")}
        value = {"role": role, "content": value.get("value"), **others}
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(origin, "wrong type", f"{where} has no 'role' string", cure)
    content, calls_tools = value.get("content"), value.get("tool_calls")
    if isinstance(content, str):
        checked_text(content, where, origin)
    elif content is not None or not calls_tools:
        raise DataError(origin, "wrong type", f"{where} has no 'content' string", cure)
    return {
        key: _without_nulls(item)
        for key, item in value.items()
        if item is not None or key == "content"
    }


def as_messages(record: Record, raw: Mapping[str, Any]) -> Record:
    """A record of texts as a conversation: ``user_messages``, and the assistant's responses.

    DataError for a transcript, which has roles of its own.
    """
    if not isinstance(record.prompt, str):
        return record
    prompt = user_messages(record.prompt, raw, record.origin)
    answers = tuple([{"role": "assistant", "content": text}] for text in record.responses)
    variables = template_kwargs(raw, record.origin)
    return replace(record, prompt=prompt, responses=answers, template_kwargs=variables)


def user_messages(prompt: str, raw: Mapping[str, Any], origin: str) -> list[Message]:
    """A prompt's text as a message, after the record's ``system``; DataError for a transcript."""
    if prompt.startswith(HUMAN):
        what, cure = "the prompt is a transcript of its own", "set data.apply_chat_template=false"
        raise DataError(origin, "wrong type", what, cure)
    return [*_system_message(raw, origin), {"role": "user", "content": prompt}]


def _system_message(raw: Mapping[str, Any], origin: str) -> list[Message]:
    """The column ``system`` as a message; none if it is missing, empty or no text."""
    system = raw.get("system")
    if not isinstance(system, str) or not system:
        return []
    return [{"role": "system", "content": checked_text(system, "field 'system'", origin)}]


def _from_sharegpt(raw: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """A ShareGPT record with the fields of the other formats; another record as it is."""
    if raw.get("prompt") is not None or raw.get("conversations") is None:
        return raw
    turns = to_content(raw, "conversations", origin)
    if isinstance(turns, str):
        what = "field 'conversations' is a string, not a message list"
        raise DataError(origin, "wrong type", what, "give a list of {'from': ..., 'value': ...}")
    turns = [*_system_message(raw, origin), *turns]
    others = {key: item for key, item in raw.items() if key not in ("conversations", "system")}
    is_answered = len(turns) > 1 and turns[-1]["role"] == "assistant"
    if is_answered and all(raw.get(name) is None for name in ("chosen", "completion")):
        return {**others, "prompt": turns[:-1], "completion": turns[-1:]}
    return {**others, "prompt": turns}


def checked_text(value: str, where: str, origin: str) -> str:
    """Return the text; DataError for a lone surrogate, which no tokenizer encodes."""
    if value.isascii():
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{where} has a lone surrogate at character {error.start}"
        cure = "write the character itself, not half of it"
        raise DataError(origin, "invalid UTF-8", what, cure) from None
    return value


def taken_apart(records: Iterator[RawRecord], *, as_chat: bool = False) -> Iterator[RawRecord]:
    """Split the pairs among the records into single responses (``as_chat`` as in ``to_record``).

    A block's chosen responses come first, then the rejected ones, as in TRL. So neighbours, whose
    responses are exchanged for KTO's KL term, have different prompts.
    """
    while block := list(islice(records, UNPAIRED_BLOCK)):
        responses = [_responses_of(origin, raw, as_chat) for origin, raw in block]
        yield from (first for first, *_ in responses)
        yield from (second for _, *rest in responses for second in rest)


def to_response(raw: Mapping[str, Any], origin: str) -> tuple[Record, bool]:
    """Convert a raw single response: the record, and whether it is desirable; or a DataError."""
    raw = _from_sharegpt(raw, origin)
    ranked = next((name for name in ("responses", "completions") if raw.get(name) is not None), "")
    if ranked and raw.get("completion") is None:
        what = f"it has '{ranked}', a ranking, and no 'completion'"
        cure = "train on rankings in stage dpo, or give each response a record with a label"
        raise DataError(origin, "missing field", what, cure)
    prompt, completion = to_contents(raw, ("prompt", "completion"), origin)
    label = raw.get("label")
    label = _TRUTHS.get(label.lower(), label) if isinstance(label, str) else label
    if label is None or label not in (0, 1):
        problem = "missing" if label is None else f"{quoted(label)}, not true or false"
        if "label" not in raw:
            problem += f" among {_names(raw)}"
        what, cure = f"field 'label' is {problem}", "say whether the completion is desirable"
        cure += "" if "label" in raw else ", or name its column in data.columns.label"
        raise DataError(origin, "bad label", what, cure)
    variables = {} if isinstance(prompt, str) else template_kwargs(raw, origin)
    return Record(prompt, (completion,), origin, variables), bool(label)


def _responses_of(origin: str, raw: dict[str, Any] | DataError, as_chat: bool) -> list[RawRecord]:
    """The two records that a pair is split into; another record is returned alone."""
    if isinstance(raw, DataError) or raw.get("completion") is not None:
        return [(origin, raw)]
    if raw.get("chosen") is None and raw.get("rejected") is None:
        return [(origin, raw)]
    pair = value_or_error(partial(to_record, as_chat=as_chat), raw, origin)
    if isinstance(pair, DataError):
        return [(origin, pair)]
    return [
        (origin, {**raw, "prompt": pair.prompt, "completion": response, "label": label})
        for response, label in zip(pair.responses, (True, False), strict=True)
    ]
