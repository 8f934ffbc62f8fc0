"""The scalar head: one number for a token, a reward or a value, from its hidden state.

Every tensor rank has the whole head. Its input must then be alike on them with no collective in
its backward that sums over them: each rank's gradient is already the whole one.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from puzzle_align.models.cpu import engine_device


class ScalarHead(nn.Module):
    """A linear map to one number, without bias, computed in float32 whatever the weights are."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        shape, dtype = (1, config.hidden_size), config.params_dtype
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=engine_device()))

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 ``[N]`` of hidden states ``[N, hidden_size]``."""
        return F.linear(hidden.float(), self.weight.float()).squeeze(1)
