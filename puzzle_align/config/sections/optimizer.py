"""The optimizer's config section."""

import math
from dataclasses import dataclass

from puzzle_align.config.schema import key
from puzzle_align.layout.model import Dtype

# bf16 rounds by up to 2^-8 of a number: a moment that decays by less per step may not change at
# all. The margin is for decays just above that (beta 0.996), which round to up to twice as much.
MOST_BF16_BETA = 0.99
# A larger rate overflows float32 in the optimizer's arithmetic, whatever the gradients.
MOST_RATE = 1e18


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule; keys stored in a checkpoint's optimizer state are binding."""

    lr: float = key(1e-6, "peak learning rate", at_least=0, at_most=MOST_RATE)
    min_lr: float = key(
        0.0,
        "learning rate that the decay leads to: a step after the last would have it",
        at_least=0,
        at_most=MOST_RATE,
    )
    lr_scheduler_type: str = key(
        "cosine",
        "decay: of S steps, W of warm-up, step s > W (from 1) has done (s-1-W)/(S-W) of it",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = key(
        0,
        "linear warm-up of W steps: step s is at s/W of lr (transformers': (s-1)/W)",
        unit="optimizer steps",
        at_least=0,
    )
    weight_decay: float = key(
        0.0, "decoupled weight decay of matrices", at_least=0, at_most=MOST_RATE
    )
    adam_beta1: float = key(0.9, "decay of the first moment", at_least=0, below=1, binding=True)
    adam_beta2: float = key(0.95, "decay of the second moment", at_least=0, below=1, binding=True)
    adam_eps: float = key(1e-8, "added to the root of the second moment", above=0, binding=True)
    max_grad_norm: float = key(1.0, "clip the global gradient norm; 0: never", at_least=0)
    max_skipped_steps: int = key(
        10,
        "updates that may fail in a row (gradients or loss not finite); one more ends the job",
        unit="optimizer steps",
        at_least=0,
    )
    use_distributed_optimizer: bool = key(
        False, "shard optimizer state over data-parallel ranks", binding=True
    )
    overlap_grad_reduce: bool = key(False, "reduce gradients during the backward pass")
    state_dtype: Dtype = key(
        "fp32",
        "precision of moments; bf16 keeps main weights of bf16 weights as their other 16 bits",
    )
    cpu_offload: bool = key(
        False,
        "keep optimizer state in host memory, pinned (up to twice its bytes), and step in pieces",
    )

    @property
    def in_pieces(self) -> bool:
        """Whether the state is in bf16 or host memory, which Megatron's optimizers do not offer."""
        return self.state_dtype != "fp32" or self.cpu_offload


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``num_steps``; above 0 if ``lr`` is.

    Warm-up is linear and reaches ``lr`` at step ``warmup_steps - 1``. The decay is transformers':
    the step after the warm-up is at ``lr``, and one after the last would be at ``min_lr``.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.lr
    span = max(num_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    left = 1.0 - done
    if config.lr_scheduler_type == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left
