"""RMSNorm for Megatron-core layers where Transformer Engine is absent."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension that also serves under sequence parallelism.

    Megatron's wrapper of torch's norm refuses sequence parallelism. All that is needed is the mark
    on the weight: its gradients, partial on each tensor rank, are then summed over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise ``hidden`` ``[..., hidden_size]``."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)
