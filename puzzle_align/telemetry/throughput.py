"""Rates of a run: pairs, responses and tokens a second, fill, peak memory, MFU.

MFU is model FLOPs utilization: the model's FLOP/s as a share of the devices' peak.

All numbers cover the whole job (all ranks), except ``peak_memory`` of the calling process.
"""

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

GENERATE = "generate"  # the phase that samples tokens

# Dense bf16 peaks in TFLOP/s (NVIDIA's data sheets, without sparsity). The more specific name is
# first: "NVIDIA H100 PCIe" also contains "H100".
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("A100", 312.0),
)


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Work and time of one or more steps over all ranks."""

    seconds: float = 0.0
    num_pairs: int = 0
    num_responses: int = 0  # sampled, or of unpaired data
    num_tokens: int = 0  # without padding; in stage ppo: sampled
    num_row_tokens: int = 0  # with padding
    num_flops: float = 0.0  # of the model, without recompute; 0: not counted
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by name, in order

    def __add__(self, other: "StepStats") -> "StepStats":
        names = dict.fromkeys([*self.phases, *other.phases])
        return StepStats(
            seconds=self.seconds + other.seconds,
            num_pairs=self.num_pairs + other.num_pairs,
            num_responses=self.num_responses + other.num_responses,
            num_tokens=self.num_tokens + other.num_tokens,
            num_row_tokens=self.num_row_tokens + other.num_row_tokens,
            num_flops=self.num_flops + other.num_flops,
            phases={
                name: self.phases.get(name, 0.0) + other.phases.get(name, 0.0) for name in names
            },
        )


def rates(stats: StepStats, peak_flops: float | None) -> dict[str, float]:
    """Rates and times of a step, or of several together; what was not measured is left out.

    ``peak_flops`` is the peak of all devices together in FLOP/s; None leaves ``mfu`` out. Keys:
    ``pairs_per_second`` or ``responses_per_second``, ``tokens_per_second`` (without padding; in
    stage ppo: sampled), ``fill`` (tokens without over tokens with padding, 0 to 1), ``step_time``
    (s), ``mfu`` (0 to 1), ``time/NAME`` (s) of each phase, and ``generate/tokens_per_second``
    (over phase generate alone).
    """
    measured: dict[str, float] = {}
    if stats.seconds > 0:
        counts = (("pairs", stats.num_pairs), ("responses", stats.num_responses))
        measured |= {f"{unit}_per_second": n / stats.seconds for unit, n in counts if n > 0}
        measured["tokens_per_second"] = stats.num_tokens / stats.seconds
        measured["step_time"] = stats.seconds
    measured |= {f"time/{name}": seconds for name, seconds in stats.phases.items()}
    if stats.phases.get(GENERATE, 0.0) > 0:
        measured[f"{GENERATE}/tokens_per_second"] = stats.num_tokens / stats.phases[GENERATE]
    if stats.num_row_tokens > 0:
        measured["fill"] = stats.num_tokens / stats.num_row_tokens
    if peak_flops is not None and stats.num_flops > 0 and stats.seconds > 0:
        measured["mfu"] = stats.num_flops / stats.seconds / peak_flops
    return measured


def peak_flops(device_name: str, override_tflops: float | None = None) -> float | None:
    """Dense bf16 peak of one device in FLOP/s, by its CUDA name; None for an unknown device."""
    if override_tflops is not None:
        return override_tflops * 1e12
    for name, tflops in PEAK_TFLOPS:
        if name in device_name:
            return tflops * 1e12
    return None


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated on a CUDA device, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
