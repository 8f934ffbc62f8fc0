"""Whether a plan makes sense, and whether a model can be cut as it says: one line for each problem.

``where`` and ``model`` are what the lines call the plan and the model: their dotted keys.
"""

from collections.abc import Iterator

from puzzle_align.layout.model import ModelSpec, padded_vocab_size
from puzzle_align.layout.plan import ParallelPlan


def plan_problems(plan: ParallelPlan, where: str) -> Iterator[str]:
    """Settings that contradict each other, whatever the model."""
    if plan.virtual_pipeline > 1 and plan.pipeline == 1:
        yield (
            f"{where}.virtual_pipeline_model_parallel_size: {plan.virtual_pipeline} chunks need a "
            "pipeline; set it to 1, or pipeline_model_parallel_size above 1"
        )
    if plan.sequence_parallel and plan.tensor == 1:
        yield (
            f"{where}.sequence_parallel: true needs tensor ranks; set it to false, or "
            "tensor_model_parallel_size above 1"
        )


def cut_problems(spec: ModelSpec, plan: ParallelPlan, where: str, model: str) -> Iterator[str]:
    """Dimensions of ``spec`` that the plan's sizes do not divide."""
    chunks = plan.pipeline * plan.virtual_pipeline
    cuts = (
        ("num_attention_heads", spec.num_attention_heads, plan.tensor, "tensor"),
        ("num_key_value_heads", spec.num_key_value_heads, plan.tensor, "tensor"),
        ("intermediate_size", spec.intermediate_size, plan.tensor, "tensor"),
        ("the padded vocab_size", padded_vocab_size(spec), plan.tensor, "tensor"),
        ("num_hidden_layers", spec.num_hidden_layers, chunks, "pipeline times virtual pipeline"),
    )
    for name, value, parts, axis in cuts:
        if value % parts:
            yield (
                f"{where}: {axis} size {parts} does not divide {name}={value} of {model}; choose a "
                f"divisor of {value}"
            )
