"""Formats, sources and the one-line errors of bad records."""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from puzzle_align.data.records import DataError, ReadReport, to_record
from puzzle_align.data.sources import hash_source, read_records

USER = {"role": "user", "content": "Sky?"}
BLUE = {"role": "assistant", "content": "Blue."}
RED = {"role": "assistant", "content": "Red."}
ROW = {"prompt": "Sky?", "chosen": " Blue.", "rejected": " Red."}


def hh(*turns: str) -> str:
    names = ("Human", "Assistant")
    return "".join(f"\n\n{names[i % 2]}: {turn}" for i, turn in enumerate(turns))


@pytest.mark.parametrize(
    ("row", "prompt", "responses"),
    [
        (ROW, "Sky?", (" Blue.", " Red.")),
        ({"chosen": "Sky is blue", "rejected": "Sky is red"}, "Sky is", (" blue", " red")),
        ({"chosen": "Sky: blue", "rejected": "Sky: black"}, "Sky: bl", ("ue", "ack")),
        (
            {"prompt": [USER], "chosen": [BLUE], "rejected": [RED]},
            [USER],
            ([BLUE], [RED]),
        ),
        ({"chosen": [USER, BLUE], "rejected": [USER, RED]}, [USER], ([BLUE], [RED])),
        (
            {"prompt": "Sky?", "chosen": [USER, BLUE], "rejected": [USER, RED]},
            [USER],
            ([BLUE], [RED]),
        ),
        (
            {"chosen": hh("a", "b", "c", "same start"), "rejected": hh("a", "b", "c", "same end")},
            hh("a", "b", "c") + "\n\nAssistant:",
            (" same start", " same end"),
        ),
        (  # equal responses, with and without a prompt of their own
            {**ROW, "rejected": " Blue."},
            "Sky?",
            (" Blue.", " Blue."),
        ),
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE]}, [USER], ([BLUE], [BLUE])),
        (
            {"chosen": hh("a", "b"), "rejected": hh("a", "b")},
            "\n\nHuman: a\n\nAssistant:",
            (" b", " b"),
        ),
        (  # whitespace is text
            {"chosen": hh("a", ""), "rejected": hh("a", "b")},
            "\n\nHuman: a\n\nAssistant:",
            (" ", " b"),
        ),
        (
            {"prompt": [USER], "chosen": [{**BLUE, "content": "\n"}], "rejected": [RED]},
            [USER],
            ([{**BLUE, "content": "\n"}], [RED]),
        ),
        (  # they differ in a human turn: the prompt ends at the assistant's turn before it
            {"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "b", "x", "y")},
            "\n\nHuman: a\n\nAssistant:",
            (" b\n\nHuman: c\n\nAssistant: d", " b\n\nHuman: x\n\nAssistant: y"),
        ),
    ],
)
def test_formats(row, prompt, responses):
    record = to_record(row, "f:1")
    assert (record.prompt, record.responses, record.origin) == (prompt, responses, "f:1")


def test_null_keys_of_messages_are_dropped():
    user = {**USER, "name": None}
    record = to_record({"prompt": [user], "chosen": [BLUE], "rejected": [RED]}, "f:1")
    assert record.prompt == [USER]


@pytest.mark.parametrize("content", ["", None])
def test_a_message_that_calls_tools_needs_no_content(content):
    call = {"role": "assistant", "content": content, "tool_calls": [{"name": "look"}]}
    record = to_record({"prompt": [USER], "chosen": [call], "rejected": [RED]}, "f:1")
    assert record.responses[0] == [call]


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "missing field",
            "f:3: field 'rejected' is missing; add it (a string or a message list)",
        ),
        (
            {**ROW, "prompt": None},
            "missing field",
            "f:3: field 'prompt' is missing; add it (a string or a message list)",
        ),
        ({**ROW, "chosen": ""}, "empty field", "f:3: field 'chosen' is empty; fill it in"),
        ({**ROW, "prompt": []}, "empty field", "f:3: field 'prompt' is empty; fill it in"),
        (
            {**ROW, "chosen": 7},
            "wrong type",
            "f:3: field 'chosen' is int, not a string or a message list; give one of these",
        ),
        (
            {**ROW, "chosen": [BLUE]},
            "wrong type",
            "f:3: 'chosen' and 'rejected' are not both strings or both message lists; "
            "give both the same form",
        ),
        (
            {**ROW, "prompt": [USER]},
            "wrong type",
            "f:3: 'prompt' is a message list but 'chosen' and 'rejected' are strings; "
            "give all three the same form",
        ),
        (
            {"chosen": [USER, {"content": "x"}], "rejected": [USER, RED]},
            "wrong type",
            "f:3: field 'chosen', message 1 has no 'role' string; "
            "give {'role': ..., 'content': ...}",
        ),
        (
            {"chosen": [USER, BLUE], "rejected": [USER, {"role": "assistant", "content": 1}]},
            "wrong type",
            "f:3: field 'rejected', message 1 has no 'content' string; "
            "give {'role': ..., 'content': ...}",
        ),
        (
            {"prompt": [USER], "chosen": [BLUE], "rejected": [{**RED, "content": ""}]},
            "empty field",
            "f:3: field 'rejected', message 0 has an empty 'content'; fill it in",
        ),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": hh("a", "b")},
            "empty field",
            "f:3: 'chosen' has nothing after the prompt it shares with the other response; "
            "fill it in, or give the prompt in a field of its own",
        ),
        (
            {"chosen": "Sky is blue", "rejected": "Sky is blue"},
            "empty field",
            "f:3: 'chosen' has nothing after the prompt it shares with the other response; "
            "fill it in, or give the prompt in a field of its own",
        ),
        (
            {"chosen": "blue", "rejected": "red"},
            "no shared prefix",
            "f:3: no 'prompt', and 'chosen' and 'rejected' share no beginning to take as one; "
            "add a 'prompt' field or start both with the same prompt",
        ),
        (
            {"chosen": hh("a", "b"), "rejected": hh("c", "d")},
            "no shared prefix",
            "f:3: no 'prompt', and 'chosen' and 'rejected' share no beginning to take as one; "
            "add a 'prompt' field or start both with the same prompt",
        ),
        (
            {"chosen": [USER], "rejected": [USER, RED]},
            "empty field",
            "f:3: 'chosen' has nothing after the prompt it shares with the other response; "
            "fill it in, or give the prompt in a field of its own",
        ),
        (
            {**ROW, "chosen": "ab\ud800"},
            "invalid UTF-8",
            "f:3: field 'chosen' has a lone surrogate at character 2; "
            "write the character itself, not half of it",
        ),
    ],
)
def test_errors_of_a_row(row, reason, message):
    with pytest.raises(DataError) as caught:
        to_record(row, "f:3")
    assert str(caught.value) == message and caught.value.reason == reason


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_json_lines_and_their_errors(tmp_path, name):
    lines = [
        b"\xef\xbb\xbf" + json.dumps(ROW).encode(),
        b"",
        b'{"prompt": "a\xff"}',
        b'{"prompt": ',
        b"[1]",
        json.dumps(ROW).encode(),
    ]
    path = tmp_path / name
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    rows = list(read_records(str(path)))
    assert [origin for origin, _ in rows] == [f"{path}:{line}" for line in (1, 3, 4, 5, 6)]
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
    assert all("\n" not in str(row) for _, row in rows)


def test_a_cut_gzip_file_is_an_error(tmp_path):
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(ROW) + "\n").encode() * 1000)[:-20])
    with pytest.raises(DataError, match="not a whole gzip file"):
        list(read_records(str(path)))


def test_parquet_with_messages_and_broken_text(tmp_path):
    path = tmp_path / "pairs.parquet"
    rows = [{"chosen": [USER, BLUE], "rejected": [USER, RED], "score": 1.0}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert list(read_records(str(path))) == [
        (f"{path}:0", {"chosen": [USER, BLUE], "rejected": [USER, RED]})
    ]
    raw = pyarrow.array([b"good", b"bad\xff"], type=pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(2, *raw.buffers()[1:])
    table = pyarrow.table({"prompt": text, "chosen": ["x", "x"], "rejected": ["y", "y"]})
    pyarrow.parquet.write_table(table, path)
    (_, good), (_, bad) = read_records(str(path))
    assert good == {"prompt": "good", "chosen": "x", "rejected": "y"}
    assert str(bad) == f"{path}:1: invalid UTF-8 at byte 3 of a field; save the text as UTF-8"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(read_records(str(path)))


def test_datasets_directory(tmp_path):
    dataset = datasets.Dataset.from_list([{**ROW, "other": 1}])
    dataset.save_to_disk(str(tmp_path / "one"))
    assert list(read_records(str(tmp_path / "one"))) == [(f"{tmp_path}/one:0", ROW)]
    other = datasets.Dataset.from_list([{**ROW, "prompt": "Sea?"}])
    splits = datasets.DatasetDict({"train": dataset, "test": other})
    splits.save_to_disk(str(tmp_path / "many"))
    assert len(list(read_records(f"{tmp_path}/many"))) == 1
    assert next(read_records(f"{tmp_path}/many#test"))[1] == {**ROW, "prompt": "Sea?"}
    with pytest.raises(DataError) as caught:
        list(read_records(f"{tmp_path}/many#dev"))
    assert str(caught.value) == (
        f"{tmp_path}/many#dev: no split 'dev' among test, train; write {tmp_path}/many#test"
    )


def test_unreadable_sources(tmp_path):
    with pytest.raises(DataError, match="no such file; check data.train and data.eval"):
        read_records(str(tmp_path / "none.jsonl"))
    (tmp_path / "pairs.txt").write_text("x")
    for name in ("pairs.txt", "nothing"):
        with pytest.raises(DataError, match="neither a known file type nor a directory; name a"):
            list(read_records(str(tmp_path / name)))
    with pytest.raises(DataError, match="cannot be read as a dataset"):
        list(read_records(str(tmp_path)))


def test_hash_follows_the_content(tmp_path):
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_text("x")
    first = hash_source(str(one))
    assert hash_source(str(one)) == first
    one.write_text("y")
    assert hash_source(str(one)) != first
    datasets.Dataset.from_list([ROW]).save_to_disk(str(tmp_path / "d"))
    assert hash_source(str(tmp_path / "d")) != hash_source(str(tmp_path / "d") + "#test")
    with pytest.raises(DataError):
        hash_source(str(other))


def test_report_counts_by_reason():
    report = ReadReport(num_used=5, num_truncated=2)
    assert report.summary() == "5 pairs, 2 of them truncated"
    report.num_equal = 3
    assert report.summary() == "5 pairs, 2 of them truncated, 3 of them with equal responses"
    report.num_equal = 0
    for line in (3, 4):
        report.skip(DataError(f"f:{line}", "empty field", "field 'chosen' is empty", "fill it in"))
    report.skip(DataError("f:9", "invalid JSON", "bad", "fix"))
    assert report.summary() == (
        "5 pairs, 2 of them truncated; skipped 3 bad records: 2 empty field, 1 invalid JSON"
    )
    assert report.first_errors["empty field"] == "f:3: field 'chosen' is empty; fill it in"
