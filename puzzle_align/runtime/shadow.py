"""The actor as it samples, where it trains under another plan (PUZZLE, sections 5 and 6)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from puzzle_align.layout.grad_buffer import Buckets
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.main_weights import MainWeightHoldings
from puzzle_align.layout.model import BYTES_PER_PARAMETER
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import Message, rounds
from puzzle_align.resharding.routing import RoutingTable, routing_table
from puzzle_align.runtime.context import Context, build_context, freeze
from puzzle_align.runtime.groups.communicators import Communicators
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.main_shards import main_shards
from puzzle_align.runtime.optimizer.optimizer import Optimizer, Update
from puzzle_align.runtime.reshard import keep, reshard, reshard_beside

BUCKET_BYTES = 64 * 2**20  # that a rank sends, and that it receives, at once


class Shadow:
    """A copy of a trained model under a plan of its own: there for a phase, and freed after it.

    What a rank holds under both plans in the same form is no copy: it is the trained model's, once
    the chunk is built.
    """

    def __init__(
        self,
        trained: ContextPlan,
        own: ContextPlan,
        world: World,
        source: Context | None,
        communicators: Communicators | None,
        *,
        seed: int,
        ranks_per_node: int,
        sharded: Buckets | None = None,
    ) -> None:
        """Plan the way of the weights; nothing is built yet.

        Args:
            trained, own: where the weights are, and where they are to be.
            source: this rank's part of the trained model; None: it has none.
            communicators: of the copy; None: this rank has no part of it.
            seed: as ``build_context``'s.
            ranks_per_node: as ``routing_table``'s, alike on all ranks.
            sharded: where ``step`` is to be called with a distributed optimizer, the buckets of its
                gradients.
        """
        self._own, self._world, self._seed = own, world, seed
        self._source, self._communicators = source, communicators
        self._copy: list[Context | None] = []  # once it is filled: what this rank has of it
        before, after = (Holdings(each.model, each.plan, each.ranks) for each in (trained, own))
        dtype = own.options.dtype
        self._way = self._early_way = plan_switch(before, after, dtype, ranks_per_node)
        self._main = None if sharded is None else main_weights(trained, sharded)
        if self._main is not None:
            self._early_way = plan_switch(before, after, dtype, ranks_per_node, self._main)

    @contextmanager
    def opened(self) -> Iterator[Context | None]:
        """The copy, with the trained weights as they are now; None on a rank that has no part.

        Collective over both models' ranks.
        """
        if not self._copy:
            self._fill(self._build())
        context = self._copy.pop()
        try:
            yield context
        finally:
            if context is not None:
                context.release()

    def step(self, optimizer: Optimizer | None, lr: float) -> tuple[bool, float]:
        """The trained model's step, and beside it the way of its weights to the copy.

        A distributed optimizer's go from its shards: what its ranks gather for the model, after
        that, is copied then. The copy is there from now on, until it has been opened: this must be
        the last step before. Collective over both models' ranks.

        Args:
            optimizer: the trained model's; None on a rank that has no part of it.

        Returns:
            As ``Optimizer.step``; of no meaning without one.
        """
        context = self._build()

        def beside(update: Update) -> None:
            self._fill_beside(context, optimizer, update)

        if optimizer is None:
            beside(lambda _: None)
            return True, 0.0
        moved, norm = optimizer.step(lr, beside)
        if not moved:
            beside(lambda _: None)
        if self._main is not None:
            keep(self._way[0].kept, _shards(self._source), _shards(context))
        return moved, norm

    def _fill(self, context: Context | None) -> None:
        """Have the trained weights go to the copy."""
        reshard(*self._way, _shards(self._source), _shards(context), **self._how())
        self._copy = [context]

    def _fill_beside(
        self, context: Context | None, optimizer: Optimizer | None, update: Update
    ) -> None:
        """Have the trained weights go to the copy, after they are updated."""
        source = _shards(self._source)
        if self._main is not None and optimizer is not None:
            source = main_shards(optimizer, self._main)
        table, schedule = self._early_way
        if self._main is not None:
            table = replace(table, kept=())
        ends = source, _shards(context)
        reshard_beside(table, schedule, *ends, **self._how(), update=update)
        self._copy = [context]

    def _how(self) -> dict[str, Any]:
        return {"dtype": DTYPES[self._own.options.dtype], "device": self._world.device}

    def _build(self) -> Context | None:
        if self._communicators is None:
            return None
        own = self._own
        source = _shards(self._source) or Shards((), own.model)
        context = build_context(
            own.role,
            own.model,
            own.options,
            own.plan,
            self._world,
            communicators=self._communicators,
            fill=lambda chunk: source.share(chunk, own.model),
            seed=self._seed,
        )
        freeze(context)
        return context


def _shards(context: Context | None) -> Shards | None:
    return None if context is None else Shards(context.chunks, context.spec)


def plan_switch(
    before: Holdings,
    after: Holdings,
    dtype: str,
    ranks_per_node: int,
    main: MainWeightHoldings | None = None,
) -> tuple[RoutingTable, list[list[Message]]]:
    """What goes to a copy, in which rounds.

    Args:
        dtype: the copy's precision.
        main: where the weights go beside the step of a distributed optimizer, its shards. Boxes
            that ranks will have gathered anyway are then among those that are kept.
    """
    bucket = BUCKET_BYTES // BYTES_PER_PARAMETER[dtype]
    table = routing_table(
        main or before,
        after,
        ranks_per_node=ranks_per_node,
        max_size=bucket,
        there=None if main is None else before,
    )
    return table, rounds(table.routes, bucket)


def main_weights(trained: ContextPlan, buckets: Buckets) -> MainWeightHoldings:
    """Who holds the main weights of a model that a distributed optimizer trains."""
    fused = trained.options.transformer_impl == "te"
    return MainWeightHoldings(
        trained.model, trained.plan, trained.ranks, buckets=buckets, fused_norms=fused
    )
