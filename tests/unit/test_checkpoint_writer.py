"""A checkpoint's file on its way to the disk: whole, summed, and seen to go on."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from puzzle_align.runtime.checkpoint import writer as checkpoint_writer
from puzzle_align.runtime.checkpoint.writer import _SummedStream
from puzzle_align.runtime.liveness.activity import this_rank


def test_a_large_piece_is_written_in_chunks_that_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(checkpoint_writer, "_LARGE_BYTES", 600)
    data, before = os.urandom(3500), this_rank.count
    with ThreadPoolExecutor(1) as pool, (tmp_path / "file").open("wb") as file:
        stream = _SummedStream(file, pool)
        assert stream.write(data) == 3500
        assert this_rank.count == before + 4
        assert stream.write(b"") == 0
        sums = stream.sums()
    assert (tmp_path / "file").read_bytes() == data
    assert (sums.ends, sums.xxh3_64) == ((3500,), (xxhash.xxh3_64_hexdigest(data),))


def test_a_file_is_whole_when_it_is_synced_which_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, this_rank.num_unhurried))

    monkeypatch.setattr(os, "fsync", sync)
    with ThreadPoolExecutor(1) as pool, (tmp_path / "file").open("wb") as file:
        stream = _SummedStream(file, pool)
        stream.write(b"abc")
        stream.close()
        assert file.closed
    assert synced == [(3, 1)] and this_rank.num_unhurried == 0
