"""Write a checkpoint's tensors in the rank's process, without other writers.

Megatron-core's writer starts a manager process and forks a writer for every file. That takes
seconds whatever the size, leaves processes behind when the job is killed, and waits forever for a
writer that died early. torch's writer makes the same files without other processes, and raises one
rank's error on every rank. Invariants (the tests assert them):
- a file is completely synced to the disk before it is closed;
- a rank that writes reports progress, however slow (``liveness.activity``), and others wait for it
  as long as it takes.
"""

import io
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as torch_checkpoint
import xxhash
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageWriterTransforms
from torch.distributed.checkpoint.planner import WriteItem

from puzzle_align.files.checksums import PieceSums
from puzzle_align.runtime.checkpoint.metadata import FORMAT
from puzzle_align.runtime.groups.collectives import from_rank_zero, patient_group
from puzzle_align.runtime.liveness.activity import this_rank, unhurried

_CHUNK_BYTES = 2**24  # a slow disk writes it well within any time-out


def write_state(state: dict[str, Any], folder: Path) -> dict[str, PieceSums]:
    """Write ``state`` to a new directory in Megatron's format ``torch_dist``, version 1.

    Every version of Megatron-core writes the same bytes, with rank 0's unsharded values in
    ``common.pt``. Collective over the world.

    Returns:
        Checksums of this rank's files by name, a piece for every tensor. They are computed while
        writing: no file is read again.

    Raises:
        CheckpointException: (torch's) on every rank, with every rank's errors.
        OSError: on every rank, if rank 0 cannot write the unsharded values.
    """
    sharded: Any  # Megatron would warn that ranks' unsharded values differ: it is shown none
    sharded, common = save_preprocess(state, True, lambda _: {})

    def write_small() -> None:
        whole = io.BytesIO()  # a full disk is then an OSError
        torch.save(common, whole)
        (folder / "common.pt").write_bytes(whole.getbuffer())
        (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")

    from_rank_zero(write_small)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    # One thread: errors in torch's additional writer threads are lost.
    writer = torch_checkpoint.FileSystemWriter(
        folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0
    )
    files = writer.fs = _SummedFiles()
    writer.transforms = _Pieces()
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(by_key, False),
        storage_writer=writer,
        process_group=patient_group(),  # some ranks write all optimizer state, others none
        planner=MCoreSavePlanner(flatten_state_dict=False, can_run_decentralized_global_plan=False),
    )
    return files.sums


class _SummedFiles(FileSystem):
    """torch's file system, which computes checksums of tensors' files as they are written."""

    def __init__(self) -> None:
        self.sums: dict[str, PieceSums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file as torch does, with checksums if it holds tensors."""
        with super().create_stream(path, mode) as stream:
            if Path(path).suffix != ".distcp":
                yield stream
                return
            summed = _SummedStream(cast(IO[bytes], stream))
            yield cast(io.IOBase, summed)
        self.sums[Path(path).name] = summed.sums()


class _SummedStream:
    """A file that is written in order, piece by piece, with a checksum for each."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = xxhash.xxh3_64()
        self._place, self._ends, self._checksums = 0, list[int](), list[str]()

    def __getattr__(self, name: str) -> Any:
        """Forward other methods that torch calls: ``tell``, ``flush``."""
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        """Write all of ``data``, in chunks."""
        whole = memoryview(data)
        for start in range(0, whole.nbytes, _CHUNK_BYTES):
            chunk = whole[start : start + _CHUNK_BYTES]
            self._digest.update(chunk)
            self._stream.write(chunk)
            this_rank.went_on()
        self._place += whole.nbytes
        return whole.nbytes

    def close(self) -> None:
        """Sync the file to the disk, without a time-out since it shows no progress; close it."""
        with unhurried():
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._stream.close()

    def end_piece(self) -> None:
        """End the current piece, if anything was written since the last one."""
        if self._place > (self._ends[-1] if self._ends else 0):
            self._ends.append(self._place)
            self._checksums.append(self._digest.hexdigest())
            self._digest.reset()

    def sums(self) -> PieceSums:
        """End the last piece and return the checksums of all pieces."""
        self.end_piece()
        return PieceSums(tuple(self._ends), tuple(self._checksums))


class _Pieces(_StorageWriterTransforms):
    """torch's hook for every tensor that it writes: begins a piece."""

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        """Begin a piece; the bytes stay unchanged."""
        cast(_SummedStream, raw_stream).end_piece()
        return super().transform_save_stream(write_item, raw_stream)
