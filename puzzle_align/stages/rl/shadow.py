"""The actor as it samples, where it trains under another plan (PUZZLE, sections 5 and 6)."""

from collections.abc import Iterator
from contextlib import contextmanager

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import BYTES_PER_PARAMETER
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import routing_table
from puzzle_align.runtime.context import Context, build_context, freeze
from puzzle_align.runtime.groups import Communicators, World
from puzzle_align.runtime.reshard import reshard

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
    ) -> None:
        """Plan the way of the weights; nothing is built yet.

        Args:
            trained, own: where the weights are, and where they are to be.
            source: this rank's part of the trained model; None: it has none.
            communicators: of the copy; None: this rank has no part of it.
            seed: as ``build_context``'s.
            ranks_per_node: as ``routing_table``'s, alike on all ranks.
        """
        self._own, self._world, self._seed = own, world, seed
        self._source, self._communicators = source, communicators
        bucket = BUCKET_BYTES // BYTES_PER_PARAMETER[own.options.dtype]
        before, after = (Holdings(each.model, each.plan, each.ranks) for each in (trained, own))
        self._table = routing_table(before, after, ranks_per_node=ranks_per_node, max_size=bucket)
        self._schedule = rounds(self._table.routes, bucket)

    @contextmanager
    def opened(self) -> Iterator[Context | None]:
        """The copy, with the trained weights as they are now; None on a rank that has no part.

        Collective over both models' ranks.
        """
        source = _shards(self._source)
        context = self._build(source or Shards((), self._own.model))
        reshard(
            self._table,
            self._schedule,
            source,
            _shards(context),
            dtype=DTYPES[self._own.options.dtype],
            device=self._world.device,
        )
        try:
            yield context
        finally:
            if context is not None:
                context.release()

    def _build(self, source: Shards) -> Context | None:
        if self._communicators is None:
            return None
        own = self._own
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
