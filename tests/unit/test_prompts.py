"""Prompts: what is read, cut, kept beside them and drawn for an iteration."""

import datetime
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from puzzle_align.config.sections.data import DataConfig
from puzzle_align.data import build, synthetic
from puzzle_align.data.build import Preparation
from puzzle_align.data.prepare import Prepared, prepare_prompts
from puzzle_align.data.prompts import PromptDataset, prompt_indices
from puzzle_align.data.tokenize import ByteTokenizer
from tests.refusals import refusal

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k_test.jsonl"
HH = Path(__file__).parents[3] / "shared/data/hh_rlhf_harmless_base_test.jsonl.gz"
USER, BOT = {"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "It is "}


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(
    config: DataConfig, cache_dir: Path | None = None, template: str | None = None
) -> Prepared[PromptDataset]:
    tokenizer, how = ByteTokenizer(template), Preparation(cache_dir)
    return prepare_prompts(config, tokenizer, how, max_new_tokens=8, seed=0)


def test_text_and_messages(tmp_path):
    rows = [{"prompt": "é"}, {"prompt": [USER]}, {"prompt": [USER, BOT]}]
    data = run(DataConfig(train=write(tmp_path / "a.jsonl", rows))).train
    assert data.prompt(0).tolist() == [257, *"é".encode()] and data.prompt(0).dtype == np.int32
    # The template writes what stands before the text: no BOS. The assistant's turn is begun.
    assert data.prompt(1).tolist() == list(b"\n\nHuman: Sky?\n\nAssistant:")
    assert data.prompt(2).tolist() == list(b"\n\nHuman: Sky?\n\nAssistant: It is ")
    assert [data.text(row) for row in range(3)][1:] == [
        "\n\nHuman: Sky?\n\nAssistant:",
        "\n\nHuman: Sky?\n\nAssistant: It is ",
    ]
    assert [data.as_given(row) for row in range(3)] == ["é", [USER], [USER, BOT]]
    assert [data.ending(row) for row in range(3)] == ["é", "Sky?", "It is "]
    assert data.prompt_lengths.tolist() == [3, 25, 32] and len(data) == 3
    assert data.columns([0, 2]) == {}


def test_messages_are_kept_in_the_cache_and_text_is_not_twice(tmp_path):
    rows = [{"prompt": [USER], "n": 1}, {"prompt": "é", "n": 2}]
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows))
    for _ in range(2):
        data = run(config, tmp_path / "cache").train
        assert [data.as_given(row) for row in range(2)] == [[USER], "é"]
        assert [data.text(row) for row in range(2)] == ["\n\nHuman: Sky?\n\nAssistant:", "é"]
        assert data.columns([1, 0]) == {"n": [2, 1]}
    assert json.loads(bytes(data.lines).splitlines()[1]) == ["é", {"n": 2}]


def test_the_prompts_of_preference_rows(tmp_path):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ]
    data = run(DataConfig(train=write(tmp_path / "a.jsonl", rows))).train
    assert [data.text(0), data.text(1)] == ["a", "\n\nHuman: a\n\nAssistant:"]
    assert data.columns([1, 0])["rejected"] == ["\n\nHuman: a\n\nAssistant: c", "c"]


def test_columns_are_those_of_all_rows(tmp_path):
    rows = [{"q": "a", "n": 1}, {"q": "b", "answer": {"x": [None, 2.5]}, "prompt": "no"}]
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows), columns={"prompt": "q"})
    for _ in range(2):
        data = run(config, tmp_path / "cache").train
        assert data.column_names == ("n", "answer")
        assert data.columns(np.array([1, 0, 1])) == {
            "n": [None, 1, None],
            "answer": [{"x": [None, 2.5]}, None, {"x": [None, 2.5]}],
        }


def test_the_cache_follows_options_and_other_columns(tmp_path):
    def read(answer: str, **options: Any) -> PromptDataset:
        source = write(tmp_path / "a.jsonl", [{"prompt": "abcdef", "answer": answer}])
        return run(DataConfig(train=source, **options), tmp_path / "cache").train

    whole, cut, other = read("1"), read("1", max_length=8 + 4), read("2")
    assert whole.prompt(0).tolist() == other.prompt(0).tolist() == [257, *b"abcdef"]
    assert cut.prompt(0).tolist() == list(b"cdef")
    assert len({whole.fingerprint, cut.fingerprint, other.fingerprint}) == 3
    assert read("1").fingerprint == whole.fingerprint
    chat = DataConfig(train=write(tmp_path / "b.jsonl", [{"prompt": [USER]}]))
    for name, text in USER.items():
        template = f"{{{{ messages[0].{name} }}}}"
        assert run(chat, tmp_path / "cache", template).train.text(0) == text


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        # As transformers: what a template trims of a message to continue is trimmed of it.
        ("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", {}, "Sky?|It is"),
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", {}, "Sky?|It is "),
        ("{{ tools is none }} {{ messages[-1].content }}", {"tools": []}, "True It is "),
        ("{{ tools is none }} {{ messages[-1].content }}", {"tools": [{}]}, "False It is "),
    ],
)
def test_what_templates_write_of_a_message_to_continue_and_of_tools(tmp_path, template, row, text):
    source = write(tmp_path / "a.jsonl", [{"prompt": [USER, BOT], **row}])
    data = run(DataConfig(train=source), template=template)
    assert data.train.text(0) == text
    assert data.train.prompt(0).tolist() == list(text.encode())


def test_every_kind_of_source_gives_the_same(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": i, "tags": ["x"]} for i in range(5)]
    write(tmp_path / "a.jsonl", rows)
    packed = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "b.jsonl.gz").write_bytes(packed)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
    fingerprints = set()
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d"):
        data = run(DataConfig(train=str(tmp_path / name)), tmp_path / "cache").train
        assert data.text(4) == "p4" and data.columns([4]) == {"answer": [4], "tags": [["x"]]}
        fingerprints.add(data.fingerprint)
    assert len(fingerprints) == 1


def test_what_json_has_no_form_for_becomes_text(tmp_path):
    rows = [{"prompt": "a", "day": datetime.date(2026, 2, 1)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = run(DataConfig(train=str(tmp_path / "a.parquet"))).train
    assert data.columns([0]) == {"day": ["2026-02-01"]}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (DataConfig(max_length=13), [*b"cdefg"]),
        (DataConfig(max_length=13, truncation_mode="keep_start"), [257, *b"abcd"]),
        (DataConfig(max_length=99, max_prompt_length=2), [*b"fg"]),
        (DataConfig(max_length=16), [257, *b"abcdefg"]),
    ],
)
def test_long_prompts_are_cut_and_counted_and_their_text_is_whole(tmp_path, config, kept):
    source = write(tmp_path / "a.jsonl", [{"prompt": "abcdefg"}, {"prompt": "a"}])
    data = run(replace(config, train=source), tmp_path / "cache")
    assert data.train.prompt(0).tolist() == kept and data.train.text(0) == "abcdefg"
    assert data.summary == f"data: 2 prompts, {int(len(kept) < 8)} of them truncated"


def test_errors_are_one_line_with_the_cure(tmp_path):
    def error(rows: list[dict], **settings) -> str:
        source = write(tmp_path / "a.jsonl", rows)
        caught = refusal(
            lambda: run(DataConfig(**{"train": source, **settings}), tmp_path / "cache")
        )
        return caught.replace(source, "FILE")

    skip = ", or leave bad records out with data.on_error=skip"
    assert error([{"prompt": "abcdef"}], max_length=14, truncation_mode="error") == (
        "FILE:1: the prompt has 7 tokens, over the 6 that data.max_prompt_length, or"
        " data.max_length less generation.max_new_tokens, leaves it; raise it or set"
        " data.truncation_mode to keep_end or keep_start" + skip
    )
    assert error([{"prompt": "a"}, {"query": "a", "n": 1}]) == (
        "FILE:2: field 'prompt' is missing among query, n;"
        " add it (a string or a message list), or name its column in data.columns.prompt" + skip
    )
    assert error([{"prompt": []}]) == "FILE:1: field 'prompt' is empty; fill it in" + skip
    assert "FILE:1: field 'prompt' is int, not a string" in error([{"prompt": 3}])
    called = {"role": "assistant", "content": None, "tool_calls": [1]}
    assert "no text to continue; correct the messages" in error([{"prompt": [USER, called]}])
    assert "FILE: no usable prompts (FILE:1: field" in error([{"prompt": []}], on_error="skip")
    assert "data.format=packed holds rows" in error([], format="packed")
    assert "data.train is not set" in error([], train=None)


def test_bad_rows_are_skipped_and_counted_and_the_cache_remembers(tmp_path, monkeypatch):
    rows = [{"prompt": "abcdef"}, {"prompt": None}, {"x": 1}, {"prompt": "a", "n": 2}]
    source = write(tmp_path / "a.jsonl", rows)
    config = DataConfig(train=source, on_error="skip", truncation_mode="error", max_length=14)
    data = run(config, tmp_path / "cache")
    monkeypatch.setattr(build, "parts", None)
    cached = run(config, tmp_path / "cache")
    for found in (data, cached):
        assert found.summary == (
            "data: 1 prompts, 0 of them truncated; skipped 3 bad records: "
            "2 missing field, 1 too long"
        )
        assert found.train.columns([0]) == {"n": [2]} and found.train.text(0) == "a"
    assert cached.train.fingerprint == data.train.fingerprint
    assert isinstance(cached.train.tokens, np.memmap) and isinstance(cached.train.lines, np.memmap)


def test_the_generated_task():
    data = run(DataConfig(format="synthetic", num_synthetic=50)).train
    for row, (prompt, chosen, _) in enumerate(synthetic.generate(50, seed=0)):
        assert data.text(row) == prompt and data.columns([row]) == {"answer": [chosen]}
        assert data.prompt(row).tolist() == [257, *prompt.encode()]


def test_vowels_pay_by_their_share():
    completions = ["", "aeiou", "ab", "AEx ", "éa"]
    assert synthetic.vowel_share(completions) == [0.0, 1.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize(("num_prompts", "batch_size"), [(10, 4), (4, 4), (3, 8), (7, 1)])
def test_every_prompt_comes_once_an_epoch_and_every_iteration_is_full(num_prompts, batch_size):
    def draw(seed: int, shuffle: bool) -> np.ndarray:
        steps = range(3 * num_prompts)
        drawn = [prompt_indices(num_prompts, batch_size, step, seed, shuffle) for step in steps]
        assert all(rows.shape == (batch_size,) and rows.dtype == np.int64 for rows in drawn)
        return np.concatenate(drawn).reshape(-1, num_prompts)  # a row an epoch

    shuffled = draw(0, True)
    assert np.array_equal(np.sort(shuffled, axis=1), draw(0, False))
    assert np.array_equal(draw(0, False)[1], np.arange(num_prompts))
    assert len({tuple(epoch) for epoch in shuffled.tolist()}) > 1
    assert not np.array_equal(shuffled, draw(1, True))


@pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K file is not at hand")
def test_gsm8k():
    data = run(DataConfig(train=str(GSM8K), columns={"prompt": "query"})).train
    assert len(data) == 1319 and data.column_names == ("response",)
    assert data.text(0).startswith("Janet’s ducks lay 16 eggs")
    assert data.columns([0])["response"][0].endswith("#### 18")


@pytest.mark.skipif(not HH.is_file(), reason="the HH file is not at hand")
def test_the_prompts_of_transcripts():
    data = run(DataConfig(train=str(HH)))
    assert len(data.train) == 2312
    assert all(data.train.text(row).endswith("\n\nAssistant:") for row in range(0, 2312, 97))
