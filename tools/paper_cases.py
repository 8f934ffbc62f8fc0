"""PUZZLE's configurations on its two clusters as jobs that can be planned on paper.

Devices and links are declared (``declared_profile``). Between nodes the ranks of a node share its
adapter: a ring over nodes has as many beside it as the node has ranks for (8 of one rank each, or 1
of all 8), neighbours in a pipeline as many as each of its parts has ranks, and in a switch, and
while it samples, all ranks of a node are taken to talk at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from declared_profile import A100, Network, Sizes, declared_profile
from reshard_cases import LLAMA, ORION, PHOENIX, Links, llama

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.stages import STAGES
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import ModelSpec, with_scalar_head
from puzzle_align.planning.iteration import Settings
from puzzle_align.planning.link_costs import LinkCosts
from puzzle_align.planning.load import GenerationLoad, Load, PassLoad
from puzzle_align.planning.measured import Measured, RowShape
from puzzle_align.planning.memory import OptimizerStates, hidden_bytes
from puzzle_align.planning.profile import Profile
from puzzle_align.planning.simulate import TransferTime
from puzzle_align.planning.space import Cluster, Job, Space
from puzzle_align.planning.times import Times

RANKS_PER_NODE = 8
MARGIN = 0.1  # of a device's memory, kept free
PROMPT, RESPONSE = 256, 256  # tokens, section 7.1
CLUSTERS = {"orion": ORION, "phoenix": PHOENIX}
TRAINED = ("actor", "critic")
# Table 1 tells neither the heads nor the vocabulary of its 350M; 64 numbers a head, and Llama's.
MODELS = {**LLAMA, "350M": (512, 11008, 16, 8)}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A row of Table 2."""

    actor: str
    critic: str
    batch: int  # prompts of an iteration
    ranks: int

    @property
    def name(self) -> str:
        """As in Table 2."""
        return f"{self.actor}/{self.critic}"


TABLE_2 = tuple(
    Configuration(actor=actor, critic=critic, batch=batch, ranks=ranks)
    for actor, critic, batch, ranks in (
        ("7B", "350M", 128, 8),
        ("7B", "7B", 256, 16),
        ("13B", "350M", 256, 16),
        ("13B", "7B", 256, 16),
        ("33B", "7B", 128, 32),
    )
)
# What the paper reports: sections 7.3 and 7.4, Figures 9 to 11.
PAPER = {
    "time_sharing_of_table_2_up_to": 1.12,
    "time_sharing_of_figure_10_up_to": 1.34,
    "switch_over_generation_optimal_in_the_mean": 1.22,
    "switch_over_training_optimal_in_the_mean": 1.34,
}


class SharedLinks(LinkCosts):
    """Links whose declared bandwidth between nodes is a whole adapter's, and is shared."""

    def p2p(self, source: int, destination: int, size: float) -> float:
        """As where all ranks of the node send at once."""
        return self.beside(self.ranks_per_node, source, destination, size)

    def beside(self, number: int, source: int, destination: int, size: float) -> float:
        """Seconds of ``size`` bytes where ``number`` ranks of a node send as much."""
        far = self.place((source, destination)) == "network"
        return super().p2p(source, destination, size * (number if far else 1))

    def all_reduce(self, ranks: Sequence[int], size: float) -> float:
        """Beside the other groups that the node's ranks are in."""
        return super().all_reduce(ranks, size * self._rings(ranks))

    def all_gather(self, ranks: Sequence[int], size: float) -> float:
        """Beside the other groups that the node's ranks are in."""
        return super().all_gather(ranks, size * self._rings(ranks))

    def _rings(self, ranks: Sequence[int]) -> float:
        """Groups like this one that pass through a node's adapter."""
        if self.place(ranks) == "node":
            return 1.0
        node = ranks[0] // self.ranks_per_node
        return self.ranks_per_node / sum(rank // self.ranks_per_node == node for rank in ranks)


class SharedMeasured(Measured):
    """Times with ``SharedLinks``."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.shared = SharedLinks(profile.links, profile.hardware.ranks_per_node)
        self.links = self.shared

    def transfer(self, contexts: Sequence[ContextPlan], row: RowShape) -> TransferTime:
        """As many ranks send beside one as there are in its part of the pipeline."""
        by_role = {context.role: context for context in contexts}

        def seconds(role: str, source: int, destination: int) -> float:
            context = by_role[role]
            plan, parts = context.plan, context.parts
            size = hidden_bytes(context.model, plan, context.options, row.row_tokens)
            beside = min(RANKS_PER_NODE, plan.data * plan.tensor)
            return self.shared.beside(beside, parts[source], parts[destination], size)

        return seconds


def load_of(batch: int) -> Load:
    """An iteration of ``batch`` prompts, one response each: one epoch of one mini-batch."""
    length = PROMPT + RESPONSE

    def rows(row_tokens: int, batches: int, data: int, multiple: int) -> PassLoad:
        examples = row_tokens // length
        number = ceil(batch / batches / examples)
        microbatches = max(1, ceil(number / (data * multiple))) * multiple
        shape = RowShape(
            row_tokens=row_tokens,
            pairs=examples * length**2 / 2,
            predictions=examples * RESPONSE,
        )
        return PassLoad(microbatches=float(microbatches), row=shape)

    return Load(
        rows=rows,
        num_examples=batch,
        num_iterations=1000,
        least_row_tokens=length,
        generation=GenerationLoad(
            num_prompts=batch,
            num_generations=1,
            prompt_tokens=PROMPT,
            response_tokens=RESPONSE,
            longest=length,
        ),
    )


def space_of(
    configuration: Configuration, links: Links, row_sizes: Sequence[int], *, sharded: bool
) -> tuple[Space, Times]:
    """All plans of a configuration on a cluster; ``sharded``: with distributed optimizers."""
    models = models_of(configuration)
    profile = declared_profile(
        models.values(),
        A100,
        Network(node_bandwidth=links.node * 1e9, network_bandwidth=links.network * 1e9),
        ranks_per_node=RANKS_PER_NODE,
        sizes=Sizes(rows=tuple(row_sizes)),
    )
    settings = Settings(
        row_tokens=row_sizes[0],
        optimizers=OptimizerStates(sharded=frozenset(TRAINED if sharded else ())),
        prefill_tokens=row_sizes[-1],
    )
    job = Job(
        stage="ppo",
        trained=TRAINED,
        phases=STAGES["ppo"].phases(load_file(find_config("ppo_7b"), [])),
        models=models,
        options=profile.options,
        settings=settings,
        sequence_parallel=True,
        ranks_by_role=True,
    )
    cluster = Cluster(
        num_ranks=configuration.ranks,
        ranks_per_node=RANKS_PER_NODE,
        memory_bytes=int(A100.memory_bytes * (1 - MARGIN)),
    )
    times = Times(SharedMeasured(profile), load_of(configuration.batch), settings)
    return Space(job, cluster, times), times


def models_of(configuration: Configuration) -> dict[str, ModelSpec]:
    """The four models: the reference is the actor's, the reward model the critic's."""
    actor = llama(*MODELS[configuration.actor])
    critic = with_scalar_head(llama(*MODELS[configuration.critic]))
    return {"actor": actor, "critic": critic, "reference": actor, "reward": critic}
