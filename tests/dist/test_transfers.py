"""The transfers of whole steps of DPO on a 7B model under P2 T2 D2, without the eight ranks.

Every rank runs the trainer's own first step (``tests.dist.recorded``) with the real sizes: the
reference's forwards, the policy's forwards and backwards, the reduction of gradients, their norm,
the optimizer's update, the gathering of weights, the sum of metrics. Unlike on a GPU, layers are
Megatron-core's, weights are not loaded, AdamW is torch's, and links are not warmed up by a step.
"""

import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from puzzle_align.config.load import load_file
from puzzle_align.config.resolve import Job
from puzzle_align.planning.costs.flops import flop_costs
from puzzle_align.runtime.groups.world import World
from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.lookahead import lookahead_step
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import forward_only, one_f_one_b
from puzzle_align.schedules.validate import validate
from puzzle_align.stages import models
from puzzle_align.stages.dpo import DPOTrainer
from tests.dist.recorded import META, Record, Transfer, record_ranks
from tests.dist.spawn import run_alone
from tests.jobs import resolved

WORLD_SIZE, STRIDE = 8, 4  # STRIDE: ranks from one pipeline rank to the next
HIDDEN_SIZE = 4096
CONFIG = Path(__file__).parents[2] / "configs" / "dpo_7b.yaml"
PLAN = ("actor.parallel.pipeline_model_parallel_size=2", "engine.transformer_impl=local")
FEW_LAYERS = "actor.model.config.num_hidden_layers=4"  # all layers are alike
ONE_CHUNK = "engine.logprob_chunk_size=8192"  # of a row's logits: chunks transfer nothing
CASES = {
    # With all 128 pairs: the reference also runs the next batch, in bubbles.
    "time_shared": (FEW_LAYERS, ONE_CHUNK),
    "sequential": ("placement.reference=sequential", FEW_LAYERS),
    "every layer": (),  # the config as it is
}


class Step(NamedTuple):
    """Result of a rank's work."""

    start: int  # number of transfers before the step
    tokens: list[list[int]]  # of this rank's rows of this step, and of the next


def job(folder: str, *overrides: str) -> Job:
    few = "data.num_synthetic=300"  # pairs, for two batches and what is held out
    config = load_file(CONFIG, [f"output_dir={folder}", few, *PLAN, *overrides])
    return resolved(config, WORLD_SIZE, elsewhere=True)


class Unread:
    """Weights that are not loaded."""

    def fill(self, _chunk: object, _lent: object) -> None:
        pass


def record_steps(folder: str, *overrides: str) -> list[Record]:
    """Each rank's first step."""
    models.role_weights = lambda *_args: Unread()  # type: ignore[assignment]
    made = job(folder, *overrides)

    def work(rank: int, record: Record) -> Step:
        trainer = DPOTrainer(made, World(rank, WORLD_SIZE, META))
        start = len(record.transfers)
        trainer.train_step(0)
        batches = [trainer.batches.batch(step).microbatches for step in (0, 1)]
        return Step(start, [[row.layout.num_tokens for row in rows] for rows in batches])

    return record_ranks(work, WORLD_SIZE)


# The time-shared step has each transfer of the others.
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("sequential", "every layer")]


@pytest.fixture(scope="module", params=["time_shared", *MORE])
def case(request: pytest.FixtureRequest) -> "Case":
    overrides = CASES[request.param]
    with tempfile.TemporaryDirectory() as folder:
        records, made = run_alone(record_steps, folder, *overrides), job(folder, *overrides)
        num_layers = made.plan.phase("train").contexts[0].model.num_hidden_layers
        return Case(records, _proven_lists(made, records[0].result), num_layers // 2)


class Case(NamedTuple):
    """Records of all ranks, and the proven actions of both pipeline ranks."""

    records: list[Record]
    actions: list[list[Action]]
    num_layers: int  # of a pipeline rank

    @property
    def lists(self) -> list[list[Transfer]]:
        """Each rank's transfers, as lists that a test may change."""
        return [[*record.transfers] for record in self.records]

    @property
    def groups(self) -> dict[str, list[int]]:
        return {name: ranks for record in self.records for name, ranks in record.groups.items()}

    def step(self, rank: int) -> list[Transfer]:
        return self.records[rank].transfers[self.records[rank].result.start :]

    def proven(self, rank: int) -> list[Transfer]:
        """What the proven actions say that these are."""
        tokens = [length for rows in self.records[rank].result.tokens for length in rows]
        pipeline_rank, first = divmod(rank, STRIDE)
        sends = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        expected = []
        for action in self.actions[pipeline_rank]:
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                continue
            is_forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
            number = ("actor", "reference").index(action.model)  # in the order of making groups
            name = f"{'forward' if is_forward else 'backward'} {number} of {first},{first + STRIDE}"
            shape = (tokens[action.microbatch] // 2, 1, HIDDEN_SIZE)  # sequence-parallel halves
            kind = "send" if action.kind in sends else "recv"
            peer = (rank + STRIDE) % WORLD_SIZE
            expected.append(Transfer(f"{name} #0", kind, peer, shape, torch.bfloat16))
        return expected


def _proven_lists(job: Job, step: Step) -> list[list[Action]]:
    """Validated lists of the step, from the schedules alone."""
    phase = job.plan.phase("train")
    num_rows, num_next = map(len, step.tokens)
    frozen, trained = Program("reference", num_rows, backward=False), Program("actor", num_rows)
    if phase.order == "time_shared":
        row_tokens = job.config.packing.row_tokens
        costs = {
            c.role: flop_costs(
                c.model, c.plan, c.options, row_tokens=row_tokens, train=c.role == "actor"
            )
            for c in phase.contexts
        }
        made = lookahead_step(trained, "reference", num_next, num_ranks=2, costs=costs)
        validate(made.lists, made.programs)
        return made.lists
    first = lower(forward_only("reference", 2, num_rows), [frozen])
    then = lower(one_f_one_b("actor", 2, num_rows), [trained])
    validate(first, [frozen])
    validate(then, [trained])
    return [before + after for before, after in zip(first, then, strict=True)]


def check_proven(case: Case, lists: Sequence[Sequence[Transfer]]) -> None:
    """Each rank's sends and receives are those of the proven lists, in their order."""
    for rank, (record, transfers) in enumerate(zip(case.records, lists, strict=True)):
        issued = [one for one in transfers[record.result.start :] if one.peer is not None]
        for number, (one, proven) in enumerate(zip_longest(issued, case.proven(rank))):
            assert one == proven, f"rank {rank}, transfer {number}: {one}, not {proven}"


def check_pairs(lists: Sequence[Sequence[Transfer]]) -> None:
    """On every link the k-th receive has the shape and type of the k-th send."""
    ends: dict[tuple[str, int, int], tuple[list, list]] = {}  # sends and receives
    for rank, transfers in enumerate(lists):
        for one in transfers:
            if one.peer is not None:
                is_send = one.kind == "send"
                hop = (rank, one.peer) if is_send else (one.peer, rank)
                ends.setdefault((one.group, *hop), ([], []))[not is_send].append(one[3:])
    for link, (sent, received) in ends.items():
        for number, (send, receive) in enumerate(zip_longest(sent, received)):
            assert send == receive, f"link {link}, transfer {number}: {send} is {receive} there"


def check_groups(lists: Sequence[Sequence[Transfer]], groups: dict[str, list[int]]) -> None:
    """All ranks of a group issue the same collectives in the same order."""
    for name, ranks in groups.items():
        issued = [[t for t in lists[rank] if t.group == name and t.peer is None] for rank in ranks]
        for number, calls in enumerate(zip_longest(*issued)):
            assert len(set(calls)) == 1, f"group {name}, collective {number}: {calls}"


def check_progress(lists: Sequence[Sequence[Transfer]], groups: dict[str, list[int]]) -> None:
    """All ranks reach their end even if every transfer blocks until its other ends are there.

    With NCCL fewer wait: each communicator keeps its own order, and hosts go on.
    """
    at = [0] * len(lists)

    def here(rank: int) -> Transfer | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    def met(rank: int) -> Iterator[int]:
        """Ranks that wait for one another at a rank's transfer; none if one is elsewhere."""
        one = here(rank)
        if one is None:
            return
        if one.peer is not None:
            wanted = one.group, {"send": "recv", "recv": "send"}[one.kind], rank
            other = here(one.peer)
            if other is not None and other[:3] == wanted:
                yield from (rank, one.peer)
            return
        others = [here(other) for other in groups[one.group]]
        if all(o is not None and o.peer is None and o.group == one.group for o in others):
            yield from groups[one.group]

    while any(moved := [*met(rank)] for rank in range(len(lists))):
        for rank in moved:
            at[rank] += 1
    stuck = [f"rank {rank} at {one}" for rank in range(len(lists)) if (one := here(rank))]
    assert not stuck, f"these wait for ever: {stuck}"


def test_ranks_do_what_is_proven_agree_and_never_wait_for_ever(case: Case) -> None:
    lists, groups = case.lists, case.groups
    assert sorted(map(len, groups.values())).count(2) == 3 * 4 + 4 + 4 + 4  # links, tp, dp, pp
    assert len(case.proven(0)) >= 3 * 10  # of so many rows
    check_proven(case, lists)
    check_pairs(lists)
    check_groups(lists, groups)
    check_progress(lists, groups)


def swap(transfers: list[Transfer], first: int, second: int) -> None:
    assert transfers[first] != transfers[second]
    transfers[first], transfers[second] = transfers[second], transfers[first]


def test_every_check_finds_two_entries_that_are_swapped(case: Case) -> None:
    groups, start = case.groups, case.records[0].result.start

    def places(rank: int, group: str, kind: str, first: int = start) -> list[int]:
        transfers = case.records[rank].transfers
        return [n for n, t in enumerate(transfers) if n >= first and t[:2] == (group, kind)]

    # A receive before the send that it needs: each link still has its order.
    lists = case.lists
    sends = places(0, "forward 0 of 0,4 #0", "send")
    swap(lists[0], sends[0], places(0, "backward 0 of 0,4 #0", "recv")[0])
    check_pairs(lists)
    check_groups(lists, groups)
    with pytest.raises(AssertionError, match="rank 0, transfer"):
        check_proven(case, lists)
    with pytest.raises(AssertionError, match="these wait for ever.*rank 0 at .*backward 0 of 0,4"):
        check_progress(lists, groups)

    # On one link, what opened it and the first activations.
    lists, received = case.lists, places(4, "forward 0 of 0,4 #0", "recv", 0)
    swap(lists[4], received[0], received[1])
    check_groups(lists, groups)
    with pytest.raises(AssertionError, match="'forward 0 of 0,4 #0', 0, 4., transfer 0"):
        check_pairs(lists)

    # In one group, a gather and a scatter.
    lists, tensor = case.lists, "ranks 0,1 #0"
    swap(lists[0], places(0, tensor, "all_gather")[0], places(0, tensor, "reduce_scatter")[0])
    check_proven(case, lists)
    check_pairs(lists)
    with pytest.raises(AssertionError, match=f"group {tensor}, collective"):
        check_groups(lists, groups)


def test_every_layer_s_collectives_are_recorded(case: Case) -> None:
    """Two gathers and two scatters a layer and forward, and four and two in a backward."""
    actions, layers = case.actions[0], case.num_layers
    forwards = sum(action.kind is Kind.FORWARD for action in actions)
    backwards = sum(action.kind is Kind.BACKWARD for action in actions)
    tensor = [one.kind for one in case.step(0) if one.group == "ranks 0,1 #0"]
    # One more for the embedding: it is scattered, and its gradient is gathered.
    assert tensor.count("reduce_scatter") == 2 * layers * (forwards + backwards) + forwards
    assert tensor.count("all_gather") == layers * (2 * forwards + 4 * backwards) + backwards


def test_the_step_ends_with_the_optimizer_s_transfers(case: Case) -> None:
    """Gradients, partial ones of norms, their norm, the weights, the sum of metrics."""
    for rank in range(WORLD_SIZE):
        data = f"ranks {rank // 4 * 4 + rank % 2},{rank // 4 * 4 + rank % 2 + 2} #0"
        tensor = f"ranks {rank // 2 * 2},{rank // 2 * 2 + 1} #0"
        step = case.step(rank)
        first = [one.group == data for one in step].index(True)
        ends = [key for key, _ in groupby(one[:2] for one in step[first:] if one.peer is None)]
        reduced, gathered = (data, "reduce_scatter"), (data, "all_gather")
        norms, everyone = (tensor, "all_reduce"), ("0", "all_reduce")
        assert ends[-5:] == [reduced, norms, everyone, gathered, everyone]
        sizes = [sorted(prod(t.shape) for t in step if t[:2] == key) for key in (reduced, gathered)]
        assert sizes[0] == sizes[1]  # what is reduced is gathered
