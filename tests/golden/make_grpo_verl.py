"""Writes grpo_verl.json from verl's own code; needs verl 0.9.1, which the tests do not.

    python tests/golden/make_grpo_verl.py > tests/golden/grpo_verl.json

Everything is in float64, three draws of six responses to two prompts. verl's GRPO adds 1e-6 to the
standard deviation.
"""

# pyright: reportMissingImports=false

import json
import sys
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig

PROMPTS = [0, 0, 0, 1, 1, 1]
LONGEST, GAMMA = 5, 0.9
BASELINES = [0.5, 0.5, 0.5, -1.0, -1.0, -1.0]  # of the greedy responses
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}
MODES = ("vanilla", "gspo", "cispo")
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = len(PROMPTS), LONGEST
    lengths = torch.randint(1, LONGEST + 1, (shape[0],), generator=generator)
    lengths[0] = LONGEST
    mask = (torch.arange(LONGEST) < lengths[:, None]).double()
    noise = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]
    return {
        "mask": mask,
        "rewards": noise[0] * mask,
        "logps": -noise[1].exp() * mask,
        "old_logps": (-noise[1].exp() + 0.4 * noise[2]) * mask,
        "advantages": noise[3] * mask,
    }


def advantages_of(case: dict[str, torch.Tensor]) -> dict[str, Any]:
    config = verl.AlgoConfig(gamma=GAMMA)
    index = np.array(PROMPTS)
    given = {"response_mask": case["mask"], "config": config}

    def rewards() -> torch.Tensor:
        return case["rewards"].clone()

    found = {
        "grpo": verl.compute_grpo_outcome_advantage(rewards(), index=index, **given),
        "dr_grpo": verl.compute_grpo_outcome_advantage(
            rewards(), index=index, norm_adv_by_std_in_grpo=False, **given
        ),
        "rloo": verl.compute_rloo_outcome_advantage(rewards(), index=index, **given),
        "opo": verl.compute_opo_outcome_advantage(rewards(), index=index, **given),
        "remax": verl.compute_remax_outcome_advantage(
            rewards(), reward_baselines=torch.tensor(BASELINES, dtype=torch.float64), **given
        ),
        "reinforce_plus_plus": verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards(), **given
        ),
    }
    return {name: advantages.tolist() for name, (advantages, _) in found.items()}


def losses_of(case: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    found = []
    for mode in MODES:
        # verl averages GSPO over sequences whatever it is asked for.
        for aggregation in AGGREGATIONS if mode != "gspo" else ("seq-mean-token-mean",):
            config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
            for name, value in CLIPS.items():
                object.__setattr__(config, name, value)
            logps = case["logps"].clone().requires_grad_()
            loss, metrics = verl.get_policy_loss_fn(mode)(
                old_log_prob=case["old_logps"],
                log_prob=logps,
                advantages=case["advantages"],
                response_mask=case["mask"],
                loss_agg_mode=aggregation,
                config=config,
            )
            loss.backward()
            assert logps.grad is not None
            found.append(
                {
                    "mode": mode,
                    "aggregation": aggregation,
                    "loss": loss.item(),
                    "gradient": logps.grad.tolist(),
                    "clipped": metrics["actor/pg_clipfrac"],
                }
            )
    return found


def main() -> None:
    cases = []
    for seed in range(3):
        case = drawn(seed)
        cases.append(
            {
                **{name: table.tolist() for name, table in case.items()},
                "estimates": advantages_of(case),
                "losses": losses_of(case),
            }
        )
    settings = {
        "prompts": PROMPTS,
        "baselines": BASELINES,
        "gamma": GAMMA,
        "longest": LONGEST,
        **CLIPS,
    }
    json.dump({**settings, "cases": cases}, sys.stdout)


if __name__ == "__main__":
    main()
