"""A microbatch on the device, in the form every chunk of every model takes it."""

from dataclasses import dataclass

import torch

from puzzle_align.models.attention import AttentionPlan, prepare
from puzzle_align.models.build import Predictions
from puzzle_align.spec.model import AttentionBackend
from puzzle_align.spec.rows import Microbatch


@dataclass(frozen=True)
class RowInput:
    """One row of S tokens with N predictions in R response slots."""

    tokens: torch.Tensor  # int64 [1, S]
    position_ids: torch.Tensor  # int64 [1, S]
    predictions: Predictions
    slots: torch.Tensor  # int64 [N]
    num_slots: int  # R
    pair_ids: torch.Tensor  # int64 [R]
    branch_ids: torch.Tensor  # int64 [R]
    attention: AttentionPlan


def to_device(
    microbatch: Microbatch, attention: AttentionBackend, device: torch.device
) -> RowInput:
    """Copy a microbatch to the device and prepare its mask, once for all layers and models."""

    def tensor(array: object) -> torch.Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    return RowInput(
        tokens=tensor(microbatch.tokens)[None],
        position_ids=tensor(microbatch.position_ids)[None],
        predictions=Predictions(tensor(microbatch.predict_from), tensor(microbatch.targets)),
        slots=tensor(microbatch.slots),
        num_slots=len(microbatch.pair_ids),
        pair_ids=tensor(microbatch.pair_ids),
        branch_ids=tensor(microbatch.branch_ids),
        attention=prepare(microbatch.layout, attention, device),
    )
