"""Costs in proportion to FLOPs, against counts made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from puzzle_align.layout.model import ModelOptions, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.flops import FLOPS_PER_SECOND, flop_costs
from puzzle_align.planning.memory.model import layer_activation_bytes
from puzzle_align.schedules.costs import ModelCosts
from tests.specs import PAPER
from tests.unit.job_plans import TWO

# One layer and ten tokens: q 64, k and v 64, output 64, gate, up and down 3 * 128 weights; 55
# (query, key) pairs, each a product of 8 numbers with keys and one with values.
MATRICES = 2 * 10 * (64 + 64 + 64 + 384)
ATTENTION = 2 * 2 * 8 * 55
LAYER = MATRICES + ATTENTION
HEAD = 2 * 5 * 8 * 128  # five of the ten tokens are predicted


def costs(plan: ParallelPlan, train: bool = True, **options: Any) -> ModelCosts:
    made = ModelOptions(**{"attention": "flex", **options})
    return flop_costs(PAPER, plan, made, row_tokens=10, train=train)


def flops(times: tuple[float, ...]) -> list[float]:
    return [time * FLOPS_PER_SECOND for time in times]


def test_the_head_is_on_the_last_position_and_costs_nothing_where_it_is_scalar() -> None:
    both, alone = costs(TWO), costs(TWO, train=False)
    assert flops(both.forward) == pytest.approx([2 * LAYER, 2 * LAYER + HEAD])
    # Twice the forward's; the head makes its logits again.
    assert flops(both.backward) == pytest.approx([4 * LAYER, 4 * LAYER + 3 * HEAD])
    assert (alone.forward, alone.backward) == (both.forward, ())
    options = ModelOptions(attention="flex")
    scalar = flop_costs(with_scalar_head(PAPER), TWO, options, row_tokens=10, train=True)
    assert flops(scalar.forward) == pytest.approx([2 * LAYER] * 2)
    assert flops(scalar.backward) == pytest.approx([4 * LAYER] * 2)


def test_chunks_are_finer_and_tensor_ranks_share_while_data_ranks_do_not() -> None:
    chunks, tensor = costs(replace(TWO, virtual_pipeline=2)), costs(replace(TWO, tensor=2))
    assert flops(chunks.forward) == pytest.approx([LAYER, LAYER, LAYER, LAYER + HEAD])
    assert flops(tensor.forward) == pytest.approx([LAYER, LAYER + HEAD / 2])
    assert costs(replace(TWO, data=4)) == costs(TWO)


def test_recompute_makes_forwards_again() -> None:
    full, selective = costs(TWO, recompute="full"), costs(TWO, recompute="selective")
    assert flops(full.backward) == pytest.approx([6 * LAYER, 6 * LAYER + 3 * HEAD])
    assert flops(selective.backward) == pytest.approx(
        [4 * LAYER + 2 * ATTENTION, 4 * LAYER + 2 * ATTENTION + 3 * HEAD]
    )
    assert full.forward == selective.forward == costs(TWO).forward


def test_dense_attention_computes_all_pairs() -> None:
    found = costs(ParallelPlan(pipeline=4), attention="dense")
    assert flops(found.forward[:1]) == pytest.approx([MATRICES + 2 * 2 * 8 * 100])


def test_activation_is_what_a_position_keeps() -> None:
    hidden = 10 * 8 * 4
    layer = layer_activation_bytes(PAPER, TWO, ModelOptions(attention="flex"), 10)
    assert costs(TWO).activation == (2 * layer + hidden,) * 2
    # Two inputs and the output.
    assert costs(TWO, recompute="full").activation == (3 * hidden,) * 2
    assert costs(replace(TWO, virtual_pipeline=2)).activation == (layer + hidden,) * 4
    uneven = costs(replace(TWO, pipeline_layers=(3, 1)))
    assert uneven.activation == (3 * layer + hidden, layer + hidden)


def test_layers_are_where_the_plan_has_them() -> None:
    found = costs(replace(TWO, pipeline_layers=(3, 1)), recompute="full")
    assert flops(found.forward) == pytest.approx([3 * LAYER, LAYER + HEAD])
    assert flops(found.backward) == pytest.approx([9 * LAYER, 3 * LAYER + 3 * HEAD])
    five = replace(PAPER, num_hidden_layers=5)
    uneven = replace(TWO, virtual_pipeline=2, pipeline_layers=(1, 2, 1, 1))
    made = ModelOptions(attention="flex")
    found = flop_costs(five, uneven, made, row_tokens=10, train=False)
    assert flops(found.forward) == pytest.approx([LAYER, 2 * LAYER, LAYER, LAYER + HEAD])
