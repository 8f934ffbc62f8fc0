"""Writes grpo_trl.json from TRL's own code; needs trl 1.16.0, which the tests do not.

    python tests/golden/make_grpo_trl.py > tests/golden/grpo_trl.json

GRPOTrainer computes its loss inside _compute_loss, which here gets a trainer without a model, whose
token log-probabilities are given: three draws of six responses, in float64. Each case has the
names of our keys beside TRL's options.
"""

# pyright: reportMissingImports=false

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

NUM, LONGEST = 6, 5
BETA, LOW, HIGH, CISPO_HIGH = 0.04, 0.2, 0.28, 1.5
# (TRL's loss_type and importance_sampling_level, ours)
CASES = [
    ("grpo", "token", {"loss_mode": "vanilla", "loss_agg_mode": "seq-mean-token-mean"}),
    ("bnpo", "token", {"loss_mode": "vanilla", "loss_agg_mode": "token-mean"}),
    ("dapo", "token", {"loss_mode": "vanilla", "loss_agg_mode": "token-mean"}),
    ("dr_grpo", "token", {"loss_mode": "vanilla", "loss_agg_mode": "seq-mean-token-sum-norm"}),
    ("grpo", "sequence", {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"}),
    ("cispo", "token", {"loss_mode": "cispo", "loss_agg_mode": "token-mean"}),
]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (NUM,), generator=generator)
    mask = (torch.arange(LONGEST) < lengths[:, None]).double()
    noise = torch.randn(4, NUM, LONGEST, dtype=torch.float64, generator=generator)
    logps = -noise[0].exp()
    return {
        "mask": mask,
        "logps": logps,
        "old_logps": logps + 0.4 * noise[1],
        "ref_logps": logps + 0.5 * noise[2],
        "corrections": noise[3].exp().clamp(max=2.0),
        "advantages": torch.randn(NUM, dtype=torch.float64, generator=generator),
    }


def trainer(
    loss_type: str, level: str, logps: torch.Tensor, corrects: bool, corrects_kl: bool
) -> Any:
    def given(*_args: Any, **_named: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return logps, torch.zeros_like(logps), None

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=given,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=corrects_kl, steps_per_generation=1
        ),
        aux_loss_enabled=False,
        beta=BETA,
        current_gradient_accumulation_steps=1,
        epsilon_high=CISPO_HIGH if loss_type == "cispo" else HIGH,
        epsilon_low=LOW,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
    )


def losses(case: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    found = []
    ids = torch.zeros(NUM, LONGEST, dtype=torch.int64)
    for loss_type, level, ours in CASES:
        # TRL spreads a response's gradient evenly before it corrects tokens; verl and we do not.
        of_sampling = [(True, False)] if level == "token" else []
        for corrects, corrects_kl in [(False, False), *of_sampling, (False, True)]:
            logps = case["logps"].clone().requires_grad_()
            own = trainer(loss_type, level, logps, corrects, corrects_kl)
            inputs = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1],
                "completion_ids": ids,
                "completion_mask": case["mask"],
                "advantages": case["advantages"],
                "old_per_token_logps": case["old_logps"],
                "ref_per_token_logps": case["ref_logps"],
                "num_items_in_batch": case["mask"].sum(),
                "importance_sampling_ratio": case["corrections"],
            }
            loss = GRPOTrainer._compute_loss(own, None, inputs)
            loss.backward()
            assert logps.grad is not None
            metrics = own._metrics["train"]
            clipped = metrics["clip_ratio/region_mean"] or metrics["cispo_clip_ratio"]
            found.append(
                {
                    **ours,
                    "corrects": corrects,
                    "corrects_kl": corrects_kl,
                    "loss": loss.item(),
                    "gradient": logps.grad.tolist(),
                    "kl": metrics["kl"][0],
                    "clipped": clipped[0],
                }
            )
    return found


def main() -> None:
    cases = []
    for seed in range(3):
        case = drawn(seed)
        tables = {name: table.tolist() for name, table in case.items()}
        cases.append({**tables, "losses": losses(case)})
    settings = {"longest": LONGEST, "beta": BETA, "low": LOW, "high": HIGH}
    json.dump({**settings, "cispo_high": CISPO_HIGH, "cases": cases}, sys.stdout)


if __name__ == "__main__":
    main()
