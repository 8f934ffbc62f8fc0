"""Writes preference_trl.csv from TRL's own code; needs trl 1.16.0, which the tests do not.

    python tests/golden/make_preference_trl.py > tests/golden/preference_trl.csv

DPOTrainer computes its losses inside _compute_loss, which here gets a model that returns given
token log-probabilities, one pair at a time in float64. SimPO is CPOTrainer's, ORPO ORPOTrainer's
(float32; its negative log-likelihood is taken over the response alone). DPOTrainer 1.x has no
label smoothing for the sigmoid loss; CPOTrainer's sigmoid formula, given log-ratios, is cDPO's.
"""

# pyright: reportMissingImports=false

import random
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer

CASES = [  # loss type, beta, label smoothing, gamma, SFT weight
    ("sigmoid", 0.1, 0.0, 0.0, 0.0),
    ("sigmoid", 0.5, 0.0, 0.0, 0.7),
    ("sigmoid", 0.1, 0.2, 0.0, 0.0),
    ("ipo", 0.1, 0.0, 0.0, 0.0),
    ("ipo", 1.0, 0.0, 0.0, 0.3),
    ("hinge", 0.1, 0.0, 0.0, 0.0),
    ("robust", 0.3, 0.1, 0.0, 0.0),
    ("apo_zero", 0.1, 0.0, 0.0, 0.0),
    ("apo_down", 0.2, 0.0, 0.0, 0.0),
    ("simpo", 2.0, 0.0, 0.5, 0.0),
    ("simpo", 2.5, 0.1, 1.2, 0.0),
    ("orpo", 0.1, 0.0, 0.0, 0.0),
    ("orpo", 1.0, 0.0, 0.0, 0.0),
]


def random_tokens(rng: random.Random, length: int) -> list[float]:
    return [-rng.expovariate(1.0) for _ in range(length)]


def dpo_loss(
    case: tuple, chosen: list[float], rejected: list[float], ref: tuple[float, float]
) -> tuple[float, float, float]:
    loss_type, beta, smoothing, _, sft_weight = case
    width = max(len(chosen), len(rejected))
    rows = [row + [0.0] * (width - len(row)) for row in (chosen, rejected)]
    mask = [[0] + [1] * len(row) + [0] * (width - len(row)) for row in (chosen, rejected)]
    log_probs = torch.tensor(rows, dtype=torch.float64)
    outputs = SimpleNamespace(
        log_probs=log_probs,
        entropy=log_probs,
        mean_logits=log_probs,
        is_top1=log_probs > -1,
    )
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=[loss_type, "sft"],
        loss_weights=[1.0, sft_weight],
        beta=beta,
        label_smoothing=smoothing,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.ones(2, width + 1, dtype=torch.int64),
        "attention_mask": torch.ones(2, width + 1, dtype=torch.int64),
        "completion_mask": torch.tensor(mask),
        "ref_chosen_logps": torch.tensor([ref[0]], dtype=torch.float64),
        "ref_rejected_logps": torch.tensor([ref[1]], dtype=torch.float64),
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    metrics = trainer._metrics["train"]
    return loss.item(), metrics["rewards/chosen"][0], metrics["rewards/rejected"][0]


def cpo_loss(case: tuple, chosen: float, rejected: float) -> tuple[float, float, float]:
    loss_type, beta, smoothing, gamma, _ = case
    trainer = SimpleNamespace(
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type=loss_type,
        beta=beta,
        label_smoothing=smoothing,
        simpo_gamma=gamma,
    )
    pair = [torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected)]
    loss, *rewards = CPOTrainer.cpo_loss(trainer, *pair)
    return loss.item(), rewards[0].item(), rewards[1].item()


def orpo_loss(case: tuple, chosen: float, rejected: float) -> tuple[float, float, float]:
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=case[1])
    pair = [torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected)]
    ratio, *rewards = ORPOTrainer.odds_ratio_loss(trainer, *pair)[:3]
    return -chosen - ratio.item(), rewards[0].item(), rewards[1].item()


def main() -> None:
    rng = random.Random(5)
    columns = "loss_type,beta,label_smoothing,simpo_gamma,sft_loss_weight,chosen,rejected,"
    columns += "ref_chosen,ref_rejected,chosen_length,rejected_length,loss,reward_chosen,"
    print(columns + "reward_rejected")
    for case in CASES:
        for _ in range(6):
            chosen = random_tokens(rng, rng.randint(1, 12))
            rejected = random_tokens(rng, rng.randint(1, 12))
            ref = sum(chosen) + rng.gauss(0, 4), sum(rejected) + rng.gauss(0, 4)
            if case[0] == "orpo":
                means = sum(chosen) / len(chosen), sum(rejected) / len(rejected)
                ref, result = (0.0, 0.0), orpo_loss(case, *means)
            elif case[0] == "simpo":
                means = sum(chosen) / len(chosen), sum(rejected) / len(rejected)
                ref, result = (0.0, 0.0), cpo_loss(case, *means)
            elif case[0] == "sigmoid" and case[2]:
                ratios = sum(chosen) - ref[0], sum(rejected) - ref[1]
                result = cpo_loss(case, *ratios)
            else:
                result = dpo_loss(case, chosen, rejected, ref)
            sums = sum(chosen), sum(rejected)
            row = [*case, *sums, *ref, len(chosen), len(rejected), *result]
            print(",".join(map(str, row)))


if __name__ == "__main__":
    sys.exit(main())
