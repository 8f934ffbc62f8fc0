"""A model's main weights, sharded by a distributed optimizer: ranges, boxes and their holders.

Megatron-core's distributed optimizer lays a chunk's parameters into one flat buffer, the last
parameter first, cuts the buffer into buckets, and gives every data-parallel rank an equal part of
each bucket, regardless of parameters' boundaries.

Invariants (the tests assert them):
- the ranges of all data-parallel ranks cover every element of a parameter exactly once;
- ranges equal Megatron-core 0.16.1's (``_ParamAndGradBuffer``, ``DistributedOptimizer``);
- a rank may hold several boxes of a tensor: a flat range of a matrix consists of the rest of a row,
  whole rows and the beginning of a row;
- two boxes of a tensor are either the same, replicated (norms over tensor ranks, a tied embedding
  over the first and the last position), or disjoint; all boxes together cover the tensor;
- a flat box is contiguous in its parameter, so it is a view of the rank's flat shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm, prod

from puzzle_align.layout import rules
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Box, Parameter, Piece
from puzzle_align.layout.weights import parameter_boxes, tensor_shapes

Range = tuple[int, int]  # start and end in a flat parameter, in elements

_PARAMETER_MULTIPLE = 64  # elements; parameters start at multiples of it
_BUCKET_MULTIPLE = 128  # bucket sizes are multiples of it and of the data-parallel size


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes of gradient buckets.

    A chunk has several buckets only if gradients are reduced during the backward pass
    (``overlapped``) and it is at the first position. ``size`` is the number of elements at which a
    bucket is full; None: Megatron-core's default.
    """

    overlapped: bool = False
    size: int | None = None

    def size_at(self, plan: ParallelPlan, position: int) -> int | None:
        """Bucket size of the chunk at a position; None if it has only one bucket."""
        if not self.overlapped or position > 0:
            return None
        return max(40_000_000, 1_000_000 * plan.data) if self.size is None else self.size


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A data-parallel rank's range of a parameter's main weights."""

    parameter: Parameter
    numbers: Range


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A box of a Hugging Face tensor, stored row by row in a flat shard from ``start``."""

    tensor: str
    box: Box
    start: int


@dataclass(frozen=True)
class MainWeightHoldings(Holdings):
    """Main weights of a model under a plan; a source of routing tables, as any ``Holdings``.

    ``buckets`` are those of the gradients; ``fused_norms`` is true for Transformer Engine's layers.
    """

    buckets: Buckets = field(default_factory=Buckets)
    fused_norms: bool = False

    @cached_property
    def holders(self) -> dict[str, dict[Box, tuple[int, ...]]]:
        """Ranks that hold each box, by tensor in the order of the model.

        A rank's boxes of adjacent rows are joined.
        """
        holders: dict[str, dict[Box, tuple[int, ...]]] = {}
        for pipeline in range(self.plan.pipeline):
            for tensor in range(self.plan.tensor):
                for data, chunks in enumerate(self._shards(pipeline, tensor)):
                    rank = self.topology.rank(pipeline, data, tensor)
                    for name, boxes in _boxes(part for chunk in chunks for part in chunk).items():
                        of_tensor = holders.setdefault(name, {})
                        of_tensor |= {box: (*of_tensor.get(box, ()), rank) for box in boxes}
        return {name: holders[name] for name in tensor_shapes(self.model)}

    def shards(self, rank: int) -> list[list[ShardRange]]:
        """Ranges whose main weights a rank's optimizer has, by chunk."""
        pipeline, data, tensor = self.topology.coordinates(rank)
        return self._shards(pipeline, tensor)[data]

    def _shards(self, pipeline: int, tensor: int) -> list[list[list[ShardRange]]]:
        """Ranges by data-parallel rank and chunk."""
        chunks = (
            shard_ranges(
                self.model,
                self.plan,
                self.buckets,
                position,
                tensor,
                fused_norms=self.fused_norms,
            )
            for position in self.plan.positions_of(pipeline)
        )
        return [list(of_rank) for of_rank in zip(*chunks, strict=True)]


def flat_boxes(shard: ShardRange) -> Iterator[FlatBox]:
    """Boxes of tensors in a shard of a parameter; none if the shard is padding."""
    first, last = shard.numbers
    width = prod(shard.parameter.shape[1:])
    for piece in shard.parameter.pieces:
        assert piece.place[1:] == tuple((0, extent) for extent in shard.parameter.shape[1:]), piece
        begin, end = (row * width for row in piece.place[0])
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            within = start - begin, stop - begin
            for offset, box in _range_boxes(piece, width, within):
                yield FlatBox(piece.tensor, box, begin + offset - first)


def _range_boxes(piece: Piece, width: int, numbers: Range) -> Iterator[tuple[int, Box]]:
    """Split a flat range of a piece into boxes of its tensor, each with its first element."""
    first, last = numbers
    (top, _), *columns = piece.box
    if not columns:
        yield first, ((top + first, top + last),)
        return
    ((left, _),) = columns
    for start, end in _cuts(first, last, width):
        row, column = divmod(start, width)
        rows, rest = divmod(end - start, width)
        if rows:
            yield start, ((top + row, top + row + rows), (left, left + width))
        else:
            yield start, ((top + row, top + row + 1), (left + column, left + column + rest))


def _cuts(first: int, last: int, width: int) -> Iterator[Range]:
    """Cut a flat range at its first and last row boundary, without empty parts."""
    if first // width == (last - 1) // width:
        yield first, last
        return
    whole = -(-first // width) * width, last // width * width
    for start, end in ((first, whole[0]), whole, (whole[1], last)):
        if start < end:
            yield start, end


def _boxes(shards: Iterator[ShardRange]) -> dict[str, list[Box]]:
    """Boxes in the shards, by tensor."""
    by_tensor: dict[str, list[Box]] = {}
    for shard in shards:
        for part in flat_boxes(shard):
            by_tensor.setdefault(part.tensor, []).append(part.box)
    return {name: _joined(boxes) for name, boxes in by_tensor.items()}


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Join boxes of adjacent rows, which come in the order of their rows."""
    joined: list[Box] = []
    for rows, *columns in boxes:
        if joined and joined[-1][1:] == tuple(columns) and joined[-1][0][1] == rows[0]:
            joined[-1] = ((joined[-1][0][0], rows[1]), *columns)
        else:
            joined.append((rows, *columns))
    return joined


def shard_ranges(
    model: ModelSpec,
    plan: ParallelPlan,
    buckets: Buckets,
    position: int,
    tensor_rank: int,
    *,
    fused_norms: bool = False,
) -> list[list[ShardRange]]:
    """Ranges of one chunk's parameters on one tensor rank, by data-parallel rank; none is empty.

    ``fused_norms``: see ``parameter_boxes``.
    """
    chunk = parameter_boxes(model, plan, position, tensor_rank, fused_norms=fused_norms)
    tied = model.tie_word_embeddings and plan.pipeline > 1
    alone = rules.EMBEDDING.hf if tied else ()
    ranges: list[list[ShardRange]] = [[] for _ in range(plan.data)]
    for bucket in _buckets([*chunk.values()], plan.data, buckets.size_at(plan, position), alone):
        share = bucket.size // plan.data
        for parameter, start in bucket.starts:
            end = start + prod(parameter.shape)
            for rank in range(start // share, (end - 1) // share + 1):
                first, last = max(start, rank * share), min(end, (rank + 1) * share)
                ranges[rank].append(ShardRange(parameter, (first - start, last - start)))
    return ranges


@dataclass(frozen=True, slots=True)
class _Bucket:
    starts: tuple[tuple[Parameter, int], ...]  # from the bucket's beginning
    size: int


def _buckets(
    parameters: Sequence[Parameter], data_size: int, full: int | None, alone: tuple[str, ...]
) -> Iterator[_Bucket]:
    """Buckets of a chunk's buffer, filled with its parameters from the last to the first.

    ``alone`` names the tensor of a tied embedding, if any. Its parameter has a separate bucket, so
    that ranks of the first and of the last position shard it in the same way.
    """
    starts: list[tuple[Parameter, int]] = []
    end = 0

    def closed() -> _Bucket:
        nonlocal starts, end
        bucket = _Bucket(tuple(starts), _up(end, lcm(data_size, _BUCKET_MULTIPLE)))
        starts, end = [], 0
        return bucket

    for parameter in reversed(parameters):
        is_alone = any(name in alone for name, _ in parameter.tensors)
        if is_alone and starts:
            yield closed()
        start = _up(end, _PARAMETER_MULTIPLE)
        starts.append((parameter, start))
        end = start + prod(parameter.shape)
        if is_alone or (full is not None and end >= full):
            yield closed()
    if starts:
        yield closed()


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
