"""Process groups that a rank makes: in an order that cannot lock up, each once, and few."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from puzzle_align.layout.groups import RankGroups, link_hops, link_kinds
from puzzle_align.layout.plan import ParallelPlan, Topology
from puzzle_align.runtime.groups.world import Communicators, World, build_communicators

NUM_RANKS = 12
BIG = ParallelPlan(pipeline=8, data=8, tensor=8)


@dataclass(frozen=True)
class Model:
    """A model somewhere."""

    plan: ParallelPlan
    ranks: tuple[int, ...]
    trained: bool

    @property
    def topology(self) -> Topology:
        return Topology(self.plan, self.ranks)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """On any ranks, in any order."""
    pipeline, data, tensor = (draw(st.integers(1, most)) for most in (4, 3, 2))
    plan = ParallelPlan(
        pipeline=pipeline, data=data, tensor=tensor, virtual_pipeline=draw(st.integers(1, 2))
    )
    if plan.world_size > NUM_RANKS:
        plan = replace(plan, data=1)
    ranks = draw(st.permutations(range(NUM_RANKS)))[: plan.world_size]
    if draw(st.booleans()):
        ranks = sorted(ranks)
    return Model(plan, tuple(ranks), draw(st.booleans()))


Step = tuple[str, tuple[int, ...]]  # a group that is made, or a hop that is opened: who takes part


def _steps(jobs: Sequence[Model], rank: int) -> list[Step]:
    """All that a rank waits in for others, in its order, as the runtime does it."""
    own, made, steps = RankGroups(rank), set(), []
    for number, model in enumerate(jobs):
        groups = own.add_model(model.topology, trained=model.trained)
        for group in groups.values():
            if group.name not in made:
                made.add(group.name)
                steps.append((group.name, group.ranks))
        for kind in link_kinds(model.plan, trained=model.trained) if groups else ():
            for hop in link_hops(kind, groups["pp"].ranks):
                if rank in hop:
                    steps.append((f"{number} {kind} {hop}", hop))
    return steps


def _played(sequences: list[list[Step]]) -> int:
    """Steps done when each waits for all who take part; raises where all wait."""
    places, num_done = [0] * len(sequences), 0
    moved = True
    while moved:
        moved = False
        for sequence, place in zip(sequences, places, strict=True):
            if place == len(sequence):
                continue
            step = sequence[place]
            members = step[1]
            assert sequence in [sequences[m] for m in members], "waits where it has no part"
            if all(sequences[m][places[m] : places[m] + 1] == [step] for m in members):
                for member in members:
                    places[member] += 1
                num_done += 1
                moved = True
                break
    waiting = {r: s[p] for r, (s, p) in enumerate(zip(sequences, places, strict=True)) if s[p:]}
    assert not waiting, f"all wait: {waiting}"
    return num_done


@given(st.lists(models(), min_size=1, max_size=5))
def test_no_ranks_wait_for_each_other_in_a_circle(jobs: list[Model]) -> None:
    sequences = [_steps(jobs, rank) for rank in range(NUM_RANKS)]
    num_done = _played(sequences)
    assert num_done == len(set(itertools.chain(*sequences)))
    for steps in sequences:
        assert len(set(steps)) == len(steps), "made twice"


@given(st.lists(models(), min_size=1, max_size=5))
def test_an_order_of_ranks_is_made_once_and_links_are_a_models_own(jobs: list[Model]) -> None:
    for rank in range(NUM_RANKS):
        own = RankGroups(rank)
        shared: dict[tuple[int, ...], str] = {}
        links: set[str] = set()
        for model in jobs:
            groups = own.add_model(model.topology, trained=model.trained)
            assert bool(groups) == (rank in model.ranks)
            for kind, group in groups.items():
                assert rank in group.ranks
                if group.is_link:
                    assert kind in link_kinds(model.plan, trained=model.trained)
                    assert group.name not in links
                    links.add(group.name)
                else:
                    assert shared.setdefault(group.ranks, group.name) == group.name
        assert len(set(shared.values())) == len(shared)
        assert not links & set(shared.values())


def test_long_lists_of_ranks_have_short_names_of_their_own() -> None:
    names = set()
    for ranks in (range(512), [1, 0, *range(2, 512)], [*range(510), 511, 510]):
        plan = ParallelPlan(data=512)
        names.add(RankGroups(7).add_model(Topology(plan, ranks), trained=True)["dp"].name)
    assert len(names) == 3 and max(map(len, names)) < 64


def test_links_of_a_frozen_model_go_forward_only() -> None:
    ring = ParallelPlan(pipeline=2, virtual_pipeline=2)
    assert link_kinds(ring, trained=False) == ("forward", "wrap_forward")
    assert link_kinds(ParallelPlan(pipeline=2), trained=False) == ("forward",)
    assert len(link_kinds(ring, trained=True)) == 4
    assert link_kinds(ParallelPlan(), trained=True) == ()


def test_hops_of_a_link_go_its_way() -> None:
    pipeline = (5, 3, 8)
    assert link_hops("forward", pipeline) == [(5, 3), (3, 8)]
    assert link_hops("backward", pipeline) == [(8, 3), (3, 5)]
    assert link_hops("wrap_forward", pipeline) == [(8, 5)]
    assert link_hops("wrap_backward", pipeline) == [(5, 8)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The ranks of every group that is made, on one of 512 ranks that does not wait for others."""
    calls: list[list[int]] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        calls.append(ranks)
        assert options["use_local_synchronization"]
        made = new_group(ranks, **options)
        assert isinstance(made, dist.ProcessGroup)
        return made

    monkeypatch.setattr(dist, "new_group", counted)
    yield calls
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(rank: int) -> World:
    dist.init_process_group("fake", rank=rank, world_size=512, store=FakeStore())
    return World(rank, 512, torch.device("cpu"))


def _build(world: World, plans: Sequence[ParallelPlan]) -> list[Communicators]:
    """Four models: two that are trained, two that are not."""
    found = [
        build_communicators(plan, world, trained=number < 2) for number, plan in enumerate(plans)
    ]
    return [one for one in found if one is not None]


ONE_PLAN = (BIG,) * 4
FOUR_PLANS = (
    BIG,
    replace(BIG, virtual_pipeline=2),
    ParallelPlan(pipeline=4, data=16, tensor=8),
    ParallelPlan(pipeline=16, data=4, tensor=8, virtual_pipeline=2),
)


@pytest.mark.parametrize("rank", [0, 100, 511])
@pytest.mark.parametrize(
    ("plans", "most"),
    [(ONE_PLAN, 12), (FOUR_PLANS, 23)],  # on all ranks it was 905 for a model that is trained
    ids=["one plan", "four plans"],
)
def test_four_models_on_512_ranks_take_few_groups(made, plans, most: int, rank: int) -> None:
    world = _join(rank)
    communicators = _build(world, plans)
    assert len(communicators) == 4
    assert len(made) <= most <= 400
    assert all(rank in ranks for ranks in made)
    links = [one.links.groups for one in communicators]
    assert all("backward" in of_model for of_model in links[:2])
    assert not any(of_model.keys() & {"backward", "wrap_backward"} for of_model in links[2:])
    assert len({id(of_model["forward"]) for of_model in links}) == 4


def test_models_share_their_groups_but_not_their_links(made) -> None:
    world = _join(3)
    first, second = _build(world, (BIG, BIG))
    names = [name for name in vars(first.groups) if getattr(first.groups, name) is not None]
    assert {"tp", "dp", "pp", "mp", "embd", "cp", "intra_dist_opt"} <= set(names)
    for name in names:
        assert getattr(first.groups, name) is getattr(second.groups, name), name
    assert first.groups.intra_dist_opt is dist.group.WORLD  # no second group of all ranks
    assert first.links.groups["forward"] is not second.links.groups["forward"]
    assert first.links.groups["forward"] is not first.links.groups["backward"]


def test_a_rank_is_numbered_by_its_place_in_the_plan(made) -> None:
    plan, ranks = ParallelPlan(pipeline=2, data=2, tensor=2), (9, 4, 7, 1, 3, 8, 2, 6)
    for rank in ranks:
        found = build_communicators(plan, _join(rank), ranks, trained=True)
        assert found is not None
        groups = found.groups
        place = groups.pp.rank(), groups.dp.rank(), groups.tp.rank()
        assert place == Topology(plan, ranks).coordinates(rank)
        assert groups.intra_dist_opt.rank() == ranks.index(rank)
        dist.destroy_process_group()


def test_a_new_world_makes_groups_beside_those_that_are_there(made) -> None:
    """Names are taken by the process's groups, whoever made them."""
    first, second = (
        build_communicators(ParallelPlan(pipeline=2), world, [4, 5], trained=False)
        for world in (_join(4), World(4, 512, torch.device("cpu")))
    )
    assert first is not None and second is not None
    assert first.groups.pp is not second.groups.pp
    assert made.count([4, 5]) == 4  # in both worlds the pipeline and its link
