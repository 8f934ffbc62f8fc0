"""Engine of a job on this machine: device, precision, layers, fused operations, attention."""

import logging
from typing import Literal, cast

import torch
from torch.torch_version import TorchVersion

from puzzle_align.config.resolve import Engine, Job
from puzzle_align.config.sections.engine import FUSIONS, EngineConfig
from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import FP8_MULTIPLES, AttentionBackend, Fusions, ModelOptions
from puzzle_align.layout.rank_order import RANKS_PER_NODE
from puzzle_align.layout.rows import RowLayout
from puzzle_align.models.attention import why_unavailable
from puzzle_align.models.attention.flash import use_flash_attention
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.transformer_engine import import_error, is_absent
from puzzle_align.planning.profiled_rows import packed_row
from puzzle_align.runtime.groups.collectives import from_rank_zero, gather_everywhere
from puzzle_align.runtime.groups.world import ORDERS_RANKS, World, ranks_near
from puzzle_align.runtime.profiler.attention import AttentionCase, fastest_attention
from puzzle_align.stages.outlook import microbatch_of, open_outlook

# Requirements of FP8 recipes: compute capability, and the CUDA version that torch is built with.
_FP8_NEEDS = {"tensorwise": ((8, 9), (12, 1)), "blockwise": ((9, 0), (12, 9))}
assert {*_FP8_NEEDS} == {*FP8_MULTIPLES}
_LEAST_TORCH = "2.11.dev0"  # includes the pre-releases of 2.11 in containers
_logger = logging.getLogger(__name__)


def resolve_engine(config: EngineConfig, *, elsewhere: bool = False) -> Engine:
    """Decide device, precision, attention, layer implementation and fused operations.

    With ``engine.attention=auto``, attention on CUDA is flex until ``settle_attention`` has
    measured; plans made on another machine keep flex.

    Args:
        elsewhere: the job is for another machine, which has the device that the config names.

    Raises:
        ValueError: if the config needs something that this machine does not have.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise ValueError("engine.device=cuda: torch sees no CUDA device; set engine.device=cpu")
    on_gpu = device == "cuda"
    if on_gpu and not elsewhere:
        check_torch(torch.__version__)
    implementation = _layers(config, on_gpu, elsewhere)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bf16" if on_gpu else "fp32"
    attention = cast(AttentionBackend, config.attention)
    if config.attention == "auto":
        attention = "flex" if on_gpu else "segments"
    reason = None if elsewhere else why_unavailable(attention, device, dtype)
    if reason is not None:
        raise ValueError(f"engine.attention={attention}: {reason}")
    fusions = _fusions(config, on_gpu, implementation, elsewhere)
    if config.fp8 is not None and not elsewhere:
        _check_fp8(config, device, implementation)
    options = ModelOptions(
        dtype=dtype,
        attention=attention,
        transformer_impl=implementation,
        fusions=fusions,
        fp8=config.fp8,
        fp8_recipe=config.fp8_recipe,
        logprob_chunk_size=config.logprob_chunk_size,
    )
    return Engine(device, options, ranks_near(RANKS_PER_NODE), elsewhere or ORDERS_RANKS)


def check_torch(version: str) -> None:
    """Raise ValueError unless this version of torch has the attention used on CUDA."""
    if TorchVersion(version) < TorchVersion(_LEAST_TORCH):
        raise ValueError(f"engine.device=cuda: torch {version}; install torch 2.11 or later")


def _layers(config: EngineConfig, on_gpu: bool, elsewhere: bool) -> Literal["local", "te"]:
    """Layer implementation: ``auto`` takes Transformer Engine's on CUDA where they import.

    It warns if Transformer Engine is installed and cannot be imported.
    """
    asked = config.transformer_impl
    if asked == "local" or (asked == "auto" and not on_gpu):
        return "local"
    if asked == "te" and elsewhere:
        return "te"
    error = import_error()
    if error is None:
        return "te"
    reason = " ".join(str(error).split())
    if asked == "te":
        raise ValueError(
            f"engine.transformer_impl=te: Transformer Engine cannot be imported ({reason}); pip "
            "install -e .[gpu], or set it to auto"
        )
    if not is_absent(error):
        _logger.warning(
            "Transformer Engine cannot be imported (%s): Megatron's own layers are used", reason
        )
    return "local"


def _fusions(config: EngineConfig, on_gpu: bool, implementation: str, elsewhere: bool) -> Fusions:
    """Fused operations: those set to true; ``auto`` fuses with Transformer Engine's layers."""
    chosen = {}
    for name in FUSIONS:
        asked = getattr(config, name)
        if asked is True and not on_gpu and not elsewhere:
            raise ValueError(f"engine.{name}=true: there is no CUDA device; set it to auto")
        needs_te = name != "bias_activation_fusion"
        if asked is True and needs_te and implementation != "te" and not elsewhere:
            raise ValueError(
                f"engine.{name}=true: needs engine.transformer_impl=te, which is "
                f"{implementation} here; install Transformer Engine, or set it to auto"
            )
        chosen[name] = implementation == "te" if asked == "auto" else asked
    return Fusions(**chosen)


def _check_fp8(config: EngineConfig, device: str, implementation: str) -> None:
    """Raise ValueError unless this machine's device and layers compute in FP8."""
    if device != "cuda":
        lacks = "there is no CUDA device"
    elif implementation != "te":
        lacks = f"needs Transformer Engine's layers, not engine.transformer_impl={implementation}"
    else:
        capability = torch.cuda.get_device_capability()
        lacks = why_no_fp8(config.fp8_recipe, capability, torch.version.cuda or "0")
    if lacks is not None:
        raise ValueError(f"engine.fp8={config.fp8}: {lacks}; set it to null")


def why_no_fp8(recipe: str, capability: tuple[int, int], cuda: str) -> str | None:
    """Reason why a device and torch's CUDA version lack an FP8 recipe; None if they have it."""
    least_capability, least_cuda = _FP8_NEEDS[recipe]
    for what, present, least in (
        ("compute capability", capability, least_capability),
        ("a torch for CUDA", tuple(map(int, cuda.split(".")[:2])), least_cuda),
    ):
        if present < least:
            wanted, is_here = (".".join(map(str, number)) for number in (least, present))
            return f"fp8_recipe={recipe} needs {what} {wanted} or later, and here is {is_here}"
    return None


def settle_attention(job: Job, world: World, kept: AttentionBackend | None = None) -> Job:
    """Settle a job's attention: under ``auto`` on CUDA, the fastest on this machine. Collective.

    Backends are measured on a row of the data, with the heads of the first trained model. This
    also activates the FlashAttention that ``engine.flash_attention`` names.

    Args:
        kept: attention of the resumed run: used again, unmeasured, if it works.

    Raises:
        ValueError: one line, if no backend works, or the one in the config does not.
    """
    engine, asked = job.engine, job.config.engine.attention
    if engine.device != "cuda" or not (asked == "auto" or BACKENDS[asked].chooses_flash):
        return job
    flash = use_flash_attention(job.config.engine.flash_attention, world.device)
    chosen = engine.options.attention
    if asked == "auto":
        chosen = still_available(kept, engine, world) or _fastest(job, world)
    if not BACKENDS[chosen].computes_through_flash:  # others were measured with ``flash``
        use_flash_attention("fa2", world.device)
    if BACKENDS[chosen].chooses_flash and world.rank == 0:
        _logger.info("attention: %s's kernels are those of %s", chosen, flash)
    return job.with_attention(chosen)


def still_available(
    kept: AttentionBackend | None, engine: Engine, world: World
) -> AttentionBackend | None:
    """Return a resumed run's attention if it works on every rank; rank 0 logs it. Collective.

    Timings differ from start to start, and backends in rounding: with a new measurement a resumed
    run might give other numbers.
    """
    if kept is None:
        return None
    reasons = gather_everywhere(why_unavailable(kept, engine.device, engine.options.dtype))
    reason = next(filter(None, reasons), None)
    if world.rank == 0 and reason is None:
        _logger.info(
            "attention: using %s again, which the checkpoint's run used; set engine.attention for "
            "another",
            kept,
        )
    elif world.rank == 0:
        _logger.warning(
            "attention: the job was saved with %s, which does not work here (%s): measured anew",
            kept,
            reason,
        )
    return kept if reason is None else None


def _fastest(job: Job, world: World) -> AttentionBackend:
    layout = from_rank_zero(lambda: row_of_data(job))
    engine = job.engine
    dtype = engine.options.dtype
    backends: list[AttentionBackend] = [
        name
        for name, backend in BACKENDS.items()
        if backend.is_candidate and why_unavailable(name, engine.device, dtype) is None
    ]
    fastest = fastest_attention(attention_case(job.plan, layout), backends, world)
    torch.cuda.empty_cache()
    return fastest


def row_of_data(job: Job) -> RowLayout:
    """A row of the job's data; if they cannot be read, a row of equal examples."""
    outlook, packing = open_outlook(job.config), job.config.packing
    try:
        return outlook.drawn_row()
    except (OSError, ValueError):  # profiling needs no data; a job stops at them later
        row = packed_row(packing.row_tokens, outlook.example_size(), packing.row_layout)
        return microbatch_of(row, packing.row_layout, vocab_size=1).layout


def attention_case(plan: JobPlan, layout: RowLayout) -> AttentionCase:
    """Case to measure: a row, with a tensor rank's share of the first trained model."""
    trained = next(context for context in plan.contexts if context.workload == "train")
    spec, tensor = trained.model, trained.plan.tensor
    return AttentionCase(
        layout=layout,
        num_heads=spec.num_attention_heads // tensor,
        num_groups=spec.num_key_value_heads // tensor,
        head_dim=spec.head_dim,
        dtype=DTYPES[trained.options.dtype],
    )
