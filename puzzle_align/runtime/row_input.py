"""A microbatch on the device, in the form every chunk of every model takes it."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.rows import Microbatch, last_tokens
from puzzle_align.models.attention import AttentionPlan, prepare_attention
from puzzle_align.models.build import Predictions
from puzzle_align.models.host_copy import copied

# What a model is asked of a row with N response tokens in R responses:
# - tokens: every response token is predicted, N;
# - responses: one output at every response's last token, R;
# - states: one where every response token is predicted, then one at the last tokens, N + R.
OutputKind = Literal["tokens", "responses", "states"]


@dataclass(frozen=True)
class ModelInput:
    """What a model takes of one row of S tokens."""

    tokens: torch.Tensor  # int64 [1, S]
    position_ids: torch.Tensor  # int64 [1, S]
    predictions: Predictions
    attention: AttentionPlan


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a model reads rows: which outputs it gives, and what a loss makes of them."""

    output_kind: OutputKind = "tokens"
    temperature: float = 1.0  # of kind tokens: logits are divided by it
    entropies: bool = False  # of kind tokens: the outputs are [2, N], log-probabilities first
    tail_weight: float | None = None  # of tokens beyond the shortest response's length (LD-DPO)
    predict_prompts: bool = False  # so that the first response's likelihood has its prompt's too


PLAIN = Reading()


@dataclass(frozen=True)
class RowInput(ModelInput):
    """A row with N predictions, of the K responses of each of B examples, in R response slots.

    Predictions of prompts, if there are any, come last, and are the first response's.
    """

    cells: torch.Tensor  # int64 [N], every prediction's response: example in the row * K + branch
    weights: torch.Tensor | None  # float32 [N], in a response's log-probability; None: all 1
    num_response_tokens: int  # predictions that are of responses
    examples: torch.Tensor  # int64 [B], examples of the global batch
    lengths: torch.Tensor  # int64 [B, K], predictions of every response
    labels: torch.Tensor  # float64 [B], what the data says of the examples
    responses: np.ndarray  # int64 [R], on the host: example of the batch * K + branch, by slot
    slot_lengths: np.ndarray  # int64 [R], on the host: tokens of these responses


def predictions_of(microbatch: Microbatch, reading: Reading, device: torch.device) -> Predictions:
    """The predictions that a model is asked for on a microbatch; prompts' tokens left out."""
    if reading.output_kind == "tokens":
        sources, targets = microbatch.predict_from, copied(microbatch.targets, device)
        return Predictions(copied(sources, device), targets, reading.temperature, reading.entropies)
    positions = last_tokens(microbatch.layout)
    if reading.output_kind == "states":
        positions = np.concatenate([microbatch.predict_from, positions])
    return Predictions(copied(positions, device), targets=None)


def model_input(
    microbatch: Microbatch,
    predictions: Predictions,
    attention: AttentionBackend,
    device: torch.device,
) -> ModelInput:
    """Copy a microbatch to the device and prepare its mask, once for all layers and models."""
    return ModelInput(
        tokens=copied(microbatch.tokens, device)[None],
        position_ids=copied(microbatch.position_ids, device)[None],
        predictions=predictions,
        attention=prepare_attention(microbatch.layout, attention, device),
    )


def to_device(
    microbatch: Microbatch,
    attention: AttentionBackend,
    device: torch.device,
    reading: Reading = PLAIN,
    like: ModelInput | None = None,
) -> RowInput:
    """A microbatch on the device, and which responses the predictions are of.

    What the loss looks up is worked out here, on the host, so that it never waits for the device.

    Args:
        like: the same microbatch as another model reads it: tokens and mask are shared with it.
    """
    num_branches = microbatch.num_branches
    examples, firsts, example_in_row = np.unique(
        microbatch.example_ids, return_index=True, return_inverse=True
    )
    cell_of_slot = example_in_row * num_branches + microbatch.branch_ids
    cells = cell_of_slot[microbatch.slots]
    lengths = np.bincount(cells, minlength=len(examples) * num_branches)
    predictions = predictions_of(microbatch, reading, device)
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
    if reading.output_kind == "states":
        cells = np.concatenate([cells, cell_of_slot])
    elif reading.output_kind == "responses":
        cells = cell_of_slot
    row = like or model_input(microbatch, predictions, attention, device)
    return RowInput(
        tokens=row.tokens,
        position_ids=row.position_ids,
        predictions=predictions,
        attention=row.attention,
        cells=copied(cells, device),
        weights=None if weights is None else copied(weights.astype(np.float32), device),
        num_response_tokens=num_response_tokens,
        examples=copied(examples, device),
        lengths=copied(lengths.reshape(-1, num_branches), device),
        labels=copied(microbatch.labels[firsts], device),
        responses=microbatch.example_ids * num_branches + microbatch.branch_ids,
        slot_lengths=np.bincount(microbatch.slots, minlength=len(microbatch.branch_ids)),
    )


def prompt_predictions(microbatch: Microbatch) -> tuple[np.ndarray, np.ndarray]:
    """Positions that predict the prompts' tokens but the first, and the slots that these are of.

    A prompt that is there once a response is predicted once, as the first one's.
    """
    found, slots, slot = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
    for segment in microbatch.layout.segments:
        if microbatch.branch_ids[slot] == 0:
            sources = np.arange(segment.start, segment.prompt_end - 1)
            found.append(sources)
            slots.append(np.full(len(sources), slot))
        slot += len(segment.response_lengths)
    return np.concatenate(found), np.concatenate(slots)


def _places(slots: np.ndarray) -> np.ndarray:
    """Place of every response token in its response, from 0: int64 [N]."""
    starts = np.searchsorted(slots, slots)  # slots are in order
    return np.arange(len(slots)) - starts
