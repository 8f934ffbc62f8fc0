"""The job's tokenizer, held against its models."""

from pathlib import Path

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import named_model
from puzzle_align.config.resolve import role_model, role_names, tokenizer_config
from puzzle_align.config.saved import Saved
from puzzle_align.data.tokenize import Tokenizer, load_tokenizer
from puzzle_align.layout.model import ModelSpec


def open_tokenizer(config: JobConfig) -> Tokenizer:
    """The job's tokenizer: as configured, else the trained model's, else bytes."""
    own = tokenizer_config(config)
    return load_tokenizer(own.path, own.chat_template)


def check_vocabulary(tokenizer: Tokenizer, spec: ModelSpec, key: str = "actor.model") -> None:
    """Raise a one-line ValueError if the tokenizer has ids that the model does not know."""
    if tokenizer.vocab_size > spec.vocab_size:
        raise ValueError(
            f"tokenizer.path: the tokenizer has {tokenizer.vocab_size} tokens, the vocab_size of"
            f" {key} is {spec.vocab_size}: give the model's own tokenizer"
        )


def foreign_tokenizers(config: JobConfig) -> list[str]:
    """A warning, one line, for every checkpoint whose job had another tokenizer than this one has.

    Where both vocabularies are of one size, nothing else would tell.

    Raises:
        ValueError: as ``named_model``.
    """
    own = tokenizer_config(config).path or "byte"
    models = {key: model for model, key in (role_model(config, r) for r in role_names(config))}
    found: list[str] = []
    for key, model in models.items():
        if model.path is None or model.random_weights:
            continue
        saved = named_model(model.path, key).saved
        theirs = None if saved is None else _tokenizer_path(saved)
        if saved is not None and theirs is not None and _resolved(theirs) != _resolved(own):
            found.append(
                f"{key}.path: {saved.path} was trained with tokenizer {theirs}, and this job has "
                f"{own}: if their tokens differ, the model misreads what it is given"
            )
    return found


def _tokenizer_path(saved: Saved) -> str | None:
    """The tokenizer of a checkpoint's job; None where no job is described."""
    try:
        return saved.tokenizer["path"] or "byte"
    except ValueError:
        return None


def _resolved(path: str) -> str:
    return path if path == "byte" else str(Path(path).resolve())
