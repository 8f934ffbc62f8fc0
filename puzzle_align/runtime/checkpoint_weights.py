"""The weights of a finished checkpoint as another job's start: a model under any name and plan.

Invariants (the tests assert them):
- every rank takes the boxes that it holds, no more, whatever plan they were saved under (of what
  was saved, one rank's part of one tensor is in memory at a time);
- it waits for no other rank: models on ranks of their own are filled in any order;
- what is read is what ``puzzle-align convert`` would write of the model, bit for bit.
"""

import hashlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from puzzle_align.config.saved import Saved, damaged
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import SCALAR_HEAD, Shape
from puzzle_align.layout.weights import parameter_boxes
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf_weights import RandomSource, tell_of_new_head
from puzzle_align.runtime.checkpoint import DAMAGE
from puzzle_align.runtime.checkpoint_folder import cause

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+\.")
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class CheckpointWeights:
    """A model of a checkpoint, whose weights fill a model of dimensions ``spec``.

    ``role`` is whose it is in the checkpoint. ``new_head``: what a scalar head starts from where
    the saved model is a language model; None: its own is taken.
    """

    saved: Saved
    role: str
    spec: ModelSpec
    new_head: RandomSource | None

    def check(self) -> None:
        """Raise a one-line ValueError if files are missing or short, or of another model.

        Reads no tensor.
        """
        if self.new_head is not None:
            tell_of_new_head(self.saved.path, self.new_head.seed)
        stored = self._metadata.state_dict_metadata
        for key, shape in self._shapes().items():
            found = tuple(getattr(stored.get(key), "size", ()))
            if found != shape:
                has = f"has shape {found}" if found else "is missing"
                raise ValueError(
                    f"{self.saved.path}: tensor {key} {has}, job.json asks for {shape}: the two are"
                    " not of one checkpoint; take another"
                )
        for name, end in self._ends().items():
            file = self.saved.path / name
            if not file.is_file() or file.stat().st_size < end:
                raise damaged(self.saved.path, f"{name} is missing or cut short")

    def fill(self, chunk: ModelChunk) -> None:
        """Put this rank's weights into a chunk, in place, whatever their precision was.

        Raises:
            ValueError: if the checkpoint is damaged.
        """
        state = chunk.sharded_state_dict()
        head = None if self.new_head is None else state.pop(SCALAR_HEAD.megatron, None)
        add_prefix_for_sharding(state, f"{self.role}.")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # Megatron's, about torch's names
                loaded: Any = dist_checkpointing.load(
                    {"weights": state},
                    str(self.saved.path),
                    sharded_strategy=_OwnBoxes(),
                    validate_access_integrity=False,  # would ask all ranks
                )
        except DAMAGE as error:
            raise damaged(self.saved.path, cause(error)) from error
        weights = loaded["weights"]
        if self.new_head is not None and head is not None:
            (name,), (shape,) = SCALAR_HEAD.hf, SCALAR_HEAD.shapes(self.spec)
            whole = tuple((0, extent) for extent in shape)
            weights[SCALAR_HEAD.megatron] = self.new_head.read(name, shape, whole)
        chunk.load_state_dict(weights)

    def fingerprint(self) -> bytes:
        """Hash of the weights' bytes on disk, optimizer state left out; reads all of them."""
        keys, digest = self._shapes(), hashlib.sha256()
        stored = [
            (index.fqn, tuple(index.offset or ()), info)
            for index, info in self._metadata.storage_data.items()
            if index.fqn in keys
        ]
        for key, offset, info in sorted(stored, key=lambda entry: entry[:2]):
            digest.update(f"{key} {offset}".encode())
            for block in _blocks(self.saved.path / info.relative_path, info.offset, info.length):
                digest.update(block)
        return digest.digest()

    @cached_property
    def _metadata(self) -> Any:
        """What lies where in the checkpoint's files."""
        try:
            return torch_checkpoint.FileSystemReader(self.saved.path).read_metadata()
        except DAMAGE as error:
            raise damaged(self.saved.path, cause(error)) from error

    def _shapes(self) -> dict[str, Shape]:
        """The whole tensors that are read, by their keys: of all layers' one, layer by layer."""
        shapes: dict[str, Shape] = {}
        alone = parameter_boxes(self.spec, ParallelPlan(), 0, 0, fused_norms=True)
        for name, parameter in alone.items():
            layers = (self.spec.num_hidden_layers,) if _LAYER.search(name) else ()
            shapes[f"{self.role}.{_LAYER.sub('', name)}"] = (*layers, *parameter.shape)
        if self.new_head is not None:
            del shapes[f"{self.role}.{SCALAR_HEAD.megatron}"]
        return shapes

    def _ends(self) -> dict[str, int]:
        """How long the files of these tensors must be, at least."""
        keys, ends = self._shapes(), dict[str, int]()
        for index, info in self._metadata.storage_data.items():
            if index.fqn in keys:
                end = info.offset + info.length
                ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        return ends


class _OwnBoxes(TorchDistLoadShardedStrategy):
    """Megatron's loading without its meeting of all ranks, each of which plans for itself."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read this rank's boxes into the tensors of ``sharded_state_dict``."""
        tensors: list[Any] = list(nested_values(sharded_state_dict))
        padded = {own.key: own for own in tensors if own.allow_shape_mismatch}
        by_key, paths, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        wanted = mcore_to_pyt_state_dict(by_key, True)
        torch_checkpoint.load(
            wanted,
            storage_reader=torch_checkpoint.FileSystemReader(checkpoint_dir),
            planner=MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[
                    own for own in tensors if not own.allow_shape_mismatch
                ],
                allow_shape_mismatch_sharded_tensors=padded,
            ),
            no_dist=True,
        )
        read: Any = {key: _unwrap_pyt_sharded_tensor(own) for key, own in wanted.items()}
        return _replace_sharded_keys_with_state_dict_keys(read, paths, names)


def _blocks(file: Path, start: int, length: int) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, a portion at a time."""
    with file.open("rb") as stream:
        stream.seek(start)
        while length > 0 and (block := stream.read(min(length, _BLOCK_BYTES))):
            length -= len(block)
            yield block
