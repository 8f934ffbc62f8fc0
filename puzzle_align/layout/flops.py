"""FLOPs of a model's forward and backward passes, and pipeline splits of layers balanced by them.

A multiply-add counts as two. Counts are of one whole model, independent of its plan; vocabulary
padding is not counted.

A split minimizes the work of the busiest rank. The last position has fewer layers, since it also
computes the head; the embedding is a look-up. The split is optimal by these criteria, in this order
(the tests compare it with all splits):
- the work of the busiest rank, all its chunks together, is minimal: it sets the pace;
- the work of the busiest position is minimal, then that of the second busiest, and so on;
- of equally good splits, the last position has the fewest layers, then the first, then the second
  and so on: a rank nearer the start keeps more rows for their backward.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.model import ModelOptions, ModelSpec, layer_matmul_parameters, output_width
from puzzle_align.layout.plan import ParallelPlan


def flops_per_token(spec: ModelSpec) -> int:
    """Forward FLOPs of a token in the layers' matrices, without embedding and head."""
    return 2 * spec.num_hidden_layers * layer_matmul_parameters(spec)


def head_flops_per_token(spec: ModelSpec) -> int:
    """Forward FLOPs of the head for one predicted token (or one reward)."""
    return 2 * spec.hidden_size * output_width(spec)


def backward_of_matrices(spec: ModelSpec) -> int:
    """FLOPs of the backward of layers' matrices and the head, over their forward's."""
    return 2 if spec.lora is None else 1  # beside adapters they are frozen


def attention_flops(spec: ModelSpec, num_pairs: int) -> int:
    """Forward FLOPs of attention scores and outputs in all layers for (query, key) pairs."""
    return 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * num_pairs


@dataclass(frozen=True, kw_only=True)
class RowFlops:
    """FLOPs of one row in one layer and in the head, on all tensor ranks together."""

    layer: int
    layer_backward: int
    head: int
    head_backward: int


def row_flops(spec: ModelSpec, options: ModelOptions, row_tokens: int) -> RowFlops:
    """Estimate FLOPs of a full row of ``row_tokens`` from its length alone.

    A layer's FLOPs are its matrices' and attention's over all (query, key) pairs of a causal row,
    S(S + 1)/2, as if one segment filled it (a packed row has fewer; ``dense`` computes all S^2).
    The head predicts responses, assumed to be half of a preference row's tokens. The embedding is a
    look-up, and a scalar head's few products are not counted.

    A backward costs twice the forward; of a frozen matrix, whose gradient nobody needs, as much as
    the forward. Full recompute adds a layer's forward, selective recompute that of attention; the
    head always recomputes its logits. Adapters' own products are not counted.
    """
    all_pairs = BACKENDS[options.attention].computes_all_pairs
    pairs = row_tokens**2 if all_pairs else row_tokens * (row_tokens + 1) // 2
    attention = attention_flops(spec, pairs) // spec.num_hidden_layers
    matrices = 2 * layer_matmul_parameters(spec) * row_tokens
    layer, times = matrices + attention, backward_of_matrices(spec)
    head = head_flops_per_token(spec) * row_tokens // 2 if spec.head == "lm" else 0
    again = {"none": 0, "selective": attention, "full": layer}[options.recompute]
    return RowFlops(
        layer=layer,
        layer_backward=times * matrices + 2 * attention + again,
        head=head,
        head_backward=(1 + times) * head,
    )


def balanced_layers(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, *, row_tokens: int, train: bool
) -> tuple[int, ...]:
    """Layers by virtual position that balance the FLOPs of rows of ``row_tokens``.

    ``train`` is false for a model that only runs forward. The model must have a layer for every
    position of the plan; ``plan.pipeline_layers`` is ignored.
    """
    flops = row_flops(spec, options, row_tokens)
    layer, head = flops.layer, flops.head
    if train:
        layer, head = layer + flops.layer_backward, head + flops.head_backward
    return balance(spec.num_hidden_layers, plan.pipeline, plan.virtual_pipeline, layer, head)


def balance(
    num_layers: int, num_ranks: int, num_chunks: int, layer: int, head: int
) -> tuple[int, ...]:
    """Balanced layers by virtual position, if a layer costs ``layer`` and the head ``head``."""
    num_positions = num_ranks * num_chunks
    assert num_layers >= num_positions, f"{num_layers} layers at {num_positions} positions"
    last = num_positions - 1
    reluctance = {position: -position for position in range(num_positions)} | {0: 1, last: 2}
    room = _room(num_layers, num_ranks, num_chunks, layer, head)
    counts = [1] * num_positions
    works = [layer] * last + [layer + head]
    # Splits within the ranks' room form a polymatroid, on which the greedy choice is optimal.
    least = [(work, reluctance[position], position) for position, work in enumerate(works)]
    heapify(least)
    for _ in range(num_layers - num_positions):
        while not room[least[0][-1] % num_ranks]:
            heappop(least)
        work, _, position = least[0]
        heapreplace(least, (work + layer, reluctance[position], position))
        counts[position] += 1
        room[position % num_ranks] -= 1
    return tuple(counts)


def _room(num_layers: int, num_ranks: int, num_chunks: int, layer: int, head: int) -> list[int]:
    """Layers that each rank can take, beyond one a chunk, without becoming the slowest."""
    least = [num_chunks * layer] * num_ranks
    least[-1] += head
    work = [(load, rank) for rank, load in enumerate(least)]
    heapify(work)
    for _ in range(num_layers - num_ranks * num_chunks):
        load, rank = work[0]
        heapreplace(work, (load + layer, rank))
    most = max(load for load, _ in work)
    return [(most - load) // layer for load in least]
