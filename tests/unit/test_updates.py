"""Metrics of PPO's updates where a mini-batch trains nothing."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from puzzle_align.config.load import load_job
from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.stages.rl import learning
from puzzle_align.stages.rl.learning import Updates

JOB = """
stage: ppo
data: {format: synthetic, num_synthetic: 8, max_length: 32}
generation: {max_new_tokens: 8}
reward: {function: "puzzle_align.data.synthetic:vowel_share"}
ppo: {mask_truncated_completions: true}
"""


def test_a_policy_whose_responses_are_all_left_out_has_no_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entropy and ratio of 0 would look like a collapse; the critic trains on all responses."""
    monkeypatch.setattr(learning, "sum_on_host", lambda sums: sums)
    config = load_job(JOB, [])
    rank_without_outputs = cast(Any, SimpleNamespace(contexts={}))
    job = cast(Any, SimpleNamespace(config=config))
    updates = Updates(job, rank_without_outputs, 1, torch.device("cpu"))
    lengths = np.array([8, 3])
    for ended, roles, names in (
        ([False, False], ("actor",), set()),
        ([False, False], ("actor", "critic"), {"loss/value_avg", "val/clipfrac_avg"}),
        ([False, True], ("actor",), {"policy/entropy_avg", "val/ratio"}),
    ):
        found = {*updates.measured(updates.losses(roles, lengths, np.array(ended), 0.0))}
        assert names <= found and bool(names) == bool(found)
        assert ("val/ratio" in found) == any(ended)


def test_ranks_wait_as_long_as_a_rank_may_call_its_functions() -> None:
    config = RewardConfig(function=["a:b", "c:d"], timeout=10.0)
    assert config.longest_wait(1) == 30.0
    assert config.longest_wait(2) == 50.0  # of samples, then of greedy responses
    assert RewardConfig().longest_wait(2) == 0.0
