"""Rotary position embedding from explicit position ids.

Packed rows restart positions inside a row, so frequencies are taken at each token's own position,
not at its place in the row. Shapes: S tokens in a row, D head dimension.
"""

import math

import torch
from torch import Tensor

from puzzle_align.layout.model import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Angle per position of every rotated pair, float32 ``[D/2]``, on the CPU."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    inverse = 1.0 / (spec.rope_theta**exponents)
    return inverse if spec.rope_scaling is None else _llama3_scaled(inverse, spec.rope_scaling)


def rotary_angles(position_ids: Tensor, inverse: Tensor) -> Tensor:
    """Angles ``[S, 1, 1, D]`` for Megatron's attention from ``position_ids`` ``[1, S]``."""
    angles = position_ids[0].to(torch.float32)[:, None] * inverse
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def _llama3_scaled(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: long wavelengths are stretched by ``factor``, short ones kept, between: blended."""
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / inverse
    longest_kept = original / scaling.high_freq_factor
    shortest_stretched = original / scaling.low_freq_factor
    kept_share = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - kept_share) * inverse / scaling.factor + kept_share * inverse
    stretched = torch.where(wavelengths > shortest_stretched, inverse / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, inverse, stretched)
