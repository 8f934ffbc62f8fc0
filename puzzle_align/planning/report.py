"""Report of a search: the best plans side by side, and why the others are slower."""

from collections.abc import Iterator, Sequence

from puzzle_align.planning.picture.panel import time_text
from puzzle_align.planning.search.evaluation import Planned
from puzzle_align.planning.search.searches import SearchResult

_NOTHING = 1e-3  # share of an iteration below which differences are not reported


def best_table(best: Sequence[Planned]) -> list[str]:
    """Table of the best plans, the fastest first: a heading, and a line of times for each."""
    names = list(dict.fromkeys(name for planned in best for name in planned.phases))
    title = f"{'plan':>4} {'iteration':>10} " + " ".join(f"{name:>10}" for name in names)
    lines = [f"{title} {'idle':>6} {'memory':>10}"]
    for number, planned in enumerate(best, start=1):
        times = (
            time_text(planned.phases[name].seconds) if name in planned.phases else "-"
            for name in names
        )
        cells = " ".join(f"{text:>10}" for text in times)
        memory = f"{planned.peak_bytes / 2**30:.2f} GiB"
        whole = time_text(planned.seconds)
        lines.append(
            f"{number:>4} {whole:>10} {cells} {100 * idle_of(planned):>5.1f}% {memory:>10}"
        )
    return lines


def idle_of(planned: Planned) -> float:
    """Idle share of pipeline ranks in the passes."""
    timed = [phase for phase in planned.phases.values() if phase.busy > 0]
    total = sum(phase.seconds for phase in timed)
    return sum(phase.idle * phase.seconds for phase in timed) / total if total else 0.0


def why_slower(best: Planned, other: Planned) -> str:
    """Phases in which a plan loses or gains: ``loses by +0.12 s generate, -0.03 s switch``."""
    names = dict.fromkeys([*best.phases, *other.phases])
    differences = []
    for name in names:
        seconds = _seconds(other, name) - _seconds(best, name)
        if abs(seconds) > _NOTHING * best.seconds:
            sign = "+" if seconds > 0 else "-"
            differences.append((seconds, f"{sign}{time_text(abs(seconds))} {name}"))
    if not differences:
        return "as fast, within a thousandth"
    return f"loses by {', '.join(text for _, text in sorted(differences, key=lambda one: -one[0]))}"


def _seconds(planned: Planned, name: str) -> float:
    return planned.phases[name].seconds if name in planned.phases else 0.0


def report_lines(outcome: SearchResult) -> Iterator[str]:
    """Lines of the report: the table, every plan in words, and why it is slower than the first."""
    best = outcome.best
    yield from best_table(best)
    for number, planned in enumerate(best, start=1):
        why = "" if number == 1 else f"; {why_slower(best[0], planned)}"
        yield f"  {number}: {planned.text}{why}"
    yield (
        f"searched: bounds of {outcome.num_bounded} training plans, predictions of "
        f"{outcome.num_evaluated} whole iterations"
    )


def limit_text(before: Planned, after: Planned) -> str:
    """Text on the phase that limits the speed-up of a larger cluster: it shrinks least."""
    ranks = after.plan.world_size / before.plan.world_size
    excess = {
        name: phase.seconds - _seconds(before, name) / ranks for name, phase in after.phases.items()
    }
    name = max(excess, key=lambda each: excess[each])
    if excess[name] <= _NOTHING * after.seconds:
        return "nothing: in proportion"
    why = ""
    idle = after.phases[name].idle
    if idle > before.phases[name].idle + 0.02 if name in before.phases else idle > 0.02:
        why = f", {100 * idle:.0f}% idle"
    return f"{name}{why} ({time_text(excess[name])} over proportion)"
