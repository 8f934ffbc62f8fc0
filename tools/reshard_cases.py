"""Cases of the benches of switches: models, and switches between their plans."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist  # noqa: TID251 - barriers around what is timed

from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.models.hf.sources import RandomSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.runtime.context import Context, build_context
from puzzle_align.runtime.groups.world import World, build_communicators

Sizes = tuple[int, int, int]  # (P, D, T)

PAIRS: dict[int, tuple[tuple[Sizes, Sizes], ...]] = {  # by number of ranks
    2: (((2, 1, 1), (1, 1, 2)), ((1, 1, 2), (1, 2, 1)), ((1, 1, 2), (2, 1, 1))),
    4: (((4, 1, 1), (2, 1, 2)), ((2, 1, 2), (1, 2, 2)), ((2, 2, 1), (1, 1, 4))),
    8: (((2, 2, 2), (1, 4, 2)), ((1, 1, 8), (1, 4, 2)), ((4, 2, 1), (1, 2, 4))),
}
LLAMA = {  # PUZZLE's Table 1: hidden size, intermediate size, layers, heads
    "7B": (4096, 11008, 32, 32),
    "13B": (5120, 13824, 40, 40),
    "33B": (6656, 17920, 64, 52),
}


@dataclass(frozen=True)
class Links:
    """Bandwidths, in GB/s and each direction; ranks of a node share its adapters evenly."""

    node: float  # of a rank to others of its node
    network: float  # of an adapter
    ranks_per_adapter: int = 1


@dataclass(frozen=True)
class Case:
    """A switch of a large model; ``links`` are the paper's cluster, None: those of the options."""

    name: str
    model: str
    before: ParallelPlan
    after: ParallelPlan
    links: Links | None = None
    paper_seconds: float | None = None  # measured by the paper
    stated: bool = False  # whether the paper names the plans


def plan_of(sizes: Sizes, layers: tuple[int, ...] = ()) -> ParallelPlan:
    """(P, D, T) as a plan."""
    pipeline, data, tensor = sizes
    return ParallelPlan(pipeline=pipeline, data=data, tensor=tensor, pipeline_layers=layers)


# Section 7.1: nodes of 8 A100s and 100 Gb/s InfiniBand, linked by PCIe 4.0 (orion) or NVLink
# (phoenix). Within nodes these are the nominal figures of such links: the paper gives none.
ORION, PHOENIX = Links(32.0, 12.5, 8), Links(300.0, 12.5, 8)
_8, _16, _32 = plan_of((8, 1, 1)), plan_of((16, 1, 1), (3, 2) * 8), plan_of((32, 1, 1))
# Table 3. The text names 33B's plans, and Figure 3 has 7B's; 13B's are chosen as theirs are, with
# layers that two by two make the other plan's, as 16 does not divide 40.
TABLE_3 = (
    Case("7B/350M orion", "7B", _8, plan_of((4, 1, 2)), ORION, 0.31),
    Case("7B/350M phoenix", "7B", _8, plan_of((4, 1, 2)), PHOENIX, 0.02),
    Case("13B/350M orion", "13B", _16, plan_of((8, 1, 2)), ORION, 0.37),
    Case("13B/350M phoenix", "13B", _16, plan_of((8, 1, 2)), PHOENIX, 0.20),
    Case("33B/7B orion", "33B", _32, plan_of((16, 1, 2)), ORION, 0.49, stated=True),
    Case("33B/7B phoenix", "33B", _32, plan_of((8, 1, 4)), PHOENIX, 0.48, stated=True),
)
SCALED = tuple(
    Case(f"{model} {before} to {after}", model, plan_of(before), plan_of(after))
    for model, before, after in (
        ("7B", (1, 1, 8), (1, 4, 2)),
        ("7B", (1, 1, 8), (1, 4, 8)),
        ("7B", (4, 2, 1), (2, 2, 2)),
        ("7B", (2, 1, 8), (1, 4, 4)),
        ("7B", (4, 8, 1), (2, 8, 2)),
        ("13B", (4, 4, 2), (2, 4, 4)),
        ("33B", (8, 2, 2), (4, 2, 4)),
        ("13B", (4, 2, 8), (1, 16, 4)),
        ("33B", (8, 4, 4), (2, 16, 4)),
        ("33B", (16, 4, 4), (4, 16, 4)),
        ("33B", (8, 16, 4), (2, 64, 4)),
    )
)


def llama(
    hidden: int,
    intermediate: int,
    num_layers: int,
    num_heads: int,
    *,
    vocabulary: int = 32000,
    tied: bool = False,
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
        "tie_word_embeddings": tied,
    }
    return from_hf_config(config, "")


def switch(
    model: ModelSpec, before: ParallelPlan, after: ParallelPlan
) -> tuple[Holdings, Holdings]:
    """Holdings before and after a switch on the first ranks, as the runtime would order them.

    To more ranks, the source's and others, it goes in the usual order.
    """
    source = Holdings(model, before, tuple(range(before.world_size)))
    ranks = ordered_ranks(source, after, tuple(range(after.world_size)))
    return source, Holdings(model, after, ranks)


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
