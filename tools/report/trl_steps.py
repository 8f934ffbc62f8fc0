"""Steps of TRL's DPOTrainer beside ours: in the same process, on the same pairs."""

import os
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

from dpo_steps import now

from puzzle_align.data.dataset import ExampleDataset
from report.generation import transformers_model
from report.process import Results, free_device
from report.setting import Setting, open_dataset, reason_of, world

MOST_PAIRS = 8  # of a padded microbatch


def trl_steps(setting: Setting, data: str, pairs: int) -> Results:
    """Measure steps of ``pairs`` pairs in whole microbatches; or the reason why there are none."""
    if find_spec("trl") is None:
        return {"error": "TRL is not installed"}
    free_device()
    try:
        return {"version": version("trl"), **_measured(setting, data, pairs)}
    except Exception as error:  # noqa: BLE001 - see reason_of
        return {"error": f"TRL failed: {reason_of(error)}"}


def _measured(setting: Setting, data: str, pairs: int) -> Results:
    import trl  # pyright: ignore[reportMissingImports] - optional
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback

    device, ends = world(setting.device).device, list[float]()
    num_steps, batch = setting.warmup + setting.steps, min(MOST_PAIRS, pairs)
    in_step = pairs - pairs % batch

    class Tokenized(trl.DPOTrainer):
        """A trainer whose data are token ids."""

        def _prepare_dataset(self, dataset: Any, *_: object) -> Any:
            return dataset

    class Clock(TrainerCallback):
        """Ends of steps."""

        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(now(device))

    padding = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        # A launcher's: with it, Accelerate would hold a copy of the gradients for other ranks.
        os.environ.pop("LOCAL_RANK", None)
        trainer = Tokenized(
            model=transformers_model(setting),
            ref_model=transformers_model(setting),
            args=trl.DPOConfig(
                output_dir=folder,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=in_step // batch,
                max_steps=num_steps,
                max_length=None,
                train_sampling_strategy="sequential",
                bf16=setting.device == "cuda",
                use_cpu=setting.device == "cpu",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=_pairs(open_dataset(setting, data, num_steps, pairs), pairs, in_step),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=padding, pad_token="<pad>"),
            callbacks=[Clock()],
        )
        trainer.train()
    rates = [in_step / (end - start) for start, end in pairwise(ends[setting.warmup - 1 :])]
    return {
        "pairs_per_step": in_step,
        "pairs_per_second": median(rates),
        "extremes": [min(rates), max(rates)],
        "recompute": trainer.args.gradient_checkpointing,
    }


def _pairs(dataset: ExampleDataset, pairs: int, in_step: int) -> Any:
    """The first ``in_step`` of each step's ``pairs`` pairs, as TRL's collator takes them."""
    import datasets

    return datasets.Dataset.from_list(
        [
            {
                "prompt_ids": dataset.prompt(number).tolist(),
                "chosen_ids": dataset.response(number, 0).tolist(),
                "rejected_ids": dataset.response(number, 1).tolist(),
            }
            for number in range(len(dataset))
            if number % pairs < in_step
        ]
    )
