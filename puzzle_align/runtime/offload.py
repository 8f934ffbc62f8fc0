"""What trains a model, set aside while none is trained: the memory is there for something else."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from puzzle_align.runtime.optimizer import Optimizer
from puzzle_align.runtime.optimizer_state import parts_of


@contextmanager
def set_aside(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Give back the memory of gradients, and on a device that of optimizer state too.

    State, with the main weights where the model has others, is in host memory meanwhile; gradients
    are gone, and zero when it is over. All tensors stay the same objects, their views too.
    """
    optimizers = list(optimizers)
    wrappers = [wrapper for optimizer in optimizers for wrapper in optimizer.context.wrappers]
    with on_host([tensor for optimizer in optimizers for tensor in _state(optimizer)]):
        for wrapper in wrappers:
            wrapper.offload_grad_buffers(synchronize=False, empty_cache=False)
        yield
    for wrapper in wrappers:
        wrapper.restore_grad_buffers(synchronize=False)


@contextmanager
def on_host(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep what is in the tensors' storages in host memory, and give their memory back."""
    storages = {one.data_ptr(): one for one in (tensor.untyped_storage() for tensor in tensors)}
    kept: list[tuple[Tensor, Tensor]] = []
    for storage in storages.values():
        own = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        host = torch.empty(own.shape, dtype=torch.uint8, pin_memory=own.is_cuda)
        kept.append((own, host.copy_(own)))
        storage.resize_(0)
    yield
    for own, host in kept:
        own.untyped_storage().resize_(len(host))
        own.copy_(host)


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """The optimizer's tensors on its device, but for those that are the model's own weights."""
    weights = {
        parameter.untyped_storage().data_ptr()
        for chunk in optimizer.context.chunks
        for parameter in chunk.parameters()
    }
    inner = [part.optimizer for part in parts_of(optimizer.megatron) if part.optimizer]
    for one in inner:
        mains = (main for group in one.param_groups for main in group["params"])
        values = (value for state in one.state.values() for value in state.values())
        for tensor in (*mains, *values):
            on_device = torch.is_tensor(tensor) and tensor.is_cuda
            if on_device and tensor.untyped_storage().data_ptr() not in weights:
                yield tensor
