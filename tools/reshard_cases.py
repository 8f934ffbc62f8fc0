"""Models of the benches of switches and checkpoints, and ways that are timed in turns."""

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist  # noqa: TID251 - barriers around what is timed

from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec
from puzzle_align.models.hf.sources import RandomSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.runtime.context import Context, build_context
from puzzle_align.runtime.groups.world import World, build_communicators


def llama(
    hidden: int, intermediate: int, num_layers: int, num_heads: int, vocabulary: int = 32000
) -> ModelSpec:
    """A Llama of these dimensions."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }
    return from_hf_config(config, "")


def random_part(
    holdings: Holdings, world: World, dtype: Dtype = "fp32", *, train: bool = False
) -> Context | None:
    """This rank's part of a model with random weights; None: it has none. Collective."""
    communicators = build_communicators(holdings.plan, world, holdings.ranks, trained=train)
    if communicators is None:
        return None
    source = RandomSource(holdings.model, 0)
    return build_context(
        "actor",
        holdings.model,
        ModelOptions(dtype=dtype),
        holdings.plan,
        world,
        communicators=communicators,
        fill=lambda chunk: load_weights(chunk, holdings.model, source),
        seed=0,
    )


def in_turns(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, from when all ranks begin until the last is done. Collective.

    None is always the first: what ran before is felt in the next one's time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            started = time.perf_counter()
            ways[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    return seconds
