"""Named patches that let Megatron-core run on a CPU, each with its reason.

Megatron-core names the device ``cuda`` in many places. The job's *configured* device decides
whether the patches go in (a machine with a GPU can run a CPU job): the runtime installs them.
They change private names of Megatron-core, which is why its versions are bounded; the ablation
tests show why each is needed.
"""

import importlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType

import torch

_CPU_NAMES = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
_installed = False


def install_cpu_patches() -> None:
    """Patch this process for good to run Megatron-core on the CPU; idempotent.

    Call it before any model or optimizer is built.
    """
    global _installed
    if _installed:
        return
    for patch in PATCHES.values():
        patch()
    _installed = True


def engine_device() -> torch.device:
    """Device for this process's models: the CPU once patched, else its GPU."""
    if _installed:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def patch_current_device() -> None:
    """Redirect allocations of layers and gradient buffers on ``torch.cuda.current_device()``."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]


def patch_current_stream() -> None:
    """Make gradient buffers wait for no stream (Megatron-core 0.17 and later ask for it)."""
    torch.cuda.current_stream = lambda *_args: None  # type: ignore[assignment]


def patch_rng_states() -> None:
    """Make sequence parallelism and recompute save and restore the CPU's generator."""
    from megatron.core.tensor_parallel import random

    def get_state(*_args: object, **_kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    torch.cuda.get_rng_state = get_state
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]


def patch_optimizer_literals() -> None:
    """Replace literal names of devices and tensor types in the optimizers and the gradient norm."""
    # core.utils has the norm that is used without Apex and Transformer Engine.
    modules = (
        "optimizer.optimizer",
        "optimizer.distrib_optimizer",
        "optimizer.clip_grads",
        "utils",
    )
    for name in modules:
        for function in _functions(importlib.import_module(f"megatron.core.{name}")):
            function.__code__ = _with_cpu_names(function.__code__)


def patch_fused_kernels() -> None:
    """Replace CUDA kernels of Transformer Engine or Apex, which Megatron uses if installed."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.HAVE_APEX_OR_TE = False
    clip_grads.multi_tensor_applier = utils.local_multi_tensor_applier
    clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm


def patch_tensor_cuda() -> None:
    """Make ``.cuda()``, which moves tied embeddings and optimizer state, do nothing."""
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


PATCHES: dict[str, Callable[[], None]] = {
    "current_device": patch_current_device,
    "current_stream": patch_current_stream,
    "rng_states": patch_rng_states,
    "optimizer_literals": patch_optimizer_literals,
    "fused_kernels": patch_fused_kernels,
    "tensor_cuda": patch_tensor_cuda,
}


def _with_cpu_names(code: CodeType) -> CodeType:
    def replaced(constant: object) -> object:
        if isinstance(constant, str):
            return _CPU_NAMES.get(constant, constant)
        if isinstance(constant, tuple):
            return tuple(replaced(item) for item in constant)
        if isinstance(constant, CodeType):
            return _with_cpu_names(constant)
        return constant

    return code.replace(co_consts=tuple(replaced(constant) for constant in code.co_consts))


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for member in vars(module).values():
        members = vars(member).values() if isinstance(member, type) else (member,)
        for candidate in members:
            yield from _unwrapped(candidate, module.__name__)


def _unwrapped(candidate: object, module_name: str) -> Iterator[FunctionType]:
    """``candidate`` and the functions inside its decorators, such as ``torch.no_grad``."""
    while candidate is not None:
        candidate = getattr(candidate, "__func__", candidate)
        if isinstance(candidate, FunctionType) and candidate.__module__ == module_name:
            yield candidate
        candidate = getattr(candidate, "__wrapped__", None)
