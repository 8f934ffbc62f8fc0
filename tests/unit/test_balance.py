"""Balanced layers, against every split there is, and on models one can do by hand."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.flops import balance, balanced_layers
from puzzle_align.layout.model import ModelOptions, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from tests.specs import PAPER

# A layer's matrices take 2 * 3 * 64 * 176 + 4 * 2 * 64 * 64 FLOPs a token, about 100 thousand.
WIDE = {"hidden_size": 64, "intermediate_size": 176, "head_dim": 16, "num_key_value_heads": 4}
SPEC = replace(PAPER, **WIDE, num_hidden_layers=30)


def test_balance_by_hand() -> None:
    # A head of three layers and its rank's one are as much as four.
    assert balance(13, 4, 1, layer=10, head=30) == (4, 4, 4, 1)
    assert balance(12, 4, 1, layer=10, head=40) == (3, 4, 4, 1)
    assert balance(9, 3, 1, layer=10, head=1000) == (4, 4, 1)
    # The ends have fewer where it does not matter.
    assert balance(30, 4, 1, layer=1, head=0) == (7, 8, 8, 7)
    assert balance(29, 4, 1, layer=1, head=0) == (7, 7, 8, 7)
    assert balance(5, 2, 1, layer=1, head=0) == (3, 2)
    assert balance(7, 1, 1, layer=1, head=5) == (7,)
    # The rank that has the head makes up for it in its other chunk, too.
    assert balance(9, 2, 2, layer=10, head=30) == (3, 2, 3, 1)


@pytest.mark.parametrize("num_layers", [28, 30])
def test_every_number_of_ranks_has_its_layers(num_layers: int) -> None:
    spec = replace(SPEC, num_hidden_layers=num_layers)
    for pipeline in range(1, num_layers + 1):
        plan = ParallelPlan(pipeline=pipeline)
        layers = balanced_layers(spec, plan, ModelOptions(), row_tokens=512, train=True)
        assert len(layers) == pipeline and sum(layers) == num_layers and min(layers) >= 1


def test_the_head_counts_as_its_passes_do() -> None:
    # Trained, a layer takes 3 forwards and the head, which makes its logits again, 4 of half the
    # tokens; frozen, both take one. A head of 6.5 layers' forwards is then 8.7 or 6.5 layers.
    plan, options = ParallelPlan(pipeline=4), ModelOptions()
    layer = 2 * (3 * 64 * 176 + 4 * 64 * 64) * 512 + 4 * 64 * 512 * 513 // 2
    heavy = replace(SPEC, vocab_size=round(6.5 * layer / (64 * 512)))
    assert balanced_layers(heavy, plan, options, row_tokens=512, train=True) == (9, 10, 10, 1)
    assert balanced_layers(heavy, plan, options, row_tokens=512, train=False) == (9, 9, 9, 3)
    scalar = with_scalar_head(heavy)
    assert balanced_layers(scalar, plan, options, row_tokens=512, train=True) == (7, 8, 8, 7)


def _splits(num_layers: int, parts: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), parts - 1)
    bounds = ((0, *cut, num_layers) for cut in cuts)
    return [tuple(b - a for a, b in pairwise(at)) for at in bounds]


def _badness(split: tuple[int, ...], num_ranks: int, layer: int, head: int) -> tuple:
    """Key by which the module's docstring orders splits."""
    work = [number * layer for number in split]
    work[-1] += head
    slowest = max(sum(work[rank::num_ranks]) for rank in range(num_ranks))
    return slowest, sorted(work, reverse=True), (split[-1], *split[:-1])


@settings(max_examples=200)
@given(
    pipeline=st.sampled_from([(1, 1), *product((2, 3, 4), (1, 2, 3))]),  # ranks, chunks on each
    spare=st.integers(0, 5),
    layer=st.integers(1, 12),
    head=st.integers(0, 60),
)
def test_no_split_is_better(pipeline: tuple[int, int], spare: int, layer: int, head: int) -> None:
    num_ranks, num_chunks = pipeline
    num_layers = num_ranks * num_chunks + spare
    found = balance(num_layers, num_ranks, num_chunks, layer, head)
    splits = _splits(num_layers, num_ranks * num_chunks)
    assert found == min(splits, key=lambda split: _badness(split, num_ranks, layer, head))
