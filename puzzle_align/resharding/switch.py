"""Switch of the actor to another plan: routes and rounds of its weights."""

from functools import partial

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.main_weights import Buckets, MainWeightHoldings
from puzzle_align.layout.model import BYTES_PER_PARAMETER
from puzzle_align.layout.weights import is_moved
from puzzle_align.resharding.rounds import Message, rounds
from puzzle_align.resharding.routing import RoutingTable, routing_table

BUCKET_BYTES = 64 * 2**20  # bytes that a rank sends, and receives, in a round


def plan_switch(
    before: Holdings,
    after: Holdings,
    dtype: str,
    ranks_per_node: int,
    main: MainWeightHoldings | None = None,
) -> tuple[RoutingTable, list[list[Message]]]:
    """Make the routing table and its rounds for a copy.

    Args:
        dtype: the copy's precision.
        main: shards of a distributed optimizer, if weights are sent during its step. Boxes that
            ranks gather anyway then count as present.
    """
    bucket = BUCKET_BYTES // BYTES_PER_PARAMETER[dtype]
    table = routing_table(
        main or before,
        after,
        ranks_per_node=ranks_per_node,
        max_size=bucket,
        resident=None if main is None else before,
    )
    return table, rounds(table.routes, bucket)


def trained_part(
    table: RoutingTable, copy: ContextPlan
) -> tuple[RoutingTable, list[list[Message]]]:
    """The part of a table that moves adapters, and its rounds: every switch's but the first."""
    part = table.of(partial(is_moved, copy.model))
    return part, rounds(part.routes, BUCKET_BYTES // BYTES_PER_PARAMETER[copy.options.dtype])


def main_weights(trained: ContextPlan, buckets: Buckets) -> MainWeightHoldings:
    """Holdings of a distributed optimizer's main weights."""
    fused = trained.options.transformer_impl == "te"
    return MainWeightHoldings(
        trained.model, trained.plan, trained.ranks, buckets=buckets, fused_norms=fused
    )
