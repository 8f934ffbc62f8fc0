"""From a job's config to what it means on this machine: device, models, plans."""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from puzzle_align.config.job import EngineConfig, JobConfig, ModelConfig
from puzzle_align.config.roles import (
    resolve_role_plan,
    resolve_role_spec,
    role_model,
    role_names,
    role_parallel,
    role_ranks,
)
from puzzle_align.layout.model import (
    AttentionBackend,
    ModelOptions,
    ModelSpec,
    from_hf_config,
    read_hf_config,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.hf_weights import (
    RandomSource,
    WeightSource,
    load_weights,
    open_weights,
)
from puzzle_align.runtime.context import Context, build_context
from puzzle_align.runtime.groups import Communicators, World

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """The engine section with every ``auto`` decided."""

    device: str  # cpu | cuda
    options: ModelOptions


@dataclass(frozen=True)
class RoleSetup:
    """One model of the job, resolved."""

    spec: ModelSpec
    plan: ParallelPlan
    ranks: range
    options: ModelOptions
    model: ModelConfig
    seed: int

    def weights(self) -> WeightSource:
        """Where its weights come from (opened, not read)."""
        return weight_source(self.model, self.spec, self.seed)

    def fingerprint(self) -> str:
        """Hash of the model: dimensions, precision and every weight (reads all files)."""
        digest = hashlib.sha256(repr((self.spec, self.options.dtype)).encode())
        if self.model.path is None or self.model.random_weights:
            digest.update(f"random {self.seed}".encode())
            return digest.hexdigest()
        for file in sorted(Path(self.model.path).glob("*.safetensors")):
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


def weight_source(model: ModelConfig, spec: ModelSpec, seed: int) -> WeightSource:
    """Where a model's weights come from: its files, opened and not read, or ``seed``.

    A scalar head, which the files of a language model have not, is drawn from the seed; those of a
    sequence classifier must have theirs.

    Raises:
        ValueError: if there are no files to open.
    """
    random = RandomSource(spec, seed)
    if model.path is None or model.random_weights:
        return random
    path = Path(model.path)
    own = from_hf_config(read_hf_config(path), f"{path}/config.json")
    return open_weights(path, random if own.head != spec.head else None)


def resolve_engine(config: EngineConfig, *, elsewhere: bool = False) -> Engine:
    """Decide device, precision, attention and layer implementation.

    Args:
        elsewhere: the job is for another machine, which has the device that it names.

    Raises:
        ValueError: if the config asks for what this machine does not have.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise ValueError("engine.device=cuda: torch sees no CUDA device; set engine.device=cpu")
    on_gpu = device == "cuda"
    implementation = config.transformer_impl
    if implementation == "auto":
        implementation = "te" if on_gpu and _has_transformer_engine() else "local"
    attention = config.attention
    if attention == "auto":
        attention = "flex" if on_gpu else "segments"
    if attention == "flex" and not on_gpu:
        raise ValueError(
            "engine.attention=flex: FlexAttention has no backward on CPU; set it to segments"
        )
    options = ModelOptions(
        dtype=("bf16" if on_gpu else "fp32") if config.dtype == "auto" else config.dtype,
        attention=cast(AttentionBackend, attention),
        transformer_impl=implementation,
        logprob_chunk_size=config.logprob_chunk_size,
    )
    return Engine(device, options)


def _has_transformer_engine() -> bool:
    """Whether it can be imported; one that is installed and cannot is worth a warning."""
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        if error.name != "transformer_engine":
            reason = " ".join(str(error).split())
            _logger.warning(
                "Transformer Engine cannot be imported (%s): Megatron's own layers are used", reason
            )
        return False
    return True


def resolve_role(config: JobConfig, role: str, engine: Engine, world_size: int) -> RoleSetup:
    """One role's model and plan; what the reference leaves out is the actor's.

    Raises:
        ValueError: if the plan does not fit the world, or the architecture is not supported.
    """
    model, _ = role_model(config, role)
    parallel, _ = role_parallel(config, role)
    return RoleSetup(
        spec=resolve_role_spec(config, role),
        plan=resolve_role_plan(config, role, world_size),
        ranks=role_ranks(config, role, world_size),
        options=replace(engine.options, recompute=parallel.recompute),
        model=model,
        seed=config.seed,
    )


def resolve_roles(config: JobConfig, engine: Engine, world_size: int) -> dict[str, RoleSetup]:
    """All roles of a job, by name. ValueError as ``resolve_role``."""
    return {role: resolve_role(config, role, engine, world_size) for role in role_names(config)}


def build_role(
    role: str, setup: RoleSetup, world: World, communicators: Communicators | None = None
) -> Context:
    """Build a role's model and fill it with its weights. Collective over its ranks.

    Args:
        communicators: of a model that is not on all ranks.
    """
    source = setup.weights()
    return build_context(
        role,
        setup.spec,
        setup.options,
        setup.plan,
        world,
        fill=lambda chunk: load_weights(chunk, setup.spec, source),
        seed=setup.seed,
        communicators=communicators,
    )
