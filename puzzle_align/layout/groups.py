"""The groups of ranks that models communicate in, and the order in which a rank makes them.

Only the members of a group make it, and each of them waits in there for the others. Invariants,
for any models on any ranks in any order (the tests assert them):
- every member makes a group, once, under a name that is the same on all of them;
- one order of all groups of the job agrees with every rank's own, and with that in which it opens
  its links: no ranks wait for each other in a circle;
- an ordered list of ranks is made once, whatever it is for and however many models have it. Only
  links are a model's own: on NCCL, transfers of one communicator run in the order of their issue.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.plan import ParallelPlan, Topology

FORWARD, BACKWARD = "forward", "backward"
WRAP_FORWARD, WRAP_BACKWARD = "wrap_forward", "wrap_backward"
_MOST_LISTED = 16


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other; a rank's number in the group is its place in ``ranks``."""

    name: str  # the same on all members, and no other group's
    ranks: tuple[int, ...]
    link: str = ""  # of a group that carries transfers of one model in one direction: which

    @property
    def is_link(self) -> bool:
        """Whether it only carries transfers between pipeline ranks."""
        return self.link != ""


class OwnGroups:
    """The groups of one rank, model by model.

    All ranks of a model add it, and those that have several models in common add them in one order.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_links: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def add_model(self, topology: Topology, *, trained: bool) -> dict[str, Group]:
        """This rank's groups in one more model, by purpose, in the order of making.

        Groups that models share have one name. Empty where the rank is not in the model.

        Args:
            trained: gradients will flow: without, no backward links.
        """
        if self._rank not in topology.ranks:
            return {}
        groups = {kind: _shared(ranks) for kind, ranks in _own_lists(topology, self._rank).items()}
        pipeline = groups["pp"].ranks
        for kind in link_kinds(topology.plan, trained=trained):
            number = self._num_links[kind, pipeline]
            self._num_links[kind, pipeline] += 1
            name = f"{kind} {number} of {_listed(pipeline)}"
            groups[kind] = Group(name, pipeline, link=kind)
        return groups


def groups_of(plan: JobPlan, rank: int) -> list[Group]:
    """All groups that a rank joins in a job, as its models make them."""
    rank_groups = OwnGroups(rank)
    made: dict[str, Group] = {}
    for topology, is_trained in _models(plan):
        added = rank_groups.add_model(topology, trained=is_trained)
        made |= {group.name: group for group in added.values()}
    return list(made.values())


class Communicators(NamedTuple):
    """Numbers of communicators on a rank's device."""

    groups: int  # of ranks that reduce and gather
    links: int  # one for every neighbour of every link: NCCL's are of two ranks


def num_communicators(plan: JobPlan) -> list[Communicators]:
    """Communicators of every rank of a job, by rank, where NCCL makes them.

    Takes a few passes over the ranks, where ``groups_of`` each of them would take their square.
    """
    shared: list[set[int]] = [set() for _ in range(plan.world_size)]  # by number
    numbers: dict[tuple[int, ...], int] = {}
    num_links = [0] * plan.world_size
    lists = [[*range(plan.world_size)]]  # torch makes it, also where no model is on all ranks
    for topology, is_trained in _models(plan):
        lists += [[*topology.ranks], *topology.tensor_groups(), *topology.data_groups()]
        lists += [*topology.model_groups(), *topology.embedding_groups()]
        pipelines = topology.pipeline_groups()
        lists += pipelines
        for kind in link_kinds(topology.plan, trained=is_trained):
            for pipeline in pipelines:
                for rank in itertools.chain.from_iterable(link_hops(kind, pipeline)):
                    num_links[rank] += 1
    for ranks in lists:
        if len(ranks) > 1:
            number = numbers.setdefault(tuple(ranks), len(numbers))
            for rank in ranks:
                shared[rank].add(number)
    counts = zip(shared, num_links, strict=True)
    return [Communicators(len(lists), links) for lists, links in counts]


def num_streams(plan: JobPlan, rank: int) -> int:
    """Streams of a rank's device that may be at work at once: computation, and NCCL's.

    NCCL has one for every communicator.
    """
    return 1 + sum(num_communicators(plan)[rank])


def link_kinds(plan: ParallelPlan, *, trained: bool) -> tuple[str, ...]:
    """The links of a model's pipelines: one for each direction of each kind of edge."""
    if plan.pipeline == 1:
        return ()
    kinds = (FORWARD, BACKWARD, WRAP_FORWARD, WRAP_BACKWARD)
    if plan.virtual_pipeline == 1:
        kinds = kinds[:2]
    return kinds if trained else tuple(k for k in kinds if k in (FORWARD, WRAP_FORWARD))


def link_hops(kind: str, pipeline: Sequence[int]) -> list[tuple[int, int]]:
    """(source, destination) of every edge of a link, in the order in which they are opened."""
    first, last = pipeline[0], pipeline[-1]
    if kind == FORWARD:
        return list(itertools.pairwise(pipeline))
    if kind == BACKWARD:
        return list(itertools.pairwise(pipeline[::-1]))
    return [(last, first) if kind == WRAP_FORWARD else (first, last)]


def _models(plan: JobPlan) -> list[tuple[Topology, bool]]:
    """The job's models that have groups of their own, and whether each is trained."""
    models: dict[tuple[str, ParallelPlan, tuple[int, ...]], bool] = {}
    for context in plan.contexts:
        key = context.role, context.plan, context.ranks
        models[key] = models.get(key, False) or context.workload == "train"
    return [
        (Topology(parallel, ranks), trained) for (_, parallel, ranks), trained in models.items()
    ]


def _own_lists(topology: Topology, rank: int) -> dict[str, tuple[int, ...]]:
    """The groups that ``rank`` is in, as ranks by Megatron's name of the group.

    Each is a group of ``Topology``, worked out without the others.
    """
    plan, at = topology.plan, topology.rank
    p, d, t = topology.coordinates(rank)
    pipeline, data, tensor = range(plan.pipeline), range(plan.data), range(plan.tensor)
    groups = {
        "everyone": topology.ranks,
        "tp": tuple(at(p, d, other) for other in tensor),
        "dp": tuple(at(p, other, t) for other in data),
        "pp": tuple(at(other, d, t) for other in pipeline),
        "mp": tuple(at(stage, d, other) for stage in pipeline for other in tensor),
    }
    if p in (0, plan.pipeline - 1):  # of the pipeline's ends: nothing in between
        groups["embd"] = tuple(at(end, d, t) for end in sorted({0, plan.pipeline - 1}))
    return {**groups, "single": (rank,)}


def _shared(ranks: tuple[int, ...]) -> Group:
    return Group(f"ranks {_listed(ranks)}", ranks)


def _listed(ranks: tuple[int, ...]) -> str:
    """The ranks, in a few words: every key by which members meet begins with the name."""
    text = ",".join(map(str, ranks))
    if len(ranks) <= _MOST_LISTED:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{ranks[0]},..,{ranks[-1]} ({len(ranks)}: {digest})"
