"""Read a checkpoint's tensors and values, verified as they are read; runs no code from it.

It uses torch's reader and Megatron's strategies without their unrestricted unpickling. Invariants
(the tests assert them):
- bytes are verified before they are used;
- a rank reads and verifies only its part, and waits for no other rank;
- a rank that reads reports progress after every piece (``liveness.activity``);
- any wrong file ends in an error of one line.
"""

import io
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint import CheckpointException, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.planner import LoadItemType

from puzzle_align.config.saved import (
    DamagedError,
    Saved,
    UnreadableError,
    cause,
    damaged,
    not_read,
    unlike,
    unreadable,
)
from puzzle_align.files.messages import shown
from puzzle_align.runtime.checkpoint.folder import first_failure
from puzzle_align.runtime.checkpoint.metadata import FORMAT, METADATA, read_metadata
from puzzle_align.runtime.liveness.activity import this_rank

_NO_MEMORY = "DefaultCPUAllocator: "  # in torch's RuntimeError when the host is out of memory
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
_GLOBAL = re.compile(r"GLOBAL (\S+)")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of loading a checkpoint's values into errors of one line.

    Only certain damage is a DamagedError, for which a checkpoint may be set aside: not a file that
    the machine cannot read now, nor intact bytes that do not load.

    Raises:
        DamagedError: if a file is missing, or the block raised one.
        ValueError: for any other error that a checkpoint's files can cause.
    """
    try:
        yield
    except (CheckpointException, Exception) as error:  # torch's is a BaseException
        inner = first_failure(error)
        if isinstance(inner, (DamagedError, UnreadableError, *_OF_THE_DEVICE)):
            raise inner from None
        if isinstance(inner, OSError):
            raise not_read(path, inner) from error
        if isinstance(inner, MemoryError) or _NO_MEMORY in str(inner):
            raise unreadable(path, inner) from error
        raise ValueError(
            f"checkpoint {path} does not load ({cause(inner)}), and is left as it is: move that"
            " directory away, and the one before it is taken"
        ) from error


def read_state(saved: Saved, state: dict[str, Any]) -> dict[str, Any]:
    """Load the entries of ``state``, a checkpoint form of Megatron's; waits for no other rank.

    ValueError if the checkpoint is damaged, or holds code.
    """
    _check_format(saved)
    reader = _Reader(saved, stored(saved))
    with reading(saved.path), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Megatron's, about torch's old names
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        return _load(saved, state, reader)


def _load(saved: Saved, state: dict[str, Any], reader: "_Reader") -> dict[str, Any]:
    """Take the steps of Megatron's ``dist_checkpointing.load``, for weights of no FP8 dtype.

    Megatron's own unpickles the unsharded values without restriction from 0.17 on.
    """
    sharded, not_saved, factories = load_preprocess(state)
    loaded = _plain(io.BytesIO(saved.read("common.pt")), saved.path, "common.pt")
    merge(loaded, not_saved)
    sharded, _ = extract_sharded_base(sharded)
    merge(loaded, _load_sharded(sharded, reader))
    return apply_factory_merges(loaded, cast(StateDict, factories))


def stored(saved: Saved) -> Metadata:
    """Read the place of each tensor in a checkpoint's files.

    ValueError if ``.metadata`` is damaged, or holds code.
    """
    data = saved.read(METADATA)
    try:
        return read_metadata(data)
    except MemoryError as error:
        raise unreadable(saved.path, error) from error
    except ValueError as error:
        raise damaged(saved.path, str(error)) from error


def _check_format(saved: Saved) -> None:
    data = saved.read("metadata.json")
    try:
        is_known = json.loads(data) == FORMAT
    except (ValueError, RecursionError):
        is_known = False
    if not is_known:
        raise unlike(saved.path, "metadata.json is not of this format")


class _Reader(torch_checkpoint.FileSystemReader):
    """torch's reader with given metadata, which verifies every piece before it is used."""

    def __init__(self, saved: Saved, metadata: Metadata) -> None:
        super().__init__(saved.path)
        self._saved, self._metadata = saved, metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata given to the reader."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Load the planned items, if all are tensors and their files have the right sizes."""
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:  # torch would unpickle it without restriction
                self._refuse(f"{shown(item.dest_index.fqn)} is no tensor: it is refused")
        files = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        for name in sorted(files):
            self._refuse(self._saved.sums(name).size_problem(self._saved.path / name))
        with _no_added_classes():
            return super().read_data(plan, planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """torch's hook, called for each piece that it reads: returns the verified bytes."""
        this_rank.went_on()
        name, data = sinfo.relative_path, super()._slice_file(file, sinfo).read()
        self._refuse(self._saved.sums(name).piece_problem(name, sinfo.offset, data))
        return io.BytesIO(data)

    def _refuse(self, problem: str | None) -> None:
        """Raise a DamagedError for a problem, if there is one."""
        if problem is not None:
            raise damaged(self._saved.path, problem)


@contextmanager
def _no_added_classes() -> Iterator[None]:
    """Restrict ``weights_only`` to torch's built-in list while the block runs.

    Megatron, torch.distributed and other packages add classes to it when they are imported.
    """
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)


def _plain(stream: io.BytesIO, path: Path, what: str) -> Any:
    """Unpickle tensors and plain values that ``torch.save`` wrote; DamagedError for any code."""
    try:
        with _no_added_classes():
            return torch.load(stream, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        foreign = f"an unknown class ({shown(named[1])})" if named else "what is no plain value"
        raise damaged(path, f"{what} holds code, or {foreign}: it is refused") from None
    except Exception as error:  # a damaged pickle can raise anything
        if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
            raise
        raise damaged(path, f"{what} holds no values ({cause(error)})") from error


def _load_sharded(state: ShardedStateDict, reader: _Reader) -> StateDict:
    """Read this rank's boxes into the tensors of ``state``; each rank plans for itself."""
    tensors = [tensor for tensor in nested_values(state) if type(tensor) is ShardedTensor]
    padded = {tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch}
    by_key, paths, names = _replace_state_dict_keys_with_sharded_keys(state)
    wanted = mcore_to_pyt_state_dict(by_key, True)
    torch_checkpoint.load(
        wanted,
        storage_reader=reader,
        planner=MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[
                tensor for tensor in tensors if not tensor.allow_shape_mismatch
            ],
            allow_shape_mismatch_sharded_tensors=padded,
        ),
        no_dist=True,
    )
    read: Any = {key: _unwrap_pyt_sharded_tensor(tensor) for key, tensor in wanted.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(read, paths, names)
    _restore_dict_types(loaded, state)
    return loaded
