"""Chat templates around plain texts, and the tokens that end a response."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.config.sections.rl import GenerationConfig
from puzzle_align.data.build import Preparation
from puzzle_align.data.errors import DataError
from puzzle_align.data.prepare import prepare_data, prepare_prompts
from puzzle_align.data.tokenize import ByteTokenizer, generation_stops, load_tokenizer
from puzzle_align.stages.rl.prompts import sampling_of
from tests.refusals import refusal
from tests.specs import TINY
from tests.unit.chat_tokenizers import save_llama, save_qwen

PAIR = {"prompt": "what is the sky?", "chosen": "blue", "rejected": "green"}
SAVE = {"qwen": save_qwen, "llama": save_llama}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def as_chat(row: dict[str, str]) -> dict[str, Any]:
    """The record as a user would write it in messages."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": roles[name], "content": text}] for name, text in row.items()}


@pytest.mark.parametrize("kind", SAVE)
@pytest.mark.parametrize("unpaired", [False, True])
def test_texts_become_the_tokens_of_messages(tmp_path: Path, kind: str, unpaired: bool) -> None:
    tokenizer = load_tokenizer(SAVE[kind](tmp_path))
    texts = write(tmp_path / "texts.jsonl", PAIR)
    chats = write(tmp_path / "chats.jsonl", as_chat(PAIR))
    given: dict[str, Any] = {"add_eos": "auto", "seed": 0, "unpaired": unpaired}

    def data(source: str, asked: bool) -> Any:
        config = DataConfig(train=source, apply_chat_template=asked)
        return prepare_data(config, PackingConfig(), tokenizer, Preparation(), **given).train

    asked, plain, chat = data(texts, True), data(texts, False), data(chats, False)
    assert asked.fingerprint == chat.fingerprint != plain.fingerprint
    assert data(chats, True).fingerprint == chat.fingerprint  # messages have roles already


@pytest.mark.parametrize("kind", SAVE)
def test_prompts_to_sample_from(tmp_path: Path, kind: str) -> None:
    """As transformers renders them; reward functions still get the data's text."""
    tokenizer = load_tokenizer(SAVE[kind](tmp_path))
    config = DataConfig(train=write(tmp_path / "a.jsonl", PAIR), apply_chat_template=True)
    data = prepare_prompts(config, tokenizer, Preparation(), max_new_tokens=8, seed=0).train
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        as_chat(PAIR)["prompt"], add_generation_prompt=True, return_dict=False
    )
    assert data.prompt(0).tolist() == expected
    assert data.as_given(0) == data.ending(0) == PAIR["prompt"] != data.text(0)


@pytest.mark.parametrize("columns", [{}, {"prompt": "question"}])
def test_what_answers_share_is_no_user_s_message(tmp_path: Path, columns: dict[str, str]) -> None:
    """Without the prompt's column; with it, the column ``system`` is read, too."""
    row = {
        "system": "Be brief.",
        "question": "1 + 10?",
        "chosen": "It is 11.",
        "rejected": "It is 12.",
    }
    config = DataConfig(
        train=write(tmp_path / "a.jsonl", row), apply_chat_template=True, columns=columns or None
    )
    tokenizer = load_tokenizer(save_qwen(tmp_path))
    given: dict[str, Any] = {"add_eos": "auto", "seed": 0}

    def pairs(unpaired: bool) -> Any:
        how = (config, PackingConfig(), tokenizer, Preparation())
        return prepare_data(*how, **given, unpaired=unpaired).train

    def prompts() -> Any:
        return prepare_prompts(config, tokenizer, Preparation(), max_new_tokens=8, seed=0).train

    kinds = (lambda: pairs(False), lambda: pairs(True), prompts)
    if not columns:
        for kind in kinds:
            line = refusal(kind, DataError)
            assert line.startswith(
                f"{config.train}:1: field 'prompt' is missing among system, quest"
            )
            assert "or name its column in data.columns.prompt" in line
        return
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 10?"}]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    for kind in kinds:
        assert kind().prompt(0).tolist() == expected


def test_a_transcript_is_no_message(tmp_path: Path) -> None:
    begun = "\n\nHuman: Sky?\n\nAssistant:"
    row = {"chosen": f"{begun} Blue.", "rejected": f"{begun} Red."}
    config = DataConfig(train=write(tmp_path / "a.jsonl", row), apply_chat_template=True)
    given: dict[str, Any] = {"add_eos": "auto", "seed": 0}
    line = f"{config.train}:1: the prompt is a transcript of its own; set "
    assert refusal(
        lambda: prepare_data(config, PackingConfig(), ByteTokenizer(), Preparation(), **given),
        DataError,
    ).startswith(f"{line}data.apply_chat_template=false")


@pytest.mark.parametrize(("eos", "stops"), [(7, [7]), ([8, 7], [8, 7]), (None, []), (999, [])])
@pytest.mark.parametrize("beside", ["tokenizer", "model"])
def test_stop_tokens_of_generation_config(
    tmp_path: Path, eos: object, stops: list[int], beside: str
) -> None:
    folders = {name: tmp_path / name for name in ("tokenizer", "model")}
    for folder in folders.values():
        folder.mkdir()
    tokenizer = load_tokenizer(save_llama(folders["tokenizer"]))
    (folders[beside] / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    actor = RoleConfig(model=ModelConfig(path=str(folders["model"])))
    sampling = sampling_of(JobConfig(actor=actor), tokenizer, TINY)
    assert sampling.stop_token_ids == (tokenizer.eos_id, *stops)  # 999 is no token of it
    asked = JobConfig(actor=actor, generation=GenerationConfig(stop_token_ids=[3]))
    assert sampling_of(asked, tokenizer, TINY).stop_token_ids == (3,)


@pytest.mark.parametrize(("eos", "stops"), [(7, [7]), ((8, 7), [8, 7]), (None, [])])
def test_without_generation_config_the_model_s_config_names_stop_tokens(
    tmp_path: Path, eos: Any, stops: list[int]
) -> None:
    """As in transformers; a checkpoint has no generation_config.json."""
    tokenizer = load_tokenizer(save_llama(tmp_path))
    model = replace(TINY, eos_token_id=eos)
    job = JobConfig(actor=RoleConfig(model=ModelConfig(path=str(tmp_path))))
    assert sampling_of(job, tokenizer, model).stop_token_ids == (tokenizer.eos_id, *stops)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert sampling_of(job, tokenizer, model).stop_token_ids == (tokenizer.eos_id, 9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"eos_token_id": "x"}', ".eos_token_id: expected an integer from 0 to"),
        ("[", ": cannot be read (Expecting value"),
        ('{"eos_token_id": [-1]}', ".eos_token_id[0]: expected an integer from 0 to"),
    ],
)
def test_a_wrong_generation_config_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    assert refusal(lambda: generation_stops(str(tmp_path))).startswith(f"{file}{problem}")


def test_transformers_reads_the_byte_tokenizer(tmp_path: Path) -> None:
    """The same ids and texts, special tokens and chat template included."""
    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    text = "wörld 😀\n  a\x00b <eos"
    assert theirs(text)["input_ids"] == [*ours.bos_ids, *text.encode()]
    for ids in (list(text.encode()), [257, 72, 105, 258], [0xFF, 0x41]):
        assert again.decode(ids) == ours.decode(ids)
    assert again.encode_batch([text]) == ours.encode_batch([text])
    assert (again.eos_id, again.pad_id, again.bos_ids) == (258, 256, [257])
    messages = [{"role": "user", "content": "Sky?"}]
    assert again.render_chat(messages, add_generation_prompt=True) == (
        ours.render_chat(messages, add_generation_prompt=True)
    )
