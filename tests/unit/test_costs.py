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


def test_the_head_is_on_the_last_position() -> None:
    found = costs(ParallelPlan(pipeline=2))
    assert flops(found.forward) == pytest.approx([2 * LAYER, 2 * LAYER + HEAD])
    # Twice the forward's; the head makes its logits again.
    assert flops(found.backward) == pytest.approx([4 * LAYER, 4 * LAYER + 3 * HEAD])


def test_a_scalar_head_costs_nothing() -> None:
    plan, options = ParallelPlan(pipeline=2), ModelOptions(attention="flex")
    found = flop_costs(with_scalar_head(PAPER), plan, options, row_tokens=10, train=True)
    assert flops(found.forward) == pytest.approx([2 * LAYER] * 2)
    assert flops(found.backward) == pytest.approx([4 * LAYER] * 2)


def test_a_forward_only_model_has_no_backward() -> None:
    found = costs(ParallelPlan(pipeline=2), train=False)
    assert found.backward == ()
    assert found.forward == costs(ParallelPlan(pipeline=2)).forward


def test_interleaving_cuts_layers_finer() -> None:
    found = costs(ParallelPlan(pipeline=2, virtual_pipeline=2))
    assert flops(found.forward) == pytest.approx([LAYER, LAYER, LAYER, LAYER + HEAD])


def test_tensor_ranks_share_layers_and_head() -> None:
    found = costs(ParallelPlan(pipeline=2, tensor=2))
    assert flops(found.forward) == pytest.approx([LAYER, LAYER + HEAD / 2])


def test_data_ranks_share_nothing_of_a_row() -> None:
    assert costs(ParallelPlan(pipeline=2, data=4)) == costs(ParallelPlan(pipeline=2))


def test_recompute_makes_forwards_again() -> None:
    plan = ParallelPlan(pipeline=2)
    full, selective = costs(plan, recompute="full"), costs(plan, recompute="selective")
    assert flops(full.backward) == pytest.approx([6 * LAYER, 6 * LAYER + 3 * HEAD])
    assert flops(selective.backward) == pytest.approx(
        [
            4 * LAYER + 2 * ATTENTION,
            4 * LAYER + 2 * ATTENTION + 3 * HEAD,
        ]
    )
    assert full.forward == selective.forward == costs(plan).forward


def test_dense_attention_computes_all_pairs() -> None:
    found = costs(ParallelPlan(pipeline=4), attention="dense")
    assert flops(found.forward[:1]) == pytest.approx([MATRICES + 2 * 2 * 8 * 100])


def test_activation_is_what_a_position_keeps() -> None:
    plan, options = ParallelPlan(pipeline=2), ModelOptions(attention="flex")
    hidden = 10 * 8 * 4
    layer = layer_activation_bytes(PAPER, plan, options, 10)
    assert costs(plan).activation == (2 * layer + hidden,) * 2
    # Two inputs and the output.
    assert costs(plan, recompute="full").activation == (3 * hidden,) * 2
    halved = replace(plan, virtual_pipeline=2)
    assert costs(halved).activation == (layer + hidden,) * 4
    uneven = replace(plan, pipeline_layers=(3, 1))
    assert costs(uneven).activation == (3 * layer + hidden, layer + hidden)


def test_layers_are_where_the_plan_has_them() -> None:
    found = costs(ParallelPlan(pipeline=2, pipeline_layers=(3, 1)), recompute="full")
    assert flops(found.forward) == pytest.approx([3 * LAYER, LAYER + HEAD])
    assert flops(found.backward) == pytest.approx([9 * LAYER, 3 * LAYER + 3 * HEAD])
    plan = ParallelPlan(pipeline=2, virtual_pipeline=2)
    five = replace(PAPER, num_hidden_layers=5)
    uneven = replace(plan, pipeline_layers=(1, 2, 1, 1))
    made = ModelOptions(attention="flex")
    found = flop_costs(five, uneven, made, row_tokens=10, train=False)
    assert flops(found.forward) == pytest.approx([LAYER, 2 * LAYER, LAYER, LAYER + HEAD])
