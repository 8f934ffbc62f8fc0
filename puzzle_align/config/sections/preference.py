"""The losses of the preference stages and their hyperparameters."""

from dataclasses import dataclass
from typing import ClassVar

from puzzle_align.config.schema import key


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Properties of a preference loss that checks and options depend on."""

    uses_reference: bool = True  # in the loss itself, or for logged rewards
    takes_label_smoothing: bool = False
    takes_weights: bool = True  # WPO's; only a loss that depends on its pair alone can
    sorts_batch: bool = False  # compares a pair with pairs of equal rank in the sorted batch
    # Other than reverse_kl; only a loss of the difference of two rewards can.
    takes_divergence: bool = False


# Choices of ``dpo.loss_type``; algos.preference computes each.
PREFERENCE_LOSSES = {
    "sigmoid": LossTraits(takes_label_smoothing=True, takes_divergence=True),
    "sigmoid_norm": LossTraits(takes_divergence=True),
    "ipo": LossTraits(takes_divergence=True),
    "hinge": LossTraits(takes_divergence=True),
    "robust": LossTraits(takes_label_smoothing=True, takes_divergence=True),
    "exo_pair": LossTraits(takes_label_smoothing=True, takes_divergence=True),
    "nca_pair": LossTraits(),
    "bco_pair": LossTraits(),
    "sppo_hard": LossTraits(),
    "aot": LossTraits(takes_label_smoothing=True, takes_weights=False, sorts_batch=True),
    "aot_unpaired": LossTraits(takes_label_smoothing=True, takes_weights=False, sorts_batch=True),
    "apo_zero": LossTraits(),
    "apo_down": LossTraits(),
    "discopop": LossTraits(takes_divergence=True),
    "sft": LossTraits(takes_divergence=True, takes_weights=False),
    "simpo": LossTraits(uses_reference=False, takes_label_smoothing=True, takes_weights=False),
    "orpo": LossTraits(uses_reference=False, takes_weights=False),
    "plackett_luce": LossTraits(takes_weights=False, takes_divergence=True),
}
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


@dataclass(frozen=True, kw_only=True)
class ReferenceLossConfig:
    """Keys shared by all losses that compare a policy with a frozen reference."""

    section: ClassVar[str]  # name of the config section with these keys

    beta: float = key(0.1, "strength of the penalty for leaving the reference", above=0)
    sync_ref_model: bool = key(
        False, "mix the policy into the reference every ref_model_sync_steps steps (TR-DPO)"
    )
    ref_model_mixup_alpha: float = key(
        0.6, "the policy's share in the mixed reference", above=0, at_most=1
    )
    ref_model_sync_steps: int = key(
        512, "steps between two mixes of the reference", unit="steps", at_least=1
    )
    precompute_ref_log_probs: bool = key(
        False, "run the reference once over the data before training, cached on disk"
    )

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs a reference model."""
        return True

    @property
    def sequence_reason(self) -> str | None:
        """Why the reference must run on a batch directly before the policy; None if it need not."""
        if self.sync_ref_model:
            return f"{self.section}.sync_ref_model=true changes the reference between two steps"
        return None

    @property
    def live_reason(self) -> str | None:
        """Why the reference cannot run over all data before training; None if it can."""
        if self.sync_ref_model:
            return f"{self.section}.sync_ref_model=true changes the reference"
        return None


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ReferenceLossConfig):
    """The preference loss of pairs."""

    section: ClassVar[str] = "dpo"

    loss_type: str | list[str] = key(
        "sigmoid",
        "the loss, or a list of losses that are added up",
        choices=tuple(PREFERENCE_LOSSES),
    )
    loss_function: str | None = key(
        None,
        "module:function(PairLogps, DPOConfig) of your own in place of loss_type; returns [B]",
    )
    loss_weights: list[float] | None = key(
        None, "weights of a list's losses, one each; null: 1 for all"
    )
    label_smoothing: float = key(
        0.0,
        "probability that a label is flipped (sigmoid, simpo: as cDPO; robust, exo_pair, aot*)",
        at_least=0,
        below=0.5,
    )
    f_divergence_type: str = key(
        "reverse_kl",
        "the divergence of policy and reference that defines rewards",
        choices=DIVERGENCES,
    )
    f_alpha_divergence_coef: float = key(
        0.5, "alpha of alpha_divergence; 1: the same as reverse_kl"
    )
    reference_free: bool = key(False, "take the reference's log-probabilities as zero")
    simpo_gamma: float = key(0.5, "SimPO's target reward margin", at_least=0)
    discopop_tau: float = key(0.05, "DiscoPOP's temperature", above=0)
    sft_loss_weight: float = key(
        0.0,
        "weight of the chosen response's negative log-likelihood, a mean as nll_scope says",
        at_least=0,
    )
    nll_scope: str = key(
        "response",
        "likelihoods (orpo's too) are means over a response, the batch, or with prompts (sequence)",
        choices=("response", "batch", "sequence"),
    )
    ld_alpha: float | None = key(
        None,
        "LD-DPO's weight of tokens beyond the shorter response's length; null: 1",
        at_least=0,
        at_most=1,
    )
    use_weighting: bool = key(False, "weigh pairs by their probability under the policy (WPO)")

    @property
    def loss_names(self) -> list[str]:
        """The names in ``loss_type``, as a list; duplicates are kept."""
        return [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type

    @property
    def losses(self) -> dict[str, float]:
        """The weights of the summed losses, by name."""
        names = self.loss_names
        weights = self.loss_weights or [1.0] * len(names)
        return dict(zip(names, weights, strict=False))  # the checks compare the lengths

    @property
    def sorts_batch(self) -> bool:
        """Whether a loss sorts the batch's log-ratios, before the first backward pass."""
        return any(PREFERENCE_LOSSES[name].sorts_batch for name in self.losses)

    @property
    def sequence_reason(self) -> str | None:
        """Reason to run the reference directly before the policy; one more: a loss that sorts."""
        if self.sorts_batch and self.uses_reference and not self.precompute_ref_log_probs:
            return "a loss that sorts (aot, aot_unpaired) needs the whole batch's reference first"
        return super().sequence_reason

    @property
    def reads_statistics(self) -> bool:
        """Whether losses read more of a response than a weighted sum of its log-probabilities."""
        has_nll = "sft" in self.losses or self.sft_loss_weight > 0
        return (
            self.use_weighting
            or self.nll_scope == "sequence"
            or (self.ld_alpha is not None and has_nll)
        )

    @property
    def compares_means(self) -> bool:
        """Whether responses are compared by their mean log-probabilities, without a reference."""
        return not any(PREFERENCE_LOSSES[name].uses_reference for name in self.losses)

    @property
    def uses_reference(self) -> bool:
        """Whether a loss compares with a reference, and ``reference_free`` is false."""
        return not self.compares_means and not self.reference_free


@dataclass(frozen=True, kw_only=True)
class KTOConfig(ReferenceLossConfig):
    """The preference loss of single responses, each desirable or not."""

    section: ClassVar[str] = "kto"

    loss_type: str = key(
        "kto",
        "kto: against the KL divergence of the batch; apo_zero_unpaired: against 0",
        choices=("kto", "apo_zero_unpaired"),
    )
    desirable_weight: float = key(1.0, "weight of desirable responses' losses", at_least=0)
    undesirable_weight: float = key(1.0, "weight of undesirable responses' losses", at_least=0)

    @property
    def estimates_kl(self) -> bool:
        """Whether a step begins with forwards over mismatched prompts and responses."""
        return self.loss_type == "kto"

    @property
    def live_reason(self) -> str | None:
        """Reason not to run the reference before training; one more: the KL term."""
        if self.estimates_kl:
            return "loss kto (not apo_zero_unpaired) needs the reference on each batch's mismatches"
        return super().live_reason


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """The reward model's loss."""

    loss_type: str = key(
        "bradley_terry",
        "bradley_terry: of each comparison; plackett_luce: of a whole ranking of responses",
        choices=("bradley_terry", "plackett_luce"),
    )
    center_rewards_coefficient: float = key(
        0.0,
        "weight of the squared sum of a pair's rewards, which pulls their mean to 0",
        at_least=0,
    )
