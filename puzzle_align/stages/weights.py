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
from puzzle_align.config.model_path import ModelPaths
from puzzle_align.config.resolve import Job, RoleModel
from puzzle_align.config.saved import Saved, Start
from puzzle_align.config.sections.output import CheckpointConfig
from puzzle_align.files.json_file import as_json, differences
from puzzle_align.files.messages import shown
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.model import ModelSpec, without_adapters
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.models.hf.adapters import NewAdapters, open_adapters
from puzzle_align.models.hf.sources import RandomSource, SafetensorsSource, WeightSource
from puzzle_align.models.hf.weights import check_adapters, load_adapters, load_weights
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


@dataclass(frozen=True)
class NamedAdapters:
    """A model's adapters by PEFT's names, not yet read."""

    spec: ModelSpec
    source: WeightSource

    def check(self) -> None:
        """Raise a one-line ValueError if a tensor is missing or mis-shaped; reads only headers."""
        check_adapters(self.spec, self.source)

    def fill(self, chunk: "ModelChunk") -> None:
        """Load this rank's adapters into a chunk; not a collective."""
        load_adapters(chunk, self.spec, self.source)

    def fingerprint(self) -> bytes:
        """Hash the file, or the seed; ValueError if it cannot be read."""
        return self.source.fingerprint()


@dataclass(frozen=True)
class AdaptedWeights:
    """Weights of a base, and of adapters on it, not yet read."""

    base: "NamedWeights | CheckpointWeights"
    adapters: "NamedAdapters | CheckpointWeights"

    @property
    def spec(self) -> ModelSpec:
        """The model with its adapters."""
        return self.adapters.spec

    def check(self) -> None:
        """Raise a one-line ValueError if a tensor is missing or mis-shaped."""
        self.base.check()
        self.adapters.check()

    def fill(self, chunk: "ModelChunk") -> None:
        """Load this rank's tensors into a chunk; not a collective."""
        self.base.fill(chunk)
        self.adapters.fill(chunk)

    def fingerprint(self) -> bytes:
        """Hash the files of both; ValueError if one cannot be read."""
        return self.base.fingerprint() + self.adapters.fingerprint()


Weights: TypeAlias = "NamedWeights | CheckpointWeights | AdaptedWeights"  # of one model


def role_weights(model: RoleModel, config: JobConfig) -> Weights:
    """Open a role's weights without reading them.

    The scalar head that a language model lacks is drawn from the seed; a sequence classifier or a
    reward model's checkpoint must have one.

    Raises:
        ValueError: if the files do not exist.
    """
    base, lora = _base_weights(model, config), model.lora
    if lora is None:
        return base
    source = NewAdapters(lora.init_lora_weights == "gaussian", config.seed)
    if lora.path is not None:
        source = open_adapters(lora.path)
    return AdaptedWeights(base, NamedAdapters(model.spec, source))


def _base_weights(model: RoleModel, config: JobConfig) -> "NamedWeights | CheckpointWeights":
    spec = without_adapters(model.spec)
    random = RandomSource(spec, config.seed)
    source = model.source
    if source is None:
        return NamedWeights(spec, random)
    new_head = random if source.spec.head != spec.head else None
    if source.saved is not None:
        from puzzle_align.runtime.checkpoint.weights import CheckpointWeights  # imports Megatron

        verify = config.checkpoint.verify
        return CheckpointWeights(source.saved, source.role, spec, new_head, verify)
    return NamedWeights(spec, SafetensorsSource(source.path, new_head))


def base_of(
    saved: Saved, role: str, spec: ModelSpec, *, verify: bool = True
) -> "NamedWeights | CheckpointWeights":
    """The base that a checkpoint's adapters were trained on.

    Raises:
        ValueError: one line, if it is gone, or another one is in its place.
    """
    start, config = saved.job["starts"][role], saved.job["config"]
    key = f"{role}.model"
    model = RoleModel(
        role=role,
        key=key,
        spec=spec,
        files=None if start.path is None else ModelPaths().model(start.path, key),
        random_weights=bool(config[role]["model"]["random_weights"]),
    )
    checks = CheckpointConfig(verify=verify)
    base = _base_weights(model, JobConfig(seed=config["seed"], checkpoint=checks))
    if not start.weights_xxh3.startswith(base.fingerprint().hex()):
        raise ValueError(
            f"{start.path} has other weights than the adapters in {saved.path} were trained on: "
            "put those back"
        )
    return base


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
    hashes: dict[tuple[str, str | None, ModelSpec], str] = {}  # roles may share files
    for role, model in job.models.items():
        adapters = model.lora and model.lora.path
        key = (str(model.source), adapters, model.spec)
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
        has_base = job.models[role].lora is None  # else only the adapters are saved
        is_saved = (role in job.plan.trained and has_base) or role in saved.frozen
        if is_saved and start.path == before.path:
            continue
        what = f"{key}: the {role} in {saved.path} began with"
        for name, old, new in differences("", before.model, as_json(start.model)):
            raise ValueError(
                f"{what} {shown(name)}={shown(old)}, and here is {shown(new)}: {_CURE}"
            )
        if start.weights_xxh3 != before.weights_xxh3:
            raise ValueError(f"{what} other weights than are in {start.path} now: {_CURE}")
