"""PPO's updates: schedules, responses that are left out, metrics where nothing trains."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from puzzle_align.algos.ppo import LossCounts
from puzzle_align.config.load import load_job
from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.config.sections.rl import PPOConfig
from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import collate_row
from puzzle_align.runtime.row_input import to_device
from puzzle_align.stages.rl import learning
from puzzle_align.stages.rl.experience import KEPT
from puzzle_align.stages.rl.learning import ActorLoss, Updates, counts_of
from tests.jobs import resolved
from tests.specs import CONFIG

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


@pytest.mark.parametrize(("masks", "tokens", "responses"), [(False, 16, 3), (True, 8, 2)])
def test_means_are_over_the_responses_that_are_not_left_out(
    masks: bool, tokens: int, responses: int
) -> None:
    config = load_job(JOB, [f"ppo.mask_truncated_completions={str(masks).lower()}"])
    counts = counts_of(config, np.array([5, 8, 3]), np.array([True, False, True]))
    assert counts == LossCounts(tokens, responses, longest=8)


def test_ranks_wait_as_long_as_a_rank_may_call_its_functions() -> None:
    config = RewardConfig(function=["a:b", "c:d"], timeout=10.0)
    assert config.longest_wait(1) == 30.0
    assert config.longest_wait(2) == 50.0  # of samples, then of greedy responses
    assert RewardConfig().longest_wait(2) == 0.0


def test_the_actor_s_schedule_begins_after_the_critic_s_warm_up(tmp_path: Path) -> None:
    """Two updates in each of six iterations; the critic alone in the first two of these."""
    rows = ["ppo.critic_warmup=2", "ppo.ppo_epochs=2", "ppo.num_mini_batches=1"]
    rate = ["optimizer.lr=1.0", "optimizer.lr_scheduler_type=linear", "optimizer.warmup_steps=0"]
    model = f"actor.model.config={json.dumps(CONFIG)}"
    own = [f"output_dir={tmp_path}", model, "actor.model.random_weights=true", "engine.device=cpu"]
    job = resolved(load_job(JOB, ["tokenizer.path=byte", *own, *rows, *rate]))
    updates = Updates(job, cast(Any, None), 6, torch.device("cpu"))
    found = [updates.summary(iteration, [], [])[0] for iteration in range(6)]
    assert ["policy/learning_rate" in metrics for metrics in found] == [False] * 2 + [True] * 4
    rates = [metrics["policy/learning_rate"] for metrics in found[2:]]
    assert rates == pytest.approx([1.0, 3 / 4, 2 / 4, 1 / 4])
    rates = [metrics["val/learning_rate"] for metrics in found]
    assert rates == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_actor_s_loss_without_a_response_is_as_if_it_were_not_there(mode: Any) -> None:
    """Two responses of three and two tokens, the second left out: loss, gradient and metrics."""
    config = PPOConfig(
        mask_truncated_completions=True, loss_agg_mode=mode, entropy_coeff=0.1, use_kl_loss=True
    )
    counts, cpu = LossCounts(tokens=3, responses=1, longest=8), torch.device("cpu")
    numbers = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    names, found = ("old_logps", "ref_logps", "advantages"), []
    for responses in ([[3, 4, 5], [6, 7]], [[3, 4, 5]]):
        data = from_examples([([1, 2], responses)], pad_id=0)
        one = np.arange(1)
        row = to_device(collate_row(data, one, one, layout="shared", num_tokens=8), "dense", cpu)
        number = len(row.cells)
        outputs = numbers[:2, :number].clone().requires_grad_()
        columns = dict(zip(names, numbers[2:, :number], strict=True))
        columns[KEPT] = (torch.arange(number) < 3).double()
        loss = ActorLoss(config, counts, cpu, kl_coef=0.2)
        share = loss(row, outputs, columns)
        (gradient,) = torch.autograd.grad(share, outputs)
        assert not gradient[:, 3:].any() and gradient[:, :3].all()
        entropy = loss.sums[loss.names.index("policy/entropy_avg")]
        assert entropy == pytest.approx(outputs[1, :3].sum().item())
        found.append(torch.cat([share[None], gradient[:, :3].flatten(), loss.sums]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
@pytest.mark.parametrize("corrects", [False, True])
def test_a_kl_in_the_loss_may_be_weighed_by_the_ratio_of_the_loss(
    corrects: bool, loss_mode: Any
) -> None:
    """Without advantages the loss is the KL's: k3 by hand, of three and two tokens."""
    config = PPOConfig(
        loss_mode=loss_mode,
        use_kl_loss=True,
        kl_estimator="k3",
        use_bias_correction_kl=corrects,
    )
    cpu, one = torch.device("cpu"), np.arange(1)
    data = from_examples([([1, 2], [[3, 4, 5], [6, 7]])], pad_id=0)
    row = to_device(collate_row(data, one, one, layout="shared", num_tokens=8), "dense", cpu)
    logps, old, ref = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).double() / 4
    columns = {"old_logps": old, "ref_logps": ref, "advantages": torch.zeros(5).double()}
    loss = ActorLoss(config, LossCounts(tokens=5, responses=2, longest=8), cpu, kl_coef=0.2)
    share = loss(row, torch.stack([logps, torch.zeros(5).double()]), columns)
    ratios = logps - old
    if loss_mode == "gspo":
        ratios = torch.cat([ratios[:3].mean().expand(3), ratios[3:].mean().expand(2)])
    kls = (ref - logps).exp() - (ref - logps) - 1
    weighed = kls * ratios.exp() if corrects else kls
    assert share.item() == pytest.approx(0.2 * weighed.mean().item())
