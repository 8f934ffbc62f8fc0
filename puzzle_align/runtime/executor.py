"""Interprets a pipeline rank's action list, for any number of models at once.

Invariants:
- every model has links, buffers and outputs of its own: transfers of different models never meet;
- on each edge, sends and receives are issued in list order (the validator proves that both ends
  agree); neither blocks: a receive is waited for by the computation that uses it, so the list
  that posts it early overlaps transfer and computation;
- shapes are known beforehand: nothing but activations and their gradients crosses an edge.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from puzzle_align.runtime.context import Context
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.lowering import edge_of

Key = tuple[int, int]  # (microbatch, chunk)


@dataclass
class ModelRun:
    """One model's part in one execution.

    ``finish(microbatch, log_probs [N])`` is called on the last chunk; what it returns is
    differentiated by the microbatch's backward (None for a forward-only run).
    """

    context: Context
    rows: Sequence[RowInput]
    finish: Callable[[int, torch.Tensor], torch.Tensor | None]
    train: bool
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    waiting: dict[tuple[Kind, int, int], dist.Work] = field(default_factory=dict)


def execute(actions: Sequence[Action], runs: dict[str, ModelRun]) -> None:
    """Run one rank's lowered action list; ``runs`` is keyed by the actions' ``model``.

    Raises:
        Exception: whatever an action raised, with the action's text added as a note.
    """
    sends: list[tuple[dist.Work, torch.Tensor]] = []
    last_backward = {
        (a.model, a.chunk): i for i, a in enumerate(actions) if a.kind is Kind.BACKWARD
    }
    for index, action in enumerate(actions):
        run = runs[action.model]
        try:
            if action.kind is Kind.FORWARD:
                _forward(run, action)
            elif action.kind is Kind.BACKWARD:
                _backward(run, action, sync=last_backward[action.model, action.chunk] == index)
            elif action.kind.is_send:
                # On CUDA this lets go of what has arrived; gloo tells only when it is waited for.
                sends = [pending for pending in sends if not pending[0].is_completed()]
                sends.append(_send(run, action))
            else:
                _receive(run, action)
        except Exception as error:
            error.add_note(f"in action {action} ({index + 1} of {len(actions)})")
            raise
    for work, _ in sends:
        work.wait()


def _receive(run: ModelRun, action: Action) -> None:
    key = (action.microbatch, action.chunk)
    shape = run.context.activation_shape(run.rows[action.microbatch].tokens.size(1))
    buffer = torch.empty(shape, dtype=run.context.dtype, device=run.context.device)
    arriving = run.inputs if action.kind is Kind.RECV_FORWARD else run.gradients
    arriving[key] = buffer
    group, peer = _edge(run, action)
    work = dist.irecv(buffer, peer, group=group)
    assert work is not None, "this rank is not of the group"
    run.waiting[action.kind, *key] = work


def _send(run: ModelRun, action: Action) -> tuple[dist.Work, torch.Tensor]:
    key = (action.microbatch, action.chunk)
    if action.kind is Kind.SEND_FORWARD:
        output = run.outputs[key] if run.train else run.outputs.pop(key)
        tensor = output.detach().contiguous()
    else:
        tensor = run.gradients.pop(key).contiguous()
    group, peer = _edge(run, action)
    work = dist.isend(tensor, peer, group=group)
    assert work is not None, "this rank is not of the group"
    return work, tensor


def _edge(run: ModelRun, action: Action) -> tuple[dist.ProcessGroup, int]:
    """The group of a transfer, and the global rank at its other end."""
    links = run.context.links
    edge = edge_of(action, run.context.pipeline_rank, len(links.ranks))
    if edge.forward:
        group = links.wrap_forward if edge.wraps else links.forward
    else:
        group = links.wrap_backward if edge.wraps else links.backward
    assert group is not None, "an edge the plan does not have"
    return group, links.ranks[edge.destination if action.kind.is_send else edge.source]


def _forward(run: ModelRun, action: Action) -> None:
    key = (action.microbatch, action.chunk)
    chunk, row = run.context.chunks[action.chunk], run.rows[action.microbatch]
    if not chunk.is_first:
        run.waiting.pop((Kind.RECV_FORWARD, *key)).wait()
        hidden = run.inputs[key] if run.train else run.inputs.pop(key)
        chunk.set_input_tensor(hidden.requires_grad_(run.train))
    chunk.row_state.current = row.attention
    with contextlib.nullcontext() if run.train else torch.no_grad():
        output = run.context.modules[action.chunk](row.tokens, row.position_ids, row.predictions)
        if chunk.is_last:
            output = run.finish(action.microbatch, output)
    if output is not None:
        run.outputs[key] = output


def _backward(run: ModelRun, action: Action, sync: bool) -> None:
    key = (action.microbatch, action.chunk)
    chunk, row = run.context.chunks[action.chunk], run.rows[action.microbatch]
    gradient = None
    if not chunk.is_last:
        run.waiting.pop((Kind.RECV_BACKWARD, *key)).wait()
        gradient = run.gradients.pop(key)
    chunk.row_state.current = row.attention  # recomputed layers read the mask again
    # The last backward of a chunk may start reducing its gradients.
    wrapper = run.context.wrappers[action.chunk]
    with contextlib.nullcontext() if sync else wrapper.no_sync():
        torch.autograd.backward(run.outputs.pop(key), gradient)
    if not chunk.is_first:
        incoming = run.inputs.pop(key).grad
        assert incoming is not None, "the chunk's output does not depend on its input"
        run.gradients[key] = incoming
