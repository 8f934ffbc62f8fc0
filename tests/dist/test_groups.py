"""Process groups on real ranks: who meets, in what order ranks lie, what outlives a model.

The limit of open files is raised to what a job's groups need; where it cannot be, one line.
"""

import ctypes
import datetime
import gc
import os
import resource
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.groups import groups_of
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.collectives import wait_for_all
from puzzle_align.runtime.groups.limits import allow_open_files, files_needed
from puzzle_align.runtime.groups.world import (
    Communicators,
    World,
    build_communicators,
    init_distributed,
    shutdown_distributed,
)
from puzzle_align.runtime.row_input import RowInput, to_device
from puzzle_align.stages.ppo import open_trainer
from tests.dist.preference_step import Case, assemble, run_case
from tests.dist.random_models import make_pairs, pair_loader, random_context, trainable
from tests.dist.spawn import run_alone, run_ranks
from tests.jobs import resolved
from tests.refusals import refusal
from tests.specs import LLAMA, TIED
from tools.one_model import accumulate_gradients, response_outputs

CPU = torch.device("cpu")
D2, D3 = ParallelPlan(data=2), ParallelPlan(data=3)


def _sums(rank: int, world_size: int) -> list[float]:
    """Sums over models whose ranks made 1, 2 and 0 groups before the last."""
    world = World(rank, world_size, CPU, datetime.timedelta(seconds=5))
    places = [(D2, [0, 1]), (D2, [3, 1]), (D3, [2, 1, 0])]
    found = [build_communicators(plan, world, ranks, trained=True) for plan, ranks in places]
    sums = []
    for one in found:
        if one is not None:
            value = torch.tensor([10.0**rank])
            dist.all_reduce(value, group=one.groups.dp)
            sums.append(float(value))
    return sums


def test_members_meet_however_many_groups_each_has_made() -> None:
    assert run_ranks(_sums, 4) == [
        [11.0, 111.0],
        [11.0, 1010.0, 111.0],
        [111.0],
        [1010.0],
    ]


def _first_collectives(rank: int, world_size: int) -> tuple[list, list]:
    """The ranks of every group that the rank has made, and of those it has talked in at once."""
    talked, all_reduce = [], dist.all_reduce

    def watched(tensor: torch.Tensor, *args: Any, group: Any, **named: Any) -> Any:
        talked.append(sorted(dist.get_process_group_ranks(group)))
        return all_reduce(tensor, *args, group=group, **named)

    dist.all_reduce = watched
    world = World(rank, world_size, CPU, datetime.timedelta(seconds=20))
    plan = ParallelPlan(pipeline=2, tensor=2)
    for _ in range(2):  # a second model has the first one's groups
        build_communicators(plan, world, trained=True)
    dist.all_reduce = all_reduce
    made = {group.ranks for group in groups_of(_two_models(plan), rank) if not group.is_link}
    return sorted(sorted(ranks) for ranks in made if len(ranks) > 1), sorted(talked)


def _two_models(plan: ParallelPlan) -> JobPlan:
    contexts = tuple(
        ContextPlan(
            role=role, workload="train", model=LLAMA, options=ModelOptions(), plan=plan,
            ranks=tuple(range(plan.world_size)),
        )
        for role in ("actor", "critic")
    )  # fmt: skip
    phase = Phase(name="learn", order="sequential", contexts=contexts)
    return JobPlan(stage="ppo", world_size=plan.world_size, phases=(phase,))


def test_every_group_talks_once_before_any_schedule() -> None:
    for made, talked in run_ranks(_first_collectives, 4):
        assert len(made) > 2 and made == talked


ORDERS = {2: ((1, 0),), 4: ((3, 2, 1, 0), (2, 0, 3, 1))}  # by the number of ranks
SEQUENCE = ParallelPlan(tensor=2, sequence_parallel=True)


def _in_all_orders(rank: int, world_size: int, case: Case) -> list[tuple]:
    return [
        run_case(rank, world_size, TIED, replace(case, ranks=ranks), 8)
        for ranks in (None, *ORDERS[world_size])
    ]


@pytest.mark.parametrize(
    "case",
    [
        Case(ParallelPlan(pipeline=2, data=2), overlap=True),
        Case(SEQUENCE),
        # Two kinds of groups at once, each of which the others have.
        pytest.param(Case(replace(SEQUENCE, pipeline=2)), marks=pytest.mark.slow),
        pytest.param(Case(ParallelPlan(data=2, tensor=2)), marks=pytest.mark.slow),
    ],
    ids=lambda case: str(case.plan),
)
def test_a_model_lies_on_its_ranks_in_any_order(case: Case) -> None:
    """Loss and gradients are bitwise those of the order of the ranks, each in its rank's place."""
    found, places = [], []
    for of_ranks in zip(*run_ranks(_in_all_orders, case.plan.world_size, case), strict=True):
        assert len({loss for loss, _ in of_ranks}) == 1
        found.append((of_ranks[0][0], assemble([s for _, shards in of_ranks for s in shards])))
        places.append([[(s.key, s.offset) for s in shards] for _, shards in of_ranks])
    for ranks, held in zip(ORDERS[case.plan.world_size], places[1:], strict=True):
        assert held != places[0]
        assert [held[rank] for rank in ranks] == places[0]
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        assert gradients.keys() == found[0][1].keys()
        for name, values in gradients.items():
            np.testing.assert_array_equal(values, found[0][1][name], err_msg=name)


LARGE = replace(LLAMA, vocab_size=32_000, hidden_size=256, head_dim=64)


def _build(plan: ParallelPlan, world: World, communicators: Communicators | None) -> Context:
    return random_context(
        LARGE, plan, world, seed=1, communicators=communicators, logprob_chunk_size=32
    )


def _rows(context: Context) -> list[RowInput]:
    loader = pair_loader(make_pairs(2, 64, seed=5), context, 2)
    return [to_device(m, "segments", CPU) for m in loader.batch(0).microbatches]


def _train(context: Context) -> None:
    """One optimizer step, whose state dies with this call."""
    optimizer = trainable(context, OptimizerConfig(lr=0.1, overlap_grad_reduce=True))
    accumulate_gradients(context, _rows(context), lambda _row, log_probs: log_probs.sum())
    optimizer.reduce_gradients()
    assert optimizer.step(0.1)[0]


def _memory() -> int:
    """Bytes that the process has, without what was freed and only kept for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def _released_and_rebuilt(rank: int, world_size: int, plan: ParallelPlan) -> tuple[float, float]:
    """Memory that a trained model takes and leaves taken, in its weights on this rank."""
    world = World(rank, world_size, CPU)
    shares = []
    for _ in range(2):  # the first time, there are things that are made only once
        before = _memory()
        context = _build(plan, world, build_communicators(plan, world, trained=True))
        first = response_outputs(context, _rows(context), 2, 2)
        _train(context)
        assert not torch.equal(response_outputs(context, _rows(context), 2, 2), first)
        gc.collect()
        weights = sum(p.nbytes for chunk in context.chunks for p in chunk.parameters())
        taken = _memory() - before
        held = [
            *(weakref.ref(p) for chunk in context.chunks for p in chunk.parameters()),
            *(weakref.ref(b.grad_data) for w in context.wrappers for b in list(w.buffers)),  # type: ignore[arg-type]
            *map(weakref.ref, context.modules),
        ]
        context.release()
        assert all(one() is None for one in held)
        shares.append((taken / weights, (_memory() - before) / weights))
        num_groups = len(dist.distributed_c10d._world.pg_names)
        again = _build(plan, world, Communicators(context.groups, context.links))
        assert len(dist.distributed_c10d._world.pg_names) == num_groups
        assert torch.equal(response_outputs(again, _rows(again), 2, 2), first)
        again.release()
    return shares[-1]


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(pipeline=2),
        pytest.param(SEQUENCE, marks=pytest.mark.slow),  # releases the same things, and no link
    ],
    ids=str,
)
def test_a_released_model_gives_its_memory_back_and_is_built_again_on_its_groups(
    plan: ParallelPlan,
) -> None:
    """Weights and gradients are two copies; what is left over is a small part of one."""
    for taken, left in run_ranks(_released_and_rebuilt, 2, plan):
        assert taken > 1.8
        assert left < 0.2


GROUPED = [
    *(f"actor.parallel.{n}_model_parallel_size=2" for n in ("pipeline", "tensor")),
    "generation.parallel.tensor_model_parallel_size=2",
]


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_groups_have_as_many_files_as_are_counted(tmp_path: Path, world_size: int) -> None:
    """On eight ranks there are groups of replicas besides, which are counted as the others are."""
    for counted, opened in run_ranks(_count, world_size, tmp_path):
        assert counted == opened > 0


def _count(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """Files that the groups of a job are said to open, and that they open."""
    world = World(rank, world_size, torch.device("cpu"))
    config = load_file(find_config("ppo_tiny"), [*GROUPED, f"output_dir={folder}"])
    wait_for_all(world.device)
    before = _num_sockets()
    trainer = open_trainer(resolved(config, world.size), world)
    wait_for_all(world.device)
    opened = _num_sockets() - before
    sizes = [len(g.ranks) for g in groups_of(trainer.plan, rank) if len(g.ranks) < world_size]
    return files_needed(world_size, 0, sizes) - files_needed(world_size, 0), opened


def _num_sockets() -> int:
    """Open files of this process that are in no folder: sockets, and what waits for them.

    But for those to processes of its own (Unix sockets, pipes), which call the reward functions.
    """
    children = {link for child in psutil.Process().children() for link in _links(child.pid)}
    to_children = len(psutil.Process().net_connections("unix"))
    links = [link for link in _links(os.getpid()) if not link.startswith("/")]
    return sum(not (link.startswith("pipe:") and link in children) for link in links) - to_children


def _links(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(file) for file in folder.iterdir() if file.is_symlink()]


def test_a_low_soft_limit_is_raised_and_a_low_hard_one_is_an_error() -> None:
    soft, message = run_alone(_under_limits)
    assert soft == 200
    assert message == (
        "this job has about 201 files open on a rank, but the limit is 200: raise the hard limit "
        "(ulimit -Hn; docker run --ulimit nofile=...; LimitNOFILE= of slurmd)"
    )


def _under_limits() -> tuple[int, str]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
    allow_open_files(200)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, refusal(lambda: allow_open_files(201))


def test_a_job_joins_under_a_soft_limit_that_its_groups_exceed() -> None:
    assert run_alone(_join) == 256


def _join() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 256))
    os.environ["WORLD_SIZE"] = "1"
    init_distributed("cpu", 60)
    shutdown_distributed()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
