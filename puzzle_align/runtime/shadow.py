"""Copy of the actor for sampling under another plan than training (PUZZLE, sections 5 and 6)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.main_weights import Buckets
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.switch import main_weights, plan_switch, trained_part
from puzzle_align.runtime.context import Context, build_copy, free_copy
from puzzle_align.runtime.groups.world import Communicators, World
from puzzle_align.runtime.optimizer.main_shards import MainShards
from puzzle_align.runtime.optimizer.optimizer import Optimizer, Update
from puzzle_align.runtime.reshard import Endpoints, keep, reshard, reshard_beside


class Shadow:
    """A copy of a trained model under another plan, whose weights exist during a phase.

    Tensors that a rank has in the same form under both plans are not copied: the copy shares the
    trained model's. Its modules are built once; each opening gives their parameters memory. The
    base of a model with adapters is moved once, and stays.
    """

    def __init__(
        self,
        trained: ContextPlan,
        planned: ContextPlan,
        world: World,
        source: Context | None,
        communicators: Communicators | None,
        *,
        ranks_per_node: int,
        sharded: Buckets | None,
    ) -> None:
        """Plan the routes of the weights; builds nothing yet.

        Args:
            trained, planned: contexts of the trained model and of the copy.
            source: this rank's part of the trained model; None: it has none.
            communicators: the copy's; None: this rank has no part of it.
            ranks_per_node: passed to ``routing_table``, equal on all ranks.
            sharded: gradient buckets, if ``step`` is called with a distributed optimizer.
        """
        self._planned, self._world = planned, world
        self._source = None if source is None else Shards(source.chunks, source.spec)
        self._communicators = communicators
        self._copy: Context | None = None  # this rank's part, built when first needed
        self._copy_shards: Shards | None = None
        self._is_filled = False  # by ``step``
        self._is_first = True  # opening, which also moves what training does not
        before, after = (Holdings(each.model, each.plan, each.ranks) for each in (trained, planned))
        dtype = planned.options.dtype
        self._way = self._early_way = plan_switch(before, after, dtype, ranks_per_node)
        self._later_way = self._way
        if planned.model.lora is not None:
            self._later_way = trained_part(self._way[0], planned)
        self._main = None if sharded is None else main_weights(trained, sharded)
        if self._main is not None:
            self._early_way = plan_switch(before, after, dtype, ranks_per_node, self._main)

    @contextmanager
    def opened(self) -> Iterator[Context | None]:
        """Yield the copy with the current trained weights; None on a rank without a part of it.

        Collective over both models' ranks.
        """
        if not self._is_filled:
            self._take_memory()
            reshard(*(self._way if self._is_first else self._later_way), self._ends(self._source))
        self._is_filled = self._is_first = False
        try:
            yield self._copy
        finally:
            if self._copy is not None:
                free_copy(self._copy)

    def step(self, optimizer: Optimizer | None, lr: float) -> tuple[bool, float]:
        """Step the trained model, and send its weights to the copy at the same time.

        With a distributed optimizer, weights are sent from its shards; boxes that its ranks gather
        anyway are copied after the gather. The copy then exists until ``opened`` releases it, so
        this must be the last step before ``opened``. Collective over both models' ranks.

        Args:
            optimizer: the trained model's; None on a rank that has no part of it.

        Returns:
            The result of ``Optimizer.step``; meaningless if ``optimizer`` is None.
        """
        self._take_memory()
        source, (table, schedule) = self._source, self._early_way
        if self._main is not None:
            table = replace(table, kept=())
            source = MainShards(optimizer, self._main) if optimizer is not None else source

        def beside(update: Update) -> None:
            reshard_beside(table, schedule, self._ends(source), update)

        moved, norm = True, 0.0
        if optimizer is not None:
            moved, norm = optimizer.step(lr, beside)
        if optimizer is None or not moved:
            beside(lambda _: None)
        if self._main is not None:
            keep(self._way[0].kept, self._ends(self._source))
        self._is_filled = True
        return moved, norm

    def _ends(self, source: Shards | None) -> Endpoints:
        dtype = DTYPES[self._planned.options.dtype]
        return Endpoints(source, self._copy_shards, dtype, self._world.device)

    def _take_memory(self) -> None:
        """Give this rank's part of the copy memory for weights that it does not share."""
        if self._communicators is None:
            return
        if self._copy is None or self._copy_shards is None:
            planned = self._planned
            self._copy = build_copy(planned, planned.model, self._world, self._communicators)
            self._copy_shards = Shards(self._copy.chunks, planned.model)
        source = self._source or Shards((), self._planned.model)
        source.share(self._copy_shards, is_first=self._is_first)
        for chunk in self._copy.chunks:
            chunk.mark_changed()
