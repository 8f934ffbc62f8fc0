"""Where a role's weights come from: a Hugging Face directory, a checkpoint, or the seed."""

from dataclasses import dataclass
from typing import Protocol

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import RoleModel
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf import RandomSource, WeightSource, load_weights, open_weights
from puzzle_align.runtime.checkpoint.weights import CheckpointWeights
from puzzle_align.runtime.liveness.activity import this_rank


class Weights(Protocol):
    """A model's weights, not yet read."""

    def check(self) -> None:
        """Raise a one-line ValueError if they are not whole, or of another model; reads none."""
        ...

    def fill(self, chunk: ModelChunk) -> None:
        """Put this rank's into a chunk, in place. Waits for no other rank, and is seen to go on."""
        ...

    def fingerprint(self) -> bytes:
        """Hash of all bytes that they are read from; ValueError if a file cannot be read."""
        ...


@dataclass(frozen=True)
class _Tensors:
    """Weights by their Hugging Face names."""

    spec: ModelSpec
    source: WeightSource

    def check(self) -> None:
        """See Weights."""
        self.source.check(hf_shapes(self.spec))

    def fill(self, chunk: ModelChunk) -> None:
        """See Weights."""
        load_weights(chunk, self.spec, self.source, this_rank.went_on)

    def fingerprint(self) -> bytes:
        """Hash of the source's files, or of its seed."""
        return self.source.fingerprint()


def role_weights(model: RoleModel, config: JobConfig) -> Weights:
    """A role's weights, opened and not read.

    A scalar head, which a language model has not, is drawn from the seed; a sequence classifier,
    or a reward model's checkpoint, must have its own.

    Raises:
        ValueError: if there is nothing to open.
    """
    random = RandomSource(model.spec, config.seed)
    source = model.source
    if source is None:
        return _Tensors(model.spec, random)
    new_head = random if source.spec.head != model.spec.head else None
    if source.saved is not None:
        verify = config.checkpoint.verify
        return CheckpointWeights(source.saved, source.role, model.spec, new_head, verify)
    return _Tensors(model.spec, open_weights(source.path, new_head))
