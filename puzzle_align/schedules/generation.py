"""Continuous batching for a pipeline that generates.

Sequences live in slot groups, as many as there are pipeline ranks: with one group at each rank,
every rank has work. In a round every group with work sends one batch through the pipeline: a
prefill batch if prompts wait and the group has free slots, else a decode batch, which makes a token
for each of its sequences. A decode batch may make several tokens per sequence, one a round, before
the ranks receive which of them ended (multi-step scheduling): tokens after a response's end are
then dropped.

Invariants (the tests assert them):
- batches depend only on lengths, limits and which sequences ended, so every rank that receives
  these makes the same batches, and nothing else is exchanged;
- a group holds at most its share of sequences, in slots 0, 1, ... without a gap: the last sequence
  moves into the slot of one that ended;
- prompts are taken in order, as many as the group's free slots and the tokens of a batch allow; a
  prompt that is longer than that goes alone;
- every sequence has one prefill batch, then decode batches until it ends;
- a decode batch ends when its first sequence reaches ``max_new_tokens``: none goes beyond them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of the first ``length`` cached tokens of slot ``source`` to ``destination``."""

    source: int
    destination: int
    length: int


@dataclass(frozen=True, slots=True)
class GenerationBatch:
    """A slot group's pass through the pipeline; ``moves`` are made before it, in any order."""

    number: int
    group: int
    is_prefill: bool
    sequences: tuple[int, ...]  # in slots first_slot, first_slot + 1, ...
    first_slot: int
    cached: tuple[int, ...]  # tokens of each sequence in the cache before the batch
    moves: tuple[Move, ...]
    num_steps: int = 1  # passes through the pipeline; each makes a token for every sequence

    def __str__(self) -> str:
        work = "prompts of" if self.is_prefill else "next tokens of"
        return f"batch {self.number}: {work} {len(self.sequences)} sequences, group {self.group}"


class GenerationSchedule:
    """The state of all sequences; advanced by ``next_batch`` and ``learn`` in turn, group by group.

    Args:
        prompt_lengths: tokens of every sequence's prompt.
        prompt_of: number of every sequence's prompt; neighbours with one number share it.
        num_groups: groups in flight.
        group_size: most sequences of a group; fewer sequences are spread over the groups.
        prompt_tokens: most tokens of a prefill batch, which computes a shared prompt once.
        max_new_tokens: most tokens of a response.
        num_steps: most tokens per sequence of a decode batch.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        prompt_of: Sequence[int],
        *,
        num_groups: int,
        group_size: int,
        prompt_tokens: int,
        max_new_tokens: int,
        num_steps: int,
    ) -> None:
        assert min(num_groups, group_size, prompt_tokens, max_new_tokens, num_steps) > 0
        assert len(prompt_lengths) == len(prompt_of)
        self._lengths = list(prompt_lengths)
        self._prompt_of = list(prompt_of)
        self._prompt_tokens = prompt_tokens
        self._max_new_tokens = max_new_tokens
        self._num_steps = num_steps
        self._waiting = deque(range(len(prompt_lengths)))
        share, rest = divmod(len(prompt_lengths), num_groups)
        self.capacities = [min(group_size, share + (g < rest)) for g in range(num_groups)]
        self._live: list[list[int]] = [[] for _ in range(num_groups)]  # by slot
        self._cached = [0] * len(prompt_lengths)
        self._moves: list[list[Move]] = [[] for _ in range(num_groups)]
        self._under_way: list[GenerationBatch | None] = [None] * num_groups
        self._num_batches = 0

    def next_batch(self, group: int) -> GenerationBatch | None:
        """The group's next batch; None, from then on, once the group has no more work."""
        assert self._under_way[group] is None, "learn the last batch's outcome first"
        live = self._live[group]
        first_slot, sequences = len(live), self._admitted(group)
        is_prefill = bool(sequences)
        if is_prefill:
            live += sequences
        else:
            first_slot, sequences = 0, list(live)
        if not sequences:
            return None
        batch = GenerationBatch(
            self._num_batches,
            group,
            is_prefill,
            tuple(sequences),
            first_slot,
            tuple(self._cached[sequence] for sequence in sequences),
            tuple(self._moves[group]),
            1 if is_prefill else self._steps(sequences),
        )
        self._num_batches += 1
        self._moves[group].clear()
        self._under_way[group] = batch
        return batch

    def learn(self, batch: GenerationBatch, ended: Sequence[bool]) -> None:
        """Record which sequences have ended at any of the batch's steps."""
        assert self._under_way[batch.group] is batch and len(ended) == len(batch.sequences)
        self._under_way[batch.group] = None
        for sequence in batch.sequences:
            new = self._lengths[sequence] if batch.is_prefill else batch.num_steps
            self._cached[sequence] += new
        live = self._live[batch.group]
        empty = {batch.first_slot + place for place, has_ended in enumerate(ended) if has_ended}
        left = len(live) - len(empty)
        sources = (slot for slot in range(left, len(live)) if slot not in empty)
        for slot in sorted(slot for slot in empty if slot < left):
            source = next(sources)
            live[slot] = live[source]
            self._moves[batch.group].append(Move(source, slot, self._cached[live[slot]]))
        del live[left:]

    def _steps(self, sequences: Sequence[int]) -> int:
        """Tokens per sequence of a decode batch, within the limit of each."""
        # The prefill batch made the first token, which is not cached yet.
        generated = max(self._cached[s] - self._lengths[s] + 1 for s in sequences)
        assert generated < self._max_new_tokens, "a sequence goes on beyond its limit"
        return min(self._num_steps, self._max_new_tokens - generated)

    def _admitted(self, group: int) -> list[int]:
        """Take the next prefill batch's sequences from the queue."""
        room = self.capacities[group] - len(self._live[group])
        admitted: list[int] = []
        num_tokens = 0
        while self._waiting and len(admitted) < room:
            sequence = self._waiting[0]
            if not admitted or self._prompt_of[sequence] != self._prompt_of[admitted[-1]]:
                num_tokens += self._lengths[sequence]
            if admitted and num_tokens > self._prompt_tokens:
                break
            admitted.append(self._waiting.popleft())
        return admitted
