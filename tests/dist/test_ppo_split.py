"""Rows too short for all responses of a prompt: it is repeated, and the numbers are the same."""

from pathlib import Path

import pytest
import torch

from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.rl import rollout
from tests.dist.spawn import run_ranks
from tests.dist.test_ppo_runs import SAMPLED, Metrics, assert_close, folder, plan, run_of

__all__ = ["folder"]  # the fixture

# Responses of ten tokens and more: in 48, three do not lie beside the longest prompts, one does.
LONG = [*SAMPLED, "generation.min_new_tokens=10"]
ITERATIONS = 2  # the critic alone, then both
WHOLE = {"P2": plan("actor", P=2)}
SPLIT = {
    "P2": [*plan("actor", P=2), "packing.row_tokens=48"],
    "T2 | D2, paired": [
        *plan("actor", T=2),
        *plan("critic", D=2),
        *("packing.layout=paired", "packing.row_tokens=48"),
    ],
}


def _runs(
    rank: int, world_size: int, folder: Path, cases: dict[str, list[str]]
) -> dict[str, tuple[Metrics, set[int]]]:
    """By case, the metrics, and how many responses shared a prompt in an iteration."""
    world = World(rank, world_size, torch.device("cpu"))
    chosen: list[int] = []
    choose = rollout.responses_together

    def note(*arguments) -> int:
        chosen.append(choose(*arguments))
        return chosen[-1]

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "responses_together", note)
        for name, overrides in cases.items():
            chosen.clear()
            metrics, _ = run_of(folder, world, *LONG, *overrides, iterations=ITERATIONS)
            found[name] = metrics, set(chosen)
    return found


def test_split_prompts_give_the_numbers_of_whole_ones(folder: Path) -> None:
    for whole, split in zip(
        run_ranks(_runs, 2, folder, WHOLE), run_ranks(_runs, 2, folder, SPLIT), strict=True
    ):
        expected, together = whole["P2"]
        assert together == {3}
        for name, (metrics, parts) in split.items():
            assert 1 in parts, name
            assert_close(metrics, expected)
