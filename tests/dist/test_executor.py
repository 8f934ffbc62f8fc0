"""Several models in one list compute bit for bit what each computes alone, whatever the order."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.layout.model import LORA_TARGETS, LoraSpec, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import Context, freeze
from puzzle_align.runtime.executor import ModelRun, action_list, execute, schedule
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.row_input import Reading, RowInput, to_device
from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import schedule_for
from puzzle_align.schedules.timeline import Span
from puzzle_align.schedules.validate import validate
from tests.costs import uniform
from tests.dist.random_models import make_pairs, pair_loader, random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import LLAMA, TIED

Lists = list[list[Action]]
Runs = dict[str, ModelRun]

LARGE = replace(LLAMA, hidden_size=48, num_hidden_layers=8, head_dim=12)


@dataclass(frozen=True)
class Model:
    """A model under test; ``num_pairs`` of a batch make its number of microbatches.

    With ``entropies`` it is asked for these, too.
    """

    role: str
    spec: ModelSpec
    num_pairs: int
    train: bool = True
    chunks: int = 1
    entropies: bool = False


# Transfers of actor and reference are of one size: if they mixed, only their values would tell.
ACTOR = Model("actor", LLAMA, 14, entropies=True)
CRITIC = Model("critic", LARGE, 7)
REFERENCE = Model("reference", TIED, 10, train=False)
TWO, THREE = (ACTOR, CRITIC), (ACTOR, CRITIC, REFERENCE)
INTERLEAVED = (ACTOR, replace(CRITIC, chunks=2), replace(REFERENCE, chunks=2))
NUM_ORDERS = 3
CASES = {
    2: [(ParallelPlan(pipeline=2), INTERLEAVED)],
    4: [
        (ParallelPlan(pipeline=2, tensor=2, sequence_parallel=True), THREE),
        (ParallelPlan(pipeline=2, data=2), TWO),
    ],
}
# Others have each part of them.
SLOW = {
    2: [(ParallelPlan(pipeline=2), TWO), (ParallelPlan(pipeline=2), THREE)],
    4: [
        (ParallelPlan(pipeline=4), TWO),
        (ParallelPlan(pipeline=4), THREE),
        (ParallelPlan(pipeline=2, data=2), THREE),
    ],
}


@dataclass
class Placed:
    """A model on this rank, and what it has made since it was last asked."""

    model: Model
    context: Context
    optimizer: Optimizer | None
    loader: ExampleLoader
    made: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by batch, microbatch

    def rows(self, batch: int) -> list[RowInput]:
        device, reading = self.context.device, Reading(entropies=self.model.entropies)
        microbatches = self.loader.batch(batch).microbatches
        return [to_device(microbatch, "segments", device, reading) for microbatch in microbatches]

    def program(self, num_microbatches: int) -> Program:
        return Program(self.model.role, num_microbatches, self.model.chunks, self.model.train)

    def run(self, batch: int = 0) -> ModelRun:
        rows = self.rows(batch)

        def finish(microbatch: int, output: torch.Tensor) -> torch.Tensor | None:
            assert output.dim() == 1 + self.model.entropies
            self.made[batch, microbatch] = output.detach().clone()
            return output.square().sum() / 100 if self.model.train else None

        return ModelRun(self.context, rows, finish, self.model.train)

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs (on the last pipeline rank) and reduced gradients since the last."""
        assert all(chunk.decoder.input_tensor is None for chunk in self.context.chunks)
        found = {f"output {key}": values for key, values in self.made.items()}
        self.made = {}
        if self.optimizer is not None:
            self.optimizer.reduce_gradients()
            for number, chunk in enumerate(self.context.chunks):
                for name, parameter in chunk.named_parameters():
                    found[f"{number}.{name}"] = parameter.main_grad.clone()
            self.optimizer.zero_grad()
        return found


def place(model: Model, plan: ParallelPlan, world: World) -> Placed:
    plan = replace(plan, virtual_pipeline=model.chunks)
    seed = sum(model.role.encode())
    context = random_context(
        model.spec,
        plan,
        world,
        seed=seed,
        role=model.role,
        trained=model.train,
        logprob_chunk_size=7,
    )
    optimizer = None
    if model.train:
        optimizer = trainable(context, OptimizerConfig(overlap_grad_reduce=plan.data > 1))
    else:
        freeze(context)
    pairs = make_pairs(4 * model.num_pairs, model.spec.vocab_size, seed)
    return Placed(model, context, optimizer, pair_loader(pairs, context, model.num_pairs))


def own_lists(program: Program, num_ranks: int) -> Lists:
    """A model's own schedule, or the forwards of its windows."""
    if program.windows is None:
        return schedule_for(program, num_ranks)
    return [
        [Action(program.model, Kind.FORWARD, number, 0) for number in program.microbatches(rank)]
        for rank in range(num_ranks)
    ]


def random_merge(programs: Sequence[Program], num_ranks: int, rng: random.Random) -> Lists:
    """All models' own schedules, merged in an order in which they can happen."""
    graph = Dependencies(programs, num_ranks)
    left = {(p.model, r): own_lists(p, num_ranks)[r] for p in programs for r in range(num_ranks)}
    merged: Lists = [[] for _ in range(num_ranks)]
    done: set[Event] = set()
    weights = {key: rng.random() for key in left}  # some models hurry on some ranks
    while any(left.values()):
        able = [
            (model, rank)
            for (model, rank), actions in left.items()
            if actions and done.issuperset(graph.of(actions[0], rank))
        ]
        model, rank = rng.choices(able, [weights[key] for key in able])[0]
        action = left[model, rank].pop(0)
        merged[rank].append(action)
        done.add(graph.event(action, rank))
    return merged


def random_costs(programs: Sequence[Program], num_ranks: int, rng: random.Random) -> Costs:
    return {
        p.model: uniform(
            num_ranks * p.num_chunks, size := rng.uniform(1, 5), 2 * size if p.backward else None
        )
        for p in programs
    }


def run_together(runs: Runs, costs: Costs | None = None) -> None:
    execute(action_list(runs, costs), runs)


def ways(programs: Sequence[Program], num_ranks: int) -> Iterator[Callable[[Runs], None]]:
    """Ways to run all models together: as ``action_list`` orders them, and in any other order."""
    yield run_together
    costs = random_costs(programs, num_ranks, random.Random(num_ranks))
    yield lambda runs: run_together(runs, costs)
    for lists in orders(programs, num_ranks):
        yield lambda runs, lists=lists: execute(lists[runs["actor"].context.pipeline_rank], runs)


def orders(programs: Sequence[Program], num_ranks: int) -> Iterator[Lists]:
    """Lowered lists of all models, each another order."""
    rng = random.Random(num_ranks)
    for _ in range(NUM_ORDERS):
        lists = random_merge(programs, num_ranks, rng)
        lowered = lower(lists, programs)
        validate(lowered, programs)
        yield lowered


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def compare_orders(rank: int, world_size: int, cases: list) -> list[int]:
    """Raises where an order gives other bits than the models alone; how much was compared."""
    world = World(rank, world_size, torch.device("cpu"))
    compared = []
    for plan, models in cases:
        placed = {model.role: place(model, plan, world) for model in models}
        truth, programs = {}, []
        for role, one in placed.items():
            run = one.run()
            run_together({role: run})
            truth[role] = one.results()
            programs.append(one.program(len(run.rows)))
        assert len({program.num_microbatches for program in programs}) > 1
        for run_all in ways(programs, plan.pipeline):
            runs = {role: one.run() for role, one in placed.items()}
            run_all(runs)
            for role, one in placed.items():
                check_equal(one.results(), truth[role])
                assert not runs[role].inputs and not runs[role].outputs
                assert not runs[role].gradients and not runs[role].waiting
        compared.append(sum(map(len, truth.values())))
    return compared


@pytest.mark.parametrize("world_size", CASES)
def test_time_shared_models_are_bitwise_themselves(world_size: int) -> None:
    by_rank = run_ranks(compare_orders, world_size, CASES[world_size])
    assert all(count > 10 for counts in by_rank for count in counts)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SLOW)
def test_and_so_are_others(world_size: int) -> None:
    by_rank = run_ranks(compare_orders, world_size, SLOW[world_size])
    assert all(count > 10 for counts in by_rank for count in counts)


NUM_BATCHES = 3


def lookahead_programs(
    sizes: Sequence[int], num_ranks: int, rng: random.Random
) -> Iterator[list[Program]]:
    """Training and a lookahead model beside it, for every batch; its ranks as far as they like.

    ``sizes`` are the microbatches of all batches. A rank is never behind those after it.
    """
    done = (0,) * num_ranks
    for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
        ahead = sorted((rng.randint(0, following) for _ in range(num_ranks)), reverse=True)
        windows = tuple(range(d, size + a) for d, a in zip(done, ahead, strict=True))
        frozen = Program("reference", size + max(ahead), backward=False, windows=windows)
        yield [Program("actor", size), frozen]
        done = tuple(ahead)


def compare_lookahead(rank: int, world_size: int) -> int:
    """A lookahead model over three lists beside three batches; most inputs held at once."""
    world = World(rank, world_size, torch.device("cpu"))
    plan = ParallelPlan(pipeline=world_size)
    actor, reference = (place(model, plan, world) for model in (ACTOR, REFERENCE))
    reference.loader = actor.loader
    truth, made = [], {}
    for batch in range(NUM_BATCHES):
        for one in (reference, actor):
            run_together({one.model.role: one.run(batch)})
        truth.append(actor.results())
        made |= reference.results()
    sizes = [len(actor.rows(batch)) for batch in range(NUM_BATCHES)]
    held = 0
    for seed in range(NUM_ORDERS):
        held = max(held, run_lookahead(actor, reference, sizes, truth, random.Random(seed)))
        check_equal(reference.results(), made)
    return held


def run_lookahead(
    actor: Placed,
    reference: Placed,
    sizes: Sequence[int],
    truth: list[dict[str, torch.Tensor]],
    rng: random.Random,
) -> int:
    """Check the actor's results in every batch; the most inputs held between two lists."""
    batch, held = 0, 0

    def finish(microbatch: int, log_probs: torch.Tensor) -> None:
        ahead = microbatch >= sizes[batch]
        place = microbatch - sizes[batch] if ahead else microbatch
        reference.made[batch + ahead, place] = log_probs.clone()

    frozen = ModelRun(reference.context, reference.rows(0), finish, train=False)
    num_ranks = actor.context.plan.pipeline
    for programs in lookahead_programs(sizes, num_ranks, rng):
        if batch + 1 < len(sizes):
            frozen.rows = [*frozen.rows, *reference.rows(batch + 1)]
        lists = lower(random_merge(programs, num_ranks, rng), programs)
        validate(lists, programs)
        runs = {"actor": actor.run(batch), "reference": frozen}
        execute(lists[actor.context.pipeline_rank], runs)
        check_equal(actor.results(), truth[batch])
        assert not frozen.waiting
        held = max(held, len(frozen.inputs))
        frozen.advance(sizes[batch])
        batch += 1
    assert not frozen.inputs and not frozen.rows
    return held


# The second rank does what a third and fourth do.
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_lookahead_model_goes_on_from_list_to_list(world_size: int) -> None:
    held = run_ranks(compare_lookahead, world_size)
    assert held[0] == 0  # nobody sends to the first
    assert all(held[1:]), "no order put a microbatch off to the next list"


LONG_S = 1.5
NAP_S = 2.5  # a busy machine may start the other rank's clock late


def record(rank: int, world_size: int) -> tuple[list[Span], list[Action]]:
    """Spans of a pass in which the first rank sleeps in every forward."""
    world = World(rank, world_size, torch.device("cpu"))
    actor = place(replace(ACTOR, num_pairs=5), ParallelPlan(pipeline=world_size), world)

    def nap(*_: Any) -> None:
        time.sleep(NAP_S if rank == 0 else 0)

    run = actor.run()
    lists = schedule((actor.program(len(run.rows)),), world_size)
    execute(lists[rank], {"actor": run})  # what is done only once is not measured
    actor.context.chunks[0].register_forward_pre_hook(nap)
    spans: list[Span] = []
    execute(lists[rank], {"actor": actor.run()}, spans)
    return spans, [action for action in lists[rank] if action.kind.is_compute]


def test_spans_are_of_computation_without_its_waiting() -> None:
    for rank, (spans, actions) in enumerate(run_ranks(record, 2)):
        assert len(actions) > 2  # forwards and backwards of several microbatches
        assert [span.action for span in spans] == actions
        moments = [moment for span in spans for moment in (span.start, span.end)]
        assert moments == sorted(moments) and moments[0] >= 0
        for span in spans:
            naps = rank == 0 and span.action.kind is Kind.FORWARD
            assert (span.end - span.start > LONG_S) == naps, span
        # Both clocks have one start: the second rank's input is there after the first one's nap.
        assert (moments[0] > LONG_S) == (rank == 1)


LORA = LoraSpec(r=4, lora_alpha=8.0, target_modules=LORA_TARGETS, lora_dropout=0.5)
DROPPING = replace(ACTOR, spec=replace(LLAMA, lora=LORA))


def drop(rank: int, world_size: int) -> list[torch.Tensor]:
    """Outputs of a pass that scores, one that trains, and two more that score."""
    world = World(rank, world_size, torch.device("cpu"))
    actor = place(DROPPING, ParallelPlan(), world)
    found = []
    for train in (False, True, False, False):
        actor.model = replace(actor.model, train=train)
        run = actor.run()
        execute(action_list({"actor": run}), {"actor": run})
        found.append(torch.cat([*actor.made.values()], dim=-1))
    return found


def test_adapters_drop_inputs_only_in_training() -> None:
    [(first, trained, second, third)] = run_ranks(drop, 1)
    assert torch.equal(first, second) and torch.equal(second, third)
    assert (trained - first).abs().max() > 0.1


def drop_apart(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Outputs of a row that is every microbatch of both replicas, trained from several seeds."""
    world = World(rank, world_size, torch.device("cpu"))
    actor, found = place(DROPPING, ParallelPlan(data=world_size), world), {}
    actor.loader = actor.loader.seen_by(DataView())
    row = actor.rows(0)[0]
    for name, role, seed in (
        ("first", "actor", (1, 1)),
        ("other step", "actor", (1, 2)),
        ("other job", "actor", (2, 1)),
        ("other role", "critic", (1, 1)),
        ("again", "actor", (1, 1)),
    ):
        run = actor.run()
        run.context, run.rows, run.seed = replace(run.context, role=role), [row, row], seed
        execute(action_list({role: run}), {role: run})
        found |= {f"{name}, {microbatch}": made for (_, microbatch), made in actor.made.items()}
    return found


def test_what_is_dropped_depends_on_seed_step_role_replica_and_microbatch() -> None:
    by_rank = run_ranks(drop_apart, 2)
    for found in by_rank:
        for microbatch in "01":
            assert torch.equal(found.pop(f"again, {microbatch}"), found[f"first, {microbatch}"])
    outputs = [made for found in by_rank for made in found.values()]
    assert len(outputs) == 2 * 4 * 2
    for number, made in enumerate(outputs):
        assert all((made - other).abs().max() > 0.01 for other in outputs[:number])


def seeds_of_forwards(
    rank: int, world_size: int, plan: ParallelPlan, chunks: int
) -> tuple[list[int], list[bytes], int]:
    """Seeds of forwards, their states for what tensor ranks have apart, and the microbatches."""
    world = World(rank, world_size, torch.device("cpu"))
    actor = place(replace(DROPPING, chunks=chunks), plan, world)
    seeds, apart = [], []

    def note(*_: Any) -> None:
        seeds.append(torch.initial_seed())
        state = get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        apart.append(state.numpy().tobytes())

    for chunk in actor.context.chunks:
        chunk.register_forward_pre_hook(note)
    run = replace(actor.run(), seed=(1, 1))
    execute(action_list({"actor": run}), {"actor": run})
    return seeds, apart, len(run.rows)


def test_no_two_chunks_of_a_microbatch_drop_alike() -> None:
    plan = ParallelPlan(pipeline=2)
    (first, _, number), (second, _, _) = run_ranks(seeds_of_forwards, 2, plan, 2)
    assert len({*first, *second}) == len([*first, *second]) == 2 * 2 * number


def test_tensor_ranks_drop_alike_only_where_they_have_the_same() -> None:
    (first, one, number), (second, other, _) = run_ranks(
        seeds_of_forwards, 2, ParallelPlan(tensor=2), 1
    )
    assert first == second and len({*first}) == number
    assert len({*one, *other}) == 2 * number


def fail(rank: int, world_size: int) -> list[str]:
    """Notes of an error that was raised for the second microbatch."""
    world = World(rank, world_size, torch.device("cpu"))
    actor = place(ACTOR, ParallelPlan(), world)
    run = actor.run()

    def finish(microbatch: int, log_probs: torch.Tensor) -> torch.Tensor:
        if microbatch == 1:
            raise FloatingPointError("not a number")
        return log_probs.sum()

    run.finish = finish
    lists = schedule((actor.program(len(run.rows)),), world_size)
    with pytest.raises(FloatingPointError, match="^not a number") as raised:
        execute(lists[0], {"actor": run})
    return raised.value.__notes__


def test_an_error_keeps_its_type_and_names_its_action() -> None:
    [[note]] = run_ranks(fail, 1)
    assert note.startswith("in action actor:F1.0 (3 of ")
