"""Log-probabilities of given tokens under a linear head whose full logits never exist.

Shapes: N predictions, H hidden size, V vocabulary rows held here (all of them, or one tensor
rank's shard), T shards, R response slots.

A log-probability is ``logit[target] - logsumexp(logits)``. Over a sharded vocabulary each shard
gives its part of both, and the caller joins them: logsumexp over the shards' ``lse``, sum over
the shards' ``target_logit``. A shard's entropy is that of its own softmax; ``join_entropies`` makes
the whole softmax's of them, and ``join_statistics`` its ``STATISTICS``. The gradient of
``hidden`` is then the sum of the shards' gradients.

The gradient of a weight with a ``main_grad`` (the float32 buffer of Megatron's data parallelism) is
added to that buffer at once, as Megatron's own layers do under ``gradient_accumulation_fusion``: no
other [V, H] tensor in float32 is made, and no bf16 rounds it on its way.
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


# Statistics of a softmax, for metrics and weights: its entropy in nats, its logits' mean, whether
# its maximum is at the target (the first of equal ones), the logarithm of its squares' sum.
STATISTICS = ("entropy", "mean_logit", "is_top1", "log_sum_squares")
# A shard's part of them: the entropy and log-sum of squares of its own softmax, its logits' sum and
# maximum, and the token that has it (whole in float32: there are fewer than 2^24).
_PARTS = ("entropy", "log_sum_squares", "logit_sum", "best_logit", "best_token")
_NO_LOG = -1e30  # in place of log 0: 0 * -inf is no number


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
    """Parts of the logits ``hidden [N, H] @ weight [V, H].T / temperature``, differentiable.

    ``weight`` holds the rows from ``vocab_start`` of the padded vocabulary; those from
    ``vocab_size`` on are padding and take no part. ``targets`` int64 [N] are global token ids.
    ``lse`` is -inf where this shard has no valid row (its entropy 0), ``target_logit`` 0 where
    another shard has the target. Logits of at most ``chunk_size`` predictions exist at once (with
    entropies or statistics: twice), in the backward as in the forward. Temperature, softmax and
    results are in float32 (float64 stays); so are the logits of bf16 inputs on CUDA, while on the
    CPU the product rounds them to the inputs' dtype.

    A weight that has a ``main_grad`` must be given a gradient nowhere else in a step, but by the
    embedding of a model of one pipeline rank that it is tied to.
    """
    assert chunk_size > 0 and temperature > 0
    num_valid = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    settings = _Settings(vocab_start, num_valid, chunk_size, temperature, entropies, statistics)
    return LogprobParts(*_LinearLogprobParts.apply(hidden, weight, targets, settings))


def join_entropies(lse: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Entropies [N] of the whole softmax from every shard's ``lse`` and entropy, [N, T] each.

    With a shard's probability ``w = exp(lse - logsumexp(lse))`` they are ``sum w (entropy - log
    w)``: nothing large cancels, as in ``lse`` minus the mean logit it would.
    """
    log_shares = torch.log_softmax(lse, dim=-1).clamp(min=_NO_LOG)
    return (log_shares.exp() * (entropies - log_shares)).sum(dim=-1)


@torch.no_grad()
def join_statistics(
    lse: torch.Tensor, parts: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """``STATISTICS`` of the whole softmax, [4, N], from every shard's ``lse`` and parts.

    Args:
        lse: [N, T].
        parts: [N, T, len(_PARTS)], the shards in the vocabulary's order.
        targets: int64 [N].
        vocab_size: logits that the mean is over.
    """
    entropies, log_squares, sums, best, tokens = parts.unbind(dim=-1)
    log_shares = torch.log_softmax(lse, dim=-1).clamp(min=_NO_LOG)
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
    """Sums of ``values [N]`` by their slot in ``slots`` int64 [N]: float64 [R], differentiable.

    float64, because a loss takes differences of sums of hundreds, which float32 rounds to 3e-5.
    The order of the additions is fixed, so that runs repeat bitwise: with ``accumulate``,
    index_put sorts its indices on CUDA (index_add uses atomics there) and is serial on the CPU.
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
    """Keeps inputs and results of [N], and makes each chunk's logits again in the backward."""

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
    """A chunk's logits, scaled after the product: bf16 would round the temperature in."""
    rows, dtype = weight[: settings.num_valid], _softmax_dtype(hidden)
    if _widens(hidden, dtype):
        logits = torch.mm(hidden, rows.T, out_dtype=dtype)
    else:
        logits = (hidden @ rows.T).to(dtype)
    return logits if settings.temperature == 1 else logits.div_(settings.temperature)


def _weight_gradient(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Buffer for the weight's gradient [V, H] over chunks: bf16 would lose the later chunks."""
    if hasattr(weight, "main_grad"):
        return weight.main_grad
    return torch.zeros_like(weight, dtype=dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total [V, H] += left [V, n] @ right [n, H]``; total may be wider than both."""
    if _widens(right, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def _widens(factor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a product can return its float32 sums unrounded; torch can on CUDA alone."""
    return factor.is_cuda and factor.dtype is not dtype


def _handed_on(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight's gradient for autograd: zeros where ``main_grad`` has it already.

    The zeros make the hook of data parallelism run, which then adds them nowhere, or, to a tied
    embedding, beside the embedding's own gradient.
    """
    if not hasattr(weight, "main_grad"):
        return gradient.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.new_zeros(()).expand_as(weight)


def _no_statistics(lse: torch.Tensor) -> torch.Tensor:
    """Parts of a shard without a valid row: its share of the softmax is 0."""
    parts = lse.new_zeros(*lse.shape, len(_PARTS))
    parts[:, _PARTS.index("best_logit")] = float("-inf")
    return parts


def _statistics(logits: torch.Tensor, lse: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """A chunk's parts [n, len(_PARTS)] from its logits [n, V], which stay as they are."""
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
    """``(column [N], is_local [N])``; the column of a target that is not here is any valid one."""
    columns = targets - settings.vocab_start
    is_local = (columns >= 0) & (columns < settings.num_valid)
    return columns.masked_fill(~is_local, 0), is_local


def _chunks(num: int, settings: _Settings) -> list[slice]:
    """Slices of the predictions, a chunk each; none where the shard has no valid row."""
    num, size = num if settings.num_valid > 0 else 0, settings.chunk_size
    return [slice(start, start + size) for start in range(0, num, size)]
