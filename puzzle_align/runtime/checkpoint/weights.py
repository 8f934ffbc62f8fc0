"""Initial weights from another job's checkpoint, for a model under any role and plan.

Invariants (the tests assert them):
- a rank reads only its boxes, saved under any plan (one saved rank's part of one tensor is in
  memory at a time);
- a rank waits for no other: models on separate ranks are filled in any order;
- the weights are bitwise those that ``puzzle-align convert`` writes for the model.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import xxhash
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from puzzle_align.config.saved import CHECKSUMS, Saved, damaged
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import SCALAR_HEAD, Shape
from puzzle_align.layout.weights import is_adapter, is_trained, parameter_boxes
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf.sources import RandomSource, log_new_head
from puzzle_align.runtime.checkpoint.reader import read_state, reading, stored

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+\.")


@dataclass(frozen=True)
class CheckpointWeights:
    """Weights of a checkpoint's model ``role``, for a model of dimensions ``spec``.

    If ``spec`` has adapters, they are these and a scalar head: the base is not in the checkpoint.

    ``new_head`` initialises a scalar head if the saved model is a language model; None: load the
    saved head.
    """

    saved: Saved
    role: str
    spec: ModelSpec
    new_head: RandomSource | None

    def check(self) -> None:
        """Raise a one-line ValueError if files are missing, short, or of another model.

        Reads no tensor.
        """
        if self.new_head is not None:
            log_new_head(self.saved.path, self.new_head.seed)
        stored = self._metadata.state_dict_metadata
        for key, shape in self._shapes().items():
            saved_shape = tuple(getattr(stored.get(key), "size", ()))
            if saved_shape != shape:
                has = f"has shape {saved_shape}" if saved_shape else "is missing"
                raise ValueError(
                    f"{self.saved.path}: tensor {key} {has}, job.json asks for {shape}: the two are"
                    " not of one checkpoint; take another"
                )
        self.saved.check()

    def fill(self, chunk: ModelChunk, lent: Collection[str] = ()) -> None:
        """Load this rank's weights into a chunk, but for ``lent`` parameters, in place.

        They may be saved in any precision. ValueError if the checkpoint is damaged.
        """
        state = {
            name: value
            for name, value in chunk.sharded_state_dict().items()
            if (is_trained(self.spec, name) if self.spec.lora else not is_adapter(name))
            and name not in lent
        }
        head = None if self.new_head is None else state.pop(SCALAR_HEAD.megatron, None)
        add_prefix_for_sharding(state, f"{self.role}.")
        # With all parameters lent, or but for a new head, there is nothing to read.
        weights = read_state(self.saved, {"weights": state})["weights"] if state else {}
        if self.new_head is not None and head is not None:
            (name,), (shape,) = SCALAR_HEAD.hf, SCALAR_HEAD.shapes(self.spec)
            whole = tuple((0, extent) for extent in shape)
            weights[SCALAR_HEAD.megatron] = self.new_head.read(name, shape, whole)
        with reading(self.saved.path):
            # With adapters or lent weights, the state has a part of the chunk's parameters.
            chunk.load_state_dict(weights, strict=not (chunk.adapters or lent))

    def fingerprint(self) -> bytes:
        """Hash of the checksums of the weights on disk, without optimizer state.

        ValueError if there is none of a part.
        """
        keys, digest = self._shapes(), xxhash.xxh3_128()
        stored = [
            (index.fqn, tuple(index.offset or ()), info)
            for index, info in self._metadata.storage_data.items()
            if index.fqn in keys
        ]
        with reading(self.saved.path):
            for key, place, info in sorted(stored, key=lambda entry: entry[:2]):
                digest.update(f"{key} {place} {self._checksum(info)};".encode())
        return digest.digest()

    def other_fingerprints(self) -> list[bytes]:
        """Hash of the weights with the head that a new one replaces, if there is a new one."""
        if self.new_head is None:
            return []
        return [replace(self, spec=replace(self.spec, head="lm"), new_head=None).fingerprint()]

    def _checksum(self, info: _StorageInfo) -> str:
        """Checksum of a saved part of a tensor."""
        name, place = info.relative_path, (info.offset, info.length)
        checksum = self.saved.sums(name).piece_sum(*place)
        if checksum is None:
            raise damaged(self.saved.path, f"{CHECKSUMS} has none of {name} at byte {info.offset}")
        return checksum

    @cached_property
    def _metadata(self) -> Metadata:
        """Place of each tensor in the checkpoint's files."""
        return stored(self.saved)

    def _shapes(self) -> dict[str, Shape]:
        """Shapes of the tensors to read, by key; all layers share a key, stacked layers first."""
        shapes: dict[str, Shape] = {}
        alone = parameter_boxes(self.spec, ParallelPlan(), 0, 0, fused_norms=True)
        for name, parameter in alone.items():
            if not is_trained(self.spec, name):
                continue
            layers = (self.spec.num_hidden_layers,) if _LAYER.search(name) else ()
            shapes[f"{self.role}.{_LAYER.sub('', name)}"] = (*layers, *parameter.shape)
        if self.new_head is not None:
            del shapes[f"{self.role}.{SCALAR_HEAD.megatron}"]
        return shapes
