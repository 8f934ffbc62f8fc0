"""Generation on a placed model, under any plan.

Every rank of a replica steps through the same `GenerationSchedule`: it knows each batch's row
without being told. Hidden states go from pipeline rank to pipeline rank as in training; the tokens
that the last one sampled, and their log-probabilities, go to the others in one small broadcast,
which a group's next batch waits for.

Invariants (the tests assert them):
- the tokens of a request depend on its prompt, its id and the sampling alone, not on the plan, the
  other requests or the sizes of the batches (up to the rounding of logits);
- on each communicator all ranks issue transfers in the order (round, chunk, group);
- nothing is on the wire, and no cache is left, when it has ended.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from puzzle_align.models.attention import KeyValueCache
from puzzle_align.models.build import ModelChunk
from puzzle_align.runtime import p2p
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.batch_input import (
    BatchInput,
    decode_input,
    number_prompts,
    prefill_input,
)
from puzzle_align.runtime.generation.request import Request, Response, Sampling, check_requests
from puzzle_align.runtime.generation.sampler import next_tokens, whole_vocabulary
from puzzle_align.runtime.watch import activity
from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.generation import GenerationBatch, GenerationSchedule


def generate(
    context: Context,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    prefill_tokens: int,
    decode_batch_size: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Response]:
    """Answer ``requests``, in their order. Collective over the ranks of this replica.

    Args:
        requests: this replica's, the same on all its ranks; so is the result. Those of one prompt
            are best side by side: a prefill batch computes it once for all that it takes.
        prefill_tokens: prompt tokens of one microbatch (a longer prompt has one of its own).
        decode_batch_size: sequences of one decode microbatch; each pipeline rank has one under way.
        on_progress: called with the number of finished responses whenever it has grown.

    Raises:
        ValueError: one line, before anything runs, for a request that the model cannot answer.
        FloatingPointError: if the model's logits are not finite.
    """
    check_requests(context.spec, requests, sampling)
    work = _Generation(context, requests, sampling, prefill_tokens, decode_batch_size)
    with torch.no_grad(), _evaluating(context.chunks):
        work.run(on_progress)
    return work.responses()


@dataclass
class _Running:
    """A batch on its way, and what is on the wire for it."""

    batch: GenerationBatch
    input: BatchInput
    outcome: torch.Tensor | None = None  # int64 [2, B]: tokens, and log-probabilities' bits
    works: list[dist.Work] = field(default_factory=list)
    sends: list[p2p.Transfer] = field(default_factory=list)


class _Generation:
    """One call of ``generate`` on one rank."""

    def __init__(
        self,
        context: Context,
        requests: Sequence[Request],
        sampling: Sampling,
        prefill_tokens: int,
        decode_batch_size: int,
    ) -> None:
        plan = context.plan
        self._context = context
        self._requests = requests
        self._sampling = sampling
        self._multiple = plan.tensor if plan.sequence_parallel else 1
        self._schedule = GenerationSchedule(
            [len(request.prompt) for request in requests],
            number_prompts([request.prompt for request in requests]),
            num_groups=plan.pipeline,
            group_size=decode_batch_size,
            prompt_tokens=prefill_tokens,
        )
        self._caches = [
            [self._empty_cache(chunk, slots) for chunk in context.chunks]
            for slots in self._schedule.capacities
        ]
        self._running: list[_Running | None] = [None] * plan.pipeline  # by group
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._log_probs: list[list[float]] = [[] for _ in requests]
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._num_finished = 0

    def run(self, on_progress: Callable[[int], None] | None) -> None:
        """Round after round, until no group has work."""
        reported = 0
        groups = range(self._context.plan.pipeline)
        while True:
            for group in groups:
                self._begin(group)
                self._pass(group, chunk=0)
            for chunk in range(1, len(self._context.chunks)):
                for group in groups:
                    self._pass(group, chunk)
            if on_progress is not None and self._num_finished > reported:
                reported = self._num_finished
                on_progress(reported)
            if not any(self._running):
                return

    def responses(self) -> list[Response]:
        """What has been generated, in order of requests."""
        return [
            Response(
                request.id,
                np.array(tokens, dtype=np.int64),
                np.array(log_probs, dtype=np.float32),
                tokens[-1] in self._stop_tokens,
            )
            for request, tokens, log_probs in zip(
                self._requests, self._tokens, self._log_probs, strict=True
            )
        ]

    def _begin(self, group: int) -> None:
        """Learn what the group's last batch gave, and prepare its next, if there is work."""
        running, self._running[group] = self._running[group], None
        if running is not None:
            self._learn(running)
        batch = self._schedule.next_batch(group)
        if batch is None:
            self._caches[group].clear()
            return
        for cache in self._caches[group]:
            for move in batch.moves:
                cache.copy(move.source, move.destination, move.length)
        self._running[group] = _Running(batch, self._input(batch))

    def _input(self, batch: GenerationBatch) -> BatchInput:
        device = self._context.device
        if batch.is_prefill:
            prompts = [self._requests[number].prompt for number in batch.sequences]
            made = prefill_input(batch, prompts, self._multiple, device)
        else:
            last = [self._tokens[number][-1] for number in batch.sequences]
            made = decode_input(batch, last, self._multiple, self._context.dtype, device)
        return made

    def _pass(self, group: int, chunk: int) -> None:
        """Run one of this rank's chunks on the group's batch."""
        running = self._running[group]
        if running is None:
            return
        with activity(f"{self._context.role}: {running.batch}, chunk {chunk}"):
            output = self._forward(running, chunk)
            if self._context.chunks[chunk].is_last:
                running.outcome = self._choose(running.batch, output)
            else:
                hidden = output.contiguous()
                send = self._transfer(Kind.SEND_FORWARD, running.batch, chunk, hidden)
                running.sends.append(send)
            if chunk == len(self._context.chunks) - 1:
                self._share(running)

    def _forward(self, running: _Running, number: int) -> torch.Tensor:
        context, row = self._context, running.input
        chunk = context.chunks[number]
        if not chunk.is_first:
            shape = context.activation_shape(row.tokens.size(1))
            hidden = torch.empty(shape, dtype=context.dtype, device=context.device)
            self._transfer(Kind.RECV_FORWARD, running.batch, number, hidden).work.wait()
            chunk.set_input_tensor(hidden)
        chunk.row_state.current = row.cache_row(self._caches[running.batch.group][number])
        output = chunk(row.tokens, row.position_ids, row.predictions)
        chunk.row_state.current = None
        return output

    def _transfer(
        self, kind: Kind, batch: GenerationBatch, chunk: int, hidden: torch.Tensor
    ) -> p2p.Transfer:
        action = Action(self._context.role, kind, batch.number, chunk)
        return p2p.start(action, hidden, self._context.links, self._context.pipeline_rank)

    def _choose(self, batch: GenerationBatch, logits: torch.Tensor) -> torch.Tensor:
        """The batch's outcome, from this tensor rank's logits [B, V/T] of its sequences."""
        ids = np.array([self._requests[number].id for number in batch.sequences])
        places = np.array([len(self._tokens[number]) for number in batch.sequences])
        whole = whole_vocabulary(logits, self._context)
        tokens, log_probs = next_tokens(whole, ids, places, self._sampling)
        return torch.stack([tokens, log_probs.view(torch.int64)])  # one transfer, and no rounding

    def _share(self, running: _Running) -> None:
        """Give the outcome to the other pipeline ranks, or start to receive it."""
        group = self._context.groups.pp
        if running.outcome is None:
            shape = (2, len(running.batch.sequences))
            running.outcome = torch.empty(shape, dtype=torch.int64, device=self._context.device)
        if group.size() > 1:
            last = self._context.links.ranks[-1]
            work = dist.broadcast(running.outcome, last, group=group, async_op=True)
            assert work is not None, "this rank is of the group"
            running.works.append(work)

    def _learn(self, running: _Running) -> None:
        """Wait for a batch's outcome, and take it in. What this rank sent for it has arrived."""
        batch = running.batch
        with activity(f"{self._context.role}: {batch}, its outcome"):
            for work in (*running.works, *(sent.work for sent in running.sends)):
                work.wait()
            assert running.outcome is not None
            tokens = running.outcome[0].tolist()
            log_probs = running.outcome[1].view(torch.float64).tolist()
            if not np.isfinite(log_probs).all():
                raise FloatingPointError(
                    f"{self._context.role}: logits are not finite; the weights or the optimizer's"
                    " settings are at fault"
                )
        ended = []
        for number, token, log_prob in zip(batch.sequences, tokens, log_probs, strict=True):
            generated = self._tokens[number]
            generated.append(token)
            self._log_probs[number].append(log_prob)
            full = len(generated) == self._sampling.max_new_tokens
            ended.append(full or generated[-1] in self._stop_tokens)
        self._num_finished += sum(ended)
        self._schedule.learn(batch, ended)

    def _empty_cache(self, chunk: ModelChunk, slots: int) -> KeyValueCache:
        spec, plan = self._context.spec, self._context.plan
        shape = (slots, spec.num_key_value_heads // plan.tensor, spec.head_dim)
        longest = max((len(request.prompt) for request in self._requests), default=0)
        return KeyValueCache(
            len(chunk.decoder.layers),
            shape,
            longest + self._sampling.max_new_tokens,
            self._context.dtype,
            self._context.device,
        )


@contextmanager
def _evaluating(chunks: Sequence[ModelChunk]) -> Iterator[None]:
    """Put the chunks into evaluation mode (nothing is recomputed), and then back."""
    modes = [chunk.training for chunk in chunks]
    try:
        for chunk in chunks:
            chunk.eval()
        yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
