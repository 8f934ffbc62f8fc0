"""AdamW in pieces, with optimizer state in low precision, or in host memory, or both.

Megatron-core's distributed optimizer uses it like Transformer Engine's FusedAdam that keeps the
main weights (``use_precision_aware_optimizer``): the parameters are shards of the model's weights,
gradients are in ``decoupled_grad``, and a checkpoint reads and sets state as float32. The
arithmetic is AdamW's in float32, on a piece of a shard at a time: float32 copies, and the part of
the host's state on the device, take at most two pieces. On CUDA one kernel updates a piece
(``adamw_kernel``) where Triton works; it makes no copies, so that without the host's state a piece
is a whole shard, with fewer launches. Else torch's AdamW does, between conversions.

A float32 main weight may be stored as the nearest bf16 weight and a 16-bit remainder. A main weight
halfway between two bf16 numbers rounds to the larger in magnitude. A cast would round to the even
one, but then 16 bits could not tell the main weight from its neighbour. (Transformer Engine's
``store_param_remainders`` also rounds like this.)

Invariants (the tests assert them):
- with float32 moments the results equal torch's AdamW on float32 main weights bitwise (the kernel's
  but for float32's last bits);
- with bf16 moments, every step computes with the rounded moments;
- results are bitwise the same with state on host or device, and for every size of pieces;
- ``joined`` restores every bit of what was ``split``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from puzzle_align.layout.model import PIECE_SIZE

_logger = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "master_param"  # this name, like the moments', is Megatron-core's
State = dict[str, Tensor]


class _Piece(NamedTuple):
    """A part of a shard, [n] each.

    ``state`` is the state kept between steps, without the main weight if that is the weight itself.
    """

    group: dict[str, Any]
    weight: Tensor
    gradient: Tensor
    state: State


class PieceAdamW:
    """AdamW for a distributed optimizer's flat shards, replacing the one that it was built with.

    ``state``, by shard: ``exp_avg`` and ``exp_avg_sq`` in ``dtype``, and ``master_param``, which is
    - for a float32 shard, the shard itself;
    - for a bf16 shard with bf16 ``dtype``, the remainders of its main weights (int16);
    - for a bf16 shard with float32 ``dtype``, its main weights.

    Steps are counted by group. A shard has state from its first step on, or from ``allocate``.

    ``scale`` multiplies the gradients of the next steps, if ``scales_gradients``.
    """

    scale = 1.0

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        dtype: torch.dtype,
        offload: bool,
        piece_size: int = PIECE_SIZE,
    ) -> None:
        """Take over the groups of an optimizer that has not stepped.

        Args:
            param_groups: torch's, with ``betas`` and ``eps``; shards are flat.
            dtype: dtype of the moments, float32 or bf16.
            offload: keep state in host memory, pinned for a GPU's shards.
            piece_size: elements that are updated at once.
        """
        self.param_groups = param_groups
        self.state: dict[Tensor, State] = {}
        self._dtype, self._offload, self._piece_size = dtype, offload, piece_size

    def allocate(self) -> None:
        """Allocate all shards' state: moments of zero, and main weights equal to the weights."""
        for group in self.param_groups:
            group.setdefault("step", 0)
            for shard in group["params"]:
                self._state_of(shard)

    @property
    def scales_gradients(self) -> bool:
        """Whether the update multiplies gradients by ``scale``, without a pass of its own."""
        shards = (shard for group in self.param_groups for shard in group["params"])
        return all(_kernel(shard.device) is not None for shard in shards)

    @torch.no_grad()
    def step(self) -> None:
        """Update every shard that is in a group."""
        for group in self.param_groups:
            # Like FusedAdam, which counts no step of a group without parameters.
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
        if not self._offload:
            for piece in self._pieces():  # one by one: the device works while the next is made
                self._update(piece, piece.state)
        elif pieces := [*self._pieces()]:
            kinds = {name: value.dtype for piece in pieces for name, value in piece.state.items()}
            longest = max(piece.weight.numel() for piece in pieces)
            staged = _Staging(kinds, longest, pieces[0].weight.device)
            staged.fetch(0, pieces[0].state)
            for number, piece in enumerate(pieces):
                staged.wait()
                if number + 1 < len(pieces):
                    staged.fetch(number + 1, pieces[number + 1].state)
                self._update(piece, staged.of(number, piece.state))

    def get_unscaled_state(self, shard: Tensor, name: str) -> Tensor:
        """Return a shard's moment or main weights in float32, [n]; a view if they are float32."""
        self._finish_copies(shard)
        value = self.state[shard][name]
        if value.dtype is torch.int16:
            return joined(shard.detach(), value.to(shard.device))
        return value.float()

    @torch.no_grad()
    def set_scaled_state(self, shard: Tensor, name: str, value: Tensor) -> None:
        """Set a shard's moment, or main weights and the shard, from any precision."""
        self._finish_copies(shard)
        stored = self.state[shard][name]
        if stored.dtype is torch.int16:
            value = split(value.to(shard.device, torch.float32, copy=True), shard.detach())
        elif name == _MAIN:
            shard.detach().copy_(value)
        stored.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form of the state, with a step for every shard."""
        shards = [(group, shard) for group in self.param_groups for shard in group["params"]]
        numbers = {id(shard): number for number, (_, shard) in enumerate(shards)}
        return {
            "state": {
                number: {**self.state[shard], "step": torch.tensor(float(group["step"]))}
                for number, (group, shard) in enumerate(shards)
                if shard in self.state
            },
            "param_groups": [
                {**group, "params": [numbers[id(shard)] for shard in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all except tensors, which ``set_scaled_state`` sets."""
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group |= {name: value for name, value in saved.items() if name != "params"}
            group["step"] = int(saved.get("step", 0))

    def _state_of(self, shard: Tensor) -> State:
        if shard not in self.state:
            weight = shard.detach()
            state = {
                name: self._kept(torch.zeros_like(weight, dtype=self._dtype)) for name in _MOMENTS
            }
            if weight.dtype is torch.float32:
                state[_MAIN] = weight
            elif self._dtype is torch.bfloat16:
                state[_MAIN] = self._kept(torch.zeros_like(weight, dtype=torch.int16))
            else:
                state[_MAIN] = self._kept(weight.float())
            self.state[shard] = state
        return self.state[shard]

    def _kept(self, value: Tensor) -> Tensor:
        """Copy a value to pinned host memory if state is offloaded from a GPU.

        Torch allocates pinned memory in powers of two: up to twice the bytes of the value.
        """
        if not self._offload or not value.is_cuda:
            return value
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for shard in group["params"]:
                stored = self._state_of(shard)
                state = {
                    name: value
                    for name, value in stored.items()
                    if name != _MAIN or shard.dtype is not torch.float32
                }
                weight, gradient = shard.detach(), shard.decoupled_grad
                in_place = not self._offload and _kernel(shard.device) is not None
                if in_place or shard.numel() <= self._piece_size:
                    yield _Piece(group, weight, gradient, state)
                    continue
                parts = (x.split(self._piece_size) for x in (weight, gradient, *state.values()))
                for own, its, *values in zip(*parts, strict=True):
                    yield _Piece(group, own, its, dict(zip(state, values, strict=True)))

    def _update(self, piece: _Piece, here: State) -> None:
        """Update a piece, its state ``here`` on the device, and the kept state."""
        group, weight = piece.group, piece.weight
        kept = here.get(_MAIN, weight)
        kernel = _kernel(weight.device)
        if kernel is not None:
            moments = (here[name] for name in _MOMENTS)
            kernel(weight, kept, piece.gradient, *moments, group, self.scale)
            for name, value in here.items():
                _store(value, piece.state[name])
            return
        main = joined(weight, kept) if kept.dtype is torch.int16 else kept
        first, second = (here[name].float() for name in _MOMENTS)
        adamw(
            [main],
            [piece.gradient],
            [first],
            [second],
            [],
            [torch.full((), group["step"] - 1, dtype=torch.float32, device=weight.device)],
            foreach=False,
            fused=weight.is_cuda,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        results = {"exp_avg": first, "exp_avg_sq": second}
        if main is not kept:
            results[_MAIN] = split(main, weight)
        elif main is not weight:
            weight.copy_(main)
            results[_MAIN] = main
        for name, value in results.items():
            _store(value, piece.state[name])

    def _finish_copies(self, shard: Tensor) -> None:
        """Wait until the device's last copies to the host are done."""
        if self._offload and shard.is_cuda:
            torch.cuda.current_stream(shard.device).synchronize()


class _Staging:
    """Device memory for two pieces' state: one is updated while the next one is copied here.

    Copies to the device are on a separate stream, copies back on the computing stream.
    """

    def __init__(self, kinds: Mapping[str, torch.dtype], size: int, device: torch.device) -> None:
        """Allocate memory for state with these names and dtypes, ``size`` elements each."""
        self._slots = [
            {name: torch.empty(size, dtype=dtype, device=device) for name, dtype in kinds.items()}
            for _ in range(2)
        ]
        self._copies = _copy_stream(device) if device.type == "cuda" else None

    def fetch(self, number: int, state: State) -> None:
        """Begin to copy a piece's state here, after the last use of the memory."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            for name, value in self.of(number, state).items():
                value.copy_(state[name], non_blocking=True)

    def wait(self) -> None:
        """Let the computing stream wait for all copies in flight."""
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    def of(self, number: int, state: State) -> State:
        """Return the device's copy of a piece's state."""
        slot = self._slots[number % 2]
        return {name: slot[name][: len(value)] for name, value in state.items()}


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream of copies to the device: made once, since torch hands out 32 in turn, to NCCL too."""
    return torch.cuda.Stream(device)


@cache
def _kernel(device: torch.device) -> Callable[..., None] | None:
    """The kernel that updates a piece, tried once; None, on CUDA with a warning, without one."""
    if device.type != "cuda":
        return None
    try:
        from puzzle_align.runtime.optimizer.adamw_kernel import try_update, update

        try_update(device)
    except Exception as error:  # noqa: BLE001 a missing compiler or driver raises what it likes
        reason = " ".join(str(error).split())
        _logger.warning("AdamW runs as separate kernels, since Triton's fails: %s", reason[:300])
        return None
    return update


def _store(value: Tensor, to: Tensor) -> None:
    """Copy numbers to their place between steps; convert them before they leave the device."""
    if value.device != to.device:
        value = value.to(to.dtype).contiguous()
    if value.data_ptr() != to.data_ptr():
        to.copy_(value, non_blocking=True)


def split(main: Tensor, weight: Tensor) -> Tensor:
    """Put the nearest weights of float32 ``main`` into bf16 ``weight``, [n] both.

    Returns the remainders, int16 [n]: a view of ``main``.
    """
    low, high = _halves(main)
    # Below zero the lower half is more than half of the upper one's last place: round away.
    torch.sub(high, low >> 15, out=weight.view(torch.int16))
    return low


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """Join float32 main weights [n] from bf16 ``weight`` and int16 ``remainder``, [n] both."""
    main = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    low, high = _halves(main)
    low.copy_(remainder)
    torch.add(weight.view(torch.int16), remainder >> 15, out=high)
    return main


def _halves(main: Tensor) -> tuple[Tensor, Tensor]:
    """Views of float32 numbers' lower and upper 16 bits, as integers (little-endian)."""
    low, high = main.view(torch.int16).view(-1, 2).unbind(1)
    return low, high
