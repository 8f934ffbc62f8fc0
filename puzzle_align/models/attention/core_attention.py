"""Core attention of Megatron's layers over one packed row, or during generation over the KV cache.

The row's structure is not an argument: activation recompute saves a layer's arguments for the
backward, and can save tensors only. The caller of a model chunk sets ``row_state.current`` before
its forward and again before its backward, where recompute reads it.

Shapes: S tokens in a row, h query heads and g query groups of this tensor rank, d channels a head.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from puzzle_align.models.attention import AttentionPlan, attend
from puzzle_align.models.attention.cache import CacheRow


class RowState:
    """Holder of a model chunk's current row.

    It is not a context variable, since the backward may run in another thread.
    """

    def __init__(self) -> None:
        self.current: AttentionPlan | CacheRow | None = None


class PackedCoreAttention(MegatronModule):
    """Attention over the row of its ``row_state``, in place of DotProductAttention.

    The model's config must ask for plain causal attention: no dropout, no sliding window, no
    attention sink, no context parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0 and config.window_size is None and config.softmax_type == "vanilla"
        assert not config.apply_query_key_layer_scaling and config.context_parallel_size == 1
        assert pg_collection is not None, "there are no global groups"
        self.tp_group = pg_collection.tp  # else checkpoints use Megatron's global group
        self.softmax_scale = softmax_scale
        self.row_state: RowState | None = None
        self.layer = 0  # its number in the chunk

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [S, 1, h, d], key and value [S, 1, g, d] -> [S, 1, h * d].

        Megatron's masks and packing must be None.
        """
        assert attention_mask is None and attention_bias is None and packed_seq_params is None
        plan = self.row_state.current if self.row_state is not None else None
        assert plan is not None, "set row_state.current before every forward and backward"
        if not isinstance(plan, AttentionPlan):
            return plan.attend(self.layer, query, key, value, self.softmax_scale)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = attend(q, k, v, plan, self.softmax_scale)
        return output.permute(2, 0, 1, 3).flatten(2)


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention, which keeps values for the backward without queries and keys.

    Megatron's values are a view of the fused projection. Attention saves them, and with them all of
    the projection, whose queries and keys it has saved once more, rotated.
    """

    def get_query_key_value_tensors(
        self, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [S, 1, h, d], key and value [S, 1, g, d]."""
        tensors: Any = super().get_query_key_value_tensors(*args, **named)
        query, key, value = tensors
        return query, key, value.contiguous() if torch.is_grad_enabled() else value


def bind_row_state(module: nn.Module, row_state: RowState) -> None:
    """Set ``row_state`` and layer numbers of every PackedCoreAttention in ``module``."""
    attentions = [part for part in module.modules() if isinstance(part, PackedCoreAttention)]
    for layer, attention in enumerate(attentions):
        attention.row_state, attention.layer = row_state, layer
