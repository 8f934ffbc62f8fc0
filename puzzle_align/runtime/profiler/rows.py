"""Measure rows on a shard: time of a layer's and the ends' forward and backward, and memory.

The executor runs them as in training; its spans are whole actions, and ``stamping`` measures parts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from puzzle_align.models.chunk import ModelChunk
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, action_list, execute
from puzzle_align.runtime.moments import now
from puzzle_align.runtime.profiler.timing import Samples, repeated, seconds, stamping
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.timeline import Span

_MICROBATCHES = 3  # microbatches of a pass; the first warms up, and is not a sample
_NUMBER_BYTES = 64  # a smaller tensor is a number that recompute keeps, not an activation


@dataclass(frozen=True)
class RowCase:
    """A row as input of a frozen and of a trained model, and the latter's loss.

    With ``statistics`` the trained model also computes statistics of the softmaxes.
    """

    scored: RowInput
    trained: RowInput
    loss: Callable[[torch.Tensor], torch.Tensor]
    statistics: bool


def measure_row(context: Context, make: Callable[[], RowCase], repeats: int) -> Samples:
    """Measure seconds of a row's layer and ends, by the names of a profile's points.

    Args:
        context: a trained shard's.
        make: makes the row's tensors and attention plan from the host.
    """
    return repeated(lambda: _sample(context, make), repeats)


def kept_layer_bytes(context: Context, row: RowInput) -> int:
    """Bytes of a row that a layer keeps from forward to backward, without parameters.

    The mean of all layers but the first, which also keeps shared tensors; needs two layers.
    """
    (chunk,) = context.chunks
    decoder: Any = chunk.decoder
    chunk.train()
    chunk.row_state.current = row.attention
    on_gpu = context.device.type == "cuda"
    counting = nullcontext(torch.cuda.memory_allocated) if on_gpu else _saved_bytes(chunk)
    counts: list[int] = []
    with counting as count:
        handles = [
            module.register_forward_pre_hook(lambda *_: counts.append(count()))
            for module in (decoder.layers[1], decoder.final_layernorm)
        ]
        context.modules[0](row.tokens, row.position_ids, row.predictions)
        for handle in handles:
            handle.remove()
    first, last = counts
    return round((last - first) / (context.spec.num_hidden_layers - 1))


def _sample(context: Context, make: Callable[[], RowCase]) -> Samples:
    prepare = []
    for _ in range(_MICROBATCHES):
        start = now(context.device)
        case = make()
        prepare.append(now(context.device) - start)
    (chunk,), num_layers = context.chunks, context.spec.num_hidden_layers
    chunk.eval()
    chunk.statistics = False
    with stamping(context) as stamps:
        rows = [case.scored] * _MICROBATCHES
        spans = _spans(ModelRun(context, rows, lambda *_: None, train=False))
        total, layers = _of(spans, Kind.FORWARD), stamps.took("layers", "head")
        embedding = stamps.took("start", "embedded")
    times = {
        "prepare": prepare,
        "forward": [x / num_layers for x in layers],
        "head_forward": _rest(total, layers, embedding),
    }
    times |= _trained(context, case)
    return {name: values[1:] for name, values in times.items()}


def _trained(context: Context, case: RowCase) -> Samples:
    """Measure each microbatch's forward in training, and its backward."""
    (chunk,), num_layers = context.chunks, context.spec.num_hidden_layers
    chunk.train()
    chunk.statistics = case.statistics
    for wrapper in context.wrappers:
        wrapper.zero_grad_buffer()
    with stamping(context) as stamps:

        def learn(_microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
            loss = case.loss(outputs)
            stamps.mark_backward("loss", loss)
            return loss

        spans = _spans(ModelRun(context, [case.trained] * _MICROBATCHES, learn, train=True))
        forward, backward = _of(spans, Kind.FORWARD), _of(spans, Kind.BACKWARD)
        layers, embedding = stamps.took("layers", "head"), stamps.took("start", "embedded")
        head_backward = stamps.took("loss", "gradient enters layers")
    # The layers' graph is freed after the gradient has left them, which belongs to their time. So
    # the embedding's share is measured alone, and the rest is the layers'.
    embedding_backward = [_embedding_backward(context, case.trained) for _ in backward]
    layers_backward = _rest(backward, head_backward, embedding_backward)
    return {
        "train_forward": [x / num_layers for x in layers],
        "backward": [x / num_layers for x in layers_backward],
        "embedding_forward": embedding,
        "embedding_backward": embedding_backward,
        "head_train_forward": _rest(forward, layers, embedding),
        "head_backward": head_backward,
    }


def _embedding_backward(context: Context, row: RowInput) -> float:
    (chunk,) = context.chunks
    output = chunk.embedding(row.tokens, row.position_ids)
    if not output.requires_grad:  # adapters are trained, and nothing before the layers
        return 0.0
    gradient = torch.ones_like(output)
    return seconds(lambda: torch.autograd.backward(output, gradient), context.device)


def _spans(run: ModelRun) -> list[Span]:
    spans: list[Span] = []
    runs = {run.context.role: run}
    execute(action_list(runs), runs, spans)
    return spans


def _of(spans: Sequence[Span], kind: Kind) -> list[float]:
    """Seconds of the actions of a kind, in order of microbatches."""
    return [span.end - span.start for span in spans if span.action.kind is kind]


def _rest(total: Sequence[float], *parts: Sequence[float]) -> list[float]:
    return [whole - sum(others) for whole, *others in zip(total, *parts, strict=True)]


@contextmanager
def _saved_bytes(chunk: ModelChunk) -> Iterator[Callable[[], int]]:
    """Count bytes of storages that forwards in the block save, without parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive: a freed address would be reused

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() > _NUMBER_BYTES:
            storages[storage.data_ptr()] = storage
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        yield lambda: sum(storage.nbytes() for storage in storages.values())
