"""Writes kto_trl.json from TRL's own code; needs trl 1.16.0, which the tests do not.

    python tests/golden/make_kto_trl.py > tests/golden/kto_trl.json

KTOTrainer's ``_compute_loss`` of a batch of responses with given log-probabilities and statistics
of every token, in float64; and all that it then logs.
"""

# pyright: reportMissingImports=false

import json
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.kto_trainer import KTOTrainer

LENGTHS = [5, 2, 1, 4, 3, 7]  # of the responses
PROMPTS = [3, 1, 4, 2, 5, 6]
CASES: list[dict[str, Any]] = [
    {"options": {}, "labels": [1, 0, 0, 1, 1, 0]},
    {"options": {"beta": 0.5}, "labels": [1, 0, 0, 1, 1, 0], "mismatched": "near"},
    {
        "options": {"desirable_weight": 1.5, "undesirable_weight": 0.25},
        "labels": [0, 0, 0, 1, 0, 0],
    },
    {"options": {"loss_type": "apo_zero_unpaired"}, "labels": [1, 0, 0, 1, 1, 0]},
    {"options": {}, "labels": [1, 1, 1, 1, 1, 1]},
    {"options": {"undesirable_weight": 2.0}, "labels": [0, 0, 0, 0, 0, 0]},
]


def padded(values: list[list[float]]) -> torch.Tensor:
    """One row a response, in float64."""
    width = max(map(len, values))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in values], dtype=torch.float64)


def logged(case: dict[str, Any], tokens: dict[str, list], kl: dict[str, list[float]]) -> dict:
    """TRL's loss and metrics of the tokens."""
    options = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **case["options"]}
    rows = {name: padded(values) for name, values in tokens.items()}
    mask = padded([[1.0] * length for length in LENGTHS]).long()
    outputs = SimpleNamespace(
        log_probs=rows["log_probs"], entropy=rows["entropy"], mean_logits=rows["mean_logit"]
    )
    calculate_kl = options.get("loss_type", "kto") == "kto"

    def reference(**_: object) -> SimpleNamespace:
        return SimpleNamespace(log_probs=rows["reference"])

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model=reference,
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        calculate_KL=calculate_kl,
        loss_type=options.get("loss_type", "kto"),
        beta=options["beta"],
        desirable_weight=options["desirable_weight"],
        undesirable_weight=options["undesirable_weight"],
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda model, _: torch.tensor(
            kl["reference" if model is reference else "policy"], dtype=torch.float64
        ),
    )
    inputs = {
        "input_ids": torch.ones(len(mask), mask.size(1) + 1, dtype=torch.int64),
        "attention_mask": torch.cat([mask, torch.tensor(PROMPTS)[:, None]], dim=1),
        "completion_mask": torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1),
        "label": torch.tensor(case["labels"], dtype=torch.bool),
    }
    loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return {
        "loss": loss.item(),
        **{name: values[0] for name, values in trainer._metrics["train"].items()},
    }


def main() -> None:
    rng = random.Random(7)

    def drawn(draw) -> list[list[float]]:
        return [[draw() for _ in range(length)] for length in LENGTHS]

    tokens = {
        "log_probs": drawn(lambda: -rng.expovariate(1.0)),
        "reference": drawn(lambda: -rng.expovariate(1.0)),
        "entropy": drawn(lambda: rng.uniform(0, 5)),
        "mean_logit": drawn(lambda: rng.gauss(0, 2)),
    }
    far = [-rng.expovariate(0.2) for _ in LENGTHS]
    mismatched = {
        # The policy makes mismatched responses likelier than the reference: a positive KL term.
        "far": {"policy": far, "reference": [x - rng.uniform(0, 4) for x in far]},
        # The policy makes them less likely: it is held at 0.
        "near": {"policy": far, "reference": [x + rng.uniform(0, 1) for x in far]},
    }
    for case in CASES:
        case.setdefault("mismatched", "far")
    cases = [
        {**case, "logged": logged(case, tokens, mismatched[case["mismatched"]])} for case in CASES
    ]
    print(
        json.dumps(
            {"prompts": PROMPTS, "tokens": tokens, "mismatched": mismatched, "cases": cases},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
