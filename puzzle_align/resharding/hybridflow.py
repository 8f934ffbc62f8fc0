"""Communication volume of HybridFlow's 3D-HybridEngine, for comparison with routing tables.

(Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", section 5 and its Table 2.)
The engine is for plans on the same ranks whose pipeline and tensor sizes shrink by whole factors.
Ranks are grouped so that each already holds a piece of its new part; the ranks of a group
all-gather their pieces.
"""

from fractions import Fraction

from puzzle_align.layout.plan import ParallelPlan


def applies(before: ParallelPlan, after: ParallelPlan) -> bool:
    """Whether the engine supports a switch between these plans, and it moves anything.

    Neighbouring pipeline ranks together must hold exactly one new rank's layers: no interleaving,
    and cuts that match.
    """
    return (
        before.world_size == after.world_size
        and before.pipeline % after.pipeline == 0
        and before.tensor % after.tensor == 0
        and before.data < after.data
        and before.virtual_pipeline == after.virtual_pipeline == 1
        and _joined(_shares(before), before.pipeline // after.pipeline) == _shares(after)
    )


def _shares(plan: ParallelPlan) -> list[Fraction]:
    """Share of the layers at every position."""
    layers = plan.pipeline_layers or (1,) * plan.num_positions
    return [Fraction(number, sum(layers)) for number in layers]


def _joined(shares: list[Fraction], size: int) -> list[Fraction]:
    """Sums of every ``size`` neighbouring shares."""
    return [sum(shares[i : i + size], Fraction()) for i in range(0, len(shares), size)]


def even_share(before: ParallelPlan, after: ParallelPlan) -> float:
    """The paper's figure: share of the model that every rank receives, if it is cut evenly.

    ``applies`` must hold.
    """
    cut, kept = before.pipeline * before.tensor, after.pipeline * after.tensor
    return (cut - kept) / (kept * cut)
