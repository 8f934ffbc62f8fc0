"""Writes a checkpoint's tensors in the process that owns them.

Megatron-core's own writer starts a manager process and forks a writer for every file. That takes
seconds whatever the size, leaves processes behind when the job is killed, and waits for ever for a
writer that died early. torch's writer makes the same files without any process, and raises on every
rank what failed on one. Invariants (the tests assert them):
- a file is synced to the disk before it is closed, to its last byte;
- a rank that writes is seen to go on, however slowly (``liveness.activity``), and others wait for
  it as long as it takes.
"""

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch.distributed.checkpoint as torch_checkpoint
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageWriterTransforms
from torch.distributed.checkpoint.planner import WriteItem

from puzzle_align.files.checksums import PieceSums
from puzzle_align.runtime.groups.collectives import patient_group
from puzzle_align.runtime.liveness.activity import this_rank, unhurried

_CHUNK_BYTES = 2**24  # what a slow disk takes well within any time-out


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's format ``torch_dist``, which ``dist_checkpointing.load`` knows.

    ``sums``: once saved, the checksums of this rank's files by name, a piece for every tensor.
    They are of the bytes on their way to the file, which is not read again.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.sums: dict[str, PieceSums] = {}

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards to ``checkpoint_dir``. Collective over the world.

        Raises:
            CheckpointException: (torch's) on every rank, with what failed on any.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        # One thread: what fails in torch's additional writer threads is lost.
        writer = torch_checkpoint.FileSystemWriter(
            checkpoint_dir, sync_files=False, thread_count=1, per_thread_copy_ahead=0
        )
        files = writer.fs = _SummedFiles()
        writer.transforms = _Pieces()
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=writer,
            process_group=patient_group(),  # some write all of the optimizer's state, others none
            planner=MCoreSavePlanner(
                flatten_state_dict=False, can_run_decentralized_global_plan=False
            ),
        )
        self.sums = files.sums


class _SummedFiles(FileSystem):
    """torch's files, with checksums of the tensors' as they are written."""

    def __init__(self) -> None:
        self.sums: dict[str, PieceSums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file as torch does, summed if it is of tensors."""
        with super().create_stream(path, mode) as stream:
            if Path(path).suffix != ".distcp":
                yield stream
                return
            summed = _SummedStream(cast(IO[bytes], stream))
            yield cast(io.IOBase, summed)
        self.sums[Path(path).name] = summed.sums()


class _SummedStream:
    """A file that is written from its start to its end, piece by piece."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = xxhash.xxh3_64()
        self._place, self._ends, self._checksums = 0, list[int](), list[str]()

    def __getattr__(self, name: str) -> Any:
        """Pass on what else torch asks of a file: ``tell``, ``flush``."""
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        """Write all of ``data``, bytes."""
        whole = memoryview(data)
        for start in range(0, whole.nbytes, _CHUNK_BYTES):
            chunk = whole[start : start + _CHUNK_BYTES]
            self._digest.update(chunk)
            self._stream.write(chunk)
            this_rank.went_on()
        self._place += whole.nbytes
        return whole.nbytes

    def close(self) -> None:
        """Sync the file to the disk, which tells nothing of its pace, and close it."""
        with unhurried():
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._stream.close()

    def end_piece(self) -> None:
        """End a piece, if anything was written since the last: what follows is of another."""
        if self._place > (self._ends[-1] if self._ends else 0):
            self._ends.append(self._place)
            self._checksums.append(self._digest.hexdigest())
            self._digest.reset()

    def sums(self) -> PieceSums:
        """The checksums of all that was written."""
        self.end_piece()
        return PieceSums(tuple(self._ends), tuple(self._checksums))


class _Pieces(_StorageWriterTransforms):
    """torch's hook for what it writes of every tensor: here a piece begins, nothing is changed."""

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        """Begin a piece, and change nothing."""
        cast(_SummedStream, raw_stream).end_piece()
        return super().transform_save_stream(write_item, raw_stream)
