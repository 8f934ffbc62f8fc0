"""Checks of the engine section's keys among themselves, whatever machine the job is for."""

from collections.abc import Iterator

from puzzle_align.config.sections.engine import FUSIONS, EngineConfig


def engine_problems(engine: EngineConfig) -> Iterator[str]:
    """What keys of ``engine`` ask for that other keys of it rule out, one line each."""
    if engine.device == "cpu" and engine.attention in ("flex", "flex_flash"):
        yield f"engine.attention: {engine.attention} has no backward pass on cpu; set it to auto"
    is_flash = engine.attention in ("varlen", "flex_flash")
    if engine.device == "cuda" and engine.dtype == "fp32" and is_flash:
        yield f"engine.attention: {engine.attention} on cuda is of bf16 alone; set it to flex"
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
