"""``profile.json``: measurements of models and links, from which plans are chosen.

The planner knows a cluster by its profile alone. Every time is a median with its spread, on one
rank. Tensor shards are measured without communication, which is in ``links``. Units are seconds,
bytes and tokens.

The points of a model (``ModelProfile``) are
- ``rows``: one layer in a microbatch, by tensor size, recompute, tokens of a row, and the (query,
  key) pairs that attention computes, a number that packing changes;
- ``ends``: embedding, and head with its loss, by tensor size, tokens and predictions of a row;
- ``optimizer``: a step (gradients zeroed, their norm, AdamW) by parameters on a rank;
- ``prefill`` and ``decode``: one layer, and all the rest, of a generation batch;
- ``merge``: adapters added to a copy of the weights, for sampling, by parameters of the copy.

Of the ``links``, ``p2p`` is a message one way; ``exchange`` is a box resharded each way at the same
time, one of many, into memory allocated for it; ``copy`` is the copy of a box within a rank's
memory, into newly allocated memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from puzzle_align.files.json_file import read_versioned, write_dataclass
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec, Recompute, traits

FORMAT = 1

# Least values of numbers; of all others it is 0. A model's sizes need none: models are looked up by
# them (``measures``).
_DIVISORS = ("tensor", "row_tokens", "sequences", "tokens", "ranks", "ranks_per_node")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # -1: none
_LEAST = {**dict.fromkeys(_DIVISORS, 1), **dict.fromkeys(_TOKEN_IDS, -1)}

Transport = Literal["p2p", "exchange", "all_reduce", "all_gather", "copy"]
Place = Literal["node", "network"]  # within a node, or between nodes


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds: the median of the samples, and half their interquartile range."""

    median: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RowPoint:
    """One layer's times for a microbatch of one row, on one of ``tensor`` ranks."""

    tensor: int
    recompute: Recompute
    row_tokens: int
    pairs: int  # (query, key) pairs of the row that attention computes
    forward: Time  # without a graph
    train_forward: Time
    backward: Time
    kept_bytes: int  # of the layer, from forward to backward


@dataclass(frozen=True, kw_only=True)
class EndPoint:
    """A row's times outside the layers, on one of ``tensor`` ranks."""

    tensor: int
    row_tokens: int
    predictions: int  # tokens of the row that are predicted, or valued
    prepare: Time  # the row's tensors and attention plan, on every rank
    embedding_forward: Time
    embedding_backward: Time
    head_forward: Time  # without a graph
    head_train_forward: Time
    head_backward: Time


@dataclass(frozen=True, kw_only=True)
class OptimizerPoint:
    """An optimizer step on one rank; ``state_dtype`` and ``cpu_offload`` are as in the config."""

    parameters: int
    step: Time
    state_dtype: Dtype = "fp32"
    cpu_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class PrefillPoint:
    """A prefill batch on one of ``tensor`` ranks."""

    tensor: int
    sequences: int
    tokens: int  # of all its prompts together
    layer: Time
    rest: Time  # embedding, head, sampling, the host's work


@dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """A decode batch, one token per sequence, on one of ``tensor`` ranks."""

    tensor: int
    sequences: int
    context: int  # tokens that each has in the cache
    layer: Time
    rest: Time


@dataclass(frozen=True, kw_only=True)
class MergePoint:
    """Adapters added to a copy of ``parameters`` weights on one rank."""

    parameters: int
    time: Time


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Points of a model; ``rows`` and ``ends`` come from packed rows of any layout."""

    model: ModelSpec
    rows: tuple[RowPoint, ...]
    ends: tuple[EndPoint, ...]
    optimizer: tuple[OptimizerPoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    merge: tuple[MergePoint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkPoint:
    """A message of ``size`` bytes; for a collective, of each rank's input, or of its result."""

    size: int
    time: Time


@dataclass(frozen=True, kw_only=True)
class Link:
    """Times of ``transport`` among ``ranks`` ranks, by size of the message."""

    transport: Transport
    place: Place
    ranks: int
    points: tuple[LinkPoint, ...]
    declared: str = ""  # name of the data sheet or file, if not measured
    at_once: int | None = None  # groups that shared a node's way to others; None: does not matter


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The profiled machine."""

    device: str  # cpu | cuda
    name: str
    memory_bytes: int  # of a device; on CPU of the machine, shared by its ranks
    ranks_per_node: int
    versions: dict[str, str]

    @property
    def orders_ranks(self) -> bool:
        """Whether process groups number their ranks in any order: torch 2.11 cannot."""
        torch = self.versions.get("torch", "2.12")
        return tuple(map(int, torch.split(".")[:2])) >= (2, 12)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Contents of the file. ``options`` hold for all points, but ``recompute`` is each point's."""

    hardware: Hardware
    options: ModelOptions
    models: tuple[ModelProfile, ...]
    links: tuple[Link, ...]
    format: int = FORMAT

    def of(self, model: ModelSpec) -> ModelProfile:
        """The points of a model; ValueError, one line, if it was not profiled."""
        for profiled in self.models:
            if measures(profiled.model) == measures(model):
                return profiled
        there = "; ".join(model_text(profiled.model) for profiled in self.models)
        raise ValueError(
            f"the profile has no {model_text(model)}, but {there}: profile this job's models"
        )


def measures(model: ModelSpec) -> tuple[object, ...]:
    """Sizes of a model that determine the times of a layer and the ends: not the layer count."""
    return (
        model.hidden_size,
        model.intermediate_size,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        model.vocab_size,
        model.head,
        *traits(model),
    )


def model_text(model: ModelSpec) -> str:
    """Readable name of a model: ``llama of hidden size 4096, 32 heads, vocabulary 32000``."""
    head = "" if model.head == "lm" else ", a scalar head"
    lora = "" if model.lora is None else f", adapters of rank {model.lora.r}"
    return (
        f"{model.model_type} of hidden size {model.hidden_size}, {model.intermediate_size} in the "
        f"MLP, {model.num_attention_heads} heads, vocabulary {model.vocab_size}{head}{lora}"
    )


def save_profile(profile: Profile, path: Path) -> None:
    """Write the file, whole or not at all."""
    write_dataclass(profile, path)


def load_profile(path: Path) -> Profile:
    """Read a profile; ValueError, one line with the file and the cure, if it is invalid."""
    data = read_versioned(path, FORMAT, "make it with puzzle-align profile")
    profile = from_plain(Profile, data, str(path))
    _check_numbers(data, str(path))
    return profile


def _check_numbers(data: Any, where: str) -> None:
    """Raise a one-line ValueError for a number in ``data`` below its minimum."""
    if isinstance(data, list):
        for place, item in enumerate(data):
            _check_numbers(item, f"{where}[{place}]")
    elif isinstance(data, dict):
        for name, item in data.items():
            least = _LEAST.get(name, 0)
            if isinstance(item, int | float) and item < least:
                raise ValueError(f"{where}.{name}: {item} is below {least}; make it again")
            _check_numbers(item, f"{where}.{shown(name)}")
