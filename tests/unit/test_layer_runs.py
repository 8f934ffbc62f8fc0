"""One layer of every run tells what all of them would."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import JobPlan, Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import layer_runs, ordered_ranks
from puzzle_align.layout.rules import extents, overlap
from puzzle_align.planning.memory.job import _shadow
from tests.specs import LLAMA, TIED
from tests.unit.job_plans import context

SPEC = replace(LLAMA, num_hidden_layers=8)


@st.composite
def plans(draw: st.DrawFn, num_ranks: int) -> ParallelPlan:
    """On so many ranks, with layers as they come."""
    tensor = draw(st.sampled_from([t for t in (1, 2) if num_ranks % t == 0]))
    left = num_ranks // tensor
    pipeline = draw(st.sampled_from([p for p in range(1, left + 1) if left % p == 0 and p <= 8]))
    chunks = draw(st.sampled_from([1, 2])) if 1 < pipeline <= 4 else 1
    positions = pipeline * chunks
    cuts = sorted(draw(st.permutations(range(1, 8)))[: positions - 1])
    layers = tuple(b - a for a, b in zip((0, *cuts), (*cuts, 8), strict=True))
    if len(set(layers)) == 1:
        layers = ()
    return ParallelPlan(
        pipeline=pipeline,
        data=left // pipeline,
        tensor=tensor,
        virtual_pipeline=chunks,
        pipeline_layers=layers,
    )


pairs = st.sampled_from([2, 4, 6, 8]).flatmap(lambda n: st.tuples(plans(n), plans(n)))
specs = st.sampled_from([SPEC, replace(TIED, num_hidden_layers=8)])


def test_runs_are_of_layers_that_both_plans_keep_together() -> None:
    one = ParallelPlan(pipeline=2)
    other = ParallelPlan(pipeline=2, pipeline_layers=(5, 3))
    found = layer_runs(SPEC, one, other)
    assert found.lengths == (4, 1, 3) and found.model.num_hidden_layers == 3
    assert found.before.pipeline_layers == (1, 2) and found.after.pipeline_layers == (2, 1)
    assert found.times("model.layers.2.mlp.up_proj.weight") == 3
    assert found.times("lm_head.weight") == 1


@settings(max_examples=40)
@given(pairs, specs)
def test_what_ranks_and_parts_have_in_common_is_the_whole_models(pair, spec) -> None:
    before, after = pair
    runs = layer_runs(spec, before, after)
    ranks = tuple(range(before.world_size))
    whole = common(Holdings(spec, before, ranks), Holdings(spec, after, ranks))
    small = common(
        Holdings(runs.model, runs.before, ranks),
        Holdings(runs.model, runs.after, ranks),
        runs.times,
    )
    assert small == whole


def common(source: Holdings, wanted: Holdings, times=lambda _: 1) -> Counter:
    """Numbers that each rank holds of what each wants."""
    found: Counter = Counter()
    for tensor, boxes in wanted.holders.items():
        for box, receivers in boxes.items():
            for held, holders in source.holders[tensor].items():
                shared = overlap(box, held)
                if shared is not None:
                    size = times(tensor) * prod(extents(shared))
                    found.update({(a, b): size for a in holders for b in receivers})
    return found


@settings(max_examples=40)
@given(pairs, specs)
def test_a_copys_bytes_are_the_whole_models(pair, spec) -> None:
    before, after = pair
    trained = context("actor", before, "train", model=spec, dtype="bf16")
    ranks = ordered_ranks(Holdings(spec, before, trained.ranks), after, trained.ranks)
    sampling = context("actor", after, "generate", model=spec, ranks=ranks, dtype="bf16")
    phases = [
        Phase(name=own.workload, order="sequential", contexts=(own,)) for own in (sampling, trained)
    ]
    plan = JobPlan(stage="ppo", world_size=before.world_size, phases=tuple(phases))
    for rank in range(before.world_size):
        built, own = _shadow(sampling, plan, rank)
        if (trained.plan, trained.ranks) == (sampling.plan, sampling.ranks):
            assert (built, own) == (0, 0)
            continue
        wanted, there = (
            {
                (p.shape, p.pieces)
                for chunk in Holdings(spec, each.plan, each.ranks).parameters(rank)
                for p in chunk.values()
            }
            for each in (sampling, trained)
        )
        assert built == 2 * sum(prod(shape) for shape, _ in wanted)
        assert own == 2 * sum(prod(shape) for shape, _ in wanted - there)


def test_the_whole_model_is_one_run_under_one_rank() -> None:
    found = layer_runs(SPEC, ParallelPlan(), ParallelPlan(tensor=2))
    assert found.lengths == (8,)
    with pytest.raises(AssertionError):
        layer_runs(SPEC, ParallelPlan(pipeline=3), ParallelPlan())
