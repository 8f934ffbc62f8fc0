"""Tokenizer, data sources, and packing into rows."""

from dataclasses import dataclass
from typing import Literal

from puzzle_align.config.schema import key
from puzzle_align.config.stages import PREFERENCES, PROMPTS, UNPAIRED, stages_with

AddEos = bool | Literal["auto"]
Comparisons = Literal["all", "best"]
# Data sets of the prefix-sharing paper's Table 1: median tokens of a prompt with both responses,
# and the median ratio of prompt to response length.
SYNTHETIC_LENGTHS = {
    "capybara": (1160, 1.59),
    "hh_rlhf": (186, 2.15),
    "metamath_dpo": (872, 3.91),
    "tldr": (416, 11.14),
    "helpsteer": (775, 6.34),
    "ultrafeedback": (409, 0.42),
}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens."""

    path: str | None = key(
        None,
        "directory of a Hugging Face tokenizer, or 'byte'; null: the trained model's, or 'byte'",
        is_path=True,
    )
    chat_template: str | None = key(
        None, "Jinja template, or a file of one; null: the tokenizer's", has_lines=True
    )
    add_eos: AddEos = key(
        "auto",
        "append end-of-sequence to a response; auto: to texts, not messages",
        unit="true, false or auto",
        stages=PREFERENCES,
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Preference data; in stage ppo, prompts."""

    train: str | None = key(
        None,
        "JSONL, JSON, CSV or Parquet file, datasets directory or hub name; NAME#SPLIT: one split",
        is_path=True,
    )
    eval: str | None = key(
        None,
        "held-out data of the same form; null: eval_fraction of train",
        stages=PREFERENCES,
        is_path=True,
    )
    eval_fraction: float = key(
        0.0, "share of train held out when eval is null", at_least=0, below=1, stages=PREFERENCES
    )
    format: str = key(
        "auto",
        "auto: by the columns (strings, message lists, implicit prompt, HH, ShareGPT, unpaired)",
        choices=("auto", "packed", "synthetic"),
    )
    columns: dict[str, str] | None = key(
        None,
        "the file's names of columns, by ours: {prompt: question, chosen: better}",
        unit="a mapping",
        binding=PROMPTS,
        generate=True,
    )
    comparisons: Comparisons = key(
        "all",
        "of K responses with scores or ranks: all pairs of which one is better, or best with rest",
        choices=("all", "best"),
        stages=stages_with(data="pairs"),
    )
    apply_chat_template: bool = key(
        False,
        "a prompt that is a text becomes one user message, responses the assistant's messages",
        binding=PROMPTS,
        generate=True,
    )
    num_synthetic: int = key(
        4096, "pairs (or prompts) that format synthetic generates", unit="pairs", at_least=1
    )
    synthetic_length: int | None = key(
        None,
        "longest generated prompt with a response; null: short, or any length of the data set",
        unit="characters",
        at_least=32,
    )
    synthetic_lengths: str = key(
        "lognormal",
        "lengths of generated texts: up to synthetic_length, or a paper's data set's",
        choices=("lognormal", *SYNTHETIC_LENGTHS),
    )
    # Binding only in some stages: in preference stages a bound that changes tokens changes the
    # data's fingerprint. In stage kto max_length also limits mismatched prompts and responses.
    max_length: int = key(
        1024,
        "longest prompt plus one response",
        unit="tokens",
        at_least=2,
        binding=(*PROMPTS, *UNPAIRED),
        generate=True,
    )
    max_prompt_length: int | None = key(
        None,
        "longest prompt; null: no bound of its own (stage ppo: max_length less "
        "generation.max_new_tokens)",
        unit="tokens",
        at_least=1,
        binding=PROMPTS,
        generate=True,
    )
    truncation_mode: str = key(
        "keep_end",
        "too long: keep_end cuts prompts' start, then ends; keep_start cuts ends; drop skips them",
        choices=("keep_end", "keep_start", "drop", "error"),
        generate=True,
    )
    on_error: str = key(
        "raise",
        "bad records: raise an error, or skip and count them",
        choices=("raise", "skip"),
        generate=True,
    )
    shuffle: bool = key(True, "new order in each epoch, drawn from seed", binding=True)
    cache_dir: str | None = key(
        None, "folder of tokenized data; null: output_dir/cache", is_path=True
    )
    num_proc: int | None = key(
        None,
        "processes that tokenize; null: one for little data, else the CPUs, at most 32",
        at_least=1,
        generate=True,
    )

    def longest_prompt(self, max_new_tokens: int) -> int:
        """Most tokens of a prompt beside ``max_new_tokens`` of a response; below 1: none fits."""
        return self.max_prompt_length or self.max_length - max_new_tokens


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How pairs become rows."""

    enabled: bool = key(
        True,
        "pack pairs into rows; false, or layout padded: pad every sequence",
        stages=PREFERENCES,
    )
    layout: str = key(
        "shared",
        "shared: one prompt for all responses; paired: for each; padded: paired, to the longest",
        choices=("shared", "paired", "padded"),
    )
    scope: str = key(
        "batch",
        "batch: pack each global batch; dataset: pack once over everything",
        choices=("batch", "dataset"),
        stages=PREFERENCES,
        binding=True,
    )
    row_tokens: int = key(4096, "most tokens in a row (a microbatch)", unit="tokens", at_least=2)

    @property
    def row_layout(self) -> str:
        """The layout of a pair in a row: shared or paired."""
        return "paired" if self.layout == "padded" else self.layout

    @property
    def is_packed(self) -> bool:
        """Whether segments lie back to back; else each has a slot as long as the longest."""
        return self.enabled and self.layout != "padded"
