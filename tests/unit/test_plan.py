"""Plans as data, and the layers they give every position."""

import json
from dataclasses import asdict

import pytest

from puzzle_align.layout.plan import ParallelPlan

UNEVEN = ParallelPlan(pipeline=2, virtual_pipeline=2, pipeline_layers=(2, 1, 3, 1))


def test_even_layers_follow_from_their_number() -> None:
    plan = ParallelPlan(pipeline=2, virtual_pipeline=2)
    assert [plan.layers_of(position, 8) for position in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]
    assert [plan.num_layers_on(rank, 8) for rank in range(2)] == [4, 4]
    with pytest.raises(AssertionError, match="does not divide 7 layers"):
        plan.layers_of(0, 7)


def test_uneven_layers_stand_as_they_are_given() -> None:
    found = [UNEVEN.layers_of(position, 7) for position in range(4)]
    assert found == [range(2), range(2, 3), range(3, 6), range(6, 7)]
    assert [list(UNEVEN.positions_of(rank)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [UNEVEN.num_layers_on(rank, 7) for rank in range(2)] == [5, 2]
    with pytest.raises(AssertionError):
        UNEVEN.layers_of(0, 8)


def test_a_plan_is_data() -> None:
    read = ParallelPlan(**json.loads(json.dumps(asdict(UNEVEN))))
    assert read == UNEVEN and hash(read) == hash(UNEVEN)
    assert {UNEVEN, UNEVEN.grid, read} == {UNEVEN, ParallelPlan(pipeline=2, virtual_pipeline=2)}
    assert str(UNEVEN) == "(P2, D1, T1, layers 2+1 | 3+1)"
    assert str(UNEVEN.grid) == "(P2, D1, T1)"
