"""Dependencies between compute actions, whatever their order in the lists."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.costs import Costs

# The end of an action: (model, kind, microbatch, virtual position).
Event = tuple[str, Kind, int, int]


class Dependencies:
    """Dependencies of actions by model and position."""

    def __init__(
        self, programs: Iterable[Program], num_ranks: int, lead: int | None = None
    ) -> None:
        """``lead``: most microbatches that a lookahead model's position is ahead of the next."""
        self.programs = {program.model: program for program in programs}
        self.num_ranks = num_ranks
        self._last = {m: p.num_chunks * num_ranks - 1 for m, p in self.programs.items()}
        self._lead = lead

    def num_plain(self, model: str) -> int:
        """Number of leading positions whose forwards wait for the previous position alone."""
        program = self.programs[model]
        return 0 if program.windows is not None else self._last[model] + (program.reads is None)

    def event(self, action: Action, rank: int) -> Event:
        """Event at the end of ``action`` on pipeline rank ``rank``."""
        return action.model, action.kind, action.microbatch, action.chunk * self.num_ranks + rank

    def kept(self, action: Action, rank: int, costs: Costs) -> float:
        """Change of the rank's live activations by an action; negative: activations freed."""
        if not self.programs[action.model].backward:
            return 0.0
        size = costs[action.model].kept(action, rank, self.num_ranks)
        return size if action.kind is Kind.FORWARD else -size

    def peaks(self, lists: Sequence[Sequence[Action]], costs: Costs) -> list[float]:
        """Peak live activations of every rank, all models together; ``lists`` are compute lists."""
        return [
            max(accumulate((self.kept(each, rank, costs) for each in actions), initial=0.0))
            for rank, actions in enumerate(lists)
        ]

    def of(self, action: Action, rank: int) -> list[Event]:
        """Events on any rank that ``action`` waits for."""
        model, kind, microbatch, position = self.event(action, rank)
        if kind is Kind.BACKWARD:
            before: list[Event] = [(model, Kind.FORWARD, microbatch, position)]
            if position < self._last[model]:
                before.append((model, kind, microbatch, position + 1))
            return before
        before = []
        if position > 0 and self._runs(model, microbatch, position - 1):
            before.append((model, kind, microbatch, position - 1))
        if self._lead is not None and position < self._last[model]:
            behind = microbatch - self._lead
            if self.programs[model].windows and self._runs(model, behind, position + 1):
                before.append((model, kind, behind, position + 1))
        read = self.programs[model].reads if position == self._last[model] else None
        if read is not None and self._runs(read, microbatch, self._last[read]):
            before.append((read, kind, microbatch, self._last[read]))
        return before

    def _runs(self, model: str, microbatch: int, position: int) -> bool:
        """Whether a position runs a microbatch in this list (else it ran in an earlier list)."""
        windows = self.programs[model].windows
        return windows is None or microbatch in windows[position]
