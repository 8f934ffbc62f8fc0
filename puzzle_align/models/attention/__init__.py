"""Attention over packed rows: each microbatch's row is prepared once for a backend, for all layers.

Backends are listed in ``layout.attention``. Each is implemented in the file of its name here:
- ``prepare(layout, device)`` makes the row's structure, for all layers, models and dtypes;
- ``attend(q, k, v, structure, scale=None)`` computes q [1, h, S, d], k and v [1, g, S, d] ->
  [1, h, S, d];
- ``why_missing()``, if defined, is the reason why the backend's package does not work here.

Shapes: S tokens in a row, h query heads, g query groups (h a multiple of g), d channels a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from puzzle_align.layout.attention import BACKENDS, AttentionBackend
from puzzle_align.layout.rows import RowLayout


@dataclass(frozen=True)
class AttentionPlan:
    """One row's structure for one backend."""

    num_tokens: int
    structure: Any
    attend: Callable[[Tensor, Tensor, Tensor, Any, float | None], Tensor]


def prepare_attention(
    layout: RowLayout, backend: AttentionBackend, device: torch.device
) -> AttentionPlan:
    """Make the plan of a row on ``device``."""
    module = _module(backend)
    return AttentionPlan(layout.num_tokens, module.prepare(layout, device), module.attend)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float | None = None
) -> Tensor:
    """Attention within one row: q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d].

    ``scale`` multiplies the scores; None is 1/sqrt(d). Outputs at padding are finite, and differ
    between backends. On CPU, flex has no backward.
    """
    assert q.size(2) == plan.num_tokens, f"{q.size(2)} tokens in the row, not {plan.num_tokens}"
    return plan.attend(q, k, v, plan.structure, scale)


def why_unavailable(backend: AttentionBackend, device: str, dtype: str) -> str | None:
    """Reason why a backend cannot train here, with a remedy; None if it can.

    Args:
        device: cpu or cuda.
        dtype: fp32 or bf16.
    """
    row = BACKENDS[backend]
    if device == "cpu":
        return None if row.trains_on_cpu else "it has no backward on CPU; set it to segments"
    if dtype not in row.cuda_dtypes:
        allowed = " or ".join(row.cuda_dtypes)
        return f"it computes in {allowed} only, not engine.dtype={dtype}; set it to flex"
    why_missing = getattr(_module(backend), "why_missing", None)
    return why_missing() if why_missing is not None else None


def _module(backend: AttentionBackend) -> Any:
    return import_module(f"{__name__}.{backend}")
