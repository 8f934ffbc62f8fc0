"""Microbatches on the device as models' input, and sums of outputs by response.

A response's output depends on the model's head: the summed log-probability of its tokens, or with a
scalar head, its reward. With ``statistics`` there are further sums (``sum_responses``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from puzzle_align.algos.logprobs import STATISTICS, sum_by_slot
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.rows import Microbatch, last_tokens
from puzzle_align.models.attention import AttentionPlan, prepare_attention
from puzzle_align.models.host_copy import copied
from puzzle_align.models.inputs import Predictions

# Outputs of a model for a row with N response tokens in R responses:
# - tokens: the prediction of every response token, N;
# - responses: one output at every response's last token, R;
# - states: one at the state before every response token, then one at the last tokens, N + R.
OutputKind = Literal["tokens", "responses", "states"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A model's reading of rows: its kind of outputs, and their weights in a loss."""

    output_kind: OutputKind = "tokens"
    temperature: float = 1.0  # kind tokens: logits are divided by it
    entropies: bool = False  # kind tokens: outputs are [2, N], log-probabilities first
    tail_weight: float | None = None  # weight of tokens beyond the shortest response (LD-DPO)
    predict_prompts: bool = False  # the first response's likelihood includes the prompt


PLAIN = Reading()


@dataclass(frozen=True)
class Comparisons:
    """P comparisons of ranked responses; a cell is ``example * K + response``."""

    better: torch.Tensor  # int64 [P], cells in the row, or in the batch
    worse: torch.Tensor  # int64 [P], cells alike
    groups: torch.Tensor  # int64 [P], below P: equal where the better response is the same
    numbers: torch.Tensor  # int64 [P], of the comparisons in the global batch

    @classmethod
    def of(cls, comparisons: np.ndarray, num_branches: int, device: torch.device) -> "Comparisons":
        """Copy rows of ``[number, example, better, worse]``, int64 [P, 4], to the device."""
        numbers, examples, better, worse = comparisons.T
        better, worse = examples * num_branches + better, examples * num_branches + worse
        groups = np.unique(better, return_inverse=True)[1]
        return cls(*copied(np.stack([better, worse, groups, numbers]), device).unbind(0))


@dataclass(frozen=True)
class RowInput:
    """A row of S tokens and N predictions: K responses of each of B examples, in R response slots.

    Predictions of prompts, if any, come last and count for the first response. Of kind states the
    last R predictions, at the responses' ends, have no cell.
    """

    tokens: torch.Tensor  # int64 [1, S]
    position_ids: torch.Tensor  # int64 [1, S]
    predictions: Predictions
    attention: AttentionPlan  # prepared once for all layers and models
    cells: torch.Tensor  # int64 [N], each prediction's response: example in the row * K + branch
    weights: torch.Tensor | None  # float32 [N], weights in log-probabilities; None: all 1
    num_response_tokens: int  # predictions of response tokens
    examples: torch.Tensor  # int64 [B], examples of the global batch
    lengths: torch.Tensor  # int64 [B, K], predictions of every response
    labels: torch.Tensor  # float64 [B], labels from the data
    responses: np.ndarray  # int64 [R], on the host: example of the batch * K + branch, by slot
    slot_lengths: np.ndarray  # int64 [R], on the host: predictions of these responses
    comparisons: Comparisons | None  # of rankings


# (row, the model's outputs, the row's part of the table's columns) -> scalar: the row's share of
# the loss; the sum over all rows and replicas is differentiated.
Loss = Callable[[RowInput, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]


class SequenceSums(NamedTuple):
    """Sums of ``sum_responses``: C = 6 tensors, float64 [B, K] each."""

    weighted: torch.Tensor  # log-probabilities, each with its weight
    likelihood: torch.Tensor  # without weights, with the prompt's if it is predicted
    # Over the responses' tokens, as in ``algos.logprobs.STATISTICS``:
    entropy: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    log_sum_squares: torch.Tensor | None = None


NUM_SUMS = len(SequenceSums._fields)
assert SequenceSums._fields[2:] == STATISTICS


def _predictions(microbatch: Microbatch, reading: Reading, device: torch.device) -> Predictions:
    """A reading's predictions on a microbatch, except predictions of prompt tokens."""
    if reading.output_kind == "tokens":
        sources, targets = microbatch.predict_from, copied(microbatch.targets, device)
        return Predictions(copied(sources, device), targets, reading.temperature, reading.entropies)
    positions = last_tokens(microbatch.layout)
    if reading.output_kind == "states":
        positions = np.concatenate([microbatch.predict_from, positions])
    return Predictions(copied(positions, device), targets=None)


def to_device(
    microbatch: Microbatch,
    attention: AttentionBackend,
    device: torch.device,
    reading: Reading = PLAIN,
    like: RowInput | None = None,
) -> RowInput:
    """Copy a microbatch to the device, with its mask and indices from predictions to responses.

    The loss's indices are computed here on the host, so the loss never waits for the device.

    Args:
        like: the same microbatch for another reading, which shares all but what it reads.
    """
    num_branches = microbatch.num_branches
    examples, firsts, example_in_row = np.unique(
        microbatch.example_ids, return_index=True, return_inverse=True
    )
    cell_of_slot = example_in_row * num_branches + microbatch.branch_ids
    cells = cell_of_slot[microbatch.slots]
    lengths = np.bincount(cells, minlength=len(examples) * num_branches)
    predictions = _predictions(microbatch, reading, device)
    weights, num_response_tokens = None, len(cells)
    if reading.tail_weight is not None:
        shared = lengths.reshape(-1, num_branches).min(axis=1)[example_in_row][microbatch.slots]
        weights = np.where(_places(microbatch.slots) < shared, 1.0, reading.tail_weight)
    if reading.predict_prompts:
        sources, slots = prompt_predictions(microbatch)
        predictions = replace(
            predictions,
            predict_from=copied(np.concatenate([microbatch.predict_from, sources]), device),
            targets=copied(
                np.concatenate([microbatch.targets, microbatch.tokens[sources + 1]]), device
            ),
        )
        cells = np.concatenate([cells, cell_of_slot[slots]])
        weights = np.where(np.arange(len(cells)) < num_response_tokens, 1.0, 0.0)
    if reading.output_kind == "responses":
        cells = cell_of_slot
    device_cells = copied(cells, device)
    device_weights = None if weights is None else copied(weights.astype(np.float32), device)
    if like is not None:
        return replace(like, predictions=predictions, cells=device_cells, weights=device_weights)
    return RowInput(
        tokens=copied(microbatch.tokens, device)[None],
        position_ids=copied(microbatch.position_ids, device)[None],
        predictions=predictions,
        attention=prepare_attention(microbatch.layout, attention, device),
        cells=device_cells,
        weights=device_weights,
        num_response_tokens=num_response_tokens,
        examples=copied(examples, device),
        lengths=copied(lengths.reshape(-1, num_branches), device),
        labels=copied(microbatch.labels[firsts], device),
        responses=microbatch.example_ids * num_branches + microbatch.branch_ids,
        slot_lengths=np.bincount(microbatch.slots, minlength=len(microbatch.branch_ids)),
        comparisons=_comparisons(microbatch, examples, device),
    )


def _comparisons(
    microbatch: Microbatch, examples: np.ndarray, device: torch.device
) -> Comparisons | None:
    """A row's comparisons, by cells of the row; ``examples`` are its examples, in order."""
    if microbatch.comparisons is None:
        return None
    in_row = microbatch.comparisons.copy()
    in_row[:, 1] = np.searchsorted(examples, in_row[:, 1])
    return Comparisons.of(in_row, microbatch.num_branches, device)


def prompt_predictions(microbatch: Microbatch) -> tuple[np.ndarray, np.ndarray]:
    """Positions that predict prompts' tokens except the first, and their slots.

    A prompt that is repeated for each response is predicted once, for the first response.
    """
    positions, slots, slot = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
    for segment in microbatch.layout.segments:
        if microbatch.branch_ids[slot] == 0:
            sources = np.arange(segment.start, segment.prompt_end - 1)
            positions.append(sources)
            slots.append(np.full(len(sources), slot))
        slot += len(segment.response_lengths)
    return np.concatenate(positions), np.concatenate(slots)


def _places(slots: np.ndarray) -> np.ndarray:
    """Place of every response token in its response, from 0: int64 [N]."""
    starts = np.searchsorted(slots, slots)  # slots are in order
    return np.arange(len(slots)) - starts


def sum_responses(row: RowInput, outputs: torch.Tensor) -> torch.Tensor:
    """Sum a row's weighted outputs [N] by response: float64 [B, K].

    For log-probabilities with ``STATISTICS`` [5, N]: ``SequenceSums`` as float64 [C, B, K].
    """
    values = outputs if outputs.dim() == 1 else outputs[0]
    weighted = _summed(row, values if row.weights is None else values * row.weights)
    if outputs.dim() == 1:
        return weighted
    plain = weighted if row.weights is None else _summed(row, values)
    statistics = [_summed(row, statistic[: row.num_response_tokens]) for statistic in outputs[1:]]
    return torch.stack([weighted, plain, *statistics])


def _summed(row: RowInput, values: torch.Tensor) -> torch.Tensor:
    """Sum values of the row's first predictions by response."""
    return sum_by_slot(values, row.cells[: len(values)], row.lengths.numel()).view_as(row.lengths)
