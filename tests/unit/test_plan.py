"""Plans as data: the layers of every position, and the rank of every coordinate."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.files.typed import from_plain
from puzzle_align.layout.plan import ParallelPlan, Topology

UNEVEN = ParallelPlan(pipeline=2, virtual_pipeline=2, pipeline_layers=(2, 1, 3, 1))


def test_even_layers_follow_from_their_number() -> None:
    plan = ParallelPlan(pipeline=2, virtual_pipeline=2)
    assert [plan.layers_of(position, 8) for position in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]
    assert [plan.num_layers_on(rank, 12) for rank in range(2)] == [6, 6]
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
    read = from_plain(ParallelPlan, json.loads(json.dumps(asdict(UNEVEN))), "plan.json")
    assert read == UNEVEN and hash(read) == hash(UNEVEN)
    assert {UNEVEN, UNEVEN.grid, read} == {UNEVEN, ParallelPlan(pipeline=2, virtual_pipeline=2)}
    assert str(UNEVEN) == "(P2, D1, T1, layers 2+1 | 3+1)"
    assert str(UNEVEN.grid) == "(P2, D1, T1)"


plans = st.builds(
    ParallelPlan, pipeline=st.integers(1, 4), data=st.integers(1, 4), tensor=st.integers(1, 4)
)


def test_groups_of_a_plan_of_eight() -> None:
    topology = Topology(ParallelPlan(pipeline=2, data=2, tensor=2))
    assert topology.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.data_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.pipeline_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.model_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert topology.embedding_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.coordinates(6) == (1, 1, 0)


def test_embedding_groups_are_the_ends_of_the_pipelines() -> None:
    assert Topology(ParallelPlan(pipeline=3)).embedding_groups() == [[0, 2]]
    assert Topology(ParallelPlan(data=2)).embedding_groups() == [[0], [1]]


def test_a_plan_lies_on_the_ranks_it_is_given() -> None:
    topology = Topology(ParallelPlan(pipeline=2, tensor=2), ranks=[9, 8, 5, 4])
    assert topology.tensor_groups() == [[9, 8], [5, 4]]
    assert topology.pipeline_groups() == [[9, 5], [8, 4]]
    assert topology.coordinates(4) == (1, 0, 1)


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 0]])
def test_wrong_ranks_are_refused(ranks) -> None:
    with pytest.raises(ValueError, match="needs 2 distinct ranks"):
        Topology(ParallelPlan(tensor=2), ranks)


@given(plans)
def test_every_kind_of_group_partitions_the_ranks(plan) -> None:
    topology = Topology(plan)
    sizes = {
        "tensor_groups": plan.tensor,
        "data_groups": plan.data,
        "pipeline_groups": plan.pipeline,
        "model_groups": plan.tensor * plan.pipeline,
    }
    for kind, size in sizes.items():
        groups = getattr(topology, kind)()
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
    # They differ in their own coordinates only.
    fixed = {"tensor_groups": (0, 1), "data_groups": (0, 2), "pipeline_groups": (1, 2)}
    for kind, dims in fixed.items():
        for group in getattr(topology, kind)():
            places = [topology.coordinates(rank) for rank in group]
            assert len({tuple(place[dim] for dim in dims) for place in places}) == 1
            (moving,) = {0, 1, 2} - set(dims)
            assert [place[moving] for place in places] == list(range(len(group)))
    for rank in range(plan.world_size):
        assert topology.rank(*topology.coordinates(rank)) == rank
