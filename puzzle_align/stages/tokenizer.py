"""The job's tokenizer, and checks of it against the models."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from puzzle_align.config.resolve import RoleModel
from puzzle_align.config.saved import Saved
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.tokenize import Tokenizer, load_tokenizer
from puzzle_align.files.messages import shown
from puzzle_align.layout.model import ModelSpec


def open_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Open the tokenizer of a resolved job."""
    return load_tokenizer(config.path, config.chat_template)


def vocabularies(models: Iterable[RoleModel]) -> dict[str, ModelSpec]:
    """Models that read a job's tokens, by config key."""
    return {model.key: model.spec for model in models}


def check_vocabulary(tokenizer: Tokenizer, models: Mapping[str, ModelSpec]) -> list[str]:
    """Return a warning, one line, for every model with fewer tokens than the tokenizer.

    Args:
        models: by key, from ``vocabularies``.

    Raises:
        ValueError: one line, if a model lacks a special token that is put around texts.
    """
    warnings: list[str] = []
    special = [("padding", tokenizer.pad_id), ("end-of-sequence", tokenizer.eos_id)]
    special += [("beginning-of-sequence", token) for token in tokenizer.bos_ids]
    for key, spec in models.items():
        for name, token in special:
            if token is not None and token >= spec.vocab_size:
                raise ValueError(
                    f"tokenizer.path: its {name} token is {token}, the vocab_size of {key} is"
                    f" {spec.vocab_size}: give the model's own tokenizer"
                )
        if tokenizer.vocab_size > spec.vocab_size:
            warnings.append(
                f"tokenizer.path: the tokenizer has {tokenizer.vocab_size} tokens, the vocab_size "
                f"of {key} is {spec.vocab_size}: data with a token that it lacks is an error"
            )
    return warnings


def check_tokens(
    datasets: Iterable[ExampleDataset | PromptDataset],
    tokenizer: Tokenizer,
    models: Mapping[str, ModelSpec],
) -> None:
    """Raise a one-line ValueError for the first token of the data that a model lacks."""
    key, spec = min(models.items(), key=lambda item: item[1].vocab_size)
    if tokenizer.vocab_size <= spec.vocab_size:
        return
    for dataset in datasets:
        if dataset.tokens.max(initial=0) < spec.vocab_size:
            continue
        for index in range(len(dataset)):
            tokens = _tokens(dataset, index)
            beyond = tokens[tokens >= spec.vocab_size]
            if len(beyond):
                name = shown(repr(tokenizer.decode([int(beyond[0])], skip_special_tokens=False)))
                text = tokenizer.decode(tokens[:64].tolist(), skip_special_tokens=False)[:40]
                raise ValueError(
                    f"tokenizer.path: token {beyond[0]} ({name}) of the record that begins "
                    f"{text!r} is not below {spec.vocab_size}, the vocab_size of {key}: give the "
                    "model's own tokenizer, or leave such records out"
                )


def _tokens(dataset: ExampleDataset | PromptDataset, index: int) -> np.ndarray:
    prompt = dataset.prompt(index)
    if isinstance(dataset, PromptDataset):
        return prompt
    branches = range(dataset.num_responses)
    return np.concatenate([prompt, *(dataset.response(index, branch) for branch in branches)])


def foreign_tokenizers(path: str | None, models: Iterable[RoleModel]) -> list[str]:
    """Return a warning, one line, for every checkpoint whose job had another tokenizer.

    If both vocabularies have the same size, no other check would notice.

    Args:
        path: this job's tokenizer.
    """
    warnings: dict[str, str] = {}
    for model in models:
        saved = None if model.source is None else model.source.saved
        if saved is None:
            continue
        trained_with = _tokenizer_path(saved)
        if trained_with is not None and _resolved(trained_with) != _resolved(path):
            warnings[model.key] = (
                f"{model.key}.path: {saved.path} was trained with tokenizer {trained_with}, this "
                f"job has {path or 'byte'}: if their tokens differ, the model misreads its input"
            )
    return list(warnings.values())


def _tokenizer_path(saved: Saved) -> str | None:
    """Tokenizer of a checkpoint's job; None if it describes no job."""
    try:
        return saved.tokenizer["path"] or "byte"
    except ValueError:
        return None


def _resolved(path: str | None) -> str:
    return "byte" if path in (None, "byte") else str(Path(path).resolve())
