"""``profile.json``: what was measured of models and links, before any plan is chosen.

A profile is all that the planner knows of a cluster. Every time is a median with its spread, of one
rank; a tensor shard's local shapes are measured alone, what tensor ranks say to each other is in
``links``. Seconds, bytes, tokens throughout.

Of a model (``ModelProfile``), the points are
- ``rows``: one layer in a microbatch, by tensor size, recompute, tokens of a row, and the (query,
  key) pairs in it that see each other, which is what packing changes;
- ``ends``: embedding, and head with its loss, by tensor size, tokens and predictions of a row;
- ``optimizer``: a step (gradients zeroed, their norm, AdamW) by parameters on a rank;
- ``prefill`` and ``decode``: one layer, and all the rest, of a batch that generates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from puzzle_align.files.json_file import read_versioned, write_dataclass
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec, Recompute, traits

FORMAT = 1

_COUNTS = ("tensor", "row_tokens", "sequences", "ranks", "ranks_per_node")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

Transport = Literal["p2p", "all_reduce", "all_gather"]
Place = Literal["node", "network"]  # within a node, or between nodes


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds: the median of what was measured, and half its interquartile range."""

    median: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RowPoint:
    """One layer's part in a microbatch of one row, on one of ``tensor`` ranks."""

    tensor: int
    recompute: Recompute
    row_tokens: int
    pairs: int  # (query, key) pairs of the row that see each other
    forward: Time  # without a graph
    train_forward: Time
    backward: Time
    kept_bytes: int  # what it keeps from forward to backward


@dataclass(frozen=True, kw_only=True)
class EndPoint:
    """Times of a row beside the layers, on one of ``tensor`` ranks."""

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
    """A step of the optimizer on one rank, with state as the config's keys of these names say."""

    parameters: int
    step: Time
    state_dtype: Dtype = "fp32"
    cpu_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class PrefillPoint:
    """A batch of prompts, on one of ``tensor`` ranks."""

    tensor: int
    sequences: int
    tokens: int  # of all its prompts together
    layer: Time
    rest: Time  # embedding, head, sampling, what the host does


@dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """A batch that takes a token each, on one of ``tensor`` ranks."""

    tensor: int
    sequences: int
    context: int  # tokens that each has in the cache
    layer: Time
    rest: Time


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The points of a model; ``rows`` and ``ends`` are of packed rows, ``shared`` or not."""

    model: ModelSpec
    rows: tuple[RowPoint, ...]
    ends: tuple[EndPoint, ...]
    optimizer: tuple[OptimizerPoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkPoint:
    """A message of so many bytes (of a collective: what each rank gives, or in the end has)."""

    size: int
    time: Time


@dataclass(frozen=True, kw_only=True)
class Link:
    """How long ``transport`` takes among ``ranks`` ranks, by size of the message."""

    transport: Transport
    place: Place
    ranks: int
    points: tuple[LinkPoint, ...]
    declared: str = ""  # from which figures, where nothing was measured


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine that was measured."""

    device: str  # cpu | cuda
    name: str
    memory_bytes: int  # of a device; of a CPU's ranks: the machine's, shared among them
    ranks_per_node: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All of it. ``options`` are how the models were computed; ``recompute`` is each point's."""

    hardware: Hardware
    options: ModelOptions
    models: tuple[ModelProfile, ...]
    links: tuple[Link, ...]
    format: int = FORMAT

    def of(self, model: ModelSpec) -> ModelProfile:
        """The points of a model.

        Raises:
            ValueError: one line, if it was not.
        """
        for profiled in self.models:
            if measures(profiled.model) == measures(model):
                return profiled
        there = "; ".join(model_text(profiled.model) for profiled in self.models)
        raise ValueError(
            f"the profile has no {model_text(model)}, but {there}: profile this job's models"
        )


def measures(model: ModelSpec) -> tuple[object, ...]:
    """Sizes of a model that decide the times of a layer and the ends; not its number of layers."""
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
    """A model for people: ``llama of hidden size 4096, 32 heads, vocabulary 32000``."""
    head = "" if model.head == "lm" else ", a scalar head"
    return (
        f"{model.model_type} of hidden size {model.hidden_size}, {model.intermediate_size} in the "
        f"MLP, {model.num_attention_heads} heads, vocabulary {model.vocab_size}{head}"
    )


def save_profile(profile: Profile, path: Path) -> None:
    """Write the file, whole or not at all."""
    write_dataclass(profile, path)


def load_profile(path: Path) -> Profile:
    """The profile in a file; ValueError, one line with the file and the cure, where it is none."""
    data = read_versioned(path, FORMAT, "make it with launch/profile.py")
    profile = from_plain(Profile, data, str(path))
    for part in ("hardware", "links"):
        _check_numbers(data[part], f"{path}.{part}")
    for number, entry in enumerate(data["models"]):
        points = {name: value for name, value in entry.items() if name != "model"}
        _check_numbers(points, f"{path}.models[{number}]")
        _check_sizes(profile.models[number].model, f"{path}.models[{number}].model")
    return profile


def _check_numbers(data: Any, where: str) -> None:
    """Raise a one-line ValueError for a number in ``data`` that is below what was measured."""
    if isinstance(data, list):
        for place, item in enumerate(data):
            _check_numbers(item, f"{where}[{place}]")
    elif isinstance(data, dict):
        for name, item in data.items():
            least = 1 if name in _COUNTS else 0
            if isinstance(item, int | float) and item < least:
                raise ValueError(f"{where}.{name}: {item} is below {least}; make it again")
            _check_numbers(item, f"{where}.{shown(name)}")


def _check_sizes(model: ModelSpec, where: str) -> None:
    for name in _SIZES:
        if getattr(model, name) < 1:
            raise ValueError(f"{where}.{name}: {getattr(model, name)} is below 1; make it again")
