"""Generation with a placed model, under any plan.

Every rank of a replica steps through the same ``GenerationSchedule``, so it knows each batch's row
without a message. Hidden states go from pipeline rank to pipeline rank as in training; the last
rank broadcasts sampled tokens and log-probabilities to the others in one small message, for which
the group's next step waits: on CUDA in the stream, not on the host. A decode batch runs several
steps, one token per sequence each, whose inputs stay on the device (``DecodeState``); then the host
fetches all outcomes at once, and drops tokens after a response's end.

Invariants (the tests assert them):
- the tokens of a request depend only on its prompt, its id and the sampling: not on the plan, other
  requests, sizes of batches or steps between the host's fetches (up to the rounding of logits);
- on each communicator all ranks issue transfers in the order (round, chunk, group);
- a rank may wait for its device at any time, as the capture of a CUDA graph and the first use of a
  kernel do, and none waits forever: so the first rank begins to receive a group's next chunk as
  soon as it has sent the chunk before, and the last rank's sends can end;
- at the end no transfer is in flight, and no cache is left.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch
import torch.distributed as dist

from puzzle_align.models.attention.cache import KeyValueCache, decode_length
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.lora import drawing_nothing
from puzzle_align.runtime import p2p
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.inputs import (
    BatchInput,
    DecodeState,
    number_prompts,
    prefill_input,
)
from puzzle_align.runtime.generation.sampling import (
    Draws,
    Request,
    Response,
    Sampler,
    Sampling,
    check_requests,
    whole_vocabulary,
)
from puzzle_align.runtime.generation.step_graphs import (
    StepGraphs,
    graph_batch_size,
    graph_length,
)
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.generation import GenerationBatch, GenerationSchedule

_SCHEDULER_STEPS = {"cpu": 1, "cuda": 8}  # on a CPU no launch waits for the host


def generate(
    context: Context,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    prefill_tokens: int,
    decode_batch_size: int,
    num_scheduler_steps: int | None = None,
    enforce_eager: bool = False,
) -> list[Response]:
    """Answer ``requests``, in their order. Collective over the ranks of this replica.

    Args:
        requests: this replica's, the same on all its ranks; so is the result. Put requests with
            the same prompt side by side: a prefill batch computes their prompt once.
        prefill_tokens: most prompt tokens of a microbatch; a longer prompt gets its own.
        decode_batch_size: sequences of one decode microbatch; each pipeline rank runs one.
        num_scheduler_steps: tokens per sequence between two of the host's fetches, which show the
            ended responses; None: 1 on a CPU, 8 on CUDA.
        enforce_eager: on CUDA, launch decode steps kernel by kernel instead of as CUDA graphs.

    Raises:
        ValueError: one line, before anything runs, for a request that the model cannot answer.
        CannotGoOn: if the model's logits are not finite.
    """
    check_requests(context.spec, requests, sampling)
    steps = num_scheduler_steps or _SCHEDULER_STEPS[context.device.type]
    steps = min(steps, sampling.max_new_tokens)  # of a batch: more would only take memory
    schedule = GenerationSchedule(
        [len(request.prompt) for request in requests],
        number_prompts([request.prompt for request in requests]),
        num_groups=context.plan.pipeline,
        group_size=decode_batch_size,
        prompt_tokens=prefill_tokens,
        max_new_tokens=sampling.max_new_tokens,
        num_steps=steps,
    )
    as_graphs = context.device.type == "cuda" and not enforce_eager
    graphs = StepGraphs() if as_graphs else None
    work = _Generation(context, requests, sampling, schedule, steps, graphs)
    with torch.no_grad(), _evaluating(context.chunks), drawing_nothing():
        work.run()
    return work.responses()


@dataclass
class _Running:
    """A batch in progress: its current step, and its transfers in flight."""

    batch: GenerationBatch
    input: BatchInput
    draws: list[Draws]  # for every step
    step: int = 0
    works: list[dist.Work] = field(default_factory=list)
    sends: list[p2p.Transfer] = field(default_factory=list)
    received: p2p.Transfer | None = None  # of the next chunk, on the first pipeline rank


class _Generation:
    """One call of ``generate`` on one rank."""

    def __init__(
        self,
        context: Context,
        requests: Sequence[Request],
        sampling: Sampling,
        schedule: GenerationSchedule,
        num_steps: int,
        graphs: StepGraphs | None,
    ) -> None:
        plan = context.plan
        self._context = context
        self._requests = requests
        self._sampling = sampling
        self._sampler = Sampler(sampling, context.device)
        self._graphs = graphs
        self._schedule = schedule
        self._multiple = plan.sequence_shards
        capacities = schedule.capacities
        self._caches = [
            [self._empty_cache(chunk, slots) for chunk in context.chunks] for slots in capacities
        ]
        self._states = [
            DecodeState(context, slots, self._multiple, num_steps) for slots in capacities
        ]
        self._running: list[_Running | None] = [None] * plan.pipeline  # by group
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._log_probs: list[list[float]] = [[] for _ in requests]
        self._stop_tokens = frozenset(sampling.stop_token_ids)

    def run(self) -> None:
        """Run rounds until no group has work."""
        groups = range(self._context.plan.pipeline)
        while True:
            for group in groups:
                self._begin(group)
                self._pass(group, chunk=0)
            for chunk in range(1, len(self._context.chunks)):
                for group in groups:
                    self._pass(group, chunk)
            if not any(self._running):
                return

    def responses(self) -> list[Response]:
        """Return the responses, in order of requests."""
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
        """Prepare the next step of the group's batch, or of its next batch, if any."""
        running = self._running[group]
        if running is not None:
            self._settle(running)
            if running.step + 1 < running.batch.num_steps:
                state, batch = self._states[group], running.batch
                state.advance(len(batch.sequences), running.step)
                running.step += 1
                running.input = state.row(*self._decode_shape(batch, running.step))
                return
            self._collect(running.batch)
        batch = self._schedule.next_batch(group)
        if batch is None:
            self._running[group] = None
            self._caches[group].clear()
            return
        for cache in self._caches[group]:
            for move in batch.moves:
                cache.copy(move.source, move.destination, move.length)
        self._running[group] = _Running(batch, self._first_input(batch), self._draws(batch))

    def _first_input(self, batch: GenerationBatch) -> BatchInput:
        """Make the row of a batch's first step, and room in the caches for all its steps."""
        if batch.is_prefill:
            prompts = [self._requests[number].prompt for number in batch.sequences]
            row = prefill_input(batch, prompts, self._multiple, self._context.device)
            self._reserve(batch.group, row.cache_length)
            return row
        state, shape = self._states[batch.group], self._decode_shape(batch, step=0)
        longest = self._decode_shape(batch, batch.num_steps - 1)[-1]
        self._reserve(batch.group, longest)
        last = [self._tokens[number][-1] for number in batch.sequences]
        state.begin(last, batch.cached, num_tokens=shape[1])
        return state.row(*shape)

    def _decode_shape(self, batch: GenerationBatch, step: int) -> tuple[int, int, int]:
        """Sequences, tokens and length of a step's row, padded if it runs as a graph."""
        size, cached = len(batch.sequences), max(batch.cached)
        length = decode_length(cached + step + 1)
        if self._graphs is not None:
            size = graph_batch_size(size, self._schedule.capacities[batch.group])
            longest = self._caches[batch.group][0].max_length
            length = graph_length(cached + batch.num_steps, longest)
        return size, -(-size // self._multiple) * self._multiple, length

    def _draws(self, batch: GenerationBatch) -> list[Draws]:
        """Draws for every step of the batch, on the rank that samples."""
        if not self._context.chunks[-1].is_last:
            return []
        ids = np.array([self._requests[number].id for number in batch.sequences])
        places = np.array([len(self._tokens[number]) for number in batch.sequences])
        return self._sampler.draws(ids, places, batch.num_steps)

    def _reserve(self, group: int, length: int) -> None:
        """Make room for ``length`` tokens in every slot of the group.

        Graphs use the caches' addresses: then the caches take their final length at once.
        """
        for cache in self._caches[group]:
            cache.reserve(length if self._graphs is None else cache.max_length)

    def _pass(self, group: int, chunk: int) -> None:
        """Run one of this rank's chunks on the group's batch."""
        running = self._running[group]
        if running is None:
            return
        with activity(f"{self._context.role}: {running.batch}, chunk {chunk}"):
            hidden = self._compute(running, chunk)
            if hidden is not None:
                send = self._transfer(Kind.SEND_FORWARD, running.batch, chunk, hidden)
                running.sends.append(send)
            if chunk == len(self._context.chunks) - 1:
                self._share(running)
            elif self._context.pipeline_rank == 0:
                running.received = self._receive(running, chunk + 1)

    def _compute(self, running: _Running, number: int) -> torch.Tensor | None:
        """Run a chunk on received hidden states; return hidden states, or None from the last chunk.

        The last chunk's outcome is stored in the group's outcomes.
        """
        batch, chunk = running.batch, self._context.chunks[number]
        if not chunk.is_first:
            received = running.received or self._receive(running, number)
            running.received = None
            received.work.wait()
            chunk.set_input_tensor(received.tensor)
        if not batch.is_prefill:
            return self._decode(running, number)
        output = self._forward(running, number)
        if not chunk.is_last:
            return output.contiguous()
        outcomes = self._states[batch.group].outcomes
        outcomes[0, :, : len(batch.sequences)] = self._choose(output, running.draws[0])
        return None

    def _receive(self, running: _Running, number: int) -> p2p.Transfer:
        """Start receiving a chunk's hidden states."""
        context, batch = self._context, running.batch
        shape = context.activation_shape(running.input.num_tokens)
        if batch.is_prefill:
            hidden = torch.empty(shape, dtype=context.dtype, device=context.device)
        else:
            hidden = self._states[batch.group].received(number, shape)
        return self._transfer(Kind.RECV_FORWARD, batch, number, hidden)

    def _decode(self, running: _Running, number: int) -> torch.Tensor | None:
        """Run a chunk's part of a decode step on fixed tensors, as a graph if possible."""
        context, batch, row = self._context, running.batch, running.input
        state, size = self._states[batch.group], len(row.predictions.predict_from)
        if not context.chunks[number].is_last:
            hidden = state.sent(number, context.activation_shape(row.num_tokens))
            key = batch.group, number, size, row.cache_length
            self._run(key, lambda: hidden.copy_(self._forward(running, number)))
            return hidden
        draws, outcome = state.draws(running.draws[running.step], size), state.outcome[:, :size]
        key = batch.group, number, size, row.cache_length, draws.too_short is None
        self._run(key, lambda: outcome.copy_(self._choose(self._forward(running, number), draws)))
        state.outcomes[running.step].copy_(state.outcome)
        return None

    def _run(self, key: Hashable, step: Callable[[], object]) -> None:
        if self._graphs is None:
            step()
        else:
            self._graphs.run(key, step)

    def _forward(self, running: _Running, number: int) -> torch.Tensor:
        chunk, row = self._context.chunks[number], running.input
        chunk.row_state.current = row.cache_row(self._caches[running.batch.group][number])
        output = chunk(row.tokens, row.position_ids, row.predictions)
        chunk.row_state.current = None
        return output

    def _choose(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Tokens and log-probabilities' bits, int64 [2, B], from this rank's logits [B, V/T]."""
        whole = whole_vocabulary(logits, self._context)
        tokens, log_probs = self._sampler.next_tokens(whole, draws)
        return torch.stack([tokens, log_probs.view(torch.int64)])  # one transfer, and no rounding

    def _transfer(
        self, kind: Kind, batch: GenerationBatch, chunk: int, hidden: torch.Tensor
    ) -> p2p.Transfer:
        action = Action(self._context.role, kind, batch.number, chunk)
        return p2p.start(action, hidden, self._context.links, self._context.pipeline_rank)

    def _share(self, running: _Running) -> None:
        """Start broadcasting the step's outcome from the last pipeline rank."""
        group = self._context.groups.pp
        if group.size() > 1:
            outcome = self._states[running.batch.group].outcomes[running.step]
            last = self._context.links.ranks[-1]
            work = dist.broadcast(outcome, last, group=group, async_op=True)
            assert work is not None, "this rank is in the group"
            running.works.append(work)

    def _settle(self, running: _Running) -> None:
        """Wait for a step's outcome, and for this rank's sends of the step."""
        with activity(f"{self._context.role}: {running.batch}, its outcome"):
            for work in (*running.works, *(sent.work for sent in running.sends)):
                work.wait()
        running.works.clear()
        running.sends.clear()

    def _collect(self, batch: GenerationBatch) -> None:
        """Fetch the outcomes of a batch's steps, and append them to unfinished responses."""
        with activity(f"{self._context.role}: {batch}, its outcome"):
            outcomes = self._states[batch.group].outcomes[: batch.num_steps].cpu()
            tokens, log_probs = outcomes[..., : len(batch.sequences)].permute(1, 2, 0)
            made = zip(tokens.tolist(), log_probs.view(torch.float64).tolist(), strict=True)
            ended = [
                self._take_in(number, *response)
                for number, response in zip(batch.sequences, made, strict=True)
            ]
        self._schedule.learn(batch, ended)

    def _take_in(self, number: int, tokens: list[int], log_probs: list[float]) -> bool:
        """Append a batch's tokens to a response, up to its end; return whether it has ended.

        CannotGoOn if a log-probability is not finite.
        """
        generated = self._tokens[number]
        for token, log_prob in zip(tokens, log_probs, strict=True):
            if not isfinite(log_prob):
                raise CannotGoOn(
                    f"the {self._context.role}'s logits are not finite while it generates: look at"
                    " its weights, or lower optimizer.lr"
                )
            generated.append(token)
            self._log_probs[number].append(log_prob)
            if token in self._stop_tokens:
                return True
        return len(generated) == self._sampling.max_new_tokens

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
    """Put the chunks into evaluation mode, without recompute, during the block."""
    modes = [chunk.training for chunk in chunks]
    try:
        for chunk in chunks:
            chunk.eval()
        yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
