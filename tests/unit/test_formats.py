"""Files as people have them: names of columns, CSV, JSON lists, ShareGPT, UltraFeedback, splits."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from puzzle_align.config.check import check_keys
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.errors import DataError
from puzzle_align.data.prepare import prepare_data, prepare_prompts
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.sources import hash_source
from puzzle_align.data.tokenize import ByteTokenizer
from tests.refusals import refusal

ROWS = [{"prompt": f'Sky, "{n}"?\n', "chosen": " blue", "rejected": " réd"} for n in range(3)]
THEIRS = {"prompt": "question", "chosen": "better", "rejected": "worse"}
RENAMED = [{THEIRS[name]: text for name, text in row.items()} for row in ROWS]
SKIP = ", or leave bad records out with data.on_error=skip"


def prepare(path: Path | str, cache: Path | None = None, **changed: Any) -> ExampleDataset:
    """The data; ``changed`` holds keys of ``data`` and arguments of ``prepare_data``."""
    keys = {name: changed.pop(name) for name in DataConfig.__dataclass_fields__ & changed.keys()}
    config = DataConfig(train=str(path), **keys)
    given: dict[str, Any] = {"add_eos": "auto", "seed": 0, **changed}
    return prepare_data(config, PackingConfig(), ByteTokenizer(), Preparation(cache), **given).train


def prompts_of(path: Path, **changed: Any) -> PromptDataset:
    config = DataConfig(train=str(path), **changed)
    return prepare_prompts(config, ByteTokenizer(), Preparation(), max_new_tokens=1, seed=0).train


def texts(data: ExampleDataset) -> list[list[str]]:
    """Prompt and responses of every example."""
    decode = ByteTokenizer().decode
    parts = [
        [data.prompt(n), *(data.response(n, k) for k in range(data.num_responses))]
        for n in range(len(data))
    ]
    return [[decode(part.tolist()) for part in example] for example in parts]


EXPECTED = [list(row.values()) for row in ROWS]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the format of the file's name."""
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2), "utf-8-sig")
    elif path.suffix == ".saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(write(path.with_suffix(""), rows).read_bytes()))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet", "csv.gz", "json.gz"])
def test_every_format_under_our_names_or_theirs(tmp_path: Path, suffix: str) -> None:
    ours = prepare(write(tmp_path / f"ours.{suffix}", ROWS))
    theirs = prepare(write(tmp_path / f"theirs.{suffix}", RENAMED), columns=THEIRS)
    assert texts(ours) == texts(theirs) == EXPECTED
    assert ours.fingerprint == theirs.fingerprint


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet", "saved"])
def test_a_missing_column_names_those_that_there_are(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a.{suffix}", RENAMED)
    first = {"csv": 2, "json": 2, "jsonl": 1, "parquet": 0, "saved": 0}[suffix]
    assert refusal(lambda: prepare(file), DataError) == (
        f"{file}:{first}: field 'chosen' is missing among question, better, worse; add it (a string"
        f" or a message list), or name its column in data.columns.chosen{SKIP}"
    )
    wrong = {**THEIRS, "chosen": "beter"}
    assert refusal(lambda: prepare(file, columns=wrong), DataError) == (
        f"{file}:{first}: column 'beter' is missing among question, better, worse;"
        f" correct data.columns.chosen{SKIP}"
    )


def test_other_names_are_other_data(tmp_path: Path) -> None:
    """The cache must not give one mapping's tokens to another."""
    file, cache = write(tmp_path / "a.jsonl", ROWS), tmp_path / "cache"
    swapped = {"chosen": "rejected", "rejected": "chosen"}
    assert texts(prepare(file, cache)) == EXPECTED
    assert texts(prepare(file, cache, columns=swapped)) == [[p, r, c] for p, c, r in EXPECTED]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2


def test_names_that_no_stage_reads_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ROWS)
    assert refusal(lambda: prepare(file, columns={"promt": "question"})) == (
        "data.columns.promt: this stage reads no such column; it reads prompt, chosen, rejected, "
        "margin, responses, scores, ranks, completion, label, conversations, system, tools, "
        "chat_template_kwargs, instruction, completions"
    )
    job = load_file(find_config("dpo_tiny"), ["data.columns={prompt: question}"])
    assert refusal(lambda: check_keys(job)) == (
        "data.columns: data.format=synthetic has columns of its own; leave it out"
    )


def test_prompts_and_what_reward_functions_get(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", [{"question": "1+1?", "solution": "2"}])
    columns = {"prompt": "question", "answer": "solution"}
    data = prompts_of(file, columns=columns)
    assert data.text(0) == "1+1?" and data.columns([0]) == {"answer": ["2"]}


def test_a_json_file_may_have_a_record_a_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ROWS).rename(tmp_path / "a.json")
    assert texts(prepare(file)) == EXPECTED


def test_a_value_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    """Python's own limit is 128 KiB."""
    file = write(tmp_path / "a.csv", [{"prompt": "x" * 200_000}])
    assert prompts_of(file).text(0) == "x" * 200_000


@pytest.mark.parametrize("label", ["True", "false", "1", "0"])
def test_labels_and_margins_of_csv_files(tmp_path: Path, label: str) -> None:
    single = {"prompt": "a", "completion": "b", "label": label}
    data = prepare(write(tmp_path / "a.csv", [single]), unpaired=True)
    assert data.labels_of(np.array([0])).tolist() == [label in ("True", "1")]
    pair = {**ROWS[0], "margin": "0.25"}
    assert prepare(
        write(tmp_path / "b.csv", [pair, {**pair, "margin": ""}]), margins=True
    ).labels_of(np.arange(2)).tolist() == [0.25, 0.0]
    bad = write(tmp_path / "c.csv", [{**pair, "margin": "much"}])
    assert refusal(lambda: prepare(bad, margins=True), DataError).startswith(
        f"{bad}:2: field 'margin' is 'much', not a finite number; "
    )


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (b"a,b\n1,2\n\n3\n", ":4", "1 values for 2 columns (a, b); put values with commas"),
        (b'a,b\n1,"x\ny"\n"3,4\n', ":4", "invalid CSV (unexpected end of data); put commas"),
        (
            b'a,b\n1,2\n1,"2"3\n',
            ":3",
            "invalid CSV (',' expected after '\"'); put commas between values, and double",
        ),
        (
            b"a,a\n1,2\n",
            ":1",
            "two columns have one name (a, a); rename one in the file's first line",
        ),
        (b"a,b\n1,2\n1,\xff\n", ":3", "invalid UTF-8; save the file as UTF-8"),
    ],
)
def test_csv_files_that_are_wrong_name_their_line(
    tmp_path: Path, text: bytes, place: str, what: str
) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(text.replace(b"a,b", b"prompt,completion"))
    caught = refusal(lambda: prompts_of(file), DataError)
    assert caught.startswith(f"{file}{place}: {what}".replace("a, b", "prompt, completion"))


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ('[{"a": 1},\n 7]', ":6", "the list's item is a JSON int, not an object; write a list"),
        ('[{"a": 1},\n\n{"a" 2}]', ":7", "invalid JSON (Expecting ':' delimiter at column 6); "),
        ('[{"a": 1}\n{"a": 2}]', ":6", "invalid JSON (Expecting ',' delimiter at column 1); "),
        ('[{"a": 1}]\n[{"a": 2}]', ":6", "invalid JSON (Extra data at column 1); write a list"),
        ('\n[{"a": 1},\n' + "[" * 10**5, "", "invalid JSON (maximum recursion depth"),
        ('[[{"a": 1}], []]', ":1", "the list's item is a JSON list, not an object; write a list"),
        ('[{"a": 1}', ":5", "invalid JSON (Expecting ',' delimiter at column "),
        ('[{"a": 1},\n"\udcff"]', ":6", "invalid UTF-8; save the file as UTF-8"),
    ],
)
def test_json_lists_that_are_wrong_name_their_line(
    tmp_path: Path, text: str, place: str, what: str
) -> None:
    """The records before, of five lines, are read; the first bad one ends the run."""
    file, row = tmp_path / "a.json", json.dumps(ROWS[0], indent=0)
    file.write_text(text.replace('{"a": 1}', row), "utf-8", "surrogateescape")
    assert refusal(lambda: prepare(file), DataError).startswith(f"{file}{place}: {what}")
    if text.endswith("7]"):
        assert texts(prepare(file, on_error="skip")) == EXPECTED[:1]


HUMAN, GPT = {"from": "human", "value": "Sky?"}, {"from": "gpt", "value": "Blue."}
RED = {"from": "gpt", "value": "Red."}
CHAT = "\n\nHuman: Sky?\n\nAssistant:"


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_sharegpt_as_llama_factory_has_it(tmp_path: Path, suffix: str) -> None:
    pair = {"conversations": [HUMAN], "chosen": GPT, "rejected": RED, "system": "Be brief."}
    more = {**pair, "system": "", "conversations": [HUMAN, GPT]}  # the answer is in the prompt
    file = write(tmp_path / f"a.{suffix}", [pair, {**pair, "system": ""}, more])
    assert texts(prepare(file, add_eos=False)) == [
        ["\n\nSystem: Be brief." + CHAT, " Blue.", " Red."],
        [CHAT, " Blue.", " Red."],
        [CHAT + " Blue.\n\nAssistant:", " Blue.", " Red."],
    ]
    single = [{"conversations": [HUMAN, answer], "kto_tag": answer == GPT} for answer in (GPT, RED)]
    single.insert(0, {**single[0], "completion": [RED]})
    file = write(tmp_path / f"b.{suffix}", single)
    data = prepare(file, unpaired=True, add_eos=False, columns={"label": "kto_tag"})
    more = [CHAT + " Blue.\n\nAssistant:", " Red."]
    assert texts(data) == [more, [CHAT, " Blue."], [CHAT, " Red."]]
    assert data.labels_of(np.arange(3)).tolist() == [1, 1, 0]
    prompts = prompts_of(file)
    assert [prompts.text(n) for n in range(3)] == [CHAT + " Blue.", CHAT, CHAT]


def test_sharegpt_that_is_wrong_names_its_message(tmp_path: Path) -> None:
    pair = {"conversations": [{"from": 7, "value": "x"}], "chosen": GPT, "rejected": RED}
    file = write(tmp_path / "a.jsonl", [pair])
    line = f"{file}:1: field 'conversations', message 0 has no 'role' string; give {{'role'"
    assert refusal(lambda: prepare(file), DataError).startswith(line)


def test_binarized_ultrafeedback(tmp_path: Path) -> None:
    """As HuggingFaceH4/ultrafeedback_binarized has it."""
    user = {"content": "Sky?", "role": "user"}
    answers = {
        name: [user, {"content": text, "role": "assistant"}]
        for name, text in (("chosen", "Blue."), ("rejected", "Red."))
    }
    row = {"prompt": "Sky?", "prompt_id": "7f", **answers, "messages": answers["chosen"]}
    row |= {"score_chosen": 8.0, "score_rejected": 3.0}
    rows = datasets.Dataset.from_list([row])
    datasets.DatasetDict({"train_prefs": rows, "test_prefs": rows}).save_to_disk(
        str(tmp_path / "data")
    )
    data = prepare(f"{tmp_path}/data#train_prefs", add_eos=False)
    assert texts(data) == [[CHAT, " Blue.", " Red."]]
    assert refusal(lambda: prepare(f"{tmp_path}/data"), DataError) == (
        f"{tmp_path}/data#train: no split 'train' among test_prefs, train_prefs; write"
        f" {tmp_path}/data#test_prefs"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "data"])
def test_a_split_of_what_has_none_is_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    if name == "data":
        datasets.Dataset.from_list(ROWS).save_to_disk(str(source))
    else:
        write(source, ROWS)
    line = f"{source}#train: it has no splits; write {source}"
    assert refusal(lambda: prepare(f"{source}#train"), DataError) == line
    if name != "data":
        assert refusal(lambda: hash_source(f"{source}#train"), DataError) == line
