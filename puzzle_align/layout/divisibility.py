"""Checks of a plan, and of a model's sizes under it: one line for each problem.

Every position of a pipeline has a layer: the ends, too, where Megatron could leave embedding or
head alone. ``where`` and ``model`` are what the lines call the plan and the model: their dotted
keys.
"""

from collections.abc import Iterator

from puzzle_align.layout.model import ModelSpec, padded_vocab_size
from puzzle_align.layout.plan import ParallelPlan, layers_text
from puzzle_align.schedules.registry import schedule_problem


def plan_problems(plan: ParallelPlan, where: str) -> Iterator[str]:
    """Sizes of a plan that contradict each other, without a model."""
    if plan.virtual_pipeline > 1 and plan.pipeline == 1:
        yield (
            f"{where}.virtual_pipeline_model_parallel_size: {plan.virtual_pipeline} chunks need a "
            "pipeline; set it to 1, or pipeline_model_parallel_size above 1"
        )
    if problem := schedule_problem(plan.schedule, plan.virtual_pipeline):
        yield f"{where}.pipeline_schedule: {problem}"
    if plan.sequence_parallel and plan.tensor == 1:
        yield (
            f"{where}.sequence_parallel: true needs tensor ranks; set it to false, or "
            "tensor_model_parallel_size above 1"
        )


def cut_problems(spec: ModelSpec, plan: ParallelPlan, where: str, model: str) -> Iterator[str]:
    """Dimensions of ``spec`` that the plan's sizes do not divide."""
    cuts = (
        ("num_attention_heads", spec.num_attention_heads, plan.tensor, "tensor"),
        ("num_key_value_heads", spec.num_key_value_heads, plan.tensor, "tensor"),
        ("intermediate_size", spec.intermediate_size, plan.tensor, "tensor"),
        ("the padded vocab_size", padded_vocab_size(spec), plan.tensor, "tensor"),
    )
    for name, value, parts, axis in cuts:
        if value % parts:
            yield (
                f"{where}: {axis} size {parts} does not divide {name}={value} of {model}; choose a "
                f"divisor of {value}"
            )
    yield from _layer_problems(spec.num_hidden_layers, plan, where, model)


def _layer_problems(num_layers: int, plan: ParallelPlan, where: str, model: str) -> Iterator[str]:
    """Numbers of layers that do not fit the plan's positions."""
    positions = plan.num_positions
    layers, key = plan.pipeline_layers, f"{where}.pipeline_layers"
    sizes = "pipeline times virtual pipeline"
    if num_layers < positions:
        yield (
            f"{where}: {sizes} size {positions} is more than num_hidden_layers={num_layers} of "
            f"{model}; choose at most {num_layers}"
        )
    elif not layers and num_layers % positions:
        yield (
            f"{where}: {sizes} size {positions} does not divide num_hidden_layers={num_layers} of "
            f"{model}; set {key}=auto"
        )
    elif layers and len(layers) != positions:
        yield (
            f"{key}: {len(layers)} numbers for {sizes} size {positions}; give one for each position"
        )
    elif layers and min(layers) < 1:
        yield f"{key}: {min(layers)} layers at a position; give every position at least 1"
    elif layers and sum(layers) != num_layers:
        yield (
            f"{key}: {layers_text(plan)} is {sum(layers)} layers, not num_hidden_layers="
            f"{num_layers} of {model}; change the numbers, or set it to auto"
        )
