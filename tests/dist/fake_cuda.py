"""A CUDA device without memory or kernels: tensors on it are fake, tensors on the host are real.

It finds what a GPU would refuse: operations on tensors of two devices or of wrong dtypes, and
where the host waits for the device. A value that the host reads is 1. Backwards do not run: torch
refuses them without a device (``test_transfers`` and ``test_meta_ppo`` run them on ``meta``).

A rank is alone, or one of several (``spawn.run_ranks``) whose hosts exchange by gloo as ever.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.nn.attention.flex_attention import BlockMask
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from puzzle_align.models import chunk, layers, lora
from puzzle_align.models.attention import flex
from puzzle_align.runtime.ahead import Ahead
from puzzle_align.runtime.groups import world as world_module

CUDA = torch.device("cuda", 0)
# Torch's views ask for a device's guard, which a CPU build does not have for CUDA.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar registrar(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""
_READS = torch.ops.aten._local_scalar_dense.default
_COPY, _TO = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
_PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm")]


class FakeCuda(TorchDispatchMode):
    """Runs operations on CUDA tensors without values; ``waits`` counts the host's reads of them."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: x for name, x in (kwargs or {}).items() if name != "pin_memory"}
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if not fakes and not any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves):
            return func(*args, **kwargs)
        if func in _PRODUCTS and len(dtypes := {leaf.dtype for leaf in fakes}) > 1:
            raise RuntimeError(f"{func} of dtypes {dtypes}")  # fake tensors allow it
        if func is _READS:
            self.waits += 1
            return torch.ones((), dtype=args[0].dtype).item()
        if func in (_COPY, _TO) and len(self._devices(func, args, kwargs)) == 2:
            self.waits += not kwargs.get("non_blocking", len(args) > 2 and args[2])
        if func is _COPY and not isinstance(args[0], FakeTensor):
            return args[0].fill_(1)
        with self._fake:
            made = func(*args, **kwargs)
        if fakes and isinstance(made, Tensor) and made.device.type == "cpu":
            return torch.ones(made.shape, dtype=made.dtype)
        return made

    def _devices(self, func: Any, args: Any, kwargs: Any) -> set[str]:
        """Types of the two ends of a copy."""
        other = kwargs.get("device") or args[0].device if func is _TO else args[1].device
        return {args[0].device.type, other.type}


class _Stream:
    """A stream, an event or a graph, which does its work at once."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_named: None

    def query(self) -> bool:
        return True


def compile_guard(folder: Path) -> Path:
    """Make the library of the guard in a folder; it takes g++ two seconds."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    root = Path(torch.__file__).parent
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", str(source)]
    subprocess.run([*command, "-o", str(library), f"-L{root / 'lib'}", "-lc10"], check=True)
    return library


def install(rank: int, world_size: int, guard: Path) -> FakeCuda:
    """Make this process a rank of a job on fake GPUs, for good; return the mode to run it in."""
    ctypes.CDLL(str(guard))
    _replace_cuda()
    _replace_groups(rank, world_size)
    for module in (chunk, layers, lora):
        module.engine_device = lambda: CUDA  # type: ignore[attr-defined]
    chunk.ModelChunk.to = _stay  # type: ignore[method-assign, assignment]
    # Modes are of a thread: nothing is prepared in another one.
    Ahead.prepare = lambda self, key: None  # type: ignore[method-assign]
    Ahead.of = _made_here  # type: ignore[method-assign]
    torch.autograd.backward = _give_gradients
    flex._compiled = lambda: _flex  # type: ignore[assignment]
    os.environ["LOCAL_RANK"] = str(rank)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then copies to a device by operations
    return FakeCuda()


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CUDA
    for name in ("_lazy_init", "synchronize", "empty_cache", "manual_seed", "graph_pool_handle"):
        setattr(cuda, name, lambda *_args, **_named: None)
    for name in ("current_stream", "default_stream", "Stream", "Event", "CUDAGraph"):
        setattr(cuda, name, lambda *_args, **_named: _Stream())
    for name in ("stream", "graph"):
        setattr(cuda, name, lambda *_args, **_named: nullcontext())
    cuda.get_rng_state = lambda *_args: torch.get_rng_state()
    cuda.max_memory_allocated = lambda *_args: 0
    megatron_random._get_cuda_rng_state = lambda *_args, **_named: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda *_args, **_named: None
    Tensor.pin_memory = lambda self, *_args: self  # type: ignore[method-assign, assignment]


def _replace_groups(rank: int, world_size: int) -> None:
    """Complete transfers between devices at once, and those between hosts of a rank alone."""
    backend = "fake"
    store: dist.Store = FakeStore()
    if dist.is_initialized():
        backend, store = "cpu:gloo,cuda:fake", dist.PrefixStore("cuda", c10d._get_default_store())
        dist.barrier()  # or others, which are not connected to this rank yet, never would be
        dist.destroy_process_group()
    else:
        _send_to_oneself()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    new_group = dist.new_group

    def fake_group(*args: Any, **named: Any) -> Any:
        if backend == "fake" or named.get("backend") == "nccl":
            named["backend"] = "fake"
        return new_group(*args, **{**named, "pg_options": None})

    @contextmanager
    def together(*_args: Any, **_named: Any) -> Iterator[Any]:
        yield mock.Mock()  # a handle to wait for

    def norm(_operation: Any, flag: Tensor, lists: Any, *_args: Any) -> tuple[Tensor, None]:
        """Megatron's own norm reads a value of every tensor (Transformer Engine's does not)."""
        assert {tensor.device for tensors in lists for tensor in tensors} <= {flag.device} == {CUDA}
        return torch.ones(1, device=CUDA), None

    dist.new_group = fake_group
    world_module.link_options = lambda _timeout: None
    param_and_grad_buffer._coalescing_manager = together  # type: ignore[assignment]
    clip_grads.multi_tensor_applier = norm  # type: ignore[assignment]


def _send_to_oneself() -> None:
    """Let what the hosts of other ranks would send be this rank's."""

    def gather(values: list[Any] | None, value: Any) -> None:
        if values is not None:
            values[:] = [value] * len(values)

    for name, module in [*sys.modules.items()]:
        if name.startswith("puzzle_align.") and hasattr(module, "from_rank_zero"):
            module.from_rank_zero = lambda make: make()  # type: ignore[attr-defined]
    dist.all_gather_object = lambda values, value, group=None: gather(values, value)
    dist.gather_object = lambda value, values=None, group=None: gather(values, value)


def _stay(self: chunk.ModelChunk, device: torch.device) -> chunk.ModelChunk:
    tensors = (*self.named_parameters(), *self.named_buffers())
    assert not (there := [name for name, tensor in tensors if tensor.device != device]), there
    return self


def _made_here(self: Any, key: Any) -> Any:
    if key not in self._made:
        self._made[key] = self._make(key)
    return self._made[key]


def _give_gradients(tensors: Tensor, gradient: Tensor | None = None, **_named: Any) -> None:
    """Give the inputs that a backward would reach, but no parameters, gradients like them."""
    assert gradient is None or (gradient.device, gradient.dtype) == (tensors.device, tensors.dtype)
    seen: set[Any] = set()
    nodes: list[Any] = [tensors.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, torch.nn.Parameter):
            leaf.grad = torch.empty_like(leaf)
        nodes += [after for after, _ in node.next_functions]


def _flex(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, **_named: Any) -> Tensor:
    """FlexAttention, which Triton would compile for the device."""
    mask = [part for part in block_mask.as_tuple() if isinstance(part, Tensor)]
    assert {tensor.device for tensor in (q, k, v, *mask)} == {
        CUDA
    } and q.dtype is k.dtype is v.dtype
    return q + k.mean() + v.mean()
