"""Checks of the engine section's keys against each other, independent of the machine."""

from collections.abc import Iterator

from puzzle_align.config.sections.engine import FUSIONS, EngineConfig
from puzzle_align.layout.attention import BACKENDS, Backend
from puzzle_align.layout.model import FP8_MULTIPLES, ModelSpec
from puzzle_align.layout.plan import ParallelPlan


def engine_problems(engine: EngineConfig) -> Iterator[str]:
    """Conflicts between keys of ``engine``, one line each."""
    backend = BACKENDS.get(engine.attention, Backend(chooses_flash=True))  # auto
    if engine.device == "cpu" and not backend.trains_on_cpu:
        yield f"engine.attention: {engine.attention} has no backward pass on cpu; set it to auto"
    if engine.device == "cuda" and engine.dtype == "fp32" and "fp32" not in backend.cuda_dtypes:
        yield f"engine.attention: {engine.attention} on cuda is of bf16 alone; set it to flex"
    is_read = engine.device != "cpu" and backend.chooses_flash
    if engine.flash_attention != "auto" and not is_read:
        yield (
            f"engine.flash_attention: {engine.flash_attention} is of attention=varlen on cuda; "
            "set it to auto"
        )
    if engine.device == "cpu" and engine.transformer_impl == "te":
        yield "engine.transformer_impl: te needs cuda, not engine.device=cpu; set it to auto"
    for name in FUSIONS:
        if getattr(engine, name) is not True:
            continue
        if engine.device == "cpu":
            yield f"engine.{name}: true needs cuda, not engine.device=cpu; set it to auto"
        elif name != "bias_activation_fusion" and engine.transformer_impl == "local":
            yield (
                f"engine.{name}: true needs Transformer Engine, not "
                "engine.transformer_impl=local; set it to auto"
            )
    if engine.fp8 is not None:
        yield from _fp8_problems(engine)


def _fp8_problems(engine: EngineConfig) -> Iterator[str]:
    ruled_out = (
        ("device", "cpu", "cuda"),
        ("transformer_impl", "local", "Transformer Engine"),
        ("dtype", "fp32", "bf16"),
    )
    for name, value, needed in ruled_out:
        if getattr(engine, name) == value:
            yield f"engine.fp8: {engine.fp8} needs {needed}, not engine.{name}={value}; change one"


def fp8_row_problems(
    engine: EngineConfig, plan: ParallelPlan, row_tokens: int, key: str
) -> Iterator[str]:
    """Row lengths that FP8 layers do not support; ``key`` names the plan."""
    shards = plan.tensor if plan.sequence_parallel else 1
    multiple = FP8_MULTIPLES[engine.fp8_recipe] * shards
    if row_tokens % multiple:
        yield (
            f"packing.row_tokens: {row_tokens} cannot be cut for engine.fp8={engine.fp8} "
            f"({engine.fp8_recipe}) under {key}; choose a multiple of {multiple}"
        )


def fp8_width_problems(
    engine: EngineConfig, spec: ModelSpec, plan: ParallelPlan, key: str
) -> Iterator[str]:
    """Layer widths on a tensor rank that FP8 does not support; ``key`` names the model."""
    heads, groups = spec.num_attention_heads, spec.num_key_value_heads
    widths = (
        ("hidden_size", spec.hidden_size),
        ("heads times head_dim", heads * spec.head_dim // plan.tensor),
        ("queries, keys and values", (heads + 2 * groups) * spec.head_dim // plan.tensor),
        ("intermediate_size", spec.intermediate_size // plan.tensor),
    )
    multiple = FP8_MULTIPLES[engine.fp8_recipe]
    for name, width in widths:
        if width % multiple:
            yield (
                f"engine.fp8: {engine.fp8} ({engine.fp8_recipe}) needs multiples of {multiple}, "
                f"and {name} of {key} is {width} on a tensor rank; set it to null"
            )
