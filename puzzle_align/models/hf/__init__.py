"""Weights of Hugging Face directories, or from a seed: loaded into chunks, and written again."""

from puzzle_align.models.hf.sources import (
    RandomSource,
    WeightSource,
    log_new_head,
    open_weights,
)
from puzzle_align.models.hf.weights import export_hf, load_weights

__all__ = [
    "RandomSource",
    "WeightSource",
    "export_hf",
    "load_weights",
    "log_new_head",
    "open_weights",
]
