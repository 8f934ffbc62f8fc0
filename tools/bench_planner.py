"""Measure quality and speed of the plan searches on a seeded family of clusters and jobs.

    python tools/bench_planner.py --cases 200 > planner.json

Each case is searched by ``similarity`` and by ``exhaustive``, which finds the fastest plan of all.
"ratio" is the iteration's time under the first search's plan over that under the second's.
"bounded" counts training plans of which a bound was made, "evaluated" plans whose whole iteration
was predicted, "simulated" passes, which many plans have in common.
Seconds are the process's CPU time, on one core. If no plan fits a case, another case is drawn.

Exit code 1 if a goal is missed: 95% of the cases within 1%, at most 20% of the plans evaluated, PPO
on 64 ranks in 5 s (similarity) and 60 s (exhaustive), on 512 ranks in 20 s and 120 s.
"""

import sys
import time
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any

from bench_run import parser_of, show
from planner_cases import Case, draw_case, paper_case

from puzzle_align.planning.search.searches import exhaustive, similarity
from puzzle_align.planning.search.space import Space

_SEARCHES = {"similarity": similarity, "exhaustive": exhaustive}
_SECONDS = {"similarity": 5.0, "exhaustive": 60.0}  # most for PPO on 64 ranks
_SECONDS_ON_512 = {"similarity": 20.0, "exhaustive": 120.0}
_KEEP = 5  # plans that a search returns


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; JSON on stdout, progress on stderr."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=200, help="cases, beside the largest (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the family (0)")
    args = parser.parse_args(argv)
    cases = []
    for number in range(args.cases):
        measured, attempt = None, 0
        while measured is None:
            measured = _measured(draw_case(args.seed, number, attempt))
            attempt += 1
        cases.append(measured)
        print(f"{number + 1:>4} {measured}", file=sys.stderr, flush=True)
    report = _report(cases, _measured(paper_case()))
    show(report)
    return 0 if all(report["goals"].values()) else 1


def _measured(case: Case) -> dict[str, Any] | None:
    """Results of both searches; None if no plan fits the case."""
    measured: dict[str, Any] = {"case": case.text}
    best = {}
    for name in _SEARCHES:
        best[name], measured[name] = _searched(case, name)
    if best["similarity"] is None or best["exhaustive"] is None:
        assert best["similarity"] == best["exhaustive"], f"{case.text}: one search finds no plan"
        return None
    timed = case.job.stage == "ppo" and case.cluster.num_ranks == 64
    measured["plans"] = _num_plans(case.space())
    return {**measured, "timed": timed, "ratio": best["similarity"] / best["exhaustive"]}


def _searched(case: Case, name: str) -> tuple[float | None, dict[str, Any]]:
    """Seconds of the best plan's iteration, None if no plan fits, and the search's figures."""
    started, space = time.process_time(), case.space()
    outcome = _SEARCHES[name](space, _KEEP)
    figures = {
        "seconds": round(time.process_time() - started, 2),
        "bounded": outcome.num_bounded,
        "evaluated": outcome.num_evaluated,
        "simulated": space.times.simulated.cache_info().misses,
    }
    return outcome.best[0].seconds if outcome.best else None, figures


def _num_plans(space: Space) -> int:
    """Number of a space's plans: every choice with every sampling, whether or not they fit."""
    if not space.job.samples:
        return sum(1 for _ in space.choices())
    samplings = cache(lambda ranks: len(space.samplings(ranks)))
    actors = (len(choice.context("actor").ranks) for choice in space.choices())
    everywhere = space.cluster.num_ranks
    return sum(samplings(n) for number in actors for n in {number, everywhere})


def _report(cases: Sequence[dict[str, Any]], largest: dict[str, Any] | None) -> dict[str, Any]:
    assert largest is not None, "no plan fits the largest case"
    ratios = [case["ratio"] for case in cases]
    close = sum(ratio <= 1.01 for ratio in ratios) / len(cases)
    share = max(case["similarity"]["evaluated"] / case["plans"] for case in cases)
    timed = [case for case in (*cases, largest) if case["timed"]]
    slowest = {name: max(case[name]["seconds"] for case in timed) for name in _SEARCHES}
    goals = {"within_1_percent": close >= 0.95, "evaluated_share": share <= 0.2}
    goals |= {f"{name}_seconds": slowest[name] <= most for name, most in _SECONDS.items()}
    on_512 = {name: _searched(paper_case(512), name)[1] for name in _SEARCHES}
    goals["seconds_on_512_ranks"] = all(
        on_512[name]["seconds"] <= most for name, most in _SECONDS_ON_512.items()
    )
    costs = [case["similarity"]["seconds"] / case["exhaustive"]["seconds"] for case in cases]
    return {
        "within_1_percent": close,
        "ratio": {"median": median(ratios), "worst": max(ratios)},
        "evaluated_share": share,
        "seconds_over_exhaustive": median(costs),
        "ppo_on_512_ranks": on_512,
        "ppo_on_64_ranks": {"cases": len(timed), "slowest_seconds": slowest},
        "largest": largest,
        "goals": goals,
        "misses": [case for case in cases if case["ratio"] > 1.01],
    }


if __name__ == "__main__":
    sys.exit(main())
