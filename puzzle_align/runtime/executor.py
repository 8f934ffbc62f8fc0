"""Make a pipeline rank's action list and execute it, for any number of models at once.

Invariants (the tests assert them):
- every model has separate links, buffers and outputs: transfers of different models never mix, and
  a model's results do not depend on the other models in the list;
- on each edge, sends and receives are issued in list order (the validator proves that both ends
  agree) without blocking: the computation that uses a receive waits for it, so a list that posts it
  early overlaps transfer and computation;
- shapes are known beforehand: only activations and their gradients cross an edge;
- no transfer is in flight when a list has ended. A lookahead model keeps received inputs that it
  has not used yet.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from zlib import crc32

import torch
import torch.distributed as dist

from puzzle_align.models.lora import seed_dropout
from puzzle_align.runtime import p2p
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.moments import Moment, between, moment, now
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.timeline import Span
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import timeline_of
from puzzle_align.schedules.validate import validate

Key = tuple[int, int]  # (microbatch, chunk)


@dataclass
class ModelRun:
    """One model's part in one execution, or for a lookahead model, in several.

    ``rows`` are the rows of all microbatches in the lists. ``finish(microbatch, output)`` gets the
    last chunk's output for the row's predictions, and returns the tensor that the microbatch's
    backward differentiates (None in a forward-only run).

    A lookahead model continues from list to list: between two lists, call ``advance`` and add the
    next rows.
    """

    context: Context
    rows: Sequence[RowInput]
    finish: Callable[[int, torch.Tensor], torch.Tensor | None]
    train: bool
    seed: tuple[int, int] | None = None  # of the job, and the step: for dropout of adapters
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    waiting: dict[Action, p2p.Transfer] = field(default_factory=dict)  # by receive action

    def advance(self, num_microbatches: int) -> None:
        """Drop the first microbatches, which are done, and number the rest from 0."""
        held = [microbatch for microbatch, _ in self.inputs]
        assert not self.waiting and not self.outputs and not self.gradients, (
            "a list is being executed"
        )
        assert min(held, default=num_microbatches) >= num_microbatches, (
            "microbatches to drop are not done"
        )
        self.rows = self.rows[num_microbatches:]
        self.inputs = {
            (microbatch - num_microbatches, chunk): hidden
            for (microbatch, chunk), hidden in self.inputs.items()
        }


def action_list(runs: Mapping[str, ModelRun], costs: Costs | None = None) -> list[Action]:
    """Make this rank's actions for whole passes of models that share their ranks.

    Args:
        runs: by role, in the same order on all ranks; plans may differ only in layers and chunks
            of a rank. A run has the same number of rows on all its ranks.
        costs: by role, the same on all ranks, for time-sharing in an order chosen to be short.
            None runs one model after the other, in the order of ``runs``.
    """
    contexts = [run.context for run in runs.values()]
    plans = {replace(context.plan.grid, virtual_pipeline=1) for context in contexts}
    assert len(plans) == 1, "the models' plans differ"
    programs = tuple(
        Program(
            role,
            len(run.rows),
            run.context.plan.virtual_pipeline,
            backward=run.train,
            schedule=run.context.plan.schedule,
        )
        for role, run in runs.items()
    )
    by_role = None if costs is None else tuple((role, costs[role]) for role in runs)
    return schedule(programs, contexts[0].plan.pipeline, by_role)[contexts[0].pipeline_rank]


@lru_cache(maxsize=64)
def schedule(
    programs: tuple[Program, ...],
    num_ranks: int,
    costs: tuple[tuple[str, ModelCosts], ...] | None = None,
) -> list[list[Action]]:
    """Make the validated, lowered lists of ``action_list``, one for each pipeline rank."""
    timeline = None
    if costs is None:
        lists = one_after_the_other(programs, num_ranks)
    else:
        lists = time_share(programs, num_ranks, dict(costs))
        timeline = timeline_of(lists, Dependencies(programs, num_ranks), dict(costs))
    lowered = lower(lists, programs, timeline)
    validate(lowered, programs)
    return lowered


def execute(
    actions: Sequence[Action], runs: Mapping[str, ModelRun], spans: list[Span] | None = None
) -> None:
    """Run one rank's lowered action list; ``runs`` is keyed by the actions' ``model``.

    Args:
        spans: receives the times of each compute action, in seconds since the pipeline's common
            start, without waits for input. Pass it on all ranks of a pipeline or on none.

    An error of an action is raised with the action as a note.
    """
    recorder = None if spans is None else _Recorder(next(iter(runs.values())).context)
    last_backward = {
        (a.model, a.chunk): i for i, a in enumerate(actions) if a.kind is Kind.BACKWARD
    }
    sends: list[p2p.Transfer] = []
    for index, action in enumerate(actions):
        run = runs[action.model]
        with activity(f"action {action} ({index + 1} of {len(actions)})"):
            if action.kind.is_send:
                # On CUDA this frees completed transfers; gloo reports completion only to a wait.
                sends = [sent for sent in sends if not sent.work.is_completed()]
                sends.append(_send(run, action))
            elif not action.kind.is_compute:
                _receive(run, action)
            else:
                _wait_for_input(run, action)
                with nullcontext() if recorder is None else recorder.recording(action):
                    if action.kind is Kind.FORWARD:
                        module = run.context.modules[action.chunk]
                        row = _ready(run, action)
                        with torch.set_grad_enabled(run.train):
                            output = module(row.tokens, row.position_ids, row.predictions)
                            _keep(run, action, output)
                    else:
                        is_last = last_backward[action.model, action.chunk] == index
                        _backward(run, action, sync=is_last)
    for transfer in (*sends, *(t for run in runs.values() for t in run.waiting.values())):
        with activity(f"action {transfer.action} (at the end of the list)"):
            transfer.work.wait()
    for run in runs.values():
        run.waiting.clear()
    if spans is not None and recorder is not None:
        spans += recorder.spans()


def _receive(run: ModelRun, action: Action) -> None:
    context = run.context
    shape = context.activation_shape(run.rows[action.microbatch].tokens.size(1))
    buffer = torch.empty(shape, dtype=context.dtype, device=context.device)
    arriving = run.inputs if action.kind is Kind.RECV_FORWARD else run.gradients
    arriving[action.microbatch, action.chunk] = buffer
    run.waiting[action] = p2p.start(action, buffer, context.links, context.pipeline_rank)


def _send(run: ModelRun, action: Action) -> p2p.Transfer:
    key = (action.microbatch, action.chunk)
    if action.kind is Kind.SEND_FORWARD:
        output = run.outputs[key] if run.train else run.outputs.pop(key)
        tensor = output.detach().contiguous()
    else:
        tensor = run.gradients.pop(key).contiguous()
    return p2p.start(action, tensor, run.context.links, run.context.pipeline_rank)


def _wait_for_input(run: ModelRun, action: Action) -> None:
    """Wait for a compute action's input, unless it arrived in an earlier list or is local."""
    kind = Kind.RECV_FORWARD if action.kind is Kind.FORWARD else Kind.RECV_BACKWARD
    receive = Action(action.model, kind, action.microbatch, action.chunk)
    if receive in run.waiting:
        run.waiting.pop(receive).work.wait()


def _ready(run: ModelRun, action: Action) -> RowInput:
    """Give a chunk its mode, its input and its row's mask; return the row."""
    chunk, row = run.context.chunks[action.chunk], run.rows[action.microbatch]
    if chunk.training != run.train:  # adapters drop no inputs of a trained model that only scores
        chunk.train(run.train)
    if run.train:
        _seed_dropout(run, action)
    if not chunk.is_first:
        key = (action.microbatch, action.chunk)
        hidden = run.inputs[key] if run.train else run.inputs.pop(key)
        chunk.set_input_tensor(hidden.requires_grad_(run.train))
    chunk.row_state.current = row.attention
    return row


def _seed_dropout(run: ModelRun, action: Action) -> None:
    """Let dropout of a forward depend on its place alone: not on other models, or a resume."""
    context = run.context
    if run.seed is None or context.spec.lora is None or not context.spec.lora.lora_dropout:
        return
    position = action.chunk * context.plan.pipeline + context.pipeline_rank
    place = (crc32(context.role.encode()), context.data_rank, position, action.microbatch)
    seed_dropout((*run.seed, *place), context.groups.tp.rank())


def _keep(run: ModelRun, action: Action, output: torch.Tensor) -> None:
    """Keep a forward's output for its send or backward; call ``finish`` on a last chunk's."""
    kept: torch.Tensor | None = output
    if run.context.chunks[action.chunk].is_last:
        kept = run.finish(action.microbatch, output)
    if kept is not None:
        run.outputs[action.microbatch, action.chunk] = kept


def _backward(run: ModelRun, action: Action, sync: bool) -> None:
    key = (action.microbatch, action.chunk)
    chunk, row = run.context.chunks[action.chunk], run.rows[action.microbatch]
    gradient = None if chunk.is_last else run.gradients.pop(key)
    chunk.row_state.current = row.attention  # recomputed layers read the mask again
    # The last backward of a chunk may start reducing its gradients.
    wrapper = run.context.wrappers[action.chunk]
    with nullcontext() if sync else wrapper.no_sync():
        torch.autograd.backward(run.outputs.pop(key), gradient)
    if not chunk.is_first:
        incoming = run.inputs.pop(key).grad
        assert incoming is not None, "the chunk's output does not depend on its input"
        run.gradients[key] = incoming


class _Recorder:
    """Records times of actions on one rank, in seconds since the pipeline's common start.

    It never makes the host wait for the device before all work is done.
    """

    def __init__(self, context: Context) -> None:
        """Wait for the other ranks of the context's pipeline. Collective over them."""
        self._device = context.device
        self._taken: list[tuple[Action, Moment, Moment]] = []
        now(self._device)  # waits for all launched work
        dist.all_reduce(torch.zeros(1), group=context.groups.pp)
        self._start = moment(self._device)

    @contextmanager
    def recording(self, action: Action) -> Iterator[None]:
        """Record the times of the block."""
        start = moment(self._device)
        yield
        self._taken.append((action, start, moment(self._device)))

    def spans(self) -> list[Span]:
        """Return all recorded spans, in order; waits for the device."""
        now(self._device)  # waits for all launched work
        return [
            Span(action, between(self._start, start), between(self._start, end))
            for action, start, end in self._taken
        ]
