"""Tokens are TRL's: its trainers' steps, repeated here with transformers, on the same records.

TRL 1.16: ``DPOTrainer._prepare_dataset`` and its collator, ``RewardTrainer._prepare_dataset``,
``data_utils.apply_chat_template`` (prompts that are sampled from).
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from puzzle_align.config.sections.data import AddEos, DataConfig, PackingConfig
from puzzle_align.data.blocks import GivenRecords, RawRecord
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.errors import DataError, ReadReport
from puzzle_align.data.pairs import Budget, BuildOptions, Limits
from puzzle_align.data.prepare import load_pairs, prepare_data
from puzzle_align.data.prompts import PromptOptions, load_prompts
from puzzle_align.data.tokenize import load_tokenizer
from tests.unit.chat_tokenizers import save_llama, save_qwen

SAVE = {"qwen": save_qwen, "llama": save_llama}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "the <sky> & séa"}}]
ASKED = {"role": "user", "content": "what is the sky?"}
BLUE = {"role": "assistant", "content": " the sky is blue \n"}
RED = {"role": "assistant", "content": "red"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {}}]}
SEEN = {"role": "tool", "content": "blue"}
CHAT = {"prompt": [ASKED], "chosen": [BLUE], "rejected": [RED]}

CHATS = {
    "plain": CHAT,
    "system": {**CHAT, "prompt": [{"role": "system", "content": "be brief"}, ASKED]},
    "turns": {**CHAT, "prompt": [ASKED, RED, ASKED]},
    "ends with the assistant": {**CHAT, "prompt": [ASKED, BLUE]},
    "implicit": {"chosen": [ASKED, RED, ASKED, BLUE], "rejected": [ASKED, RED, ASKED, RED]},
    "equal": {"chosen": [ASKED, RED], "rejected": [ASKED, RED]},
    "tools": {**CHAT, "tools": TOOLS},
    "tools as JSON": {**CHAT, "tools": json.dumps(TOOLS)},
    "no tools": {**CHAT, "tools": []},
    "null columns": {**CHAT, "tools": None, "chat_template_kwargs": None},
    "arguments": {
        **CHAT,
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 May 2026"},
    },
    "documents": {**CHAT, "chat_template_kwargs": {"documents": [{"title": "a", "text": "b"}]}},
    "another template": {
        **CHAT,
        "chat_template_kwargs": {
            "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        },
    },
    "calls": {"prompt": [ASKED], "chosen": [CALL, SEEN, BLUE], "rejected": [RED]},
    "empty contents": {
        "prompt": [{**ASKED, "content": ""}],
        "chosen": [{**BLUE, "content": ""}],
        "rejected": [RED],
    },
}
TEXTS = {
    "plain": {"prompt": "the sky", "chosen": " is blue", "rejected": " is red"},
    "implicit": {"chosen": "the sky is blue", "rejected": "the sky is red"},
    "empty response": {"prompt": "the sky is", "chosen": "", "rejected": " red"},
    "ended": {"prompt": "the sky", "chosen": " is blue{eos}", "rejected": " is red{eos} "},
    "merges": {"prompt": "the sk", "chosen": "y is", "rejected": "in"},
    "empty prompt": {"prompt": "", "chosen": "the sky", "rejected": "a sea"},
    "nothing in common": {"chosen": "the sky", "rejected": "a sea"},
    "ignored columns": {"prompt": "a", "chosen": "b", "rejected": "c", "tools": "{"},
}


def options(add_eos: AddEos = "auto", limits: Limits | None = None) -> BuildOptions:
    return BuildOptions(add_eos, limits or Limits(9999), Budget(99999, "shared", True), False)


def loaded(
    path: str, records: Iterator[RawRecord], **settings: Any
) -> tuple[ExampleDataset, ReadReport]:
    source = GivenRecords("f", records)
    return load_pairs(source, load_tokenizer(path), options(**settings), Preparation())


def ours(path: str, *rows: dict[str, Any], **settings: Any) -> ExampleDataset:
    records = ((f"f:{number}", row) for number, row in enumerate(rows, 1))
    return loaded(path, records, **settings)[0]


def parts(data: ExampleDataset, index: int = 0) -> tuple[list[int], list[int], list[int]]:
    prompt = data.prompt(index).tolist()
    return prompt, data.response(index, 0).tolist(), data.response(index, 1).tolist()


def trl_extract_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """``data_utils.extract_prompt``."""
    at = 0
    for at in range(min(len(row["chosen"]), len(row["rejected"]))):
        if row["chosen"][at] != row["rejected"][at]:
            at -= row["chosen"][at - 1] == " "
            break
    cut = {"prompt": row["chosen"][:at], "chosen": row["chosen"][at:]}
    return {**row, **cut, "rejected": row["rejected"][at:]}


def trl_tokenize(hf: Any, part: Any, **arguments: Any) -> list[int]:
    if isinstance(part, str):
        return hf(text=part)["input_ids"]
    return hf.apply_chat_template(part, tokenize=True, return_dict=True, **arguments)["input_ids"]


def trl_dpo(hf: Any, row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """``DPOTrainer._prepare_dataset``: prompt_ids, chosen_ids, rejected_ids."""
    row = row if "prompt" in row else trl_extract_prompt(row)
    prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
    given, asks = {}, {}
    if isinstance(prompt, str):
        chosen, rejected = (
            text if text.endswith(hf.eos_token) else text + hf.eos_token
            for text in (chosen, rejected)
        )
    else:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        given = {"tools": tools, **(row.get("chat_template_kwargs") or {})}
        asks = {"add_generation_prompt": True}
    prompt_ids = trl_tokenize(hf, prompt, **asks, **given)
    chosen_ids = trl_tokenize(hf, prompt + chosen, **given)
    rejected_ids = trl_tokenize(hf, prompt + rejected, **given)
    shared = 0
    for tokens in zip(prompt_ids, chosen_ids, rejected_ids, strict=False):
        if len(set(tokens)) > 1:
            break
        shared += 1
    return prompt_ids[:shared], chosen_ids[shared:], rejected_ids[shared:]


@pytest.fixture(scope="module", params=list(SAVE))
def path(request, tmp_path_factory) -> str:
    return SAVE[request.param](tmp_path_factory.mktemp(request.param))


def written(row: dict[str, Any], hf: Any) -> dict[str, Any]:
    """The row with the tokenizer's own end-of-sequence text."""
    return {
        name: value.replace("{eos}", hf.eos_token) if isinstance(value, str) else value
        for name, value in row.items()
    }


@pytest.mark.parametrize("name", CHATS)
def test_messages_have_the_tokens_of_trl(path, name):
    hf = AutoTokenizer.from_pretrained(path)
    assert parts(ours(path, CHATS[name])) == trl_dpo(hf, CHATS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_texts_have_the_tokens_of_trl(path, name):
    hf = AutoTokenizer.from_pretrained(path)
    row = written(TEXTS[name], hf)
    assert parts(ours(path, row)) == trl_dpo(hf, row)


def test_end_of_sequence_tokens_as_asked(path):
    hf = AutoTokenizer.from_pretrained(path)
    eos, text = hf.eos_token_id, TEXTS["plain"]
    unended = CHATS["another template"]  # "[...]"
    for add_eos, expected in (("auto", (1, 0)), (True, (1, 1)), (False, (0, 0))):
        for row, number in zip((text, unended), expected, strict=True):
            response = parts(ours(path, row, add_eos=add_eos))[1]
            assert response.count(eos) == number == (response[-1] == eos)
        # the template ends it itself, before a newline or not: never twice
        assert parts(ours(path, CHAT, add_eos=add_eos)) == trl_dpo(hf, CHAT)


def test_dpo_truncates_as_trl_with_keep_start(path):
    """``DataCollatorForPreference``, and the filter before it."""
    hf = AutoTokenizer.from_pretrained(path)
    rows = [*CHATS.values(), *(written(row, hf) for row in TEXTS.values())]
    tokens = [trl_dpo(hf, row) for row in rows]
    limit = sorted(len(prompt) for prompt, _, _ in tokens)[len(tokens) // 2] + 5
    kept = [part for part in tokens if len(part[0]) < limit]
    assert 0 < len(kept) < len(rows)
    records = ((f"f:{number}", row) for number, row in enumerate(rows, 1))
    limits = Limits(limit, None, "keep_start")
    data, report = loaded(path, records, limits=limits)
    for index, (prompt, *responses) in enumerate(kept):
        own, *answers = parts(data, index)
        assert own == prompt
        for response, answer in zip(responses, answers, strict=True):
            assert own + answer == (prompt + response)[:limit]
    assert len(data) == report.num_used == len(kept)
    cut = sum(len(p) + max(len(c), len(r)) > limit for p, c, r in kept)
    assert report.num_truncated == report.num_cut_responses == cut > 0
    assert report.num_dropped == len(rows) - len(kept) and not report.skipped


def test_reward_models_are_spared_long_pairs_as_in_trl(path):
    """``RewardTrainer._prepare_dataset`` filters by the whole texts."""
    hf = AutoTokenizer.from_pretrained(path)
    rows = list(CHATS.values())
    wholes = [(p + c, p + r) for p, c, r in (trl_dpo(hf, row) for row in rows)]
    limit = sorted(max(len(c), len(r)) for c, r in wholes)[len(wholes) // 2]
    kept = [pair for pair in wholes if all(len(whole) <= limit for whole in pair)]
    records = ((f"f:{number}", row) for number, row in enumerate(rows, 1))
    limits = Limits(limit, None, "drop")
    data, report = loaded(path, records, limits=limits)
    found = [parts(data, index) for index in range(len(data))]
    assert [(prompt + c, prompt + r) for prompt, c, r in found] == kept
    assert 0 < report.num_dropped == len(rows) - len(kept)
    assert report.summary().startswith(f"{len(kept)} pairs, 0 of them truncated")
    assert report.summary().endswith(f"; dropped {len(rows) - len(kept)} that are too long")


def test_all_pairs_dropped_is_an_error(path):
    with pytest.raises(DataError, match="no usable pairs .f:1: .* over data.max_length=2; raise"):
        ours(path, CHAT, limits=Limits(2, None, "drop"))


@pytest.mark.parametrize("name", CHATS)
def test_prompts_have_the_tokens_of_trl(path, name):
    hf = AutoTokenizer.from_pretrained(path)
    row = CHATS[name] if "prompt" in CHATS[name] else trl_extract_prompt(CHATS[name])
    row = {**row, "prompt": row["prompt"]}
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    goes_on = row["prompt"][-1]["role"] == "assistant"
    text = hf.apply_chat_template(  # data_utils.apply_chat_template
        row["prompt"],
        tools=tools or None,
        continue_final_message=goes_on,
        tokenize=False,
        add_generation_prompt=not goes_on,
        **(row.get("chat_template_kwargs") or {}),
    )
    settings = PromptOptions(9999, "error", False)
    prompts, _ = load_prompts(
        GivenRecords("f", iter([("f:1", row)])), load_tokenizer(path), settings, Preparation()
    )
    assert prompts.text(0) == text
    assert prompts.prompt(0).tolist() == hf(text, add_special_tokens=False)["input_ids"]
    assert set(prompts.columns([0])) == set(row) - {"prompt"}


def test_prompts_that_are_too_long_are_dropped_and_counted(path):
    tokenizer = load_tokenizer(path)
    rows = [("f:1", {"prompt": "the sky is blue " * 9}), ("f:2", {"prompt": "the sky"})]
    settings = PromptOptions(9, "drop", False)
    prompts, report = load_prompts(
        GivenRecords("f", iter(rows)), tokenizer, settings, Preparation()
    )
    assert [prompts.text(0)] == ["the sky"] and len(prompts) == 1
    assert report.summary() == "1 prompts, 0 of them truncated; dropped 1 that are too long"
    with pytest.raises(DataError, match="no usable prompts .f:1: the prompt has .* raise it or"):
        load_prompts(GivenRecords("f", iter(rows[:1])), tokenizer, settings, Preparation())


def test_columnar_files_and_fingerprints(path, tmp_path):
    """The fingerprint that resumed runs compare follows the tokens alone, cached or not."""
    import datasets

    tokenizer, seen = load_tokenizer(path), set()
    columns = [{}, {"tools": json.dumps(TOOLS)}, {"chat_template_kwargs": {"date_string": "x"}}]
    for number, more in enumerate([*columns, {"tools": TOOLS, "chat_template_kwargs": {"a": 1}}]):
        source = str(tmp_path / f"{number}.parquet")
        datasets.Dataset.from_list([{**CHAT, **more}]).to_parquet(source)
        for add_eos in ("auto", False, True):
            for mode in ("keep_start", "drop", "keep_end"):
                config = DataConfig(train=source, truncation_mode=mode, max_length=9999)
                data = [
                    prepare_data(
                        config,
                        PackingConfig(row_tokens=99999),
                        tokenizer,
                        Preparation(tmp_path / "cache"),
                        add_eos=add_eos,
                        seed=0,
                    )
                    for _ in range(2)
                ]
                assert data[0].train.fingerprint == data[1].train.fingerprint
                expected = trl_dpo(AutoTokenizer.from_pretrained(path), {**CHAT, **more})
                assert parts(data[1].train) == expected
                seen.add((data[0].train.fingerprint, number))
    by_tokens = {number: fingerprint for fingerprint, number in seen}
    assert len(seen) == 4 and by_tokens[0] != by_tokens[1] == by_tokens[3]
