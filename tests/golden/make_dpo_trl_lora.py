"""Writes dpo_trl_lora.json from runs of TRL's DPOTrainer with adapters; needs trl 1.16.0 and peft
0.21, which the tests do not.

    python -m tests.golden.make_dpo_trl_lora > tests/golden/dpo_trl_lora.json

Each case is ``DPOTrainer.train()`` with a ``peft_config`` on a CPU in float64: eight AdamW steps,
from given adapters; the reference is the base. Of each step it keeps what TRL logs, the loss, and
sums of every adapter's gradient before clipping; at the end, the same sums of every adapter, and of
how far it moved.
"""

# pyright: reportMissingImports=false

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer

from tests.dist.given_adapters import (
    BATCH,
    BOS,
    CASES,
    EOS,
    PREFIX,
    STEPS,
    adapters,
    pairs,
    save_base,
)
from tests.dist.given_steps import padding_tokenizer, sums_of


def name_of(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".default", "")


class Steps(DPOTrainer):
    """DPOTrainer on given ids, in their order, that keeps its steps' losses and gradients."""

    def __init__(self, **named: Any) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, list[float]]] = []
        super().__init__(**named)

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs, return_outputs)
        self.losses.append(loss.item())
        return loss

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*given, **named)
        self.gradients.append({n: sums_of(p.grad.numpy()) for n, p in self.trained().items()})
        return loss

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Adapters by our names."""
        return {name_of(n): p for n, p in self.model.named_parameters() if p.requires_grad}


def run(folder: Path, case: str) -> dict[str, Any]:
    """Train by TRL; what it logs, and where the adapters end."""
    options = CASES[case][2]
    rows = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for pair in pairs():
        rows["prompt_ids"].append([BOS, *pair["prompt"].encode()])
        for name in ("chosen", "rejected"):
            rows[f"{name}_ids"].append([*pair[name].encode(), EOS])
    config = DPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": torch.float64},
        gradient_checkpointing=False,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        max_steps=STEPS,
        beta=0.1,
        learning_rate=0.002,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.1,
        max_grad_norm=0.5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-4,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Steps(
        model=str(folder / case),
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=padding_tokenizer(),
        peft_config=LoraConfig(**{**options, "target_modules": list(options["target_modules"])}),
    )
    assert trainer.ref_model is None and trainer.model.dtype == torch.float64
    given = adapters(case)
    assert trainer.trained().keys() == given.keys()
    with torch.no_grad():
        for name, parameter in trainer.trained().items():
            assert parameter.dtype == torch.float64
            parameter.copy_(torch.from_numpy(given[name]))
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    after = {name: p.detach().numpy() for name, p in trainer.trained().items()}
    return {
        "steps": [
            {"loss": loss, "logged": line, "gradients": gradients}
            for loss, line, gradients in zip(trainer.losses, logged, trainer.gradients, strict=True)
        ],
        "weights": {name: sums_of(tensor) for name, tensor in after.items()},
        "moves": {name: sums_of(tensor - given[name]) for name, tensor in after.items()},
    }


def main() -> None:
    cases = {}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        for case in CASES:
            save_base(Path(folder) / case, case)
            cases[case] = run(Path(folder), case)
    json.dump({"cases": cases}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
