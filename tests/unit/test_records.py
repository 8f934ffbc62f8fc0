"""Formats, sources and the one-line errors of bad records."""

import gzip
import json
import pickle

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from puzzle_align.data.errors import DataError, ReadReport, TooLong
from puzzle_align.data.records import to_record
from puzzle_align.data.sources import hash_source
from tests.refusals import refusal
from tests.unit.source_records import read_records
from tests.unit.test_trl_texts import trl_extract_prompt

USER = {"role": "user", "content": "Sky?"}
BLUE = {"role": "assistant", "content": "Blue."}
RED = {"role": "assistant", "content": "Red."}
WHITE, EMPTY = {**BLUE, "content": "\n"}, {**BLUE, "content": ""}
CALL = {"role": "assistant", "tool_calls": [{"name": "look"}]}
ASKED = "\n\nHuman: a\n\nAssistant:"
ROW = {"prompt": "Sky?", "chosen": " Blue.", "rejected": " Red."}
NOT_SHARED = (
    "no 'prompt', and 'chosen' and 'rejected' share no beginning that leaves each a response; add a"
    " 'prompt' field of their form or start both with the same prompt"
)
CHAT, ANSWERS = {"prompt": [USER], "chosen": [BLUE], "rejected": [RED]}, ([BLUE], [RED])


def hh(*turns: str) -> str:
    names = ("Human", "Assistant")
    return "".join(f"\n\n{names[i % 2]}: {turn}" for i, turn in enumerate(turns))


@pytest.mark.parametrize(
    ("row", "prompt", "responses"),
    [
        (ROW, "Sky?", (" Blue.", " Red.")),
        ({**ROW, "responses": ["a", "b"], "scores": [1, 2]}, "Sky?", (" Blue.", " Red.")),
        ({"chosen": "Sky is blue", "rejected": "Sky is red"}, "Sky is", (" blue", " red")),
        ({"chosen": "Sky: blue", "rejected": "Sky: black"}, "Sky: bl", ("ue", "ack")),
        (CHAT, [USER], ANSWERS),
        ({"chosen": [USER, BLUE], "rejected": [USER, RED]}, [USER], ANSWERS),
        ({"prompt": "Sky?", "chosen": [USER, BLUE], "rejected": [USER, RED]}, [USER], ANSWERS),
        (
            {"chosen": hh("a", "b", "c", "same start"), "rejected": hh("a", "b", "c", "same end")},
            hh("a", "b", "c") + "\n\nAssistant:",
            (" same start", " same end"),
        ),
        # equal responses, with and without a prompt of their own
        ({**ROW, "rejected": " Blue."}, "Sky?", (" Blue.", " Blue.")),
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE]}, [USER], ([BLUE], [BLUE])),
        ({"chosen": hh("a", "b"), "rejected": hh("a", "b")}, ASKED, (" b", " b")),
        # whitespace is text, and an empty turn is a response
        ({"chosen": hh("a", ""), "rejected": hh("a", "b")}, ASKED, (" ", " b")),
        ({"chosen": ASKED, "rejected": hh("a", "b")}, ASKED, ("", " b")),
        ({**CHAT, "chosen": [WHITE]}, [USER], ([WHITE], [RED])),
        (  # they differ in a human turn: the prompt ends at the assistant's turn before it
            {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "b", "x", "y")},
            ASKED,
            (" b\n\nHuman: c\n\nAssistant: d", " b\n\nHuman: x\n\nAssistant: y"),
        ),
        # texts and contents may be empty, null keys are dropped, calls of tools need no content
        ({"prompt": "", "chosen": "", "rejected": "a"}, "", ("", "a")),
        ({"chosen": "", "rejected": "a"}, "", ("", "a")),
        ({**CHAT, "prompt": [{**USER, "content": ""}]}, [{**USER, "content": ""}], ANSWERS),
        ({**CHAT, "chosen": [EMPTY]}, [USER], ([EMPTY], [RED])),
        ({**CHAT, "prompt": [{**USER, "name": None}]}, [USER], ANSWERS),
        ({**CHAT, "chosen": [EMPTY | CALL]}, [USER], ([EMPTY | CALL], [RED])),
        (
            {**CHAT, "chosen": [{**CALL, "content": None}]},
            [USER],
            ([CALL | {"content": None}], [RED]),
        ),
    ],
)
def test_formats(row, prompt, responses):
    record = to_record(row, "f:1")
    assert (record.prompt, record.responses, record.origin) == (prompt, responses, "f:1")


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("Sky is blue", "Sky is red"),
        ("Sky is blue", "Sky is blue"),  # the last character is the response
        ("Sky is", "Sky is red"),
        ("S", "Sky"),
        ("blue", "red"),
        ("Sky is  blue", "Sky is  red"),
        ([USER, BLUE], [USER, RED]),
        ([USER, BLUE], [USER, BLUE]),
        ([USER, BLUE, USER, RED], [USER, BLUE, USER]),
        ([USER, BLUE], [USER, BLUE, USER, RED]),
    ],
)
def test_implicit_prompts_are_those_of_trl(chosen, rejected):
    row = {"chosen": chosen, "rejected": rejected}
    record, cut = to_record(row, "f:1"), trl_extract_prompt(row)
    assert (record.prompt, record.responses) == (cut["prompt"], (cut["chosen"], cut["rejected"]))


def test_variables_of_the_template_go_with_messages_only():
    tools = [{"type": "function", "function": {"name": "look"}}]
    columns = {"tools": json.dumps(tools), "chat_template_kwargs": {"thinking": False}}
    whole = {"tools": tools, "thinking": False}
    for row, expected in (
        (CHAT, {"tools": None}),
        (CHAT | columns, whole),
        (CHAT | columns | {"tools": tools}, whole),
        (CHAT | {"tools": "null"}, {"tools": None}),
        (CHAT | {"tools": []}, {"tools": []}),
        (CHAT | {"tools": "", "chat_template_kwargs": ""}, {"tools": None}),  # cells of a CSV file
        ({**ROW, "tools": "{"}, {}),
    ):
        assert to_record(row, "f:1").template_kwargs == expected


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_columnar_files_tell_a_template_what_jsonl_does(tmp_path, kind):
    """Arrow gives all records the keys of each; TRL takes what is null away again."""
    rows = [
        {
            "prompt": [USER],
            "chosen": [{**RED, "tool_calls": [{"name": name, "arguments": {key: [1, None]}}]}],
            "rejected": [RED],
            "tools": [{"name": name, "parameters": {"properties": {key: {"type": "int"}}}}],
            "chat_template_kwargs": {"look": {key: True}},
        }
        for name, key in (("far", "x"), ("near", "y"))
    ]
    source = tmp_path / f"rows.{kind}"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(source)) if kind == "parquet" else table.save_to_disk(str(source))
    found, wanted = (
        [to_record(raw, "") for _, raw in read_records(str(path)) if isinstance(raw, dict)]
        for path in (source, tmp_path / "rows.jsonl")
    )
    assert found == wanted
    assert "'arguments': {'x': [1, None]}}" in str(found[0])
    as_text = to_record({**rows[0], "tools": '[{"a": null}]'}, "")
    assert as_text.template_kwargs["tools"] == [{"a": None}]  # as its author wrote it


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "missing field",
            "field 'rejected' is missing among prompt, chosen; add it (a string or a message list),"
            " or name its column in data.columns.rejected",
        ),
        (
            {**ROW, "prompt": None},
            "missing field",
            "field 'prompt' is missing; add it (a string or a message list)",
        ),
        ({**ROW, "prompt": []}, "empty field", "field 'prompt' is empty; fill it in"),
        (
            {**ROW, "chosen": 7},
            "wrong type",
            "field 'chosen' is int, not a string or a message list; give one of these",
        ),
        (
            {**ROW, "chosen": [BLUE]},
            "wrong type",
            "'chosen' and 'rejected' are not both strings or both message lists; "
            "give both the same form",
        ),
        (
            {**ROW, "prompt": [USER]},
            "wrong type",
            "'prompt' is a message list but 'chosen' and 'rejected' are strings; "
            "give all three the same form",
        ),
        (
            {"chosen": [USER, {"content": "x"}], "rejected": [USER, RED]},
            "wrong type",
            "field 'chosen', message 1 has no 'role' string; give {'role': ..., 'content': ...}",
        ),
        (
            {"chosen": [USER, BLUE], "rejected": [USER, {"role": "assistant", "content": 1}]},
            "wrong type",
            "field 'rejected', message 1 has no 'content' string; "
            "give {'role': ..., 'content': ...}",
        ),
        (
            {**CHAT, "chosen": [CALL | {"content": 1}]},
            "wrong type",
            "field 'chosen', message 0 has no 'content' string; give {'role': ..., 'content': ...}",
        ),
        (
            {"prompt": [USER], "chosen": [BLUE], "rejected": []},
            "empty field",
            "field 'rejected' is empty; fill it in",
        ),
        (
            {**CHAT, "tools": "{"},
            "wrong type",
            "field 'tools' is not valid JSON (Expecting property name enclosed in double "
            "quotes: line 1 column 2 (char 1)); give a list of JSON schemas",
        ),
        (
            {**CHAT, "tools": '{"name": "look"}'},
            "wrong type",
            "field 'tools' is not a list of JSON schemas, nor the JSON text of one; "
            "give one of these, or leave it out",
        ),
        (
            {**CHAT, "chat_template_kwargs": "x"},
            "wrong type",
            "field 'chat_template_kwargs' is str, not a mapping; "
            "give {'name': value}, or leave it out",
        ),
        (
            {"chosen": [USER], "rejected": [USER], "chat_template_kwargs": {"tokenize": 1}},
            "wrong type",
            "field 'chat_template_kwargs' sets 'tokenize', which a record cannot set; leave it out",
        ),
        (
            {"chosen": hh("a", "b"), "rejected": hh("c", "d")},
            "no shared prefix",
            NOT_SHARED,
        ),
        (
            {"chosen": [USER], "rejected": [USER, RED]},
            "no shared prefix",
            NOT_SHARED,
        ),
        (
            {"prompt": "Sky?", "chosen": [BLUE], "rejected": [RED]},
            "no shared prefix",
            NOT_SHARED.replace("no 'prompt'", "'prompt' is a text"),
        ),
        (
            {**ROW, "chosen": "ab\ud800"},
            "invalid UTF-8",
            "field 'chosen' has a lone surrogate at character 2; "
            "write the character itself, not half of it",
        ),
    ],
)
def test_errors_of_a_row(row, reason, message):
    with pytest.raises(DataError) as caught:
        to_record(row, "f:3")
    assert str(caught.value) == f"f:3: {message}" and caught.value.reason == reason


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_json_lines_and_their_errors(tmp_path, name):
    lines = [
        b"\xef\xbb\xbf" + json.dumps(ROW).encode(),
        b"",
        b'{"prompt": "a\xff"}',
        b'{"prompt": ',
        b"[1]",
        json.dumps(ROW).encode(),
        b'{"prompt": "a',
    ]
    path = tmp_path / name
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    rows = list(read_records(str(path)))
    assert [origin for origin, _ in rows] == [f"{path}:{line}" for line in (1, 3, 4, 5, 6, 7)]
    assert rows[0][1] == rows[4][1] == ROW
    assert str(rows[1][1]) == (
        f"{path}:3: invalid UTF-8 at byte 13 of the line; save the file as UTF-8"
    )
    assert str(rows[2][1]) == (
        f"{path}:4: invalid JSON (Expecting value at character 12); write one JSON object a line"
    )
    assert str(rows[3][1]) == (
        f"{path}:5: the line is a JSON list, not an object; write one JSON object a line"
    )
    assert "(Unterminated string starting at character 11); write" in str(rows[5][1])
    assert all("\n" not in str(row) for _, row in rows)


def test_parquet_with_messages_and_broken_text(tmp_path):
    path = tmp_path / "pairs.parquet"
    rows = [{"chosen": [USER, BLUE], "rejected": [USER, RED], "score": 1.0}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert list(read_records(str(path))) == [
        (f"{path}:0", {"chosen": [USER, BLUE], "rejected": [USER, RED], "score": None})
    ]
    raw = pyarrow.array([b"good", b"bad\xff"], type=pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(2, *raw.buffers()[1:])
    table = pyarrow.table({"prompt": text, "chosen": ["x", "x"], "rejected": ["y", "y"]})
    pyarrow.parquet.write_table(table, path)
    (_, good), (_, bad) = read_records(str(path))
    assert good == {"prompt": "good", "chosen": "x", "rejected": "y"}
    assert str(bad) == (
        f"{path}:1: a field cannot be read (UnicodeDecodeError: 'utf-8' codec can't decode byte "
        "0xff in position 3: inval...); write it as UTF-8 text, numbers, or lists of them"
    )
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(read_records(str(path)))


def test_datasets_directory(tmp_path):
    dataset = datasets.Dataset.from_list([{**ROW, "other": 1}])
    dataset.save_to_disk(str(tmp_path / "one"))
    assert list(read_records(str(tmp_path / "one"))) == [
        (f"{tmp_path}/one:0", {**ROW, "other": None})  # not read
    ]
    other = datasets.Dataset.from_list([{**ROW, "prompt": "Sea?"}])
    datasets.DatasetDict({"only": other}).save_to_disk(str(tmp_path / "single"))
    assert next(read_records(f"{tmp_path}/single"))[1] == {**ROW, "prompt": "Sea?"}
    splits = datasets.DatasetDict({"train": dataset, "test": other})
    splits.save_to_disk(str(tmp_path / "many"))
    assert len(list(read_records(f"{tmp_path}/many"))) == 1
    assert next(read_records(f"{tmp_path}/many#test"))[1] == {**ROW, "prompt": "Sea?"}
    assert refusal(lambda: list(read_records(f"{tmp_path}/many#dev")), DataError) == (
        f"{tmp_path}/many#dev: no split 'dev' among test, train; write {tmp_path}/many#test"
    )


def test_unreadable_sources(tmp_path):
    for read in (read_records, hash_source):
        with pytest.raises(DataError, match="no such file; check the path"):
            read(str(tmp_path / "none.jsonl"))
    (tmp_path / "pairs.txt").write_text("x")
    for name in ("pairs.txt", "nothing"):
        with pytest.raises(DataError, match="neither a known file type nor a directory; name a"):
            list(read_records(str(tmp_path / name)))
    with pytest.raises(DataError, match="cannot be read as a dataset"):
        list(read_records(str(tmp_path)))


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [(2, 3, 5), (None, 3, 3), (None, 0, 0), (2, None, 2), (None, None, None)],
)
def test_reports_of_blocks_add_up(first: int | None, second: int | None, total: int | None) -> None:
    """Desirable responses are counted where a block of them was read."""
    report = ReadReport(
        "responses", 7, 4, 5, first, 6, 8, {"a": 1, "b": 2}, {"a": "x:1", "b": "x:2"}
    )
    other = ReadReport(
        "responses", 10, 20, 30, second, 40, 50, {"b": 3, "c": 4}, {"b": "y", "c": "y"}
    )
    report.add(other)
    skipped, errors = {"a": 1, "b": 5, "c": 4}, {"a": "x:1", "b": "x:2", "c": "y"}
    assert report == ReadReport("responses", 17, 24, 35, total, 46, 58, skipped, errors)


def test_report_counts_by_reason():
    report = ReadReport(num_used=5, num_truncated=2)
    assert report.summary() == "5 pairs, 2 of them truncated"
    report.num_equal = 3
    assert report.summary() == "5 pairs, 2 of them truncated, 3 of them with equal responses"
    report.num_cut_responses = 1
    assert report.summary() == (
        "5 pairs, 2 of them truncated (1 with a cut response), 3 of them with equal responses"
    )
    report.num_equal, report.num_desirable = 0, 4
    assert report.summary() == "5 pairs, 2 of them truncated (1 with a cut response), 4 desirable"
    report.num_cut_responses, report.num_desirable = 0, None
    for line in (3, 4):
        report.skip(DataError(f"f:{line}", "empty field", "field 'chosen' is empty", "fill it in"))
    report.skip(DataError("f:9", "invalid JSON", "bad", "fix"))
    assert report.summary() == (
        "5 pairs, 2 of them truncated; skipped 3 bad records: 2 empty field, 1 invalid JSON"
    )
    assert report.first_errors["empty field"] == "f:3: field 'chosen' is empty; fill it in"
    report.skipped.clear()
    report.skip(TooLong("f:9", "too long", "9 tokens are over 8", "raise it"))
    assert report.summary() == "5 pairs, 2 of them truncated; dropped 1 that are too long"


@pytest.mark.parametrize("kind", [DataError, TooLong])
def test_an_error_sent_to_another_process_stays_what_it_is(kind: type[DataError]) -> None:
    error = kind("a.jsonl:1", "too long", "the prompt has 9 tokens", "raise the limit")
    error.suggest("leave it out")
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is kind and received.reason == "too long"
    assert str(received) == str(error)
    assert str(error) == "a.jsonl:1: the prompt has 9 tokens; raise the limit, or leave it out"
