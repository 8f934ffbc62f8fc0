"""The pure layout of weights against the chunks that Megatron-core builds: names and shapes."""

from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.weights import parameter_boxes
from puzzle_align.models.chunk import build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from tests.dist.chunk_runs import own_groups
from tests.dist.spawn import run_ranks
from tests.unit.test_weight_layout import MODELS

PLANS = (
    ParallelPlan(tensor=4, sequence_parallel=True),
    ParallelPlan(pipeline=4, pipeline_layers=(1, 2, 1, 1)),
    ParallelPlan(pipeline=2, tensor=2, pipeline_layers=(2, 3)),
    ParallelPlan(pipeline=2, tensor=2, virtual_pipeline=2, pipeline_layers=(2, 1, 1, 1)),
    ParallelPlan(pipeline=2, data=2, pipeline_layers=(4, 1)),
)


def test_names_and_shapes_are_those_that_are_built_in_their_order() -> None:
    built = run_ranks(_build, 4)
    for number, plan in enumerate(PLANS):
        for name, spec in MODELS.items():
            places = [rank[number, name] for rank in built]
            found = {place: shapes for own in places for place, shapes in own.items()}
            assert len(found) == plan.num_positions * plan.tensor
            for (position, tensor_rank), shapes in found.items():
                boxes = parameter_boxes(spec, plan, position, tensor_rank)
                own = [(p.name, p.shape) for p in boxes.values()]
                assert own == list(shapes.items()), (plan, name, position)


def _build(rank: int, _world_size: int) -> dict:
    """By plan and model, and by position and tensor rank: the shapes of this rank's parameters."""
    install_cpu_patches()
    found = {}
    for number, plan in enumerate(PLANS):
        groups = own_groups(plan, rank)
        for name, spec in MODELS.items():
            found[number, name] = {
                (chunk * plan.pipeline + groups.pp.rank(), groups.tp.rank()): {
                    parameter: tuple(value.shape)
                    for parameter, value in build_chunk(
                        spec, ModelOptions(), plan, groups, chunk=chunk
                    ).named_parameters()
                }
                for chunk in range(plan.virtual_pipeline)
            }
    return found
