"""Megatron's optimizer: learning rate, steps that skip non-finite gradients, and memory.

A step may update parameters in parts (PUZZLE, 5.2). AdamW is elementwise, so the result is bitwise
that of one step. Invariant: every parameter is updated once a step, and the optimizer counts one
step.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.models.inputs import DTYPES
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.optimizer.adamw import PieceAdamW
from puzzle_align.runtime.optimizer.state import main_weights, parts_of

# Updates parameters of a model, unless already updated; None: all that are left. A distributed
# optimizer updates this rank's shards of their main weights.
Update = Callable[[Sequence[Tensor] | None], None]


@contextmanager
def world_is(group: dist.ProcessGroup) -> Iterator[None]:
    """Make ``group`` torch's default group for two functions that Megatron-core calls.

    Its optimizers compare their parameter groups over the whole world: a model on some of the
    ranks would wait for ranks that have no optimizer.
    """
    gather, size = dist.all_gather_object, dist.get_world_size

    def gather_in_group(values: list[Any], value: Any, named: dist.ProcessGroup | None = None):
        return gather(values, value, named or group)

    dist.all_gather_object = gather_in_group
    dist.get_world_size = lambda named=None: size(named or group)
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size = gather, size


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's AdamW, taken where Transformer Engine is missing, update by one kernel.

    By default it updates lists of tensors, with temporaries of four bytes a parameter.
    """
    if isinstance(optimizer, torch.optim.AdamW):
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings |= {"fused": True, "foreach": False}


class Optimizer:
    """AdamW on one trainable context: fp32 main weights, clipping, optionally sharded state.

    If state is in bf16 or on the host, ``PieceAdamW`` replaces torch's or Transformer Engine's
    AdamW. Building it is collective over the context's ranks.
    """

    def __init__(self, context: Context, config: OptimizerConfig) -> None:
        """Make the optimizer of a context wrapped by ``make_trainable`` with the same config."""
        sharded = config.use_distributed_optimizer
        assert all(w.ddp_config.use_distributed_optimizer == sharded for w in context.wrappers)
        bf16 = context.dtype is torch.bfloat16
        megatron_config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.max_grad_norm,
            bf16=bf16,
            params_dtype=context.dtype,
            use_distributed_optimizer=config.use_distributed_optimizer,
        )
        # Megatron's distributed optimizer then leaves main weights to its inner optimizer, which
        # otherwise would have to be Transformer Engine's.
        in_pieces = config.in_pieces
        megatron_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = in_pieces
        self.context = context
        self.config = config
        with world_is(context.groups.intra_dist_opt):
            self.megatron: MegatronOptimizer = get_megatron_optimizer(
                megatron_config,
                context.modules,
                use_gloo_process_groups=False,
                pg_collection=context.groups,
            )
        for part in parts_of(self.megatron):
            if part.optimizer is not None and in_pieces:
                part.optimizer = PieceAdamW(
                    part.optimizer.param_groups,
                    dtype=DTYPES[config.state_dtype],
                    offload=config.cpu_offload,
                )
            elif part.optimizer is not None and context.device.type == "cuda":
                fuse(part.optimizer)

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        for module in self.context.wrappers:
            module.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum gradients over replicas, sequence-parallel shards and tied embeddings."""
        finalize_model_grads([*self.context.wrappers], None, pg_collection=self.context.groups)

    @torch.no_grad()
    def step(
        self, lr: float, in_parts: Callable[[Update], None] | None = None
    ) -> tuple[bool, float]:
        """Clip the reduced gradients and update the weights.

        Args:
            in_parts: called in place of the update, with a function that updates some parameters
                at a time; the rest are updated after it returns. Bitwise the same as one update.

        Returns:
            Whether the weights moved, and the norm before clipping. A non-finite norm (the same
            on all ranks) leaves weights and optimizer state as they were.
        """
        for group in self.megatron.param_groups:
            # Megatron leaves the multipliers to its scheduler.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self.megatron.prepare_grads()
        norm = self.megatron.get_grad_norm()
        if not math.isfinite(norm):
            return False, norm
        self._clip(norm)
        if in_parts is None:
            self.megatron.step_with_ready_grads()
        else:
            chained = [part for part in parts_of(self.megatron) if part.optimizer is not None]
            steps = [_PartialStep(part) for part in chained]

            def update(parameters: Sequence[Tensor] | None) -> None:
                for step in steps:
                    step.update(parameters)

            in_parts(update)
            update(None)
            for step in steps:
                step.gather()
        if self.context.spec.lora is None:  # FP8 copies are of the base, which is frozen
            for chunk in self.context.chunks:
                chunk.mark_changed()
        return True, norm

    def _clip(self, norm: float) -> None:
        """Scale gradients of a larger norm to ``max_grad_norm``, or let the update scale them."""
        most = self.config.max_grad_norm
        for optimizer in self.megatron.chained_optimizers if most > 0 else ():
            inner = optimizer.optimizer
            if isinstance(inner, PieceAdamW) and inner.scales_gradients:
                inner.scale = min(1.0, most / (norm + 1e-6))  # as Megatron-core clips
                continue
            clip_grad_by_total_norm_fp32(
                optimizer.get_parameters(), most, norm, use_decoupled_grad=self.config.in_pieces
            )


class _PartialStep:
    """One of the chained optimizers, and its parameters left to update in a step."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self._inner = optimizer.optimizer
        self._left = dict(main_weights(optimizer))
        # Apex's and TE's Adam count steps by group, and would count every part.
        self._steps = [group.get("step") for group in self._inner.param_groups]

    @torch.no_grad()
    def update(self, parameters: Sequence[Tensor] | None) -> None:
        """Update these parameters; None: all that are left."""
        wanted = [*self._left] if parameters is None else parameters
        taken = {one: self._left.pop(one) for one in wanted if one in self._left}
        if not taken:
            return
        chosen = {*taken.values()}
        whole = [group["params"] for group in self._inner.param_groups]
        try:
            for group, everything, step in zip(
                self._inner.param_groups, whole, self._steps, strict=True
            ):
                group["params"] = [main for main in everything if main in chosen]
                if group["params"]:
                    group.pop("step", None)
                    if step is not None:
                        group["step"] = step.clone() if torch.is_tensor(step) else step
            self._inner.step()
        finally:
            for group, everything in zip(self._inner.param_groups, whole, strict=True):
                group["params"] = everything
        if not isinstance(self._optimizer, DistributedOptimizer):
            for parameter, main in taken.items():
                if parameter is not main:
                    parameter.copy_(main)

    def gather(self) -> None:
        """Gather the model's weights from the distributed optimizer's shards."""
        if isinstance(self._optimizer, DistributedOptimizer):
            self._optimizer._copy_main_params_to_model_params()
            chunks: Any = self._optimizer.model_chunks
            for chunk in chunks:
                chunk.start_param_sync()


@contextmanager
def set_aside(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Free gradients' memory during the block, and on a GPU that of optimizer state.

    State, with separate main weights, is in host memory meanwhile; gradients are dropped, and zero
    afterwards. All tensors and their views stay the same objects.
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
    """Move the tensors' storages to host memory during the block, and free their memory."""
    storages = {one.data_ptr(): one for one in (tensor.untyped_storage() for tensor in tensors)}
    copies: list[tuple[Tensor, Tensor]] = []
    for storage in storages.values():
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=data.is_cuda)
        copies.append((data, host.copy_(data)))
        storage.resize_(0)
    yield
    for data, host in copies:
        data.untyped_storage().resize_(len(host))
        data.copy_(host)


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """An optimizer's tensors on a GPU, except the model's weights."""
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
