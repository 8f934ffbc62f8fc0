"""Files that this process has read are not read again, unless they have changed."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from puzzle_align.data import cache
from puzzle_align.data.build import Preparation, columns_of
from puzzle_align.data.pairs import Budget, BuildOptions, Limits, PairRecipe
from puzzle_align.data.sources import hash_source
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.files import checksums

SIZE = 2**22
PAIRS = PairRecipe(
    ByteTokenizer(), BuildOptions("auto", Limits(SIZE), Budget(2 * SIZE, "shared", True), False)
)


def num_read() -> int:
    """Bytes that this process has read."""
    (line,) = (own for own in Path("/proc/self/io").read_text().splitlines() if "rchar" in own)
    return int(line.split()[1])


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "{"x" * SIZE}", "chosen": "a", "rejected": "b"}}')
    return path


def test_a_source_is_hashed_again_where_it_may_have_changed(source, monkeypatch):
    before = num_read()
    first = hash_source(str(source))
    assert hash_source(str(source)) == first and num_read() - before > 2 * SIZE  # it is fresh
    monkeypatch.setattr(checksums, "_FRESH_S", 0.0)
    hash_source(str(source))
    before = num_read()
    assert hash_source(str(source)) == first and num_read() - before < SIZE
    state = source.stat()
    content = source.read_bytes().replace(b"xx", b"xy", 1)
    source.write_bytes(content)  # of one size, with the same time
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert hash_source(str(source)) != first
    before = num_read()
    other = shutil.copytree(source.parent, source.parent / "d")
    assert hash_source(str(other)) != hash_source(f"{other}#test")
    assert num_read() - before > 2 * SIZE


def test_the_hash_of_a_folder_is_of_linked_folders_too(tmp_path):
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.arrow").write_text(name)
    folder = tmp_path / "set"
    folder.mkdir()
    link = folder / "train"
    link.symlink_to(tmp_path / "v1")
    (folder / "up").symlink_to(folder)  # which is no way to go on
    first = hash_source(str(folder))
    link.unlink()
    link.symlink_to(tmp_path / "v2")
    second = hash_source(str(folder))
    link.rename(folder / "test")
    assert len({first, second, hash_source(str(folder))}) == 3


def test_a_cache_is_read_through_once_a_process(source, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checksums, "_FRESH_S", 0.0)
    known = hash_source(str(source))
    how = Preparation(tmp_path / "cache", hashes={str(source): known})
    made = columns_of(str(source), None, "k", PAIRS, how)
    kept = np.array(made.arrays["tokens"])
    monkeypatch.setattr(cache, "_verified", set())  # as in another process
    sizes = []
    for _ in range(2):
        before = num_read()
        columns_of(str(source), None, "k", PAIRS, how)
        sizes.append(num_read() - before)
    assert sizes[0] > 4 * SIZE > SIZE > sizes[1]
    (file,) = (tmp_path / "cache").glob("*/tokens.bin")
    state, content = file.stat(), bytearray(file.read_bytes())
    content[SIZE] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    again = columns_of(str(source), None, "k", PAIRS, how)
    assert np.array_equal(again.arrays["tokens"], kept) and "is damaged (tokens.bin" in caplog.text
