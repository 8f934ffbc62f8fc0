"""Measure attention backends on a row, and choose the fastest.

A backend is excluded if it fails, or if its numbers differ from the first working backend's.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.rows import RowLayout, membership
from puzzle_align.models.attention import AttentionPlan, attend, prepare_attention
from puzzle_align.runtime.groups.collectives import gather_everywhere
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.profiler.timing import repeated, seconds

_REPEATS = 7
_REASON_LENGTH = 300  # of a compiler's message, which may hold a program
# Largest norm of a difference over the norm: two backends in bf16 differ by 1e-2 at most.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A row, and one tensor rank's attention in a layer."""

    layout: RowLayout
    num_heads: int
    num_groups: int  # groups of heads that share keys and values
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of a row's forward and backward; infinite, with a reason, for an excluded backend."""

    seconds: float
    left_out: str | None = None


_NOT_TRIED = AttentionTime(math.inf, "it is not available on every rank")


def fastest_attention(
    case: AttentionCase, backends: Sequence[AttentionBackend], world: World
) -> AttentionBackend:
    """Choose the backend with the least sum of all ranks' times, the same on all. Collective.

    Args:
        backends: backends available on this rank; one that another rank lacks is excluded.

    ValueError, one line, if none works.
    """
    everyone = gather_everywhere(measure_attention(case, backends, world.device))
    names: dict[AttentionBackend, None] = {name: None for times in everyone for name in times}
    of_ranks = {name: [times.get(name, _NOT_TRIED) for times in everyone] for name in names}
    totals = {name: sum(time.seconds for time in times) for name, times in of_ranks.items()}
    fastest: AttentionBackend = min(names, key=totals.__getitem__)
    reasons = {
        name: next(time.left_out for time in of_ranks[name] if time.left_out is not None)
        for name, total in totals.items()
        if math.isinf(total)
    }
    if fastest in reasons:
        raise ValueError(
            f"engine.attention=auto: no backend works here ({reasons[fastest]}); name one"
        )
    if world.rank == 0:
        for name, reason in reasons.items():
            _logger.warning("attention: %s is left out: %s", name, reason)
        times = ", ".join(
            f"{name} {1000 * totals[name] / len(everyone):.3g} ms"
            for name in sorted(totals, key=totals.__getitem__)
            if name not in reasons
        )
        _logger.info(
            "attention: %s, of a layer's forward and backward over %d tokens: %s is taken; "
            "engine.attention may name another",
            times,
            case.layout.num_tokens,
            fastest,
        )
    return fastest


def measure_attention(
    case: AttentionCase, backends: Sequence[AttentionBackend], device: torch.device
) -> dict[AttentionBackend, AttentionTime]:
    """Measure every backend: the median of repetitions, without preparing the row."""
    inputs, cotangent = _inputs(case, device), _cotangent(case, device)
    expected: list[Tensor] | None = None
    times: dict[AttentionBackend, AttentionTime] = {}
    for backend in backends:
        try:
            plan = prepare_attention(case.layout, backend, device)
            output, *gradients = _output_and_gradients(inputs, plan, cotangent)
            numbers = [output.masked_fill(cotangent == 0, 0), *gradients]
            expected = expected or numbers
            error = _error(numbers, expected)
            if not error <= _TOLERANCE[case.dtype]:
                reason = f"its numbers differ by {error:.2g} from those of {next(iter(times))}"
                times[backend] = AttentionTime(math.inf, reason)
                continue
            del output, gradients, numbers

            def sample(plan: AttentionPlan = plan) -> dict[str, list[float]]:
                once = seconds(lambda: _output_and_gradients(inputs, plan, cotangent), device)
                return {"time": [once]}

            times[backend] = AttentionTime(median(repeated(sample, _REPEATS)["time"]))
        except Exception as failure:  # noqa: BLE001 compilers and kernels raise what they like
            reason = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
            times[backend] = AttentionTime(math.inf, reason[:_REASON_LENGTH])
    return times


def _inputs(case: AttentionCase, device: torch.device) -> list[Tensor]:
    """Make q, k and v as views of tensors in Megatron's layout, tokens first."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (case.layout.num_tokens, 1, heads, case.head_dim)
        x = torch.randn(shape, generator=generator, device=device).to(case.dtype)
        return x.requires_grad_().permute(1, 2, 0, 3)

    return [draw(case.num_heads), draw(case.num_groups), draw(case.num_groups)]


def _cotangent(case: AttentionCase, device: torch.device) -> Tensor:
    """Make the output's gradient, with zeros on padding, where backends differ."""
    segment_of, _ = membership(case.layout)
    used = torch.from_numpy(segment_of < len(case.layout.segments)).to(device)
    shape = (1, case.num_heads, case.layout.num_tokens, case.head_dim)
    values = torch.linspace(-1, 1, math.prod(shape), device=device).view(shape)
    return (values * used[:, None]).to(case.dtype)


def _output_and_gradients(
    inputs: Sequence[Tensor], plan: AttentionPlan, cotangent: Tensor
) -> list[Tensor]:
    q, k, v = inputs
    output = attend(q, k, v, plan)
    return [output.detach(), *torch.autograd.grad(output, inputs, cotangent)]


def _error(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest norm of a difference over the norm, in float32."""
    errors = []
    for mine, theirs in zip(tensors, expected, strict=True):
        exact = theirs.float()
        errors.append((mine.float() - exact).norm() / exact.norm())
    return float(torch.stack(errors).max())
