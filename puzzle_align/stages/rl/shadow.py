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
from puzzle_align.runtime.optimizer import Optimizer
from puzzle_align.runtime.partial_step import Update
from puzzle_align.runtime.reshard import reshard
from puzzle_align.runtime.reshard_beside import reshard_beside

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
        self._copy: list[Context | None] = []  # once it is filled: what this rank has of it
        self._table = routing_table(before, after, ranks_per_node=ranks_per_node, max_size=bucket)
        self._schedule = rounds(self._table.routes, bucket)

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

        The copy is there from now on, until it has been opened: this must be the last step before.
        Collective over both models' ranks.

        Args:
            optimizer: the trained model's; None on a rank that has no part of it.

        Returns:
            As ``Optimizer.step``; of no meaning without one.
        """
        context = self._build()

        def beside(update: Update) -> None:
            self._fill(context, update)

        if optimizer is None:
            beside(lambda _: None)
            return True, 0.0
        moved, norm = optimizer.step(lr, beside)
        if not moved:
            beside(lambda _: None)
        return moved, norm

    def _fill(self, context: Context | None, update: Update | None = None) -> None:
        """Have the trained weights go to the copy, after they are updated, if there is a way."""
        ends = _shards(self._source), _shards(context)
        dtype, device = DTYPES[self._own.options.dtype], self._world.device
        if update is None:
            reshard(self._table, self._schedule, *ends, dtype=dtype, device=device)
        else:
            reshard_beside(
                self._table, self._schedule, *ends, dtype=dtype, device=device, update=update
            )
        self._copy = [context]

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
