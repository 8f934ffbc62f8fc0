"""Log-probabilities of given tokens under a linear head, without the full logits in memory.

Shapes: N predictions, H hidden size, V local vocabulary rows (all of them, or one tensor rank's
shard), T shards, R response slots.

A log-probability is ``logit[target] - logsumexp(logits)``. With a sharded vocabulary each shard
computes its part of both, and the caller joins them: logsumexp over the shards' ``lse``, sum over
the shards' ``target_logit``. A shard's entropy is that of its local softmax; ``join_entropies``
computes the global softmax's entropy, and ``join_statistics`` its ``STATISTICS``. The gradient of
``hidden`` is the sum of the shards' gradients.

The gradient of a weight with a ``main_grad`` (the float32 buffer of Megatron's data parallelism) is
added directly to that buffer, as Megatron's layers do under ``gradient_accumulation_fusion``: no
other [V, H] tensor in float32 is allocated, and the gradient is never rounded to bf16.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable


class LogprobParts(NamedTuple):
    """One shard's part of N predictions."""

    lse: torch.Tensor  # [N], logsumexp of the shard's logits
    target_logit: torch.Tensor  # [N]
    entropy: torch.Tensor | None  # [N], nats, of the softmax over the shard; if requested
    statistics: torch.Tensor | None  # [N, len(_PARTS)], without gradient; if requested


# Statistics of a softmax, for metrics and weights: its entropy in nats, the mean of its logits,
# whether its first maximum is at the target, the logarithm of the sum of squared probabilities.
STATISTICS = ("entropy", "mean_logit", "is_top1", "log_sum_squares")
# A shard's part of them: the first and last of its local softmax, the sum and maximum of its
# logits, and the token of the maximum (exact in float32: ids are below 2^24).
_PARTS = ("entropy", "log_sum_squares", "logit_sum", "best_logit", "best_token")
_NO_LOG = -1e30  # in place of log 0: 0 * -inf is NaN


def linear_logprob_parts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    chunk_size: int,
    temperature: float = 1.0,
    entropies: bool = False,
    statistics: bool = False,
) -> LogprobParts:
    """Parts from the logits ``hidden [N, H] @ weight [V, H].T / temperature``, differentiable.

    ``weight`` has the rows from ``vocab_start`` of the padded vocabulary; rows from ``vocab_size``
    on are padding and ignored. ``targets`` int64 [N] are global token ids. If this shard has no
    valid row, ``lse`` is -inf and the entropy 0; if another shard has the target, ``target_logit``
    is 0. Logits of at most ``chunk_size`` predictions are in memory at once (with entropies or
    statistics: twice), also in the backward. Temperature, softmax and results are in float32 (or
    float64, for float64 inputs); so are the logits of bf16 inputs on CUDA, while on the CPU the
    product rounds them to the inputs' dtype.

    A weight with a ``main_grad`` must not get a gradient elsewhere in a step, except from the tied
    embedding of a model on one pipeline rank.
    """
    assert chunk_size > 0 and temperature > 0
    num_valid = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    settings = _Settings(vocab_start, num_valid, chunk_size, temperature, entropies, statistics)
    return LogprobParts(*_LinearLogprobParts.apply(hidden, weight, targets, settings))


def join_entropies(lse: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Entropies [N] of the global softmax from every shard's ``lse`` and entropy, [N, T] each.

    With a shard's probability ``w = exp(lse - logsumexp(lse))`` they are ``sum w (entropy - log
    w)``, without the cancellation of ``lse`` minus the mean logit.
    """
    log_shares = torch.log_softmax(lse, dim=-1).clamp(min=_NO_LOG)
    return (log_shares.exp() * (entropies - log_shares)).sum(dim=-1)


@torch.no_grad()
def join_statistics(
    lse: torch.Tensor, parts: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """``STATISTICS`` of the global softmax, [4, N], from every shard's ``lse`` and parts.

    Args:
        lse: [N, T].
        parts: [N, T, len(_PARTS)], the shards in the vocabulary's order.
        targets: int64 [N].
        vocab_size: number of logits in the mean.
    """
    entropies, log_squares, sums, best, tokens = parts.unbind(dim=-1)
    log_shares = torch.log_softmax(lse, dim=-1)
    winner = best.argmax(dim=-1, keepdim=True)  # of equal ones the first
    is_top1 = tokens.gather(-1, winner)[:, 0] == targets
    return torch.stack(
        [
            join_entropies(lse, entropies),
            sums.sum(dim=-1) / vocab_size,
            is_top1.to(lse.dtype),
            torch.logsumexp(log_squares + 2 * log_shares, dim=-1),
        ]
    )


def sum_by_slot(values: torch.Tensor, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Sum ``values [N]`` by their slots, int64 [N]: float64 [R], differentiable.

    float64, because losses take differences of sums in the hundreds, where float32's error is 3e-5.
    The order of additions is fixed, so that runs repeat bitwise: with ``accumulate``, index_put
    sorts its indices on CUDA (index_add uses atomics there) and is serial on the CPU.
    """
    sums = torch.zeros(num_slots, dtype=torch.float64, device=values.device)
    return sums.index_put((slots,), values.to(torch.float64), accumulate=True)


class _Settings(NamedTuple):
    vocab_start: int
    num_valid: int  # rows of the shard that are not padding
    chunk_size: int
    temperature: float
    entropies: bool
    statistics: bool


class _LinearLogprobParts(torch.autograd.Function):
    """Saves inputs and results [N], and recomputes each chunk's logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        dtype = _softmax_dtype(hidden)
        lse = hidden.new_full(targets.shape, float("-inf"), dtype=dtype)
        target_logit = hidden.new_zeros(targets.shape, dtype=dtype)
        entropy = torch.zeros_like(lse) if settings.entropies else None
        statistics = _no_statistics(lse) if settings.statistics else None
        columns, is_local = _local_columns(targets, settings)
        for chunk in _chunks(len(targets), settings):
            logits = _logits(hidden[chunk], weight, settings)
            lse[chunk] = torch.logsumexp(logits, dim=1)
            at_target = logits.gather(1, columns[chunk, None])[:, 0]
            target_logit[chunk] = at_target.masked_fill(~is_local[chunk], 0.0)
            if statistics is not None:
                statistics[chunk] = _statistics(logits, lse[chunk], settings)
            if entropy is not None:
                log_probs = logits.sub_(lse[chunk, None])
                entropy[chunk] = -log_probs.exp().mul_(log_probs).sum(dim=1)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.settings = settings
        if statistics is not None:
            ctx.mark_non_differentiable(statistics)
        return lse, target_logit, entropy, statistics

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_lse: torch.Tensor,
        grad_target: torch.Tensor,
        grad_entropy: torch.Tensor | None,
        _grad_statistics: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = _weight_gradient(weight, lse.dtype) if needs_weight else None
        columns, is_local = _local_columns(targets, settings)
        grad_target = grad_target.masked_fill(~is_local, 0.0)
        valid = slice(settings.num_valid)
        for chunk in _chunks(len(targets), settings):
            log_probs = _logits(hidden[chunk], weight, settings).sub_(lse[chunk, None])
            if entropy is None or grad_entropy is None:
                grad_logits = log_probs.exp_().mul_(grad_lse[chunk, None])
            else:  # d entropy / d logit = -p (log p + entropy)
                grad_logits = log_probs.exp()
                slopes = log_probs.add_(entropy[chunk, None]).mul_(-grad_entropy[chunk, None])
                grad_logits.mul_(slopes.add_(grad_lse[chunk, None]))
            column = columns[chunk, None]
            at_target = grad_logits.gather(1, column) + grad_target[chunk, None]
            grad_logits.scatter_(1, column, at_target)
            if settings.temperature != 1:
                grad_logits.div_(settings.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight[valid], out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight[valid], grad_logits.T, hidden[chunk])
        if grad_weight is not None:
            grad_weight = _handed_on(grad_weight, weight)
        return grad_hidden, grad_weight, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """Compute a chunk's logits; the temperature is applied after the product, not in bf16."""
    logits = logits_of(hidden, weight[: settings.num_valid])
    return logits if settings.temperature == 1 else logits.div_(settings.temperature)


def logits_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden [n, H] @ weight.T [H, V]`` in float32, or float64 from float64.

    On CUDA the sums of a product in bf16 are not rounded to it: sampled tokens have the
    log-probabilities that training computes.
    """
    dtype = _softmax_dtype(hidden)
    if _widens(hidden, dtype):
        return torch.mm(hidden, weight.T, out_dtype=dtype)
    return (hidden @ weight.T).to(dtype)


def _weight_gradient(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Buffer for the sum of chunks' weight gradients [V, H]; in bf16 it would lose later chunks."""
    if hasattr(weight, "main_grad"):
        return weight.main_grad
    return torch.zeros_like(weight, dtype=dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total [V, H] += left [V, n] @ right [n, H]``; total may have a wider dtype."""
    if _widens(right, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def _widens(factor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a product must and can return a wider dtype than its factors: on CUDA only."""
    return factor.is_cuda and factor.dtype is not dtype


def _handed_on(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight's gradient for autograd; zeros if it was added to ``main_grad``.

    The zeros trigger data parallelism's hook, which ignores them, or, for a tied embedding, adds
    them to the embedding's gradient.
    """
    if not hasattr(weight, "main_grad"):
        return gradient.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.new_zeros(()).expand_as(weight)


def _no_statistics(lse: torch.Tensor) -> torch.Tensor:
    """Statistics' initial values, right for a shard without a valid row: its probability is 0."""
    parts = lse.new_zeros(*lse.shape, len(_PARTS))
    parts[:, _PARTS.index("best_logit")] = float("-inf")
    return parts


def _statistics(logits: torch.Tensor, lse: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """A chunk's ``_PARTS`` [n, len(_PARTS)] from its logits [n, V], which are not modified."""
    best, token = logits.max(dim=1)
    probs = torch.exp(logits - lse[:, None])
    mean_logit = (probs * logits).sum(dim=1)
    parts = (
        lse - mean_logit,
        probs.square_().sum(dim=1).log(),
        logits.sum(dim=1),
        best,
        token + settings.vocab_start,
    )
    return torch.stack(parts, dim=1)


def _softmax_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _local_columns(targets: torch.Tensor, settings: _Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """``(column [N], is_local [N])``; a target of another shard gets any valid column."""
    columns = targets - settings.vocab_start
    is_local = (columns >= 0) & (columns < settings.num_valid)
    return columns.masked_fill(~is_local, 0), is_local


def _chunks(num: int, settings: _Settings) -> list[slice]:
    """Slices of the predictions, a chunk each; none if the shard has no valid row."""
    num, size = num if settings.num_valid > 0 else 0, settings.chunk_size
    return [slice(start, start + size) for start in range(0, num, size)]
