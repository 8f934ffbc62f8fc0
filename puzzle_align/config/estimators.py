"""The registry of advantage estimators: a row here, and a file in ``algos.estimators``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """The needs of an estimator."""

    uses_critic: bool = False  # it reads a critic's values, and gives what the critic learns
    least_generations: int = 1  # responses a prompt


ESTIMATORS = {
    "gae": EstimatorTraits(uses_critic=True),
    "rloo": EstimatorTraits(least_generations=2),
}
