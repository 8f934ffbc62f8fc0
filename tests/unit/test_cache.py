"""The cache gives what was made, whatever has become of it, and lets one process make it."""

import errno
import fcntl
import json
import logging
import re
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puzzle_align.data import build
from puzzle_align.data.blocks import GivenRecords
from puzzle_align.data.build import Columns, Preparation, columns_of, gathered
from puzzle_align.data.cache import ColumnWriter, cached
from puzzle_align.data.errors import DataError
from puzzle_align.data.pairs import Budget, BuildOptions, Limits, PairRecipe
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.files.checksums import sealed, unsealed
from tests.refusals import refusal

PAIRS = PairRecipe(
    ByteTokenizer(), BuildOptions("auto", Limits(99), Budget(99, "shared", True), False, True)
)
FILES = ("tokens.bin", "part_lengths.bin", "labels.bin", "meta.json")


def write(path: Path, rest: str = "") -> str:
    rows = [
        {"prompt": f"p{n}{rest}", "chosen": "c", "rejected": "r", "margin": n + len(rest)}
        for n in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def opened(source: str, folder: Path, **how: Any) -> Columns:
    return columns_of(source, None, "k", PAIRS, Preparation(folder, 1, **how))


def folders(cache: Path) -> list[Path]:
    """Everything in the cache but locks."""
    return [path for path in cache.iterdir() if path.is_dir()]


def same(one: Columns, other: Columns) -> bool:
    arrays = [
        {name: (a.dtype, a.shape, a.tobytes()) for name, a in columns.arrays.items()}
        for columns in (one, other)
    ]
    rest = [(c.report, c.column_names, c.fingerprint) for c in (one, other)]
    return arrays[0] == arrays[1] and rest[0] == rest[1]


@pytest.fixture
def cache(tmp_path) -> tuple[str, Path, Path, Columns]:
    """A source, the cache, the folder in it, and what it holds."""
    source = write(tmp_path / "a.jsonl")
    columns = opened(source, tmp_path / "cache")
    (folder,) = folders(tmp_path / "cache")
    kept = replace(columns, arrays={name: np.array(a) for name, a in columns.arrays.items()})
    return source, tmp_path / "cache", folder, kept


def damage(file: Path, how: str, other: Path) -> None:
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "missing":
        file.unlink()
    else:
        shutil.copy(other / file.name, file)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "exchanged"])
def test_a_damaged_cache_is_made_anew_with_a_line(cache, tmp_path, caplog, name, how):
    source, folder, path, kept = cache
    opened(write(tmp_path / "b.jsonl", "x"), tmp_path / "other")
    (other,) = folders(tmp_path / "other")
    damage(path / name, how, other)
    with caplog.at_level(logging.WARNING):
        assert same(opened(source, folder), kept)
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(f"data.cache_dir: {path} is damaged ({name}")
    assert line.endswith("): it is made anew") and folders(folder) == [path]
    caplog.clear()
    assert same(opened(source, folder), kept) and not caplog.records


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("verify", [True, False])
def test_a_cache_that_cannot_be_read_is_left_as_it_is(cache, caplog, name, verify):
    """A link to itself stands for whatever a disk or a network may fail with."""
    source, folder, path, kept = cache
    content = (path / name).read_bytes()
    (path / name).unlink()
    (path / name).symlink_to(name)
    assert refusal(lambda: opened(source, folder, verify=verify)) == (
        f"data.cache_dir: {path} cannot be read ({name}: Too many levels of symbolic links), "
        "and is left as it is: mend the disk or its permissions there, and run the same "
        "command again"
    )
    assert {*FILES} == {file.name for file in path.iterdir()}
    (path / name).unlink()
    (path / name).write_bytes(content)
    assert same(opened(source, folder), kept) and not caplog.records


def test_another_folder_under_its_name_is_found(cache, tmp_path, caplog):
    source, folder, path, kept = cache
    opened(write(tmp_path / "b.jsonl", "x"), folder)
    (other,) = set(folders(folder)) - {path}
    shutil.rmtree(path)
    shutil.copytree(other, path)
    assert same(opened(source, folder), kept)
    assert "meta.json is another folder's" in caplog.text


def test_sums_are_read_where_they_are_to_be(cache, caplog):
    """Ranks other than the first look at sizes."""
    source, folder, path, kept = cache
    damage(path / "tokens.bin", "flipped", path)
    assert not same(opened(source, folder, verify=False), kept) and not caplog.records
    damage(path / "tokens.bin", "cut", path)
    assert same(opened(source, folder, verify=False), kept) and len(caplog.records) == 1


def test_token_0_and_empty_prompts_are_no_damage(tmp_path, caplog):
    template = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    recipe = replace(PAIRS, tokenizer=ByteTokenizer(template))
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "\0a"}
    row = {"prompt": [user], "chosen": [answer], "rejected": [{**answer, "content": "bc"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    for _ in range(2):
        how = Preparation(tmp_path / "cache", 1)
        columns = columns_of(str(tmp_path / "a.jsonl"), None, "k", recipe, how)
        assert columns.arrays["part_lengths"][0] == 0 and columns.arrays["tokens"][0] == 0
    assert not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: {"name": meta["name"]},
        lambda meta: {**meta, "columns": 7},
        lambda meta: of_tokens(meta, dtype="O"),
        lambda meta: of_tokens(meta, shape=["63"]),
        lambda meta: of_tokens(meta, sum=None),
    ],
)
def test_sealed_content_of_another_shape_is_damage(cache, caplog, change):
    source, folder, path, kept = cache
    meta = change(unsealed((path / "meta.json").read_bytes()))
    (path / "meta.json").write_text(sealed(meta))
    assert same(opened(source, folder), kept)
    (record,) = caplog.records
    assert f"{path} is damaged (" in record.getMessage()


def of_tokens(meta: dict[str, Any], **changed: Any) -> dict[str, Any]:
    tokens = {**meta["columns"]["tokens"], **changed}
    return {**meta, "columns": {**meta["columns"], "tokens": tokens}}


def test_one_makes_and_the_others_wait(tmp_path, monkeypatch):
    source = write(tmp_path / "a.jsonl")
    made: list[int] = []
    parts, is_begun, may_go_on = build.parts, threading.Event(), threading.Event()

    def slow(*given: Any, **named: Any) -> Any:
        made.append(1)
        is_begun.set()
        assert may_go_on.wait(60)
        return parts(*given, **named)

    monkeypatch.setattr(build, "parts", slow)
    found: list[Columns] = []
    threads = [
        threading.Thread(target=lambda: found.append(opened(source, tmp_path / "cache")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert is_begun.wait(60)
    assert len(folders(tmp_path / "cache")) == 1  # what is under way
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and len(made) == 1 and same(found[0], found[1])
    assert len(folders(tmp_path / "cache")) == 1


def flipped_after_append(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Flip a bit of a column's file right after it is written."""
    append = ColumnWriter.append

    def damaging(writer: ColumnWriter, arrays: Any) -> None:
        append(writer, arrays)
        damage(writer.folder / f"{name}.bin", "flipped", writer.folder)

    monkeypatch.setattr(ColumnWriter, "append", damaging)


@pytest.mark.parametrize("folder", ["cache", None])
@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_columns_damaged_while_they_are_written_are_an_error(tmp_path, monkeypatch, folder, name):
    source, path = write(tmp_path / "a.jsonl"), folder and tmp_path / folder
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    flipped_after_append(monkeypatch, name)
    line = refusal(lambda: columns_of(source, None, "k", PAIRS, Preparation(path, 1)))
    assert line.startswith(f"{'TMPDIR' if path is None else 'data.cache_dir'}: {tmp_path}/")
    assert f"what was just written there ({name}.bin has another checksum" in line
    assert path is None or not folders(path)


def test_a_folder_damaged_after_it_is_made_is_an_error(tmp_path):
    def make(writer: ColumnWriter) -> dict[str, Any]:
        writer.append({"tokens": np.arange(9, dtype=np.int32)})
        damage(writer.folder / "tokens.bin", "flipped", writer.folder)
        return {}

    line = refusal(lambda: cached(tmp_path, ["k"], make, verify=True))
    assert "does not hold what was just written there (tokens.bin has another checksum" in line


def test_temporary_folders_that_cannot_be_written_are_named(tmp_path, monkeypatch):
    given = GivenRecords("--prompt", iter([("--prompt 1", {"prompt": "a"})]))

    def line() -> str:
        return refusal(lambda: gathered(given, PAIRS, "--prompt", Preparation()))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    assert line().startswith(f"TMPDIR: {tmp_path} cannot be written (No usable temporary directory")
    monkeypatch.undo()
    monkeypatch.setattr(ColumnWriter, "_append", full)
    given = GivenRecords("--prompt", iter([("--prompt 1", {"chosen": "a", "rejected": "b"})]))
    assert re.fullmatch(r"TMPDIR: \S+ cannot be written \(No space left on device\): .*", line())


def test_a_source_that_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch):
    source, folder, parts = write(tmp_path / "a.jsonl"), tmp_path / "cache", build.parts

    def replaced(*given: Any, **named: Any) -> Any:
        write(tmp_path / "new.jsonl", "x")
        (tmp_path / "new.jsonl").rename(source)
        return parts(*given, **named)

    monkeypatch.setattr(build, "parts", replaced)
    with pytest.raises(DataError, match="a.jsonl: it was changed while it was read; run the same"):
        opened(source, folder)
    assert not folders(folder)


def test_other_users_can_enter_the_folder_and_take_the_lock(cache):
    _, folder, path, _ = cache
    (lock,) = folder.glob(".*.lock")
    assert lock.stat().st_mode & 0o777 == 0o666
    assert path.stat().st_mode & 0o777 == 0o755


def test_a_lock_that_another_user_made_private_is_done_without(tmp_path, monkeypatch):
    """Its owner may be preparing the same data: both make it, and the first to be done wins."""
    source, folder, real_open = write(tmp_path / "a.jsonl"), tmp_path / "cache", Path.open

    def refused(path: Path, *given: Any, **named: Any) -> Any:
        if path.suffix == ".lock":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, *given, **named)

    monkeypatch.setattr(Path, "open", refused)
    opened(source, folder)
    assert len(folders(folder)) == 1


def test_a_wait_for_a_lock_that_fails_is_no_error(tmp_path, monkeypatch):
    """A network file system's server may have no locks left."""

    def flock(_stream: object, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    opened(write(tmp_path / "a.jsonl"), tmp_path / "cache")
    assert len(folders(tmp_path / "cache")) == 1


def test_without_locks_everyone_makes_a_copy_of_their_own(tmp_path, monkeypatch):
    """Some file systems have no locks; the first to be done has made it for all."""

    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    source, convert = write(tmp_path / "a.jsonl"), build.convert_block
    found: list[Columns] = []

    def second(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(build, "convert_block", convert)
        found.append(opened(source, tmp_path / "cache"))
        return convert(*given, **named)

    monkeypatch.setattr(build, "convert_block", second)
    found.append(opened(source, tmp_path / "cache"))
    assert same(*found) and len(folders(tmp_path / "cache")) == 1

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "convert_block", stopped)
    with pytest.raises(KeyboardInterrupt):
        opened(write(tmp_path / "b.jsonl", "x"), tmp_path / "cache")
    assert len(folders(tmp_path / "cache")) == 1
