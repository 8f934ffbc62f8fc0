"""How far two right computations of one number may lie apart.

A float32 sum of n terms that are rounded one by one is off by about ``u sqrt(n)`` of its usual
size, u = 2**-24 being the unit roundoff: n errors of about u that do not know of each other. Which
order a kernel sums in depends on the processor, its instructions and the number of threads, so two
right answers differ by that much. Sums that follow each other (a model's layers) add their errors
as squares.

Bounds are ten times what this gives, for the largest of many numbers lies four or five standard
deviations out, and for what follows a sum (a norm, a softmax, a gain above one) enlarges its error.
They still tell apart what is no rounding: activations or weights in bf16 are off by 2**-9 = 2e-3 of
their size on the average, a term that is missing from a sum of n by about 1/sqrt(n) of it, and a
token that is not seen, or seen twice, by more than that.

Where the same code computes both sides with the same shapes, tests compare bitwise, not by these.
Float64 against hand-derived values or against Python's own sums has bounds of 1e-14 for a few terms
and of 1e-12 for hundreds: far over ten times its u of 1.1e-16, and far under any mistake. A loss
that is log 2 because policy and reference are one is so but for its own rounding: to 1e-6.

``tests/kernels.sh`` runs the tests with other processors' kernels, on one or two threads.
"""

import math

UNIT_ROUNDOFF = 2.0**-24  # of float32: the largest relative error of one rounding
MARGIN = 10
SUMS_PER_LAYER = 8  # in a row: norm, qkv, scores, values, output; norm, up, down

LOGIT_BOUND = 1e-4
"""Absolute, of float32 logits against transformers': DESIGN's number.

A margin of ten over rounding: the tests' models have up to four layers and sums of up to 96 terms,
for which ``fp32_bound`` gives 3e-5 of a logit, and logits of up to 6. Differences of up to 1.04e-5
have been seen. Real faults move these logits by 1e-3 or more: a norm's epsilon of 1e-5 for 1e-6 by
1e-3 to 5e-3, one weight matrix in bf16 by 5e-3, one missing term of a sum by 0.3.
Log-probabilities and entropies, where errors of logits enter once, have the same bound.
"""

LOSS_BOUND = 1e-5
"""Relative, of float32 losses under another plan, layout or schedule: DESIGN's number.

A loss is a mean over pairs of sums over tokens: errors of single log-probabilities, which are those
of logits, average out. Differences of up to 1e-6 have been seen.
"""


def fp32_bound(num_terms: int, num_layers: int = 0) -> float:
    """Bound of a float32 sum of ``num_terms``, and of ``num_layers`` sums of as many before it.

    Relative to the usual size of the numbers that are compared (their largest or their norm), not
    to each of them: near a zero that terms of both signs sum to, the error is that of its terms.
    """
    num_sums = 1 + SUMS_PER_LAYER * num_layers
    return MARGIN * UNIT_ROUNDOFF * math.sqrt(num_sums * num_terms)


def gradient_bound(num_terms: int, num_layers: int) -> float:
    """Bound of float32 gradients: a backward has two sums for each of the forward's, after it."""
    return fp32_bound(num_terms, 3 * num_layers)


def probability_bound(log_prob_bound: float) -> float:
    """Bound of a sum of a distribution's probabilities, each log-probability off by the bound.

    Probabilities p in all move by ``p (1 - p)`` times the widest difference of two errors.
    """
    return 2 * log_prob_bound / 4
