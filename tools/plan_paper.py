#!/usr/bin/env python3
"""Plan PUZZLE's configurations on its two clusters on paper, and print JSON.

Nothing is measured: devices and links are declared (``paper_cases``), and the planner's predictions
stand beside what the paper measured. "chosen" is the fastest plan of all that fit.

"time_sharing" is the learn phase with models one after the other over time-shared: "speedup" of
the phase, "of_passes" without rows' preparation, sums of gradients and optimizers; "equation_1" is
the paper's theoretical value at the ranks' mean costs. "plans" are plain pipelines, with Table 2's
batch, its half and its quarter, as Figure 10; "most_with_a_microbatch_a_rank" leaves out those with
fewer microbatches than pipeline ranks.

"switch" is the fastest plan's iteration beside those of single plans ("speedup": theirs over its).
A single plan has the actor on all ranks and samples under the plan that it trains with; placement,
time-sharing, rows, chunks, recompute and batches that sample are the planner's best for it, and it
must fit. "generation_optimal" is the fastest of the (P, D, T) under which sampling takes least;
"training_optimal" has the least score and learn phases together; "fastest_single" the shortest
iteration. "all" compares over all plans, "no_replicas" over those of one data rank. "as_the_paper"
trains in one pipeline of all ranks without chunks and samples as Table 3 has it (else, in the best
of fewer pipeline ranks with tensor ranks and no replicas); its single plans are these two, and it
may lose to one of them. The paper gives Figure 11's plans nowhere but in section 7.5, so which
single plans it compared with is our reading.

    python tools/plan_paper.py --table                      # minutes
    python tools/plan_paper.py --case 7B/7B --cluster orion > figures.json
    python tools/plan_paper.py --figures figures.json --table

Where and why these differ from the paper's:

- Time-sharing. As in the paper the gain is about Equation (1)'s, which microbatches for each
  pipeline rank decide; the size of its microbatches it does not tell. Its 1.12 lies among what
  Table 2's batch gives with rows of several sizes. The planner prefers small rows, whose pipelines
  idle little in the first place, so that the chosen plan gains less. With as many microbatches as
  ranks, equal models gain less than 4/3 by the equation: the paper's 1.34 is about that, and ours
  stays a little below. With fewer, the equation is out of reach where no rank may keep more
  activations than models in turn do, as here: the second model's forwards wait for the first's
  backwards. Of unequal models, with a microbatch for every rank, ours exceeds the equation.
- The switch. In the mean over Table 2 ours brings less than the paper's over either single plan;
  over the two configurations that are planned by default it seems as much, but by 7B/7B on phoenix
  (generation-optimal) and 33B/7B on orion (training-optimal) alone. A deep pipeline reads its
  weights once for every slot group, and so is slow to sample, most with 33B on 32 ranks: there, as
  in the paper, the training-optimal plan is the slower one.
  7B/7B has it the other way round over all plans, as its generation-optimal plan trains slowly, by
  sums over PCIe or, with replicas, by sums of gradients over the network. With NVLink one plan can
  serve both well: against the fastest single one a switch brings less on phoenix than on orion.
  "as_the_paper" gains more on phoenix, as the paper does, but over the training-optimal plan alone:
  its generation-optimal plan, with our time-sharing and rows, may even win.
- Decode is a roofline with a fixed time a layer for launches. Real steps without CUDA graphs may
  take longer, by a host's work that does not shrink with tensor ranks or batch; whether the paper's
  had graphs it does not tell. A longer generate phase weighs the training-optimal plan down.
- The baselines here have the planner's replicas, chunks, row sizes and time-sharing; PUZZLE-Base is
  a pipeline alone. "as_the_paper" is nearer to it, yet time-shared.
- The score phase makes the actor's log-probabilities, too, and counts as training's here.
- A switch is the busiest rank's bytes at the links' nominal bandwidths. Of 7B/350M and 33B/7B they
  stay within nodes, and take a small part of Table 3's seconds; what those hold beside the bytes
  (memory allocated, messages packed) it does not tell. 13B's layers do not divide by 16: balanced
  by time they lie otherwise than in ``reshard_cases``, their switches cross nodes and take longer
  than Table 3's, and "as_the_paper" says little of them.
- Nominal bandwidths are best cases: PCIe between sockets, and NVLink's ring of single and double
  bonds, give less, most of all to tensor ranks. Both clusters have the same A100 here.
- Memory holds fp32 main weights, moments and gradients unsharded, within 90% of 80 GB, and all of
  the configurations planned so fit ("distributed_optimizer" tells where not). This keeps
  generation-optimal single plans with many replicas out, which sharding or more memory would admit.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paper_cases import CLUSTERS, PAPER, TABLE_2
from paper_figures import FAMILIES, Figures, case_of, means_of

NAMES = tuple(one.name for one in TABLE_2)
DEFAULT = ("7B/7B", "33B/7B")
_FAMILY_TEXTS = {
    "all": "all plans",
    "no_replicas": "without replicas",
    "as_the_paper": "between the paper's two plans",
}


def table(found: Figures) -> Iterator[str]:
    """The figures in lines, beside the paper's."""
    for case in found["cases"]:
        yield from _case_lines(case)
    if len(found["cases"]) > 1:
        yield "In the mean over these: " + "; ".join(
            f"{_FAMILY_TEXTS[name]} {_speedups(found['mean'][name])}" for name in FAMILIES
        )
    paper = found["paper"]
    yield (
        f"The paper: time-sharing up to {paper['time_sharing_of_table_2_up_to']} (Table 2's "
        f"configurations), {paper['time_sharing_of_figure_10_up_to']} (Figure 10); the switch "
        f"{paper['switch_over_generation_optimal_in_the_mean']} over the generation-optimal plan, "
        f"{paper['switch_over_training_optimal_in_the_mean']} over the training-optimal one"
    )


def _case_lines(case: Figures) -> Iterator[str]:
    sharded = ", distributed optimizers" if case["distributed_optimizer"] else ""
    yield (
        f"{case['configuration']} on {case['cluster']}: {case['ranks']} ranks, {case['batch']} "
        f"prompts{sharded}; {case['num_plans']} plans"
    )
    yield f"  chosen: {_plan_line(case['chosen'])}"
    own = case["time_sharing"]
    for what, figures in (
        ("chosen", own["of_chosen"]),
        ("most", own["most"]),
        ("most with a microbatch for every rank", own["most_with_a_microbatch_a_rank"]),
        *(("", one) for one in own["plans"] if one["batch"] == case["batch"]),
    ):
        if figures is not None:
            yield f"  learn time-shared, {_sharing_line(what, figures)}"
    for name in FAMILIES:
        yield from _switch_lines(name, case["switch"][name])
    yield ""


def _plan_line(figures: Figures) -> str:
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in figures["phases"].items())
    return f"{figures['seconds']:.2f} s ({phases}), {figures['peak_gb']:.0f} GB: {figures['plan']}"


def _sharing_line(what: str, figures: Figures) -> str:
    plan = str(tuple(figures["plan"])) if "plan" in figures else ""
    batch = f"batch {figures['batch']}" if "batch" in figures else ""
    names = " ".join(filter(None, (what, plan, batch)))
    theory = figures["equation_1"]
    return (
        f"{names}, {figures['microbatches']} microbatches of {figures['row_tokens']}: "
        f"{figures['speedup']:.3f} (passes {figures['of_passes']:.3f}, Equation (1) "
        f"{'-' if theory is None else f'{theory:.3f}'})"
    )


def _switch_lines(name: str, figures: Figures | None) -> Iterator[str]:
    if figures is None:
        yield f"  {_FAMILY_TEXTS[name]}: none fits"
        return
    yield f"  {_FAMILY_TEXTS[name]}: {_speedups(figures['speedup'])}"
    for plan in ("best", *figures["speedup"]):
        yield f"    {plan.replace('_', ' ')}: {_plan_line(figures[plan])}"
    if figures.get("table_3_seconds") is not None:
        stated = "" if figures["plans_stated"] else ", its plans not stated"
        yield (
            f"    switch {figures['switch_seconds']:.2f} s, Table 3 "
            f"{figures['table_3_seconds']:.2f} s{stated}"
        )


def _speedups(speedup: Figures) -> str:
    return ", ".join(f"{over.replace('_', ' ')} {by:.2f}x" for over, by in speedup.items())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", nargs="+", choices=NAMES, default=DEFAULT, help=f"({' '.join(DEFAULT)})"
    )
    parser.add_argument("--cluster", nargs="+", choices=tuple(CLUSTERS), default=tuple(CLUSTERS))
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=(1024, 2048, 4096),
        metavar="TOKENS",
        help="of microbatches (1024 2048 4096); a response with its prompt has 512",
    )
    parser.add_argument(
        "--distributed-optimizer",
        action="store_true",
        help="optimizer state sharded over replicas (only where nothing fits otherwise)",
    )
    parser.add_argument("--table", action="store_true", help="in lines, not as JSON")
    parser.add_argument(
        "--figures", type=Path, nargs="+", help="JSON of earlier runs, in place of planning"
    )
    return parser.parse_args(arguments)


def _planned(options: argparse.Namespace) -> Iterator[Figures]:
    rows, sharded = sorted(options.rows), options.distributed_optimizer
    for configuration in TABLE_2:
        if configuration.name in options.case:
            for cluster in options.cluster:
                yield case_of(configuration, cluster, rows, sharded=sharded)


def _read(files: Sequence[Path]) -> Iterator[Figures]:
    for file in files:
        yield from json.loads(file.read_text())["cases"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    options = parse_arguments(arguments)
    cases = list(_read(options.figures) if options.figures else _planned(options))
    found: dict[str, Any] = {"cases": cases, "mean": means_of(cases), "paper": PAPER}
    if options.table:
        print("\n".join(table(found)))
        return
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
