"""Profiles of shipped tiny configs, declared by a roofline: no test waits for a measurement."""

from collections.abc import Sequence
from dataclasses import replace

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.resolution import Resolution
from puzzle_align.planning.costs.declared import Sizes, declared_profile
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.costs.profile import Profile
from puzzle_align.planning.iteration import Times
from puzzle_align.planning.search.space import Cluster, Space
from puzzle_align.stages.outlook import open_outlook
from puzzle_align.stages.to_plan import job_to_plan, resolution_to_plan
from tests.unit.planner_spaces import tool


def tiny_profile(job: JobConfig, rows: Sequence[int] = (512, 1024)) -> Profile:
    """Profile of a tiny config's models, as if they ran on a CPU with the job's kernels."""
    cases = tool("planner_cases")
    models = [model.spec for model in Resolution(job).all_models().values()]
    sizes = Sizes(tensors=(1, 2, 4), rows=tuple(rows), batches=(1, 8, 32))
    links = cases.links_of(200e9, 12e9)
    profile = declared_profile(models, cases.A100, links, ranks_per_node=4, sizes=sizes)
    options = replace(profile.options, dtype="fp32", attention="segments", transformer_impl="local")
    return replace(profile, hardware=replace(profile.hardware, device="cpu"), options=options)


def tiny_space(name: str, num_ranks: int, overrides: Sequence[str], profile: Profile) -> Space:
    """All plans of a shipped config on so many ranks."""
    job = load_file(find_config(name), overrides)
    resolution = resolution_to_plan(job, profile)
    to_plan, load = job_to_plan(resolution, profile), open_outlook(resolution.pinned()).load()
    times = Times(Measured(profile), load, to_plan.settings)
    return Space(to_plan, Cluster(num_ranks=num_ranks, ranks_per_node=4, memory_bytes=2**40), times)
