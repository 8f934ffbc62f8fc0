"""The losses of preference pairs: which there are, and their hyperparameters."""

from dataclasses import dataclass

from puzzle_align.config.schema import key


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """What a config has to know of a preference loss."""

    uses_reference: bool = True
    takes_label_smoothing: bool = False


# By name, the losses that ``dpo.loss_type`` chooses from; algos.preference computes each.
PREFERENCE_LOSSES = {
    "sigmoid": LossTraits(takes_label_smoothing=True),
    "ipo": LossTraits(),
    "hinge": LossTraits(),
    "robust": LossTraits(takes_label_smoothing=True),
    "apo_zero": LossTraits(),
    "apo_down": LossTraits(),
    "simpo": LossTraits(uses_reference=False, takes_label_smoothing=True),
    "orpo": LossTraits(uses_reference=False),
}


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """The preference loss."""

    loss_type: str = key("sigmoid", "the loss", choices=tuple(PREFERENCE_LOSSES))
    beta: float = key(0.1, "deviation from the reference is penalised by beta", above=0)
    label_smoothing: float = key(
        0.0, "probability that a label is flipped (cDPO, robust)", at_least=0, below=0.5
    )
    reference_free: bool = key(False, "take the reference's log-probabilities as zero")
    simpo_gamma: float = key(0.5, "SimPO's target reward margin", at_least=0)
    sft_loss_weight: float = key(
        0.0, "weight of the chosen response's mean negative log-likelihood", at_least=0
    )
    precompute_ref_log_probs: bool = key(
        False, "run the reference once over the data before training, cached on disk"
    )

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs a reference model."""
        return PREFERENCE_LOSSES[self.loss_type].uses_reference and not self.reference_free


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """The reward model's loss."""

    center_rewards_coefficient: float = key(
        0.0,
        "weight of the squared sum of a pair's rewards, which pulls their mean to 0",
        at_least=0,
    )
