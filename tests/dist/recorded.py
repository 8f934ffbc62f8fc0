"""Ranks that run one after the other in one process, without values: their transfers are recorded.

Every process group is a ``RecordedGroup``, which completes a transfer at once, and models are on
the device ``meta``, where tensors have shapes only: a model of any size fits. Operations that
transfer nothing and take most of the time there (attention, rotary, norms, activations) only make
tensors of the right shapes (``_Local``).
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import attention as megatron_attention
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from puzzle_align.models import chunk, cpu, layers
from puzzle_align.models.attention import AttentionPlan
from puzzle_align.runtime import row_input
from puzzle_align.runtime.groups import collectives

META = torch.device("meta")
_BACKEND = "recorded"
# Kind, torch's methods (2.13 renamed some), and the argument that holds the whole tensors.
_COLLECTIVES = (
    ("all_reduce", "allreduce", 0),
    ("all_gather", "allgather_into_tensor_coalesced all_gather_single_coalesced", 0),
    ("reduce_scatter", "_reduce_scatter_base reduce_scatter_tensor_coalesced", 1),
    ("reduce_scatter", "reduce_scatter_single reduce_scatter_single_coalesced", 1),
)


class Transfer(NamedTuple):
    """One tensor in one call on a process group."""

    group: str
    kind: str  # send, recv, or the collective
    peer: int | None  # global rank of the other end of a send or recv
    shape: tuple[int, ...]
    dtype: torch.dtype


class Record:
    """Transfers of one rank in order, the ranks of its groups, and what its work returned."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.groups: dict[str, list[int]] = {}
        self.result: Any = None


class RecordedGroup(dist.ProcessGroup):
    """A rank's end of a group, whose other ranks need not be there.

    Broadcasts have the content of their source, which must have run: objects of rank 0 are real.
    A gather has this rank's tensor in every place. Other receiving tensors stay as they are.
    """

    def __init__(self, rank: int, size: int, record: Record, sent: dict[Any, Any]) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._record, self._sent, self._num_broadcasts = record, sent, 0

    def getBackendName(self) -> str:
        return _BACKEND

    def note(self, kind: str, tensors: Tensor | Sequence[Tensor], peer: int | None = None) -> Any:
        """Record a call; return its completed work."""
        name, ranks = c10d._world.pg_names[self], dist.get_process_group_ranks(self)
        self._record.groups[name] = ranks
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        other = None if peer is None else ranks[peer]
        self._record.transfers += [
            Transfer(name, kind, other, tuple(tensor.shape), tensor.dtype) for tensor in tensors
        ]
        future = Future()
        future.set_result(tensors)
        return _create_work_from_future(future)

    def send(self, tensors: list[Tensor], destination: int, _tag: int) -> Any:
        return self.note("send", tensors, destination)

    def recv(self, tensors: list[Tensor], source: int, _tag: int) -> Any:
        return self.note("recv", tensors, source)

    def barrier(self, *_args: Any, **_named: Any) -> Any:
        return self.note("barrier", torch.empty(0))

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], *_args: Any) -> Any:
        for output, tensor in zip(outputs, tensors, strict=False):  # only a gather's root has any
            for part in output:
                part.copy_(tensor)
        return self.note("all_gather", tensors)

    gather = allgather  # pyright: ignore[reportAssignmentType]

    def all_gather_single(self, output: Tensor, tensor: Tensor, *_args: Any) -> Any:
        if not output.is_meta:  # from torch 2.15 on, objects are gathered so
            output.view(self.size(), -1).copy_(tensor.view(-1))
        return self.note("all_gather", output)

    _allgather_base = all_gather_single  # pyright: ignore[reportAssignmentType]

    def alltoall_base(self, output: Tensor, tensor: Tensor, *_args: Any) -> Any:
        assert self.size() == 1, "others' parts are not known"
        return self.note("all_to_all", output.copy_(tensor))

    all_to_all_single = alltoall_base  # pyright: ignore[reportAssignmentType]

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        key = c10d._world.pg_names[self], self._num_broadcasts
        self._num_broadcasts += 1
        if self.rank() == options.rootRank:
            self._sent[key] = [tensor.clone() for tensor in tensors]
        for tensor, content in zip(tensors, self._sent[key], strict=True):
            tensor.copy_(content)
        return self.note("broadcast", tensors)


def _add_methods() -> None:
    """Give ``RecordedGroup`` its other methods; those that no test needs raise."""

    def noting(kind: str, argument: int) -> Callable[..., Any]:
        return lambda self, *args: self.note(kind, args[argument])

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*_args: Any, **_named: Any) -> Any:
            raise NotImplementedError(f"ProcessGroup.{name} is not recorded")

        return refuse

    for kind, names, argument in _COLLECTIVES:
        for name in names.split():
            setattr(RecordedGroup, name, noting(kind, argument))
    verbs = ("_all", "all", "_reduce", "reduce", "scatter", "recv_any", "monitored", "_start_co")
    for name in dir(dist.ProcessGroup):
        if name.startswith(verbs) and name not in vars(RecordedGroup):
            setattr(RecordedGroup, name, refusing(name))


_add_methods()


def record_ranks(work: Callable[[int, Record], Any], world_size: int) -> list[Record]:
    """Call ``work(rank, its record)`` as each rank in turn. It changes this process for good."""
    _compute_without_values()
    sent: dict[Any, Any] = {}
    records: list[Record] = []

    def make(_store: Any, rank: int, size: int, _timeout: Any) -> RecordedGroup:
        return RecordedGroup(rank, size, records[-1], sent)

    dist.Backend.register_backend(_BACKEND, make, devices=["cpu", "meta"])
    new_group = dist.new_group
    dist.new_group = lambda *args, **named: new_group(*args, **{**named, "backend": _BACKEND})
    for rank in range(world_size):
        os.environ["LOCAL_RANK"] = str(rank)
        records.append(Record())
        store = dist.HashStore()
        dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=world_size)
        records[-1].result = work(rank, records[-1])
        dist.destroy_process_group()
        collectives.patient_group.cache_clear()
    return records


def _compute_without_values() -> None:
    """Let Megatron-core and our models compute on ``meta``; a value that is read there is 1."""
    for name in cpu._CPU_NAMES:
        cpu._CPU_NAMES[name] = name.replace("cuda", "meta")
    cpu.install_cpu_patches()
    torch.cuda.current_device = lambda: "meta"  # type: ignore[assignment]
    for module in (chunk, layers):
        module.engine_device = lambda: META  # type: ignore[attr-defined]
    to_cpu = Tensor.cpu

    def ones_of(self: Tensor, *args: Any, **named: Any) -> Tensor:
        is_meta = self.is_meta
        return torch.ones(self.shape, dtype=self.dtype) if is_meta else to_cpu(self, *args, **named)

    Tensor.cpu = ones_of  # type: ignore[method-assign]
    _library.impl("_local_scalar_dense", _one, "Meta", allow_override=True)  # asked before 2.13
    row_input.prepare_attention = lambda layout, *_: AttentionPlan(layout.num_tokens, None, _attend)
    megatron_attention.apply_rotary_pos_emb = lambda heads, *_args, **_named: heads
    layers.RMSNorm.forward = lambda self, hidden: _Local.apply(hidden.shape, hidden, self.weight)
    layers._Gated = _Gated  # type: ignore[misc]


def _one(tensor: Tensor) -> int | float | bool:
    return torch.ones((), dtype=tensor.dtype).item()


class _Local(torch.autograd.Function):
    """An operation within a rank: a tensor of this shape, and a gradient for every input."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(torch.empty_like(one) for one in ctx.saved_tensors))


class _Gated:
    @staticmethod
    def apply(gate_up: Tensor, _activation: str) -> Tensor:
        return _Local.apply((*gate_up.shape[:-1], gate_up.size(-1) // 2), gate_up)


def _attend(q: Tensor, k: Tensor, v: Tensor, _structure: None, _scale: float | None) -> Tensor:
    return _Local.apply(q.shape, q, k, v)


_library = torch.library.Library("aten", "IMPL")  # what it implements ends with it
