"""Sources of a role's weights: a Hugging Face directory, a checkpoint, or the seed."""

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
        """Raise a one-line ValueError if they are incomplete or of another model; reads headers."""
        ...

    def fill(self, chunk: ModelChunk) -> None:
        """Load this rank's weights into a chunk, without waiting for ranks; reports progress."""
        ...

    def fingerprint(self) -> bytes:
        """Hash all bytes that they are read from; ValueError if a file cannot be read."""
        ...


@dataclass(frozen=True)
class _Tensors:
    """Weights by their Hugging Face names."""

    spec: ModelSpec
    source: WeightSource

    def check(self) -> None:
        """Check names and shapes from the headers."""
        self.source.check(hf_shapes(self.spec))

    def fill(self, chunk: ModelChunk) -> None:
        """Load this rank's tensors."""
        load_weights(chunk, self.spec, self.source, this_rank.went_on)

    def fingerprint(self) -> bytes:
        """Hash the source's files, or its seed."""
        return self.source.fingerprint()


def role_weights(model: RoleModel, config: JobConfig) -> Weights:
    """Open a role's weights without reading them.

    The scalar head that a language model lacks is drawn from the seed; a sequence classifier or a
    reward model's checkpoint must have one.

    Raises:
        ValueError: if the files do not exist.
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
