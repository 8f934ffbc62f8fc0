"""HybridFlow's figures: that they are its paper's, and that no routing table needs more."""

import pytest

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import num_parameters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ranks_of_least_traffic
from puzzle_align.resharding import hybridflow
from puzzle_align.resharding.routing import lower_bound
from tests.unit.test_routing import small_model

MODEL = small_model(num_hidden_layers=8)
Sizes = tuple[int, int, int]


def plan_of(sizes: Sizes) -> ParallelPlan:
    return ParallelPlan(pipeline=sizes[0], data=sizes[1], tensor=sizes[2])


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ((1, 1, 4), (1, 2, 2), 1 / 4),
        ((1, 2, 4), (1, 8, 1), 3 / 4),
        ((4, 1, 1), (1, 4, 1), 3 / 4),
        ((2, 1, 4), (1, 4, 2), 3 / 8),
        ((8, 2, 2), (2, 16, 1), 7 / 16),
    ],
)
def test_no_table_needs_more_than_the_engine(before: Sizes, after: Sizes, share: float) -> None:
    plan = plan_of(after)
    source = Holdings(MODEL, plan_of(before), tuple(range(plan.world_size)))
    assert hybridflow.applies(source.plan, plan)
    assert hybridflow.even_share(source.plan, plan) == pytest.approx(share)
    destination = Holdings(MODEL, plan, ranks_of_least_traffic(source, plan))
    least = max(lower_bound(source, destination).values())
    assert 0 < least <= hybridflow.most_received(source, plan)


def test_what_a_group_gathers_is_counted_on_its_layers() -> None:
    """Of two stages on two ranks each gets the other's: the fuller one, with embedding or head."""
    source = Holdings(MODEL, plan_of((2, 1, 1)), (0, 1))
    size, norm, vocabulary = num_parameters(MODEL), MODEL.hidden_size, MODEL.vocab_size
    with_head = (size - 2 * vocabulary * norm - norm) // 2 + vocabulary * norm + norm
    assert hybridflow.most_received(source, plan_of((1, 2, 1))) == with_head


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, 1, 1), (2, 1, 2)),
        ((1, 2, 2), (1, 2, 2)),
        ((1, 4, 1), (1, 1, 4)),
        ((1, 1, 4), (2, 2, 1)),
        ((1, 1, 4), (1, 1, 2)),
    ],
)
def test_it_does_not_serve_every_switch(before: Sizes, after: Sizes) -> None:
    assert not hybridflow.applies(plan_of(before), plan_of(after))
