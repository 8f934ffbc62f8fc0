"""Sources of the models' initial weights, and checks that a resumed run has the same.

Weights are in a Hugging Face directory, in a checkpoint, or drawn from the seed. Equal paths do not
prove equal weights, since files may be replaced or moved. So every start hashes the whole files of
Hugging Face models, on rank 0 and the first rank of every other node; a checkpoint has the
checksums that its bytes are verified against.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import ModelPaths, NamedModel
from puzzle_align.config.resolve import Job, RoleModel
from puzzle_align.config.saved import Saved, Start
from puzzle_align.files.json_file import as_json, differences
from puzzle_align.files.messages import shown
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.model import ModelSpec, without_adapters
from puzzle_align.layout.rules import SCALAR_HEAD
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.models.hf.adapters import BASE_HASH, NewAdapters, open_adapters
from puzzle_align.models.hf.sources import RandomSource, SafetensorsSource, WeightSource
from puzzle_align.models.hf.weights import check_adapters, load_adapters, load_weights
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.runtime.liveness.activity import this_rank

if TYPE_CHECKING:
    from puzzle_align.models.chunk import ModelChunk
    from puzzle_align.runtime.checkpoint.weights import CheckpointWeights

_DRAWN = "the model drawn from the seed"


@dataclass(frozen=True)
class NamedWeights:
    """A model's weights by their Hugging Face names, not yet read."""

    spec: ModelSpec
    source: WeightSource

    def check(self) -> None:
        """Raise a one-line ValueError if a tensor is missing or mis-shaped; reads only headers."""
        self.source.check(hf_shapes(self.spec))

    def fill(self, chunk: "ModelChunk", lent: Collection[str] = ()) -> None:
        """Load this rank's tensors into a chunk and report progress; not a collective.

        ``lent``: names of parameters that are in another model's memory.
        """
        load_weights(chunk, self.spec, self.source, this_rank.went_on, lent)

    def fingerprint(self) -> bytes:
        """Hash the files, or the seed; ValueError if a file cannot be read."""
        return self.source.fingerprint()

    def other_fingerprints(self) -> list[bytes]:
        """None: files have one hash whatever head the model gets."""
        return []


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
    """Weights of a base, and of adapters on it, not yet read.

    ``trained_on`` is the hash of the base that they were trained on, and where the two are.
    """

    base: "NamedWeights | CheckpointWeights"
    adapters: "NamedAdapters | CheckpointWeights"
    trained_on: "TrainedOn | None" = None

    @property
    def spec(self) -> ModelSpec:
        """The model with its adapters."""
        return self.adapters.spec

    def check(self) -> None:
        """Raise a one-line ValueError if a tensor is missing or mis-shaped."""
        self.base.check()
        self.adapters.check()

    def fill(self, chunk: "ModelChunk", lent: Collection[str] = ()) -> None:
        """Load this rank's tensors into a chunk, but for ``lent`` ones; not a collective."""
        self.base.fill(chunk, lent)
        self.adapters.fill(chunk)

    def fingerprint(self) -> bytes:
        """Hash the files of both.

        ValueError if a file cannot be read, or the adapters were trained on another base.
        """
        base = self.base.fingerprint()
        if self.trained_on is not None:
            self.trained_on.check([base, *self.base.other_fingerprints()])
        return base + self.adapters.fingerprint()


@dataclass(frozen=True)
class TrainedOn:
    """The base that adapters were trained on: its hash; and the places of base and adapters.

    A hash may go on, with that of a new head or of adapters: the base's has the first 16 bytes.
    """

    hash: str  # hexadecimal
    base: str
    adapters: str

    def check(self, bases: Collection[bytes]) -> None:
        """Raise a one-line ValueError unless the base has one of these hashes."""
        if not any(self.hash.startswith(base[:16].hex()) for base in bases):
            raise ValueError(
                f"{self.base} has other weights than the adapters in {self.adapters} were trained "
                "on, or the same ones in other files: give what they were trained on"
            )


Weights: TypeAlias = "NamedWeights | CheckpointWeights | AdaptedWeights"  # of one model


def role_weights(model: RoleModel, config: JobConfig) -> Weights:
    """Open a role's weights without reading them.

    The scalar head that a language model lacks is drawn from the seed; a sequence classifier or a
    reward model's checkpoint must have one.

    Raises:
        ValueError: if the files do not exist, or have no head for a frozen reward model.
    """
    lora, files, place = model.lora, model.source, model.path or _DRAWN
    if model.spec.lora is None:
        return _base_weights(model, config)
    if lora is None:
        assert files is not None and files.saved is not None
        head = RandomSource(model.spec, config.seed) if model.has_new_head else None
        return saved_adapters(files.saved, files.role, model.spec, head)
    base = _base_weights(model, config)
    if lora.path is None:
        source = NewAdapters(lora.init_lora_weights == "gaussian", config.seed)
        return AdaptedWeights(base, NamedAdapters(model.spec, source))
    source = open_adapters(lora.path)
    if model.optimizer is None and model.has_new_head and not source.holds(*SCALAR_HEAD.hf):
        raise ValueError(
            f"{lora.path}: no {SCALAR_HEAD.hf[0]} is there, and {files} has no trained reward "
            "head; give what stage=reward trained"
        )
    base_hash = source.metadata().get(BASE_HASH)
    trained_on = None if base_hash is None else TrainedOn(base_hash, place, lora.path)
    return AdaptedWeights(base, NamedAdapters(model.spec, source), trained_on)


def _base_weights(model: RoleModel, config: JobConfig) -> "NamedWeights | CheckpointWeights":
    spec, source = without_adapters(model.spec), model.source
    random = RandomSource(spec, config.seed)
    if source is None:
        return NamedWeights(spec, random)
    new_head = random if model.has_new_head else None
    if source.saved is None:
        return NamedWeights(spec, SafetensorsSource(source.path, new_head))
    if source.spec.lora is not None:
        return base_of(source.saved, source.role, spec)
    from puzzle_align.runtime.checkpoint.weights import CheckpointWeights  # imports Megatron

    return CheckpointWeights(source.saved, source.role, spec, new_head)


def saved_adapters(
    saved: Saved, role: str, spec: ModelSpec, new_head: RandomSource | None = None
) -> AdaptedWeights:
    """A model with the adapters of a checkpoint's ``role``, and their base.

    ValueError, one line, if the base is gone.
    """
    from puzzle_align.runtime.checkpoint.weights import CheckpointWeights  # imports Megatron

    start: Start = saved.job["starts"][role]
    trained_on = TrainedOn(start.weights_xxh3, start.path or _DRAWN, str(saved.path))
    return AdaptedWeights(
        base_of(saved, role, without_adapters(spec)),
        CheckpointWeights(saved, role, spec, new_head),
        trained_on,
    )


def base_of(saved: Saved, role: str, spec: ModelSpec) -> "NamedWeights | CheckpointWeights":
    """The base of a checkpoint's adapters, for a model of dimensions ``spec``.

    ValueError, one line, if it is gone.
    """
    start: Start = saved.job["starts"][role]
    key, seed = f"{start.role or role}.model", saved.job["config"]["seed"]
    is_random = bytes.fromhex(start.weights_xxh3).startswith(RandomSource(spec, seed).fingerprint())
    model = RoleModel(
        role=role,
        key=key,
        spec=spec,
        files=None if start.path is None else ModelPaths().model(start.path, key),
        random_weights=is_random,
    )
    return _base_weights(model, JobConfig(seed=seed))


_CURE = "put it back, or start anew with another output_dir"

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
    for role, model in job.models.items():
        weights_hash = role_weights(model, job.config).fingerprint().hex()
        began = to_hf_config(model.spec), weights_hash, _saved_role(model.source)
        starts[role] = Start(model.path, *began)
    return starts


def _saved_role(source: NamedModel | None) -> str:
    """The role of a model, or of the base of adapters, in the checkpoint that holds it."""
    if source is None or source.saved is None:
        return ""
    if source.spec.lora is None:
        return source.role
    start: Start = source.saved.job["starts"][source.role]
    return start.role


def check_starts(job: Job, starts: Starts, saved: Saved) -> None:
    """Raise a one-line ValueError unless the run's models began with those of ``starts``.

    Models whose weights are in the checkpoint are loaded from it: if their path is unchanged, the
    files may have changed.
    """
    began: Starts = saved.job["starts"]
    if not began:  # saved before starts were
        return
    _check_same_roles(starts, began, saved)
    for role, start in starts.items():
        before, key = began[role], job.models[role].key
        has_base = job.models[role].spec.lora is None  # else only the adapters are saved
        is_saved = (role in job.plan.trained and has_base) or role in saved.frozen
        if is_saved and start.path == before.path:
            continue
        what = f"{key}: the {role} in {saved.path} began with"
        for name, old, new in differences("", before.model, as_json(start.model)):
            raise ValueError(
                f"{what} {shown(name)}={shown(old)}, and here is {shown(new)}: {_CURE}"
            )
        if start.weights_xxh3 != before.weights_xxh3:
            now = "are drawn from seed" if start.path is None else f"are in {start.path} now"
            if any(model.spec.lora for model in job.models.values()):
                now += f", or other adapters ({role}.lora)"
            raise ValueError(f"{what} other weights than {now}: {_CURE}")


def _check_same_roles(starts: Starts, began: Starts, saved: Saved) -> None:
    """Raise a one-line ValueError if a role has come or gone: rewards would change midway."""
    for role in sorted(starts.keys() - began.keys()):
        raise ValueError(
            f"{role}.model: the job in {saved.path} began without a {role}: leave it out, or start"
            " anew with another output_dir"
        )
    for role in sorted(began.keys() - starts.keys()):
        where = began[role].path or "random weights"
        raise ValueError(
            f"{role}.model: the job in {saved.path} began with a {role} ({where}), and here is"
            f" none: {_CURE}"
        )
