"""What a layer keeps for its backward, counted, against the estimate of ``planning.memory``."""

import dataclasses

import numpy as np
import torch

from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment, position_ids
from puzzle_align.models.attention import prepare_attention
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.layers import rotary_angles
from puzzle_align.planning.memory.model import layer_activation_bytes, rank_parameters
from puzzle_align.runtime.context import build_context
from puzzle_align.runtime.groups.world import World, build_communicators
from tests.dist.spawn import run_ranks
from tests.specs import LLAMA

ROW = RowLayout(256, (Segment(0, 100, (156,)),))
SPEC = dataclasses.replace(LLAMA, num_hidden_layers=1, head_dim=16)  # wider than hidden states


def test_layer_keeps_what_is_estimated():
    run_ranks(_check_all, 2, timeout=120.0)


def _check_all(rank: int, world_size: int) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    for sequence_parallel in (False, True):
        plan = ParallelPlan(tensor=2, sequence_parallel=sequence_parallel)
        groups = build_communicators(plan, world, trained=True)
        # torch's RMSNorm is not fused on CPU and keeps its normalised input besides.
        unfused = 2 * ROW.num_tokens * SPEC.hidden_size * 4 // (2 if sequence_parallel else 1)
        for attention in ("segments", "dense"):
            for recompute in ("none", "selective"):
                options = ModelOptions(attention=attention, recompute=recompute)
                spec = dataclasses.replace(SPEC, attention_bias=recompute == "selective")
                if attention == "dense":  # half of each head is rotated
                    spec = dataclasses.replace(spec, partial_rotary_factor=0.5)
                context = build_context(
                    "actor", spec, options, plan, world, communicators=groups, fill=_fill, seed=1
                )
                (chunk,) = context.chunks
                held = sum(parameter.numel() for parameter in chunk.parameters())
                assert held == rank_parameters(spec, plan, 0)
                shape = context.activation_shape(ROW.num_tokens)
                estimate = layer_activation_bytes(spec, plan, options, ROW.num_tokens)
                found = _kept_bytes(chunk, attention, torch.ones(shape, requires_grad=True))
                case = f"{plan} {options}"
                assert found == estimate + unfused, f"{case}: {found} not {estimate + unfused}"


def _fill(chunk: ModelChunk) -> None:
    for parameter in chunk.parameters():
        torch.nn.init.ones_(parameter)


def _kept_bytes(chunk: ModelChunk, attention: str, hidden: torch.Tensor) -> int:
    """Bytes of all storages the first layer saves for its backward, weights left out."""
    chunk.row_state.current = prepare_attention(ROW, attention, torch.device("cpu"))  # type: ignore[arg-type]
    positions = torch.from_numpy(np.ascontiguousarray(position_ids(ROW)))[None]
    angles = rotary_angles(positions, chunk.inverse_frequencies)
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        # Kept until counted: what nothing holds is freed, and its address used again.
        output = chunk.decoder.layers[0](hidden, None, rotary_pos_emb=angles)
    del output
    sizes = (storage.nbytes() for storage in storages.values())
    return sum(size for size in sizes if size > 64)  # recompute keeps a number of its own
