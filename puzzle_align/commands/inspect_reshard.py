"""Show the traffic of a switch from one parallel plan to another, without moving weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from puzzle_align.commands.summary import save_file, say
from puzzle_align.config.job import JobConfig
from puzzle_align.config.parallel import with_layers
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.resolve import Engine, Job
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.main_weights import MainWeightHoldings
from puzzle_align.layout.model import BYTES_PER_PARAMETER
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.layout.weights import num_parameters
from puzzle_align.planning.picture.figures import Traffic, save_traffic
from puzzle_align.resharding.routing import Route, RoutingTable, lower_bound
from puzzle_align.resharding.switch import BUCKET_BYTES, main_weights, plan_switch
from puzzle_align.telemetry.text import num_bytes, quantity, ranks_text

_MOST_DRAWN = 16  # most ranks for which every link is shown
_SHADES = " .:-=+*#%@"  # by share of the busiest link


@dataclass(frozen=True)
class Switch:
    """Holdings of a model before and after; ``main``: the main weights as the source, if any."""

    before: Holdings
    after: Holdings
    dtype: str
    main: MainWeightHoldings | None = None


def show_reshard(
    switch: Switch, *, ranks_per_node: int, every_route: bool, png: Path | None
) -> None:
    """Print the traffic between ranks by link, beside the least that is possible.

    Args:
        ranks_per_node: decides which links are between nodes; these are summed separately.
        every_route: list all routes, not only the sums of links.
        png: also draw the links into this file.

    Raises:
        ValueError: one line, if the picture cannot be drawn.
    """
    before, after, dtype, main = switch.before, switch.after, switch.dtype, switch.main
    item = BYTES_PER_PARAMETER[dtype]
    table, schedule = plan_switch(before, after, dtype, ranks_per_node, main)
    size = num_parameters(before.model)
    say(f"{before.model.model_type}, {quantity(size)} parameters, {num_bytes(size * item)}")
    shards = "" if main is None else ", the optimizer's shards of main weights"
    say(f"from {before.plan}, {ranks_text(before.ranks)}{shards}")
    say(f"to   {after.plan}, {ranks_text(after.ranks)}")
    say(*_volumes(before, after, table, item, ranks_per_node))
    relayed = sum(route.relayed for route in table.routes)
    say(
        f"table: {len(table.routes)} routes, {relayed} of them relays, "
        f"in {len(schedule)} rounds of {num_bytes(BUCKET_BYTES)}"
    )
    say(*_links(table, sorted({*before.ranks, *after.ranks}), item))
    if every_route:
        say(*(f"  {_route(route)}" for route in table.routes))
    if png is not None:
        traffic = _traffic(before, after, table, item)
        save_file("--png", png, partial(save_traffic, traffic))


def switch_of_job(job: Job) -> Switch:
    """The switch of a job's actor from training to sampling plan; ValueError if nothing moves."""
    sampling = next((c for c in job.plan.contexts if c.workload == "generate"), None)
    if sampling is None or not job.plan.switches:
        cure = "give --from and --to"
        if sampling is not None:
            cure = f"set generation.parallel to another plan than the actor's, or {cure}"
        raise ValueError(f"nothing moves in this job: {cure}")
    trained = job.plan.trained[sampling.role]
    buckets = job.shards_sent(trained.role)
    main = None if buckets is None else main_weights(trained, buckets)
    before, after = (Holdings(c.model, c.plan, c.ranks) for c in (trained, sampling))
    return Switch(before, after, job.engine.options.dtype, main)


def switch_of_plans(
    config: JobConfig, engine: Engine, plans: tuple[ParallelPlan, ParallelPlan]
) -> Switch:
    """The switch between two plans for the stage's main model."""
    model = Resolution(config).model(config.main_role).spec
    first, second = (
        with_layers(plan, config, ParallelConfig(), model, train=number == 0)
        for number, plan in enumerate(plans)
    )
    before = Holdings(model, first, tuple(range(first.world_size)))
    ranks = tuple(range(second.world_size))
    ranks = ordered_ranks(before, second, ranks, engine.ranks_per_node)
    return Switch(before, Holdings(model, second, ranks), engine.options.dtype)


def _volumes(
    before: Holdings, after: Holdings, table: RoutingTable, item: int, ranks_per_node: int
) -> Iterator[str]:
    received, sent, least = table.received, table.sent, lower_bound(before, after)
    for name, sizes in (("received", received), ("sent", sent), ("lower bound", least)):
        most, total = max(sizes.values(), default=0), sum(sizes.values())
        yield f"{name}: {num_bytes(most * item)} a rank at most, {num_bytes(total * item)} in all"
    between = sum(
        size
        for (source, to), size in table.links.items()
        if source // ranks_per_node != to // ranks_per_node
    )
    yield f"between nodes of {ranks_per_node}: {num_bytes(between * item)}"


def _traffic(before: Holdings, after: Holdings, table: RoutingTable, item: int) -> Traffic:
    title = f"{before.model.model_type}, {quantity(num_parameters(before.model))} parameters\n"
    title += f"{before.plan} to {after.plan}"
    return Traffic(
        title,
        tuple(sorted({*before.ranks, *after.ranks})),
        {link: size * item for link, size in table.links.items()},
        {rank: size * item for rank, size in lower_bound(before, after).items()},
    )


def _links(table: RoutingTable, ranks: list[int], item: int) -> Iterator[str]:
    """Picture of all links between few ranks; list of the busiest links between many."""
    links = table.links
    most = max(links.values(), default=0)
    if len(ranks) > _MOST_DRAWN:
        for (source, to), size in links.most_common(_MOST_DRAWN):
            yield f"  {source} -> {to}: {num_bytes(size * item)}"
        yield f"  and {max(0, len(links) - _MOST_DRAWN)} links more, none of them busier"
        return
    width = max(len(num_bytes(size * item)) for size in (*links.values(), 0))
    yield f"  {'to':>6} " + " ".join(f"{to:>{width}}" for to in ranks)
    for source in ranks:
        sizes = [links[source, to] for to in ranks]
        cells = (f"{num_bytes(size * item) if size else '-':>{width}}" for size in sizes)
        shades = "".join(_SHADES[-(-size * (len(_SHADES) - 1) // (most or 1))] for size in sizes)
        yield f"  {f'from {source}':>6} " + " ".join(cells) + f"  |{shades}|"


def _route(route: Route) -> str:
    box = ", ".join(f"{start}:{end}" for start, end in route.box)
    text = f"{route.source} -> {', '.join(map(str, route.destinations))}: {route.tensor}[{box}]"
    return f"{text}, relayed" if route.relayed else text
