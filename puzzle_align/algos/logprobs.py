"""Log-probabilities of given tokens under a linear head whose full logits never exist.

Shapes: N predictions, H hidden size, V vocabulary rows held here (all of them, or one tensor
rank's shard), R response slots.

A log-probability is ``logit[target] - logsumexp(logits)``. Over a sharded vocabulary each shard
gives its part of both, and the caller joins them: logsumexp over the shards' ``lse``, sum over
the shards' ``target_logit``. The gradient of ``hidden`` is then the sum of the shards' gradients.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def linear_logprob_parts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(lse [N], target_logit [N])`` of ``hidden [N, H] @ weight [V, H].T``, differentiable.

    ``weight`` holds the rows from ``vocab_start`` of the padded vocabulary; those from
    ``vocab_size`` on are padding and take no part. ``targets`` int64 [N] are global token ids.
    ``lse`` is -inf where this shard has no valid row, ``target_logit`` 0 where another shard has
    the target. Logits of at most ``chunk_size`` predictions exist at once, in the backward as in
    the forward. Products are in the inputs' dtype, softmax and results in float32 (float64 stays).
    """
    assert chunk_size > 0
    num_valid = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    return _LinearLogprobParts.apply(hidden, weight, targets, vocab_start, num_valid, chunk_size)


def sum_by_slot(values: torch.Tensor, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Sums of ``values [N]`` by their slot in ``slots`` int64 [N]: float64 [R], differentiable.

    float64, because a loss takes differences of sums of hundreds, which float32 rounds to 3e-5.
    The order of the additions is fixed, so that runs repeat bitwise: with ``accumulate``,
    index_put sorts its indices on CUDA (index_add uses atomics there) and is serial on the CPU.
    """
    sums = torch.zeros(num_slots, dtype=torch.float64, device=values.device)
    return sums.index_put((slots,), values.to(torch.float64), accumulate=True)


class _LinearLogprobParts(torch.autograd.Function):
    """Keeps the inputs and ``lse``, and makes each chunk's logits again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab_start: int,
        num_valid: int,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _softmax_dtype(hidden)
        lse = hidden.new_full(targets.shape, float("-inf"), dtype=dtype)
        target_logit = hidden.new_zeros(targets.shape, dtype=dtype)
        columns, is_local = _local_columns(targets, vocab_start, num_valid)
        if num_valid > 0:
            for chunk in _chunks(len(targets), chunk_size):
                logits = (hidden[chunk] @ weight[:num_valid].T).to(dtype)
                lse[chunk] = torch.logsumexp(logits, dim=1)
                found = logits.gather(1, columns[chunk, None])[:, 0]
                target_logit[chunk] = found.masked_fill(~is_local[chunk], 0.0)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.sizes = vocab_start, num_valid, chunk_size
        return lse, target_logit

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_lse: torch.Tensor, grad_target: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, lse = ctx.saved_tensors
        vocab_start, num_valid, chunk_size = ctx.sizes
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtype = _softmax_dtype(hidden)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Every chunk adds to the same weights: bf16 would lose the later chunks.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        columns, is_local = _local_columns(targets, vocab_start, num_valid)
        grad_target = grad_target.masked_fill(~is_local, 0.0)
        for chunk in _chunks(len(targets) if num_valid > 0 else 0, chunk_size):
            grad_logits = (hidden[chunk] @ weight[:num_valid].T).to(dtype)
            grad_logits.sub_(lse[chunk, None]).exp_().mul_(grad_lse[chunk, None])
            column = columns[chunk, None]
            at_target = grad_logits.gather(1, column) + grad_target[chunk, None]
            grad_logits = grad_logits.scatter_(1, column, at_target).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight[:num_valid], out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight[:num_valid] += grad_logits.T @ hidden[chunk]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _softmax_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _local_columns(
    targets: torch.Tensor, vocab_start: int, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(column [N], is_local [N])``; the column of a target that is not here is any valid one."""
    columns = targets - vocab_start
    is_local = (columns >= 0) & (columns < num_valid)
    return columns.masked_fill(~is_local, 0), is_local


def _chunks(num: int, chunk_size: int) -> list[slice]:
    return [slice(start, start + chunk_size) for start in range(0, num, chunk_size)]
