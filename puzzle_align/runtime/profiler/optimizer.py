"""Time of an optimizer step on one rank."""

from typing import Any

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.profiler.timing import Samples, repeated, seconds

_GRADIENT = 1e-3


def measure_step(context: Context, config: OptimizerConfig, repeats: int) -> tuple[int, Samples]:
    """Parameters on the rank, and seconds (``step``) of zeroing, reducing, norm and AdamW.

    Args:
        context: wrapped for ``config``.
    """
    optimizer = Optimizer(context, config)

    def update() -> None:
        optimizer.reduce_gradients()
        optimizer.step(config.lr)

    def sample() -> Samples:
        zeroing = seconds(optimizer.zero_grad, context.device)
        for wrapper in context.wrappers:
            buffers: Any = wrapper.buffers  # gradients', in place of a module's
            for buffer in buffers:
                buffer.grad_data.fill_(_GRADIENT)
        return {"step": [zeroing + seconds(update, context.device)]}

    parameters = sum(p.numel() for chunk in context.chunks for p in chunk.parameters())
    return parameters, repeated(sample, repeats)
