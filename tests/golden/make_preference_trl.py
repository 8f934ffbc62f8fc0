"""Writes preference_trl.csv from TRL's own code; needs trl 1.16.0, which the tests do not.

    python tests/golden/make_preference_trl.py > tests/golden/preference_trl.csv

DPOTrainer computes its losses inside _compute_loss, which here gets a model that returns given
token log-probabilities, one pair at a time in float64. SimPO is CPOTrainer's, ORPO ORPOTrainer's
(float32; its negative log-likelihood is taken over the response alone). DPOTrainer 1.x has no
label smoothing for the sigmoid loss; CPOTrainer's sigmoid formula, given log-ratios, is cDPO's.
Its alpha-divergence does not take float64: that one is in float32.
"""

# pyright: reportMissingImports=false

import random
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass, fields
from types import SimpleNamespace

import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer


@dataclass(frozen=True, kw_only=True)
class Case:
    """Options of the config, under its names; several losses and weights apart by spaces."""

    loss_type: str
    loss_weights: str = ""
    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    sft_loss_weight: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05


CASES = [
    Case(loss_type="sigmoid", beta=0.1),
    Case(loss_type="sigmoid", beta=0.5, sft_loss_weight=0.7),
    Case(loss_type="sigmoid", beta=0.1, label_smoothing=0.2),
    Case(loss_type="sigmoid", beta=0.1, f_divergence_type="forward_kl"),
    Case(loss_type="sigmoid", beta=0.1, f_divergence_type="js_divergence"),
    Case(loss_type="sigmoid", beta=0.1, f_divergence_type="alpha_divergence"),
    Case(
        loss_type="sigmoid",
        beta=0.1,
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=2.0,
    ),
    Case(
        loss_type="sigmoid",
        beta=0.1,
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=1.0,
    ),
    Case(loss_type="sigmoid_norm", beta=2.0),
    Case(loss_type="sigmoid_norm", beta=2.0, f_divergence_type="js_divergence"),
    Case(loss_type="ipo", beta=0.1),
    Case(loss_type="ipo", beta=1.0, sft_loss_weight=0.3),
    Case(loss_type="ipo", beta=0.1, f_divergence_type="js_divergence"),
    Case(loss_type="hinge", beta=0.1),
    Case(loss_type="hinge", beta=0.1, f_divergence_type="forward_kl"),
    Case(loss_type="robust", beta=0.3, label_smoothing=0.1),
    Case(loss_type="robust", beta=0.3, label_smoothing=0.1, f_divergence_type="js_divergence"),
    Case(loss_type="exo_pair", beta=0.1, label_smoothing=0.001),
    Case(loss_type="exo_pair", beta=0.4, label_smoothing=0.2, f_divergence_type="forward_kl"),
    Case(loss_type="nca_pair", beta=0.1),
    Case(loss_type="bco_pair", beta=0.2),
    Case(loss_type="sppo_hard", beta=0.2),
    Case(loss_type="aot", beta=0.1),
    Case(loss_type="aot_unpaired", beta=0.1, label_smoothing=0.1),
    Case(loss_type="apo_zero", beta=0.1),
    Case(loss_type="apo_down", beta=0.2),
    Case(loss_type="discopop", beta=0.1),
    Case(loss_type="discopop", beta=0.1, discopop_tau=0.5, f_divergence_type="js_divergence"),
    Case(loss_type="sft", beta=0.1),
    Case(loss_type="sigmoid bco_pair sft", loss_weights="0.8 0.2 1.0", beta=0.1),
    Case(loss_type="hinge exo_pair", beta=0.1, label_smoothing=0.001),
    Case(loss_type="simpo", beta=2.0, simpo_gamma=0.5),
    Case(loss_type="simpo", beta=2.5, label_smoothing=0.1, simpo_gamma=1.2),
    Case(loss_type="orpo", beta=0.1),
    Case(loss_type="orpo", beta=1.0),
]


def random_tokens(rng: random.Random, length: int) -> list[float]:
    return [-rng.expovariate(1.0) for _ in range(length)]


def dpo_loss(
    case: Case, chosen: list[float], rejected: list[float], ref: tuple[float, float]
) -> tuple[float, float, float]:
    dtype = torch.float32 if case.f_divergence_type == "alpha_divergence" else torch.float64
    names = case.loss_type.split()
    weights = [float(weight) for weight in case.loss_weights.split()] or [1.0] * len(names)
    width = max(len(chosen), len(rejected))
    rows = [row + [0.0] * (width - len(row)) for row in (chosen, rejected)]
    mask = [[0] + [1] * len(row) + [0] * (width - len(row)) for row in (chosen, rejected)]
    log_probs = torch.tensor(rows, dtype=dtype)
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
        args=SimpleNamespace(discopop_tau=case.discopop_tau),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type=case.f_divergence_type,
        f_alpha_divergence_coef=case.f_alpha_divergence_coef,
        use_weighting=False,
        loss_types=[*names, "sft"],
        loss_weights=[*weights, case.sft_loss_weight],
        beta=case.beta,
        label_smoothing=case.label_smoothing,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.ones(2, width + 1, dtype=torch.int64),
        "attention_mask": torch.ones(2, width + 1, dtype=torch.int64),
        "completion_mask": torch.tensor(mask),
        "ref_chosen_logps": torch.tensor([ref[0]], dtype=dtype),
        "ref_rejected_logps": torch.tensor([ref[1]], dtype=dtype),
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    metrics = trainer._metrics["train"]
    return loss.item(), metrics["rewards/chosen"][0], metrics["rewards/rejected"][0]


def cpo_loss(case: Case, chosen: float, rejected: float) -> tuple[float, float, float]:
    trainer = SimpleNamespace(
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type=case.loss_type,
        beta=case.beta,
        label_smoothing=case.label_smoothing,
        simpo_gamma=case.simpo_gamma,
    )
    pair = [torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected)]
    loss, *rewards = CPOTrainer.cpo_loss(trainer, *pair)
    return loss.item(), rewards[0].item(), rewards[1].item()


def orpo_loss(case: Case, chosen: float, rejected: float) -> tuple[float, float, float]:
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=case.beta)
    pair = [torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected)]
    ratio, *rewards = ORPOTrainer.odds_ratio_loss(trainer, *pair)[:3]
    return -chosen - ratio.item(), rewards[0].item(), rewards[1].item()


def main() -> None:
    rng = random.Random(5)
    columns = [field.name for field in fields(Case)]
    columns += ["chosen", "rejected", "ref_chosen", "ref_rejected"]
    columns += ["chosen_length", "rejected_length", "loss", "reward_chosen", "reward_rejected"]
    print(",".join(columns))
    for case in CASES:
        for _ in range(6):
            chosen = random_tokens(rng, rng.randint(1, 12))
            rejected = random_tokens(rng, rng.randint(1, 12))
            ref = sum(chosen) + rng.gauss(0, 4), sum(rejected) + rng.gauss(0, 4)
            if case.loss_type == "orpo":
                means = sum(chosen) / len(chosen), sum(rejected) / len(rejected)
                ref, result = (0.0, 0.0), orpo_loss(case, *means)
            elif case.loss_type == "simpo":
                means = sum(chosen) / len(chosen), sum(rejected) / len(rejected)
                ref, result = (0.0, 0.0), cpo_loss(case, *means)
            elif case.loss_type == "sigmoid" and case.label_smoothing:
                ratios = sum(chosen) - ref[0], sum(rejected) - ref[1]
                result = cpo_loss(case, *ratios)
            else:
                result = dpo_loss(case, chosen, rejected, ref)
            sums = sum(chosen), sum(rejected)
            row = [*astuple(case), *sums, *ref, len(chosen), len(rejected), *result]
            print(",".join(map(str, row)))


if __name__ == "__main__":
    sys.exit(main())
