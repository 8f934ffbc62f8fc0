"""Small jobs on small clusters, declared by data sheets, whose plans can all be looked at."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from puzzle_align.layout.job_plan import Settings
from puzzle_align.layout.model import LoraSpec, ModelSpec, with_scalar_head
from puzzle_align.planning.costs.declared import Sizes, declared_profile
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.search.space import Cluster
from tests.specs import LLAMA_2_7B

TOOLS = Path(__file__).parents[2] / "tools"
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 5, "head_dim": 64}
SMALL = replace(LLAMA_2_7B, **SIZES, num_attention_heads=16, num_key_value_heads=4)


def tool(name: str) -> Any:
    """A module of ``tools/``."""
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    return importlib.import_module(name)


def measured_of(
    *models: ModelSpec, ranks_per_node: int = 2, network_bandwidth: float = 5e9, **sizes: Any
) -> Measured:
    """Measured times and memory of such models on declared devices."""
    cases = tool("planner_cases")
    links = cases.links_of(100e9, network_bandwidth)
    own = {"tensors": (1, 2), "rows": (1024,), "batches": (1, 8), "recomputes": ("none",), **sizes}
    return Measured(
        declared_profile(
            models, cases.A100, links, ranks_per_node=ranks_per_node, sizes=Sizes(**own)
        )
    )


def small_case(
    stage: str,
    num_ranks: int,
    *,
    layers: tuple[int, int] = (5, 3),
    examples: int = 16,
    mini_batches: int = 1,
    memory_bytes: int = 2**50,
    ranks_per_node: int = 2,
    network_bandwidth: float = 5e9,
    lora: LoraSpec | None = None,
    **settings: Any,
) -> Any:
    """A case (``tools/planner_cases.py``) of an actor and a critic of so many layers.

    ``lora``: the actor's adapters.
    """
    cases = tool("planner_cases")
    actor = replace(SMALL, num_hidden_layers=layers[0])
    critic = with_scalar_head(replace(SMALL, num_hidden_layers=layers[1]))
    models = {
        "ppo": {
            "actor": replace(actor, lora=lora),
            "critic": critic,
            "reference": actor,
            "reward": critic,
        },
        "dpo": {"actor": actor, "reference": actor},
        "reward": {"reward": critic},
    }[stage]
    own = Settings(row_tokens=1024, **settings)
    return cases.Case(
        text=stage,
        job=cases.job_of(stage, models, own, recomputes=False),
        load=cases.load_of(
            examples, 1 if stage == "ppo" else 2, 128, 64, mini_batches, 1, sampled=stage == "ppo"
        ),
        cluster=Cluster(
            num_ranks=num_ranks, ranks_per_node=ranks_per_node, memory_bytes=memory_bytes
        ),
        measured=measured_of(
            *models.values(), ranks_per_node=ranks_per_node, network_bandwidth=network_bandwidth
        ),
    )
