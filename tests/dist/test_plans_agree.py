"""Loss and every gradient are the same under every plan, layout, schedule and backend.

Relative 1e-5 in fp32 of the loss; of each gradient's norm, what its sums' rounding gives.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from puzzle_align.layout.model import LORA_TARGETS, LoraSpec, ModelSpec
from tests.bounds import LOSS_BOUND, gradient_bound
from tests.dist.preference_step import Case, assemble, run_case
from tests.dist.random_models import plan
from tests.dist.spawn import run_ranks
from tests.specs import LLAMA, MANY_HEADS, TIED

NUM_PAIRS = 9
FIVE, SEVEN = replace(LLAMA, num_hidden_layers=5), replace(TIED, num_hidden_layers=7)
LORA = LoraSpec(r=3, lora_alpha=1.0, target_modules=LORA_TARGETS)  # gradients of adapters alone
ADAPTED, ADAPTED_HEADS = replace(LLAMA, lora=LORA), replace(MANY_HEADS, lora=LORA)
SPECS = (LLAMA, TIED, FIVE, SEVEN, ADAPTED, ADAPTED_HEADS)
ONE = plan(1, 1, 1)
CASES: dict[int, list[tuple[ModelSpec, Case]]] = {
    1: [
        (LLAMA, Case(ONE, layout="paired")),
        (LLAMA, Case(ONE, layout="paired", packed=False)),
        (LLAMA, Case(ONE, attention="dense")),
        (LLAMA, Case(ONE, attention="varlen", recompute="selective")),
        (ADAPTED, Case(ONE, recompute="full")),
    ],
    2: [
        (LLAMA, Case(plan(2, 1, 1, chunks=2))),
        (LLAMA, Case(replace(plan(2, 1, 1), schedule="gpipe"))),
        (LLAMA, Case(plan(1, 2, 1), overlap=True)),
        (LLAMA, Case(plan(1, 1, 2))),
        (LLAMA, Case(plan(1, 1, 2, sp=True), recompute="full")),
        (ADAPTED, Case(plan(2, 1, 1, chunks=2))),
        (ADAPTED, Case(plan(1, 2, 1), overlap=True)),
        (ADAPTED, Case(plan(1, 1, 2, sp=True), recompute="full")),
        (TIED, Case(plan(2, 1, 1))),
        # A rank recomputes a row's layers after later rows' forwards, whose masks are others.
        (SEVEN, Case(plan(2, 1, 1, layers=(2, 5)), recompute="full")),
        (SEVEN, Case(plan(2, 1, 1, chunks=2, layers=(2, 1, 3, 1)))),
    ],
    3: [(SEVEN, Case(plan(3, 1, 1, chunks=2, layers=(1, 1, 2, 1, 1, 1))))],
    4: [
        (TIED, Case(plan(2, 2, 1, chunks=2), overlap=True)),
        (ADAPTED_HEADS, Case(plan(1, 1, 4))),
    ],
    8: [(TIED, Case(plan(2, 2, 2, chunks=2, sp=True), packed=False))],
}
# Others have each part of them: one axis, or these axes with another model or layout; eight ranks
# have all three.
SLOW: dict[int, list[tuple[ModelSpec, Case]]] = {
    1: [
        (LLAMA, Case(ONE, packed=False)),
        (LLAMA, Case(ONE, attention="varlen")),
        (LLAMA, Case(ONE, recompute="full")),
        (LLAMA, Case(ONE, recompute="selective")),
    ],
    2: [
        (FIVE, Case(plan(2, 1, 1, layers=(3, 2)))),
        (FIVE, Case(plan(2, 1, 1, chunks=2, layers=(1, 2, 1, 1)))),
        (LLAMA, Case(plan(2, 1, 1))),
        (LLAMA, Case(plan(1, 2, 1))),
        (LLAMA, Case(plan(1, 1, 2, sp=True))),
        (ADAPTED, Case(plan(1, 1, 2))),
        (TIED, Case(plan(1, 1, 2, sp=True))),
    ],
    3: [
        (FIVE, Case(plan(3, 1, 1, layers=(1, 3, 1)))),
        (SEVEN, Case(plan(3, 1, 1, layers=(3, 2, 2)))),
    ],
    4: [
        (FIVE, Case(plan(4, 1, 1, layers=(1, 2, 1, 1)))),
        (FIVE, Case(plan(2, 1, 2, sp=True, layers=(2, 3)))),
        (LLAMA, Case(plan(2, 1, 2))),
        (LLAMA, Case(plan(2, 2, 1))),
        (LLAMA, Case(plan(2, 2, 1, chunks=2))),
        (SEVEN, Case(plan(4, 1, 1, layers=(2, 2, 2, 1)))),
        (SEVEN, Case(plan(2, 2, 1, chunks=2, layers=(2, 2, 2, 1)), overlap=True)),
        (LLAMA, Case(plan(2, 1, 2, sp=True), layout="paired")),
        (LLAMA, Case(plan(1, 2, 2))),
        (TIED, Case(plan(2, 1, 2, chunks=2, sp=True))),
        (ADAPTED, Case(plan(2, 1, 2, sp=True))),
        (ADAPTED_HEADS, Case(plan(1, 1, 4, sp=True))),
    ],
    8: [(LLAMA, Case(plan(2, 2, 2)))],
}


def _run_all(rank: int, world_size: int, cases: list) -> list:
    return [run_case(rank, world_size, spec, case, NUM_PAIRS) for spec, case in cases]


def _results(world_size: int, cases: list) -> list[tuple[float, dict[str, np.ndarray]]]:
    by_rank = run_ranks(_run_all, world_size, cases)
    results = []
    for number in range(len(cases)):
        shards = [shard for rank in by_rank for shard in rank[number][1]]
        results.append((by_rank[0][number][0], assemble(shards)))
    return results


@cache
def _truth() -> list[tuple[float, dict[str, np.ndarray]]]:
    """Every model alone on one rank, one sequence a row."""
    alone = Case(ONE, layout="paired", packed=False, row_tokens=56)
    return _results(1, [(spec, alone) for spec in SPECS])


@pytest.mark.parametrize("world_size", sorted(CASES))
def test_loss_and_gradients_equal_one_sequence_at_a_time(world_size: int) -> None:
    _check(world_size, CASES[world_size])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", sorted(SLOW))
def test_and_so_they_do_under_the_other_plans(world_size: int) -> None:
    _check(world_size, SLOW[world_size])


def _check(world_size: int, cases: list[tuple[ModelSpec, Case]]) -> None:
    truth = dict(zip(SPECS, _truth(), strict=True))
    for (spec, case), (loss, gradients) in zip(cases, _results(world_size, cases), strict=True):
        expected_loss, expected = truth[spec]
        bound = gradient_bound(spec.intermediate_size, spec.num_hidden_layers)
        assert loss == pytest.approx(expected_loss, rel=LOSS_BOUND), case
        assert gradients.keys() == expected.keys(), case
        for key, values in expected.items():
            error = np.linalg.norm(gradients[key] - values) / np.linalg.norm(values)
            assert error < bound, f"{case}: {key} is off by {error:.1e}"
