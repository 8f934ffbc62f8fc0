"""A frozen model's log-probabilities are, to the bit, those of the trained model that equals it."""

import pytest
import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import freeze
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.row_input import RowInput, to_device
from tests.dist.one_model import accumulate_gradients, response_outputs
from tests.dist.random_models import make_pairs, pair_loader, random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import LLAMA

PLANS = {
    "one rank": ParallelPlan(),
    "T2": ParallelPlan(tensor=2),
    "P2": ParallelPlan(pipeline=2),
}


def _differences(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    """The largest difference between both models' log-probabilities, by plan."""
    world = World(rank, world_size, torch.device("cpu"))
    found = {}
    for name in names:
        policy = random_context(LLAMA, PLANS[name], world, seed=1)
        reference = random_context(
            LLAMA, PLANS[name], world, seed=1, role="reference", trained=False
        )
        trainable(policy, OptimizerConfig())
        freeze(reference)
        batch = pair_loader(make_pairs(8, LLAMA.vocab_size, 5), policy, 8).batch(0)
        rows = [to_device(m, "segments", world.device) for m in batch.microbatches]
        table = response_outputs(reference, rows, 8, 2)
        worst = torch.zeros(1, dtype=torch.float64)

        def loss(row: RowInput, log_probs: torch.Tensor) -> torch.Tensor:
            difference = (log_probs.detach() - table[row.examples]).abs().max()  # noqa: B023
            torch.maximum(worst, difference, out=worst)  # noqa: B023
            return log_probs.sum()

        accumulate_gradients(policy, rows, loss)
        found[name] = float(policy.sum_over_ranks(worst))
    return found


@pytest.mark.parametrize("names", [["one rank"], ["T2", "P2"]])
def test_policy_and_reference_are_the_same_computation(names: list[str]) -> None:
    for found in run_ranks(_differences, len(names), names):
        assert found == dict.fromkeys(names, 0.0)
