"""Writes preference_trl_batches.json from TRL's own code; needs trl 1.16.0, which the tests do not.

    python tests/golden/make_preference_trl_batches.py > tests/golden/preference_trl_batches.json

What of a loss or a metric is not one pair's: DPOTrainer's ``_compute_loss`` of a batch of pairs
with given log-probabilities and statistics of every token, in float64; and all that it then logs.
"""

# pyright: reportMissingImports=false

import json
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.dpo_trainer import DPOTrainer

LENGTHS = [(5, 2), (1, 4), (3, 3), (7, 1), (2, 6)]  # of the responses of every pair
PROMPTS = [3, 1, 4, 2, 5]
STATISTICS = ("entropy", "mean_logit", "is_top1", "log_sum_squares")
CASES: list[dict[str, Any]] = [
    {"loss_type": ["sigmoid"]},
    {"loss_type": ["sft"]},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"loss_type": ["sigmoid"], "ld_alpha": 0.3},
    {"loss_type": ["ipo"], "ld_alpha": 0.0},
    {"loss_type": ["sppo_hard", "sft"], "ld_alpha": 0.6},
    {"loss_type": ["sigmoid"], "use_weighting": True},
    {"loss_type": ["aot"]},
    {"loss_type": ["aot_unpaired"], "label_smoothing": 0.1},
    {"loss_type": ["aot", "aot_unpaired", "sft"], "ld_alpha": 0.5, "label_smoothing": 0.2},
    {"loss_type": ["hinge", "apo_zero"], "use_weighting": True, "ld_alpha": 0.5},
]


def padded(values: list[list[float]]) -> torch.Tensor:
    """One row a response, chosen ones first, in float64."""
    width = max(map(len, values))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in values], dtype=torch.float64)


def logged(case: dict[str, Any], tokens: dict[str, list]) -> dict[str, float]:
    """TRL's loss and metrics of the tokens."""
    names = case["loss_type"]
    rows = {
        name: padded([own[0] for own in values] + [own[1] for own in values])
        for name, values in tokens.items()
    }
    lengths = [pair[0] for pair in LENGTHS] + [pair[1] for pair in LENGTHS]
    mask = padded([[1.0] * length for length in lengths]).long()
    prompts = torch.tensor(PROMPTS * 2)
    outputs = SimpleNamespace(
        log_probs=rows["log_probs"],
        entropy=rows["entropy"],
        mean_logits=rows["mean_logit"],
        is_top1=rows["is_top1"].bool(),
        log_sum_sq_probs=rows["log_sum_squares"],
    )
    reference = SimpleNamespace(log_probs=rows["reference"])
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model=lambda **_: reference,
        accelerator=accelerator,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=case.get("ld_alpha"),
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=case.get("use_weighting", False),
        loss_types=names,
        loss_weights=case.get("loss_weights", [1.0] * len(names)),
        beta=0.1,
        label_smoothing=case.get("label_smoothing", 0.0),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    attention = torch.cat([mask, prompts[:, None]], dim=1)  # its sum is all that is read
    inputs = {
        "input_ids": torch.ones(len(mask), mask.size(1) + 1, dtype=torch.int64),
        "attention_mask": attention,
        "completion_mask": torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1),
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return {
        "loss": loss.item(),
        **{name: values[0] for name, values in trainer._metrics["train"].items()},
    }


def main() -> None:
    rng = random.Random(11)

    def drawn(draw) -> list[list[list[float]]]:
        return [[[draw() for _ in range(length)] for length in pair] for pair in LENGTHS]

    tokens = {
        "log_probs": drawn(lambda: -rng.expovariate(1.0)),
        "reference": drawn(lambda: -rng.expovariate(1.0)),
        "entropy": drawn(lambda: rng.uniform(0, 5)),
        "mean_logit": drawn(lambda: rng.gauss(0, 2)),
        "is_top1": drawn(lambda: float(rng.random() < 0.4)),
        "log_sum_squares": drawn(lambda: -rng.expovariate(1.0)),
    }
    cases = [{"options": case, "logged": logged(case, tokens)} for case in CASES]
    print(json.dumps({"prompts": PROMPTS, "tokens": tokens, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
