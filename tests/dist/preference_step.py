"""One DPO loss and all its gradients under a plan, each shard with its place in the whole."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from puzzle_align.algos.preference import PairLogps, preference_loss
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.layout.model import AttentionBackend, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import Context, freeze
from puzzle_align.runtime.groups.collectives import sum_over_world
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.row_input import RowInput, to_device
from tests.dist.random_models import make_pairs, pair_loader, random_context, trainable
from tools.one_model import accumulate_gradients, response_outputs


@dataclass(frozen=True)
class Case:
    """A plan and how the rows are made."""

    plan: ParallelPlan
    layout: str = "shared"
    packed: bool = True
    row_tokens: int = 64
    attention: AttentionBackend = "segments"
    recompute: str = "none"
    overlap: bool = False
    ranks: tuple[int, ...] | None = None  # None: in their order


@dataclass(frozen=True)
class Shard:
    """A box of a global gradient."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray


def run_case(
    rank: int, world_size: int, spec: ModelSpec, case: Case, num_pairs: int
) -> tuple[float, list[Shard]]:
    """Loss of one global batch and this rank's gradient shards (policy and reference differ)."""
    world = World(rank, world_size, torch.device("cpu"))
    policy, reference = (_model(role, spec, case, world) for role in ("actor", "reference"))
    freeze(reference)
    optimizer = trainable(policy, OptimizerConfig(overlap_grad_reduce=case.overlap))
    loader = pair_loader(
        make_pairs(num_pairs, spec.vocab_size, seed=5),
        policy,
        num_pairs,
        row_tokens=case.row_tokens,
        layout=case.layout,
        packed=case.packed,
    )
    batch = loader.batch(0)
    rows = [to_device(m, case.attention, world.device) for m in batch.microbatches]
    table = response_outputs(reference, rows, batch.num_examples, 2)
    total = torch.zeros(1, dtype=torch.float64)

    def loss(row: RowInput, log_probs: torch.Tensor) -> torch.Tensor:
        logps = PairLogps(
            chosen=log_probs[:, 0],
            rejected=log_probs[:, 1],
            ref_chosen=table[row.examples, 0],
            ref_rejected=table[row.examples, 1],
            chosen_lengths=row.lengths[:, 0],
            rejected_lengths=row.lengths[:, 1],
            chosen_likelihood=log_probs[:, 0],
            rejected_likelihood=log_probs[:, 1],
            mean_nll_length=1.0,
        )
        losses, _, _ = preference_loss(logps, DPOConfig(loss_type="sigmoid", beta=0.5))
        if policy.is_output_rank:
            total.add_(losses.sum().detach())
        return losses.sum() / batch.num_examples

    accumulate_gradients(policy, rows, loss)
    optimizer.reduce_gradients()
    return float(sum_over_world(total)) / batch.num_examples, gradient_shards(policy)


def _model(role: str, spec: ModelSpec, case: Case, world: World) -> Context:
    seed = {"actor": 1, "reference": 2}[role]
    return random_context(
        spec,
        case.plan,
        world,
        seed=seed,
        role=role,
        ranks=case.ranks,
        trained=role == "actor",
        attention=case.attention,
        recompute=case.recompute,
        logprob_chunk_size=7,
    )


def gradient_shards(context: Context) -> list[Shard]:
    """This rank's reduced gradients, by their names and places in checkpoints."""
    shards = []
    for chunk in context.chunks:
        gradients = {name: p.main_grad for name, p in chunk.named_parameters() if p.requires_grad}
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": context.groups.dp_cp})
        state = {name: entry for name, entry in state.items() if name in gradients}
        for name, entry in state.items():
            entry.data = gradients[name]
        apply_factories(state)
        for entry in nested_values(state):
            if isinstance(entry, ShardedTensor) and entry.data is not None:
                values = entry.data.detach().numpy().copy()
                values = values.reshape((1,) * entry.prepend_axis_num + values.shape)
                shards.append(Shard(entry.key, entry.global_shape, entry.global_offset, values))
    return shards


def assemble(shards: list[Shard]) -> dict[str, np.ndarray]:
    """Global gradients from the shards of all ranks; replicas must agree bitwise."""
    whole: dict[str, np.ndarray] = {}
    for shard in shards:
        target = whole.setdefault(shard.key, np.full(shard.global_shape, np.nan))
        place = tuple(
            slice(start, start + size)
            for start, size in zip(shard.offset, shard.values.shape, strict=True)
        )
        seen = target[place]
        filled = ~np.isnan(seen)  # by replicas, which must never drift apart
        np.testing.assert_array_equal(seen[filled], shard.values[filled])
        target[place] = shard.values
    for key, values in whole.items():
        assert not np.isnan(values).any(), f"{key} has holes"
    return whole
