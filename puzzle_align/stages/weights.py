"""Sources of the models' initial weights, and checks that a resumed run has the same.

Weights are in a Hugging Face directory, in a checkpoint, or drawn from the seed. Equal paths do not
prove equal weights, since files may be replaced or moved. So every start hashes the whole files of
Hugging Face models, on rank 0 and the first rank of every other node; a checkpoint has the
checksums that its bytes are verified against.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job, RoleModel
from puzzle_align.config.saved import Saved, Start
from puzzle_align.files.json_file import as_json, differences
from puzzle_align.files.messages import shown
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.models.hf.sources import RandomSource, SafetensorsSource, WeightSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.runtime.liveness.activity import this_rank

if TYPE_CHECKING:
    from puzzle_align.models.chunk import ModelChunk
    from puzzle_align.runtime.checkpoint.weights import CheckpointWeights


@dataclass(frozen=True)
class NamedWeights:
    """A model's weights by their Hugging Face names, not yet read."""

    spec: ModelSpec
    source: WeightSource

    def check(self) -> None:
        """Raise a one-line ValueError if a tensor is missing or mis-shaped; reads only headers."""
        self.source.check(hf_shapes(self.spec))

    def fill(self, chunk: "ModelChunk") -> None:
        """Load this rank's tensors into a chunk and report progress; not a collective."""
        load_weights(chunk, self.spec, self.source, this_rank.went_on)

    def fingerprint(self) -> bytes:
        """Hash the files, or the seed; ValueError if a file cannot be read."""
        return self.source.fingerprint()


Weights: TypeAlias = "NamedWeights | CheckpointWeights"  # of one model, not yet read


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
        return NamedWeights(model.spec, random)
    new_head = random if source.spec.head != model.spec.head else None
    if source.saved is not None:
        from puzzle_align.runtime.checkpoint.weights import CheckpointWeights  # imports Megatron

        verify = config.checkpoint.verify
        return CheckpointWeights(source.saved, source.role, model.spec, new_head, verify)
    return NamedWeights(model.spec, SafetensorsSource(source.path, new_head))


_CURE = "put it back, or start anew with another output_dir"
_logger = logging.getLogger(__name__)

Starts = dict[str, Start]


def find_starts(job: Job) -> Starts:
    """Hash the files of all models' weights; starts by role. Collective over the world.

    Raises:
        ValueError: one line, if a node's disk has another model than rank 0's.
    """
    starts = from_rank_zero(lambda: _starts_here(job))

    def compare() -> None:
        for role, start in _starts_here(job).items():
            if start != starts[role]:
                raise ValueError(
                    f"{job.models[role].key}.path: {start.path} is another model there than on"
                    " rank 0's node: copy it again"
                )

    on_other_nodes(compare)
    return starts


def _starts_here(job: Job) -> Starts:
    starts: Starts = {}
    hashes: dict[tuple[str, ModelSpec], str] = {}  # roles may share files
    for role, model in job.models.items():
        key = (str(model.source), model.spec)
        if key not in hashes:
            hashes[key] = role_weights(model, job.config).fingerprint().hex()
        starts[role] = Start(model.path, to_hf_config(model.spec), hashes[key])
    return starts


def check_starts(job: Job, starts: Starts, saved: Saved) -> None:
    """Raise a one-line ValueError unless the run's models began with those of ``starts``.

    Models whose weights are in the checkpoint are loaded from it: if their path is unchanged, the
    files may have changed.
    """
    began: Starts | None = saved.job["starts"]
    if began is None:
        _logger.warning(
            "%s is of an older version: whether frozen models are the same is not checked",
            saved.path,
        )
        return
    for role, start in starts.items():
        before, key = began.get(role), job.models[role].key
        if before is None:
            continue
        is_saved = role in job.plan.trained or role in saved.frozen
        if is_saved and start.path == before.path:
            continue
        what = f"{key}: the {role} in {saved.path} began with"
        for name, old, new in differences("", before.model, as_json(start.model)):
            raise ValueError(
                f"{what} {shown(name)}={shown(old)}, and here is {shown(new)}: {_CURE}"
            )
        if start.weights_xxh3 != before.weights_xxh3:
            raise ValueError(f"{what} other weights than are in {start.path} now: {_CURE}")
