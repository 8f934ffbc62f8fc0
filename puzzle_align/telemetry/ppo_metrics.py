"""PPO metrics under TRL's names, for an iteration's responses and the updates on them.

Ranks add the sums of their own responses: the metrics are those of all responses, whatever the
plans and the packing (TRL takes means of processes' means).

TRL counts two metrics otherwise: ``val/num_eos_tokens`` is of all processes here and counts
responses that ended with any stop token; ``val/ratio_var`` is over updates, not over their
microbatches. The names under ``completions/`` and ``rewards/`` are those of TRL's GRPOTrainer, but
for ``num_empty`` and ``num_unscored``.

Shapes: n responses of a rank, N of all, T tokens of the longest, C = len(SUMS), F reward functions.
A mask bool [n, T] is true at a response's tokens.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SUMS = (
    "responses",
    "scored",
    "scores",
    "squared scores",
    "rewards",
    "kl",
    "negative log-probabilities",
    "tokens",
    "stopped",
    "empty",
)


def rollout_sums(
    *,
    scores: Tensor,
    rewards: Tensor,
    kls: Tensor,
    logps: Tensor,
    stopped: Tensor,
    mask: Tensor,
) -> Tensor:
    """Sums over this rank's responses, in the order of ``SUMS``: float64 [C]; ranks add theirs.

    Args:
        scores: one a response, clipped and less the penalty, as ``rewards`` contain it: [n];
            NaN where nothing rewards the response.
        rewards: one a token, before whitening: [n, T].
        kls: one a token, in nats: [n, T].
        logps: log-probabilities of the tokens under the policy that sampled them: [n, T].
        stopped: bool [n], whether a response ends with a stop token.
        mask: bool [n, T].
    """
    scored, lengths = ~scores.isnan(), mask.sum(dim=1)
    scores = scores.double().masked_fill(~scored, 0.0)
    per_response = (
        torch.ones_like(scores),
        scored,
        scores,
        scores**2,
        _over_tokens(rewards, mask).masked_fill(~scored, 0.0),
        _over_tokens(kls, mask),
        -_over_tokens(logps, mask),
        lengths,
        stopped,
        lengths - stopped.long() <= 0,
    )
    return torch.stack([values.double().sum() for values in per_response]).detach()


def rollout_metrics(sums: Tensor) -> dict[str, float]:
    """Metrics by name from ``rollout_sums`` added over all ranks: float64 [C], of some responses.

    ``objective/kl`` and ``objective/entropy`` are means over responses of sums over their tokens,
    the latter of minus the log-probability; ``objective/scores`` and ``scores_std`` (unbiased) are
    of the responses' scores, ``objective/non_score_reward`` of what the KL adds to it, and
    ``objective/rlhf_reward`` of both: of the responses that have a score, NaN if none has.
    ``completions/num_empty`` counts the responses of nothing but a stop token, and
    ``completions/num_unscored``, where there are any, those without a score.
    """
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    count = named.pop("responses")
    assert count > 0
    scored = named.pop("scored")
    of_scored = {name: named.pop(name) for name in ("scores", "squared scores", "rewards")}
    means = {name: total / count for name, total in named.items()}
    means |= {name: total / scored if scored else math.nan for name, total in of_scored.items()}
    spread = max(0.0, of_scored["squared scores"] - scored * means["scores"] ** 2)
    unscored = {"completions/num_unscored": count - scored} if scored < count else {}
    return {
        "objective/scores": means["scores"],
        "objective/scores_std": math.sqrt(spread / max(1.0, scored - 1)) if scored else math.nan,
        "objective/kl": means["kl"],
        "objective/entropy": means["negative log-probabilities"],
        "objective/non_score_reward": means["rewards"] - means["scores"],
        "objective/rlhf_reward": means["rewards"],
        "val/num_eos_tokens": named["stopped"],
        "completions/mean_length": means["tokens"],
        "completions/num_empty": named["empty"],
        **unscored,
    }


def function_metrics(names: Sequence[str], rewards: Tensor) -> dict[str, float]:
    """``rewards/<name>/mean`` and ``/std`` (unbiased, 0 of one) of every reward function.

    They are of the responses that it applies to, NaN where there are none.

    Args:
        names: of the functions, [F].
        rewards: what they gave, float64 [N, F]; NaN where one does not apply.
    """
    metrics = {}
    for name, values in zip(names, rewards.unbind(dim=1), strict=True):
        applied = values[~values.isnan()]
        metrics[f"rewards/{name}/mean"] = applied.mean().item()
        spread = applied.std() if len(applied) > 1 else applied.mean() * 0.0
        metrics[f"rewards/{name}/std"] = spread.item()
    return metrics


def logged_metrics(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Means of the numbers that reward functions logged by name, over all calls of all ranks."""
    names = sorted({name for logged in by_rank for name in logged})
    values = {name: [v for logged in by_rank for v in logged.get(name, ())] for name in names}
    return {name: sum(logged) / len(logged) for name, logged in values.items()}


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over an iteration's updates, of which there is one at least.

    If updates have a ``val/ratio``, ``val/ratio_var`` is its unbiased variance, 0 of one update.
    """
    means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
    if "val/ratio" in means:
        squares = ((update["val/ratio"] - means["val/ratio"]) ** 2 for update in updates)
        means["val/ratio_var"] = sum(squares) / max(1, len(updates) - 1)
    return means


def _over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Sums over the tokens of each response, float64 [n]."""
    return values.double().masked_fill(~mask, 0.0).sum(dim=1)
