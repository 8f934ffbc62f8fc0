"""GPipe: all forwards of a batch, then all backwards (Huang et al., 2019).

Alone on a pipeline it takes as long as 1F1B, but every rank keeps the activations of all M
microbatches. Backwards run in the order of the forwards, so gradients are summed as 1F1B sums them.
"""

from puzzle_align.schedules.actions import Action, Kind


def gpipe(
    model: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1
) -> list[list[Action]]:
    """GPipe's actions, the same list on every rank; V is 1."""
    assert num_ranks >= 1 and num_microbatches >= 1 and num_chunks == 1
    actions = [
        Action(model, kind, microbatch, 0)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for microbatch in range(num_microbatches)
    ]
    return [list(actions) for _ in range(num_ranks)]
