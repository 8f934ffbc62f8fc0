"""FLOPs of a model's forward and backward passes; a multiply-add is two.

Counts are of one whole model, whatever its plan; vocabulary padding is not counted.
"""

from dataclasses import dataclass

from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.model import (
    ModelOptions,
    ModelSpec,
    layer_matmul_parameters,
    output_width,
)


def flops_per_token(spec: ModelSpec) -> int:
    """Forward FLOPs a token takes in the layers' matrices (embedding and head not included)."""
    return 2 * spec.num_hidden_layers * layer_matmul_parameters(spec)


def head_flops_per_token(spec: ModelSpec) -> int:
    """Forward FLOPs of the head for one predicted token (or one reward)."""
    return 2 * spec.hidden_size * output_width(spec)


def attention_flops(spec: ModelSpec, num_pairs: int) -> int:
    """Forward FLOPs of all layers' attention proper over ``num_pairs`` (query, key) pairs."""
    return 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * num_pairs


@dataclass(frozen=True, kw_only=True)
class RowFlops:
    """FLOPs of one row in one layer and in the head, on all tensor ranks together."""

    layer: int
    layer_backward: int
    head: int
    head_backward: int


def row_flops(spec: ModelSpec, options: ModelOptions, row_tokens: int) -> RowFlops:
    """FLOPs of a full row of ``row_tokens``, before its content is known.

    Counted of a layer: its matrices, and attention over all (query, key) pairs of a causal row,
    S(S + 1)/2, as if one segment filled it (a packed row has fewer; ``dense`` computes all S^2).
    The head predicts responses, taken as half of a preference row's tokens. The embedding is a
    look-up, and a scalar head's few products are left out.

    The backward of a matrix costs twice its forward. Besides, full recompute makes a layer's
    forward again, selective recompute that of attention; the head makes its logits again in any
    case.
    """
    all_pairs = BACKENDS[options.attention].computes_all_pairs
    pairs = row_tokens**2 if all_pairs else row_tokens * (row_tokens + 1) // 2
    attention = attention_flops(spec, pairs) // spec.num_hidden_layers
    layer = 2 * layer_matmul_parameters(spec) * row_tokens + attention
    head = head_flops_per_token(spec) * row_tokens // 2 if spec.head == "lm" else 0
    again = {"none": 0, "selective": attention, "full": layer}[options.recompute]
    return RowFlops(
        layer=layer, layer_backward=2 * layer + again, head=head, head_backward=3 * head
    )
