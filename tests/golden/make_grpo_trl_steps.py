"""Writes grpo_trl_steps.json from runs of TRL's GRPOTrainer; needs trl 1.16.0, as the tests do not.

    python -m tests.golden.make_grpo_trl_steps > tests/golden/grpo_trl_steps.json

Each case is ``GRPOTrainer.train()`` on a CPU in float64: three iterations of two optimizer steps,
from one checkpoint and with given completions. A case has overrides of our keys beside TRL's
options. Of each optimizer step it keeps what TRL logs, the loss, and sums of every gradient before
clipping; at the end, the same sums of every weight, and of how far it moved.
"""

# pyright: reportMissingImports=false

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.dist.given_steps import (
    BATCH,
    GENERATIONS,
    LONGEST,
    PROMPTS,
    SIZES,
    eighths,
    padding_tokenizer,
    save_model,
    sums_of,
)

ITERATIONS, EPOCHS = 3, 2
EQUAL = 6  # prompt whose responses all have the reward 0
STOP = SIZES["eos_token_id"]
COMMON = {
    "learning_rate": 0.001,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-4,
    "warmup_steps": 0,
    "use_bias_correction_kl": False,  # as verl; TRL's default is true
}
# (TRL's options, ours)
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "grpo": (
        {
            "loss_type": "grpo",
            "beta": 0.1,
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "temperature": 0.8,
            "weight_decay": 0.1,
            "max_grad_norm": 2.0,
            "lr_scheduler_type": "constant",
        },
        [
            "ppo.loss_agg_mode=seq-mean-token-mean",
            "ppo.kl_coef=0.1",
            "ppo.clip_ratio_low=0.2",
            "ppo.clip_ratio_high=0.28",
            "generation.temperature=0.8",
            "optimizer.weight_decay=0.1",
            "optimizer.max_grad_norm=2.0",
            "optimizer.lr_scheduler_type=constant",
        ],
    ),
    "dapo": (
        {
            "loss_type": "dapo",
            "scale_rewards": "batch",
            "beta": 0.04,
            "epsilon": 0.05,
            "epsilon_high": 0.2,
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "linear",
        },
        [
            "ppo.loss_agg_mode=token-mean",
            "ppo.scale_rewards=batch",
            "ppo.kl_coef=0.04",
            "ppo.clip_ratio_low=0.05",
            "ppo.clip_ratio_high=0.2",
            "optimizer.weight_decay=0.0",
            "optimizer.max_grad_norm=0.0",
            "optimizer.lr_scheduler_type=linear",
        ],
    ),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "beta": 0.02,
            "epsilon": 0.05,
            "epsilon_high": 0.1,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "cosine",
        },
        [
            "ppo.loss_mode=gspo",
            "ppo.loss_agg_mode=seq-mean-token-mean",
            "ppo.kl_coef=0.02",
            "ppo.clip_ratio_low=0.05",
            "ppo.clip_ratio_high=0.1",
            "optimizer.weight_decay=0.0",
            "optimizer.max_grad_norm=1.0",
            "optimizer.lr_scheduler_type=cosine",
        ],
    ),
    "corrected KL": (
        {
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "use_bias_correction_kl": True,
            "beta": 0.2,
            "epsilon": 0.2,
            "epsilon_high": 0.2,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "constant",
        },
        [
            "ppo.loss_agg_mode=seq-mean-token-sum-norm",
            "ppo.scale_rewards=none",
            "ppo.use_bias_correction_kl=true",
            "ppo.kl_coef=0.2",
            "ppo.clip_ratio=0.2",
            "optimizer.weight_decay=0.0",
            "optimizer.max_grad_norm=1.0",
            "optimizer.lr_scheduler_type=constant",
        ],
    ),
}
CASES["gspo, corrected KL"] = (
    {**CASES["gspo"][0], "use_bias_correction_kl": True},
    [*CASES["gspo"][1], "ppo.use_bias_correction_kl=true"],
)


def responses() -> list[list[int]]:
    """Responses of every iteration, ``GENERATIONS`` to each prompt; about half of them end.

    Those to one of the prompts have equal rewards.
    """
    draws = np.random.default_rng(11)
    found = []
    for number in range(ITERATIONS * BATCH * GENERATIONS):
        ids = draws.integers(0, 240, draws.integers(1, LONGEST)).tolist()
        longer = draws.integers(0, 240, LONGEST).tolist()
        ids = [*ids, STOP] if draws.random() < 0.5 else longer
        if number // GENERATIONS == EQUAL:
            ids[0] += -sum(ids) % 8
        found.append(ids)
    return found


class Steps(GRPOTrainer):
    """GRPOTrainer that keeps the losses and gradients of its optimizer steps."""

    def __init__(self, **named: Any) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, list[float]]] = []
        super().__init__(**named)

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*given, **named)
        weights = self.model.named_parameters()
        self.gradients.append({name: sums_of(p.grad.numpy()) for name, p in weights})
        return loss


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train by TRL; what it logs, and where the weights end."""
    completions = responses()
    per_iteration = BATCH * GENERATIONS
    prompt_ids = {text: [SIZES["bos_token_id"], *text.encode()] for text in PROMPTS}

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        iteration = trainer.state.global_step // EPOCHS
        wanted = PROMPTS[iteration * BATCH : (iteration + 1) * BATCH]
        assert prompts == [text for text in wanted for _ in range(GENERATIONS)]
        first = iteration * per_iteration
        return {
            "prompt_ids": [prompt_ids[text] for text in prompts],
            "completion_ids": completions[first : first + per_iteration],
            "logprobs": None,
        }

    config = GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": torch.float64},
        gradient_checkpointing=False,
        per_device_train_batch_size=per_iteration,
        gradient_accumulation_steps=1,
        num_generations=GENERATIONS,
        num_iterations=EPOCHS,
        max_steps=ITERATIONS * EPOCHS,
        max_completion_length=LONGEST,
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Steps(
        model=str(folder / "model"),
        reward_funcs=eighths,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=padding_tokenizer(),
        rollout_func=rollout,
    )
    assert trainer.model.dtype == trainer.ref_model.dtype == torch.float64
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    steps = []
    for line, loss, gradients in zip(logged, trainer.losses, trainer.gradients, strict=True):
        known = {k: v for k, v in line.items() if "time" not in k and k not in ("epoch", "loss")}
        steps.append({"logged": known, "loss": loss, "gradients": gradients})
    after = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return {
        "steps": steps,
        "weights": {name: sums_of(weight.numpy()) for name, weight in after.items()},
        "moves": {name: sums_of((weight - before[name]).numpy()) for name, weight in after.items()},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name, redirect_stdout(sys.stderr):
        folder = Path(name)
        save_model(folder / "model")
        cases = {}
        for case, (own, ours) in CASES.items():
            options = {**COMMON, **own}
            cases[case] = {"options": options, "ours": ours, **run(folder, options)}
    inputs = {"iterations": ITERATIONS, "epochs": EPOCHS, "responses": responses()}
    print(json.dumps({**inputs, "rewards": eighths(responses()), "cases": cases}))


if __name__ == "__main__":
    main()
