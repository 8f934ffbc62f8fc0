"""Steps of other stacks beside ours, in one process on the same pairs: bare PyTorch, and TRL."""

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

from bare_stack import BareStack

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.layout.model import Recompute
from puzzle_align.runtime.moments import now
from report.compare import compare_all
from report.generation import transformers_model
from report.process import Results, free_device
from report.setting import Setting, open_dataset, reason_of, row_of, world
from report.watch import sdpa_kernels

MOST_PAIRS = 8  # of a padded microbatch


def bare_steps(setting: Setting, recompute: Recompute) -> Iterator[Results]:
    """Measure the whole model's steps in ``bare_stack``; yield all results after each data set.

    If nothing runs with ``recompute``, such as for lack of memory, then with recompute of layers.
    """
    for way in dict.fromkeys((recompute, "full")):
        free_device()
        results: Results = {"recompute": way, "data": {}}
        try:
            stack = BareStack(setting.spec, world(setting.device).device, way)
            row, pairs = row_of(setting, setting.bare_data[0], stack.attention)
            results["sdpa"] = sdpa_kernels(partial(stack.reference_outputs, [row], pairs, 2))
        except Exception as error:  # noqa: BLE001 - see reason_of
            yield results | {"error": reason_of(error)}
            continue
        for name, compared in compare_all(setting, stack, setting.bare_data, [stack.attention]):
            results["data"][name] = compared
            yield results | {"attention": stack.attention}
        if any(compared["variants"] for compared in results["data"].values()):
            return
        del stack, row


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
