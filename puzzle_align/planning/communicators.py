"""What NCCL's communicators take of a device, worked out from its defaults, not measured.

A connection has buffers of 9.2 MiB a channel, for its three protocols (4 MiB, 4.7 MiB, 0.5 MiB); a
group that reduces and gathers has about 24 channels within a node. Transfers between pipeline ranks
have four channels (``groups.world``), and two of the protocols.
"""

from collections.abc import Mapping

from puzzle_align.layout.groups import Communicators, communicators_of_all
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.planning.job_memory import ranks_named

GROUP_BYTES = int(24 * 9.2 * 2**20)
LINK_BYTES = int(4 * 4.5 * 2**20)  # to one neighbour, in one direction


def communicator_bytes(number: Communicators) -> int:
    """Bytes of all communicators of a rank."""
    return number.groups * GROUP_BYTES + number.links * LINK_BYTES


def with_communicators(
    plan: JobPlan, columns: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """``estimate_memory``'s columns with a part more, the largest of the column's ranks."""
    found = {}
    of_ranks = [communicator_bytes(number) for number in communicators_of_all(plan)]
    for name, parts in columns.items():
        added = max(of_ranks[rank] for rank in ranks_named(name, "estimate"))
        *others, (_, total) = parts.items()
        found[name] = {**dict(others), "communicators": added, "total": total + added}
    return found
