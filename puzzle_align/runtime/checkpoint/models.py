"""Save and load checkpoints of a job's trained models.

A checkpoint holds all models in one directory (``runtime.checkpoint.folder``): Megatron's
distributed checkpoint, every key prefixed with its role, and ``job.json`` with the rest.
Invariants (the tests assert them):
- a save that is killed never harms the last good checkpoint;
- models may be on any ranks, shared or separate, each with a plan and an optimizer;
- each loads under any plan; under the same plan training resumes bitwise the same;
- ranks without a part of a trained model join the collectives, and save nothing.
"""

import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    extract_nonpersistent,
    extract_sharded_base,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint import CheckpointException

from puzzle_align.config.saved import Saved, cause
from puzzle_align.files.json_file import to_plain
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.weights import is_trained
from puzzle_align.runtime.checkpoint.folder import first_failure, publish
from puzzle_align.runtime.checkpoint.reader import read_state, reading
from puzzle_align.runtime.checkpoint.writer import write_state
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.collectives import (
    from_rank_zero,
    gather_everywhere,
    gather_on_rank_zero,
    sum_on_host,
)
from puzzle_align.runtime.liveness.failure import CannotGoOn, lost_peer
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.optimizer.state import (
    allocate_state,
    allow_no_shard,
    gather_in_pieces,
    load_state,
    parts_of,
    read_own_part,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Trained:
    """A model to save or load, on one of its ranks; without an optimizer, only its weights.

    ``is_frozen``: a frozen model whose weights follow a trained one's, for resuming the same run.
    """

    context: Context
    optimizer: Optimizer | None
    is_frozen: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this rank is the model's first."""
        return self.context.groups.intra_dist_opt.rank() == 0

    def metadata(self) -> dict[str, Any]:
        """The model's entry in ``job.json``."""
        return {
            "model": to_hf_config(self.context.spec),
            "dtype": self.context.precision,
            "world_size": self.context.plan.world_size,
            "plan": to_plain(self.context.plan),
            "has_optimizer": self.optimizer is not None,
            **({"lora": to_plain(self.context.spec.lora)} if self.context.spec.lora else {}),
            **({"is_frozen": True} if self.is_frozen else {}),
        }


def save_checkpoint(
    folder: Path,
    step: int,
    job: dict[str, Any],
    models: Mapping[str, Trained],
) -> Path:
    """Save models and optimizers after ``step`` steps. Collective over the world.

    Args:
        job: JSON values for ``job.json``; rank 0's are saved. ``job_id`` is the same in all
            checkpoints of a job; without one, a new id is made.
        models: by role, the models with a part on this rank; may be empty.

    Raises:
        CannotGoOn: if it cannot be written; earlier checkpoints are unharmed.
    """
    final = folder / f"step_{step:08d}"
    # A new name for every attempt: an orphan of a killed run may still write under an old one.
    scratch = folder / from_rank_zero(lambda: f".saving_{final.name}_{uuid.uuid4().hex[:8]}")
    try:
        from_rank_zero(lambda: scratch.mkdir(parents=True))
        state = {
            role: _sharded_state(role, model, loading=False)
            for role, model in sorted(models.items())
        }
        about = _gather(models, state)
        sum_on_host(torch.zeros(1))  # some models' state takes longer to gather than others'
        everyone = gather_on_rank_zero(write_state(state, scratch)) or []
        sums = {name: s for of_rank in everyone for name, s in of_rank.items()}
        saved = {"job_id": new_job_id(), **job, "step": step, "models": about}
        from_rank_zero(lambda: publish(scratch, final, saved, sums))
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        if not lost_peer(error):  # else others may still write in it; the next run deletes it
            shutil.rmtree(scratch, ignore_errors=True)
        first = first_failure(error)
        if isinstance(first, Exception) and not _is_of_disk(first):
            if first is error:
                raise
            raise first from error
        raise CannotGoOn(
            f"{final} could not be written ({cause(first)}): free space or mend the disk, and run"
            " the same command again: it goes on from the checkpoint before"
        ) from error
    return final


def _is_of_disk(error: BaseException) -> bool:
    """Whether the error is a failed write, for which torch's archives raise RuntimeError."""
    markers = ("inline_container.cc", "Parent directory")
    is_archive = isinstance(error, RuntimeError) and any(part in str(error) for part in markers)
    return is_archive or isinstance(error, OSError)


def new_job_id() -> str:
    """Make an id that distinguishes a job's checkpoints from all others."""
    return uuid.uuid4().hex


def load_checkpoint(saved: Saved, models: Mapping[str, Trained]) -> None:
    """Load models and optimizer state of a checkpoint, written under any plans.

    Collective over the world. The optimizer of a model saved without optimizer state starts afresh
    from the loaded weights.

    Args:
        models: by role, the models with a part on this rank; may be empty, or fewer than saved.

    Raises:
        ValueError: if the checkpoint is damaged, or has other roles or another kind of optimizer.
    """
    state = {role: _wanted_state(saved, role, models[role]) for role in sorted(models)}
    loaded = _together(lambda: read_state(saved, state))

    def take_over() -> None:
        with reading(saved.path):
            for role in models:
                _take_over(models[role], loaded[role])

    _together(take_over)


def _together(work: Callable[[], T]) -> T:
    """Run ``work`` on all ranks; a ValueError of one is raised on all."""
    result, failure = None, None
    try:
        result = work()
    except ValueError as error:
        failure = error
    failures = [error for error in gather_everywhere(failure) if error is not None]
    if failures:
        raise failures[0]
    return cast(T, result)


def _gather(models: Mapping[str, Trained], state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Gather unsharded state and metadata on rank 0; returns ``job.json``'s ``models`` there.

    Megatron writes only rank 0's unsharded state (an optimizer's steps and hyperparameters). So
    rank 0's ``state`` gets that of models without a part on rank 0 from their first ranks.
    """
    here = {
        role: (model.metadata(), _not_sharded(state[role]))
        for role, model in models.items()
        if model.is_first
    }
    everyone = gather_on_rank_zero(here) or []
    by_role = {role: value for of_rank in everyone for role, value in of_rank.items()}
    for role in by_role.keys() - models.keys():
        state[role] = by_role[role][1]
    return {role: by_role[role][0] for role in sorted(by_role)}


def _not_sharded(state: dict[str, Any]) -> dict[str, Any]:
    """A model's unsharded state to save, on the host."""
    _, persistent = extract_nonpersistent(state)
    _, common = extract_sharded_base(persistent)
    on_host: Any = dict_list_map_outplace(
        lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, common
    )
    return on_host


def _wanted_state(saved: Saved, role: str, model: Trained) -> dict[str, Any]:
    about = saved.metadata(role)
    wanted = model if about["has_optimizer"] else replace(model, optimizer=None)
    return _sharded_state(role, wanted, loading=True)


def _take_over(model: Trained, loaded: dict[str, Any]) -> None:
    for number, chunk in enumerate(model.context.chunks):
        is_whole = model.context.spec.lora is None  # else without the base
        chunk.load_state_dict(loaded[f"model{number}"], strict=is_whole)
    if model.optimizer is not None:
        if "optimizer" in loaded:
            load_state(model.optimizer.megatron, loaded["optimizer"])
        else:
            model.optimizer.megatron.reload_model_params()


def _sharded_state(role: str, model: Trained, *, loading: bool) -> dict[str, Any]:
    """A model's state in Megatron's checkpoint form, with keys prefixed by the role.

    Collective over the model's ranks.
    """
    context, optimizer = model.context, model.optimizer
    metadata = {
        "dp_cp_group": context.groups.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": True,  # on the first replica's host
    }
    state: dict[str, Any] = {
        f"model{number}": {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=dict(metadata)).items()
            if is_trained(context.spec, name)
        }
        for number, chunk in enumerate(context.chunks)
    }
    if optimizer is not None:
        allocate_state(optimizer.megatron)
        for part in parts_of(optimizer.megatron):
            if isinstance(part, DistributedOptimizer):
                gather_in_pieces(part, context.device)
                read_own_part(part)
                allow_no_shard(part)
        weights = state["model0"] if len(context.chunks) == 1 else dict(state)
        state["optimizer"] = optimizer.megatron.sharded_state_dict(
            weights, is_loading=loading, metadata=dict(metadata)
        )
    add_prefix_for_sharding(state, f"{role}.")
    return state
