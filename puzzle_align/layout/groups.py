"""Process groups of models, and the order in which a rank creates them.

Only the members of a group create it, and each waits for the others while doing so. Invariants, for
any models on any ranks in any order (the tests assert them):
- every member creates a group once, under the same name as the other members;
- there is a total order of the job's groups that every rank follows, in creating groups and in
  opening links: ranks cannot deadlock;
- groups of the same ordered ranks are one group, shared by purposes and models. Only links belong
  to one model: NCCL runs transfers of one communicator in the order of their issue.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.plan import ParallelPlan, Topology
from puzzle_align.schedules.actions import Edge

FORWARD, BACKWARD = "forward", "backward"
WRAP_FORWARD, WRAP_BACKWARD = "wrap_forward", "wrap_backward"
_MOST_LISTED = 16


@dataclass(frozen=True)
class Group:
    """Ranks that communicate; a rank's number in the group is its place in ``ranks``."""

    name: str  # unique in the job, the same on all members
    ranks: tuple[int, ...]
    is_link: bool = False  # whether it only carries transfers between pipeline ranks


class RankGroups:
    """Groups of one rank, model by model.

    All ranks of a model add it; ranks that share several models add these in the same order.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_links: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def add_model(self, topology: Topology, *, trained: bool) -> dict[str, Group]:
        """Add a model; return this rank's groups in it, by purpose, in order of creation.

        Groups that models share have one name. Empty if the rank is not in the model.

        Args:
            trained: whether to add backward links, for gradients.
        """
        if self._rank not in topology.ranks:
            return {}
        lists = {**_lists(topology), "single": [[self._rank]]}
        groups = {
            kind: Group(f"ranks {_listed(ranks)}", tuple(ranks))
            for kind, of_kind in lists.items()
            for ranks in of_kind
            if self._rank in ranks
        }
        pipeline = groups["pp"].ranks
        for kind in link_kinds(topology.plan, trained=trained):
            number = self._num_links[kind, pipeline]
            self._num_links[kind, pipeline] += 1
            name = f"{kind} {number} of {_listed(pipeline)}"
            groups[kind] = Group(name, pipeline, is_link=True)
        return groups


def groups_of(plan: JobPlan, rank: int) -> list[Group]:
    """All groups that a rank joins in a job, in order of creation."""
    rank_groups = RankGroups(rank)
    made: dict[str, Group] = {}
    for topology, is_trained in _models(plan):
        added = rank_groups.add_model(topology, trained=is_trained)
        made |= {group.name: group for group in added.values()}
    return list(made.values())


class CommunicatorCounts(NamedTuple):
    """Numbers of communicators on a rank's device."""

    groups: int  # for collectives
    links: int  # one for every neighbour in every link: NCCL's point-to-point ones have two ranks


def num_communicators(plan: JobPlan) -> list[CommunicatorCounts]:
    """NCCL communicators of every rank of a job, by rank.

    Linear in the number of ranks; calling ``groups_of`` for each of them would be quadratic.
    """
    num_links = [0] * plan.world_size
    lists = [[*range(plan.world_size)]]  # torch's default group
    for topology, is_trained in _models(plan):
        of_model = _lists(topology)
        lists += itertools.chain.from_iterable(of_model.values())
        for kind in link_kinds(topology.plan, trained=is_trained):
            for pipeline in of_model["pp"]:
                for rank in itertools.chain.from_iterable(link_hops(kind, pipeline)):
                    num_links[rank] += 1
    shared = {tuple(ranks) for ranks in lists if len(ranks) > 1}
    num_groups = Counter(itertools.chain.from_iterable(shared))
    return [CommunicatorCounts(num_groups[rank], links) for rank, links in enumerate(num_links)]


def num_streams(plan: JobPlan) -> int:
    """Most CUDA streams of a rank at once: one for computation, one for each communicator."""
    return 1 + max(map(sum, num_communicators(plan)))


def link_kinds(plan: ParallelPlan, *, trained: bool) -> tuple[str, ...]:
    """Kinds of links in a model's pipelines: one for each direction of each kind of edge."""
    if plan.pipeline == 1:
        return ()
    kinds = (FORWARD, BACKWARD, WRAP_FORWARD, WRAP_BACKWARD)
    if plan.virtual_pipeline == 1:
        kinds = kinds[:2]
    return kinds if trained else tuple(k for k in kinds if k in (FORWARD, WRAP_FORWARD))


def link_kind(edge: Edge) -> str:
    """Kind of the link that carries an edge's transfers."""
    if edge.forward:
        return WRAP_FORWARD if edge.wraps else FORWARD
    return WRAP_BACKWARD if edge.wraps else BACKWARD


def link_hops(kind: str, pipeline: Sequence[int]) -> list[tuple[int, int]]:
    """``(source, destination)`` of every edge of a link, in the order of opening."""
    first, last = pipeline[0], pipeline[-1]
    if kind == FORWARD:
        return list(itertools.pairwise(pipeline))
    if kind == BACKWARD:
        return list(itertools.pairwise(pipeline[::-1]))
    return [(last, first) if kind == WRAP_FORWARD else (first, last)]


def _models(plan: JobPlan) -> list[tuple[Topology, bool]]:
    """Topologies of the job's distinct (role, plan, ranks), and whether each is trained."""
    models: dict[tuple[str, ParallelPlan, tuple[int, ...]], bool] = {}
    for context in plan.contexts:
        key = context.role, context.plan, context.ranks
        models[key] = models.get(key, False) or context.workload == "train"
    return [
        (Topology(parallel, ranks), trained) for (_, parallel, ranks), trained in models.items()
    ]


def _lists(topology: Topology) -> dict[str, list[list[int]]]:
    """Ranks of every group of a model, by Megatron's name of the group; without single ranks."""
    return {
        "everyone": [[*topology.ranks]],
        "tp": topology.tensor_groups(),
        "dp": topology.data_groups(),
        "pp": topology.pipeline_groups(),
        "mp": topology.model_groups(),
        "embd": topology.embedding_groups(),
    }


def _listed(ranks: Sequence[int]) -> str:
    """Text of the ranks, short because it is part of every key in the store."""
    text = ",".join(map(str, ranks))
    if len(ranks) <= _MOST_LISTED:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{ranks[0]},..,{ranks[-1]} ({len(ranks)}: {digest})"
