"""Shards of a chunk's parameters, by the data-parallel rank that keeps their main weights.

Megatron-core's distributed optimizer lays a chunk's parameters into one flat buffer, the last
parameter first, cuts the buffer into buckets, and gives every data-parallel rank an equal part of
each bucket, regardless of parameters' boundaries.

Invariants (the tests assert them):
- the ranges of all data-parallel ranks cover every element of a parameter exactly once;
- ranges equal Megatron-core 0.16.1's (``_ParamAndGradBuffer``, ``DistributedOptimizer``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

from puzzle_align.layout import rules
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Parameter
from puzzle_align.layout.weights import parameter_boxes

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
