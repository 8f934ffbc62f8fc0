"""The job's tokenizer, held against its models."""

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import tokenizer_config
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
