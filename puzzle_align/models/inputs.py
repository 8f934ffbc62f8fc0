"""Inputs of a model that need no Megatron: its dtypes by name, and a row's predictions."""

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Predictions:
    """Predictions of the last chunk: ``targets[n]`` from the hidden state at ``predict_from[n]``.

    Without targets, a language model's head returns the logits there. A scalar head reads only
    ``predict_from``.
    """

    predict_from: Tensor  # int64 [N], positions in the row
    targets: Tensor | None  # int64 [N], token ids
    temperature: float = 1.0  # divides the logits before the softmax
    entropies: bool = False  # whether to return the entropies of the softmaxes, too
