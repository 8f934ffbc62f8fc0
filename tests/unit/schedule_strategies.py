"""Random models on one pipeline, for property tests of schedules."""

from hypothesis import strategies as st

from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.registry import SCHEDULES, schedule_problem

Workload = tuple[int, list[Program], dict[str, ModelCosts]]


@st.composite
def workloads(draw: st.DrawFn, most_ranks: int, most_microbatches: int, models: int) -> Workload:
    """Models of any sizes, uneven positions, interleaved ones among them."""
    num_ranks = draw(st.integers(1, most_ranks))
    times = st.floats(0.05, 8.0)
    programs, costs = [], {}
    for number in range(draw(st.integers(1, models))):
        name = f"m{number}"
        backward = draw(st.booleans())
        num_chunks = draw(st.sampled_from([1, 1, 2])) if num_ranks > 1 else 1
        num = draw(st.integers(1, most_microbatches))
        num = max(1, num // num_ranks) * num_ranks if num_chunks > 1 else num
        positions = num_ranks * num_chunks
        forward = tuple(draw(times) for _ in range(positions))
        back = tuple(draw(times) for _ in range(positions)) if backward else ()
        fitting = [each for each in SCHEDULES if not schedule_problem(each, num_chunks)]
        schedule = draw(st.sampled_from([None, *fitting]))
        programs.append(Program(name, num, num_chunks, backward, schedule=schedule))
        kept = tuple(draw(st.floats(0.1, 4.0)) for _ in range(positions))
        costs[name] = ModelCosts(forward, back, kept)
    return num_ranks, programs, costs
