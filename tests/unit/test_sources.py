"""Foreign files of records that are damaged or nasty: one line, with the row where there is one."""

import datetime
import gzip
import json
import pickle
import random
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data import text_files
from puzzle_align.data.blocks import Block
from puzzle_align.data.build import Preparation
from puzzle_align.data.errors import DataError
from puzzle_align.data.prepare import prepare_data, prepare_prompts
from puzzle_align.data.sources import hash_source, open_source
from puzzle_align.data.tokenize import ByteTokenizer
from tests.dist.spawn import run_alone
from tests.refusals import closed, refusal
from tests.unit.source_records import read_records

ROW = {"prompt": "Sky?", "chosen": " blue", "rejected": " red"}
ARROW = "data-00000-of-00001.arrow"
UNREADABLE = "data: cannot be read as a dataset ("


def error_of(source: object) -> str:
    return refusal(lambda: list(read_records(str(source))), DataError)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def lines_of(path: Path, *rows: str) -> DataConfig:
    path.write_text("\n".join(rows) + "\n")
    return DataConfig(train=str(path))


def prepare(config: DataConfig) -> Any:
    given: dict[str, Any] = {"add_eos": "auto", "seed": 0}
    return prepare_data(config, PackingConfig(), ByteTokenizer(), Preparation(), **given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tools": nested(100_000)}, "field 'tools' is not valid JSON (maximum recursion depth"),
        ({"tools": "[" * 5000 + "x" * 5000}, "field 'tools' is not valid JSON ("),
        (
            {"chosen": [{"role": "\ud800", "content": "x"}]},
            "what the chat template writes has a lone surrogate at character",
        ),
    ],
)
def test_what_messages_bring_along_is_an_error_of_their_record(tmp_path, changed, message):
    messages = {name: [{"role": "user", "content": text}] for name, text in ROW.items()}
    config = lines_of(tmp_path / "some.jsonl", json.dumps({**messages, **changed}))
    caught = refusal(lambda: prepare(config), DataError)
    assert caught.startswith(f"{config.train}:1: {message}")
    assert len(caught) < 500


def test_foreign_values_are_cut_short(tmp_path):
    config = lines_of(tmp_path / "some.jsonl", json.dumps({"x" * 9999: 1}))
    caught = refusal(
        lambda: prepare_prompts(config, ByteTokenizer(), Preparation(), max_new_tokens=1, seed=0),
        DataError,
    )
    assert "field 'prompt' is missing among xxx" in caught
    assert len(caught) < 500


LINES = "".join(
    json.dumps({**ROW, "prompt": f"Sky {n} é"}, ensure_ascii=False) + "\n" for n in (0, 1)
)


@pytest.mark.parametrize(
    ("encoded", "good_lines", "problem"),
    [
        (LINES.encode(), [1, 2], None),
        (LINES.encode().rstrip(), [1, 2], None),
        (b"\xef\xbb\xbf" + LINES.encode(), [1, 2], None),
        (LINES.replace("\n", "\r\n").encode(), [1, 2], None),
        (LINES.replace("\n", "\n\n \t\n").encode(), [1, 4], None),
        (LINES.encode("latin-1"), [], "invalid UTF-8 at byte"),
        (LINES.encode("utf-16"), [], "invalid UTF-8 at byte 0"),
        (LINES.replace("\n", "").encode(), [], "invalid JSON (Extra data"),
        (LINES.replace(" ", "\0").encode(), [], "invalid JSON (Expecting value"),
        (f"[{LINES}]".encode(), [2], "invalid JSON ("),
        (b"NaN\n7\nnull\n", [], "the line is a JSON float, not an object"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", [], "invalid JSON (Exceeds the limit"),
        (b'{"prompt": ' + b"[" * 10**5, [], "invalid JSON (maximum recursion depth"),
    ],
)
def test_lines_as_editors_and_exports_write_them(tmp_path, encoded, good_lines, problem):
    for path, data in (
        (tmp_path / "a.jsonl", encoded),
        (tmp_path / "a.jsonl.gz", gzip.compress(encoded)),
    ):
        path.write_bytes(data)
        records = list(read_records(str(path)))
        good = [origin for origin, record in records if isinstance(record, dict)]
        assert good == [f"{path}:{number}" for number in good_lines]
        bad = [str(record) for _, record in records if isinstance(record, DataError)]
        assert bool(bad) == (problem is not None)
        assert problem is None or bad[0].startswith(f"{path}:1: {problem}")


def test_a_gzip_file_that_breaks_amid_its_lines_is_an_error(tmp_path):
    path = tmp_path / "some.jsonl.gz"
    data = bytearray(gzip.compress("".join(f'{{"prompt": "{n}"}}\n' for n in range(9999)).encode()))
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    assert "some.jsonl.gz: not a whole gzip file" in error_of(path)


def test_rows_that_python_has_no_values_for_are_errors_of_their_own(tmp_path):
    path = tmp_path / "some.parquet"
    spans = pa.array([1, 2**63 - 1], pa.int64()).view(pa.duration("s"))
    table = pa.table({"prompt": ["a", "b"], "chosen": spans, "rejected": ["y", "y"]})
    pyarrow.parquet.write_table(table, path)
    (_, good), (origin, bad) = read_records(str(path))
    assert good == {"prompt": "a", "chosen": datetime.timedelta(seconds=1), "rejected": "y"}
    assert str(bad).startswith(f"{origin}: a field cannot be read (OverflowError: ")
    with pytest.raises(DataError, match="some.parquet:0: field 'chosen' is timedelta"):
        prepare(DataConfig(train=str(path)))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([" blue"]).dictionary_encode(), None),
        (pa.array([" blue"], pa.large_string()), None),
        (pa.array([" blue"], pa.string_view()), None),
        (pa.array([b" blue"], pa.binary()), "field 'chosen' is bytes"),
        (pa.array([None]), "field 'chosen' is missing"),
        (pa.array([1.5]), "field 'chosen' is float"),
        (pa.array([Decimal("1.5")]), "field 'chosen' is Decimal"),
        (pa.array([{"a": 1}]), "field 'chosen' is dict"),
        (pa.array([[]], pa.list_(pa.string())), "field 'chosen' is empty"),
        (pa.array([["x"]]), "field 'chosen', message 0 has no 'role' string"),
        (pa.array([[{"role": "user"}]]), "field 'chosen', message 0 has no 'content' string"),
        (pa.array([[("role", "user")]], pa.map_(pa.string(), pa.string())), "field 'chosen', mess"),
        (pa.array([2**63 - 1]).view(pa.timestamp("us")), "a field cannot be read (OverflowError"),
    ],
)
def test_columns_of_every_type_are_read_or_an_error_of_their_row(tmp_path, column, message):
    path = tmp_path / "some.parquet"
    pyarrow.parquet.write_table(
        pa.table({**{k: [v] for k, v in ROW.items()}, "chosen": column}), path
    )
    if message is None:
        assert list(read_records(str(path))) == [(f"{path}:0", ROW)]
        return
    caught = refusal(lambda: prepare(DataConfig(train=str(path))), DataError)
    assert caught.startswith(f"{path}:0: {message}")


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_pickled_code_in_an_extension_type_does_not_run(tmp_path):
    """pyarrow before 14.0.1 unpickled it: CVE-2023-47248."""
    table, path = pa.Table.from_pylist([ROW]), tmp_path / "some.parquet"
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Code(tmp_path / "mark")),
    }
    table = table.cast(table.schema.set(0, table.field(0).with_metadata(metadata)))
    pyarrow.parquet.write_table(table, path)
    assert list(read_records(str(path))) == [(f"{path}:0", ROW)]
    assert not (tmp_path / "mark").exists()


def test_a_flipped_bit_is_found_where_parquet_has_checksums(tmp_path):
    path = tmp_path / "some.parquet"
    table = pa.Table.from_pylist([ROW] * 10)
    given: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(table, path, write_page_checksum=True, **given)
    data = bytearray(path.read_bytes())
    data[data.index(b" blue\5\0\0\0 blue")] ^= 1  # in the page, not in the statistics
    path.write_bytes(data)
    assert "some.parquet: not a readable Parquet file (OSError: could not" in error_of(path)


def read_with_bits_flipped(path: Path) -> None:
    """Read a Parquet file once for every fifth bit of its footer; asserts how that ends."""
    data, columns = path.read_bytes(), ("prompt", "chosen")
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    other = path.with_name("other.parquet")
    for bit in range(8 * start, 8 * len(data), 5):  # in a byte any of its eight
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        other.write_bytes(changed)
        with suppress(DataError):
            list(read_records(str(other), columns))


def test_no_damage_of_a_parquet_footer_ends_the_process(tmp_path):
    path = tmp_path / "some.parquet"
    table = pa.table({"prompt": ["Sky?"], "chosen": [["blue"]]})
    pyarrow.parquet.write_table(table, path, store_schema=False)
    run_alone(read_with_bits_flipped, path, timeout=60)


def test_a_row_group_of_any_size_takes_bounded_memory(tmp_path):
    path, texts = tmp_path / "a.parquet", [random.randbytes(5000).hex() for _ in range(4000)]
    settings: dict[str, Any] = {"row_group_size": len(texts), "use_dictionary": False}
    pyarrow.parquet.write_table(pa.table({"prompt": texts}), path, **settings)
    before, most, num_rows = pa.total_allocated_bytes(), 0, 0
    for block in open_source(str(path)).blocks(size=2**18):
        most = max(most, pa.total_allocated_bytes() - before)
        assert isinstance(block, Block)
        num_rows += block.data.num_rows
    assert num_rows == len(texts) and most < path.stat().st_size / 2


def test_blocks_of_a_parquet_file_hold_records_that_belong_together(tmp_path):
    """Arrow's batches of dictionary columns end with every row group."""
    path = tmp_path / "some.parquet"
    texts = pa.array([f"{number}" for number in range(20)]).dictionary_encode()
    table = pa.table({"prompt": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=3)
    source = open_source(str(path))
    blocks = [own for own in source.blocks(together=4, size=1) if isinstance(own, Block)]
    assert [(own.first, own.end) for own in blocks] == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    records = [record for own in blocks for record in source.records(own)]
    assert records == [(f"{path}:{number}", {"prompt": f"{number}"}) for number in range(20)]


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "data"
    datasets.Dataset.from_list([ROW] * 3).save_to_disk(str(path))
    return path


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_format_that_a_data_set_was_saved_with_changes_no_values(tmp_path):
    dataset = datasets.Dataset.from_list([{**ROW, "margin": 0.5}])
    dataset.with_format("numpy", columns=["margin"]).save_to_disk(str(tmp_path / "data"))
    ((_, record),) = read_records(str(tmp_path / "data"))
    assert isinstance(record, dict)
    assert record == {**ROW, "margin": 0.5} and type(record["margin"]) is float


@pytest.mark.parametrize(("before", "rows"), [(0, "0 to 2"), (1000, "1000 to 1002")])
def test_offsets_on_which_arrow_would_crash_are_an_error(tmp_path, before, rows):
    records = [{**ROW, "prompt": "Which sky?", "rejected": " green"}] * before + [ROW] * 3
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path))
    file = tmp_path / ARROW
    # Of "Sky?", and of " red", three times.
    offsets = b"".join(at.to_bytes(4, "little") for at in (0, 4, 8, 12))
    nasty = b"".join(at.to_bytes(4, "little") for at in (0, 2**31 - 1, 2**30, 12))
    data = file.read_bytes()
    assert offsets in data
    file.write_bytes(data.replace(offsets, nasty))
    assert error_of(tmp_path).startswith(f"{file}: damaged in its rows {rows} (ArrowInvalid: ")


@pytest.mark.parametrize(("splits", "names"), [([], "none"), ("train", "a, i, n, r, t")])
def test_a_data_set_without_splits_is_one_line(tmp_path, splits, names):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    assert f"no split 'train' among {names}; write " in error_of(tmp_path)


def test_a_folder_of_shards_is_read_by_split_as_a_hub_data_set(tmp_path):
    """Such as a download of it: rows in the order of the shards."""
    shards = {"train-00000-of-00002": "a", "train-00001-of-00002": "b", "test-00000-of-00001": "c"}
    for name, answer in shards.items():
        table = pa.Table.from_pylist([{**ROW, "chosen": answer}, ROW])
        (tmp_path / "data").mkdir(exist_ok=True)
        pa.parquet.write_table(table, tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "README.md").write_text("# Pairs")

    def chosen(source: str) -> list:
        records = [record for _, record in read_records(source)]
        return [record["chosen"] for record in records if isinstance(record, dict)]

    assert chosen(str(tmp_path)) == ["a", ROW["chosen"], "b", ROW["chosen"]]
    assert chosen(f"{tmp_path}#test") == ["c", ROW["chosen"]]
    assert "no split 'dev' among test, train" in error_of(f"{tmp_path}#dev")
    whole = hash_source(str(tmp_path))
    broken = tmp_path / "data" / "test-00000-of-00001.parquet"
    broken.write_bytes(b"PAR1")
    assert hash_source(str(tmp_path)) != whole
    assert f"{broken}: not a readable Parquet file (" in error_of(tmp_path)


def test_a_folder_s_file_that_is_broken_or_has_other_columns_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "b.jsonl").write_text(json.dumps(ROW) + '\n{"chosen')
    assert f"{tmp_path}/b.jsonl:2: invalid JSON (" in error_of(tmp_path)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "c"}))
    line = f"{tmp_path}/b.jsonl: its columns (text) are not those of {tmp_path}/a.jsonl; put it"
    assert line in error_of(tmp_path)


def test_a_path_may_have_the_sign_of_a_split(tmp_path):
    for name in ("v#2", "v"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({**ROW, "prompt": name}))
        datasets.Dataset.from_list([{**ROW, "prompt": name}]).save_to_disk(tmp_path / f"s{name}")
    for start in ("", "s"):
        for source in (f"{start}v#2", f"{start}v"):
            ((_, record),) = read_records(str(tmp_path / source))
            assert record == {**ROW, "prompt": source.removeprefix("s")}
    assert hash_source(f"{tmp_path}/v#2") != hash_source(f"{tmp_path}/v")
    ((_, record),) = read_records(f"{tmp_path}/v#2#train")
    assert record == {**ROW, "prompt": "v#2"}


def test_two_downloads_of_a_data_set_are_the_same(tmp_path):
    """As ``hf download`` leaves them: with the time of each file's download."""
    for name in ("one", "other"):
        hidden = tmp_path / name / ".cache" / "huggingface" / "download"
        hidden.mkdir(parents=True)
        (hidden / "train.jsonl.metadata").write_text(f"commit\netag\nwhen {name} came\n")
        (tmp_path / name / "train.jsonl").write_text(json.dumps(ROW))
    assert hash_source(str(tmp_path / "one")) == hash_source(str(tmp_path / "other"))
    (tmp_path / "other" / "train.jsonl").write_text(json.dumps({**ROW, "chosen": "grey"}))
    assert hash_source(str(tmp_path / "one")) != hash_source(str(tmp_path / "other"))


def test_a_folder_may_be_named_as_a_file(tmp_path):
    """As Spark and Dask name what they write."""
    path = tmp_path / "train.parquet"
    path.mkdir()
    (path / "_SUCCESS").touch()
    pa.parquet.write_table(pa.Table.from_pylist([ROW]), path / "part-00000.snappy.parquet")
    for source in (str(path), f"{path}#train"):
        assert [record for _, record in read_records(source)] == [ROW]
    assert f"{tmp_path}/other.parquet: no such file" in error_of(tmp_path / "other.parquet")


def test_a_folder_of_another_user_is_named_in_one_line(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with closed(theirs):
        for name in (theirs, theirs / "train.jsonl"):
            asked = DataConfig(train=str(name)), ByteTokenizer(), Preparation()
            prepare = partial(prepare_prompts, *asked, max_new_tokens=8, seed=0)
            for read in (partial(hash_source, str(name)), prepare):
                start = f"{name} cannot be read ({name.name}: Permission denied), and"
                assert refusal(read).startswith(start)


def test_other_splits_may_be_damaged(tmp_path):
    dataset = datasets.Dataset.from_list([ROW])
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "data"))
    (tmp_path / "data" / "test" / "state.json").write_text("{")
    assert len(list(read_records(f"{tmp_path}/data"))) == 1
    assert "cannot be read as a dataset (JSONDecodeError: " in error_of(f"{tmp_path}/data#test")


@pytest.mark.parametrize(
    ("name", "values", "line"),
    [
        *(  # of what is no file
            ("state", {"_data_files": [{"filename": name}]}, f"{name}: not a whole Arrow file")
            for name in ("../other.arrow", "/dev/zero", "", 7)
        ),
        ("state", {"_format_kwargs": 7}, UNREADABLE),
        ("state", {"_format_type": "no such"}, UNREADABLE),
        ("state", {"_data_files": {}}, UNREADABLE),
        ("dataset_info", {"features": {"prompt": {"_type": "no such"}}}, UNREADABLE),
        ("dataset_info", {"features": {"prompt": {"_type": "Dataset"}}}, UNREADABLE),
        ("dataset_info", {"features": 7}, UNREADABLE),
    ],
)
def test_wrong_values_of_a_data_set_are_one_line(folder, name, values, line):
    change(folder / f"{name}.json", **values)
    assert line in error_of(folder)


def test_scripts_beside_a_data_set_do_not_run(tmp_path, folder):
    mark = tmp_path / "mark"
    for place in (folder, tmp_path / "scripts"):
        place.mkdir(exist_ok=True)
        for name in (f"{place.name}.py", "dataset.py", "__init__.py"):
            (place / name).write_text(f"open({str(mark)!r}, 'w')")
    assert len(list(read_records(str(folder)))) == 3
    assert "cannot be read as a dataset" in error_of(tmp_path / "scripts")
    assert not mark.exists()


def test_no_more_of_a_line_is_read_than_it_may_have(tmp_path, monkeypatch):
    """So the damage behind that, a cut end, is not found."""
    monkeypatch.setattr(text_files, "MOST_LINE", 2**20)
    path, first = tmp_path / "a.jsonl.gz", json.dumps(ROW).encode() + b"\n"
    whole = gzip.compress(first + random.randbytes(2**21).hex().encode())
    path.write_bytes(whole[: -(2**10)])
    records = read_records(str(path))
    assert next(records) == (f"{path}:1", ROW)
    assert refusal(lambda: next(records), DataError) == (
        f"{path}:2: the line is longer than 1 MiB; write one JSON object a line, and leave such "
        "records out"
    )
