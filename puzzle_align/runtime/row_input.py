"""A microbatch on the device, in the form every chunk of every model takes it."""

from dataclasses import dataclass

import numpy as np
import torch

from puzzle_align.models.attention import AttentionPlan, prepare
from puzzle_align.models.build import Predictions
from puzzle_align.spec.model import AttentionBackend, Head
from puzzle_align.spec.rows import Microbatch, last_tokens


@dataclass(frozen=True)
class RowInput:
    """One row of S tokens with N predictions, of the K responses of each of B pairs."""

    tokens: torch.Tensor  # int64 [1, S]
    position_ids: torch.Tensor  # int64 [1, S]
    predictions: Predictions
    cells: torch.Tensor  # int64 [N], the response of every prediction: pair in the row * K + branch
    pairs: torch.Tensor  # int64 [B], pairs of the global batch
    lengths: torch.Tensor  # int64 [B, K], tokens of every response
    margins: torch.Tensor  # float64 [B], what the data asks for between the pair's rewards
    attention: AttentionPlan


def to_device(
    microbatch: Microbatch,
    attention: AttentionBackend,
    device: torch.device,
    head: Head = "lm",
) -> RowInput:
    """Copy a microbatch to the device and prepare its mask, once for all layers and models.

    What the loss looks up is worked out here, on the host, so that it never waits for the device.
    For models with a scalar head, there is one prediction a response: at its last token.
    """

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    num_branches = microbatch.num_branches
    pairs, firsts, pair_in_row = np.unique(
        microbatch.pair_ids, return_index=True, return_inverse=True
    )
    cell_of_slot = pair_in_row * num_branches + microbatch.branch_ids
    cells = cell_of_slot[microbatch.slots]
    lengths = np.bincount(cells, minlength=len(pairs) * num_branches)
    predict_from, targets = microbatch.predict_from, microbatch.targets
    if head == "scalar":
        cells, predict_from = cell_of_slot, last_tokens(microbatch.layout)
        targets = microbatch.tokens[predict_from]  # not read
    return RowInput(
        tokens=tensor(microbatch.tokens)[None],
        position_ids=tensor(microbatch.position_ids)[None],
        predictions=Predictions(tensor(predict_from), tensor(targets)),
        cells=tensor(cells),
        pairs=tensor(pairs),
        lengths=tensor(lengths.reshape(-1, num_branches)),
        margins=tensor(microbatch.margins[firsts]),
        attention=prepare(microbatch.layout, attention, device),
    )
