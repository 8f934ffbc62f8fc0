"""The reference on ranks of its own, a batch ahead of the policy.

While the policy trains on a batch, the reference's ranks run the next one and hand its
log-probabilities over at the step's end, each straight to the ranks whose loss is against it: the
policy waits only where the reference is the slower one. All ranks go through the same training loop
and meet at the end of every step, so nothing is under way between two steps: a stop or a checkpoint
finds no batch half run, and a resumed run starts with the log-probabilities of its first step.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from puzzle_align.config.resolve import Job
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.context import Context, freeze
from puzzle_align.runtime.exchange import exchange
from puzzle_align.runtime.groups.collectives import wait_for_all
from puzzle_align.runtime.groups.communicators import Communicators, build_communicators
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.costs import job_costs
from puzzle_align.stages.data_view import data_view
from puzzle_align.stages.prediction import counted, predicted_run
from puzzle_align.stages.preference.data import eval_loader, open_data, total_steps, train_loader
from puzzle_align.stages.preference.kl_term import kl_term
from puzzle_align.stages.preference.objective import objective_of
from puzzle_align.stages.preference.placement import RowLoss, accumulate_against
from puzzle_align.stages.preference.reference import LiveReference
from puzzle_align.stages.preference.step_rows import StepRows
from puzzle_align.stages.setup import open_context
from puzzle_align.stages.tracing import Tracer, in_steps
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import StepStats


def connect(contexts: Iterable[ContextPlan], world: World) -> Communicators:
    """This rank's part of models that are placed side by side. Collective over the world.

    All are connected before the first is built, so that no rank waits in here for another's
    weights.
    """
    found = [
        build_communicators(c.plan, world, c.ranks, trained=c.workload == "train") for c in contexts
    ]
    (own,) = [communicators for communicators in found if communicators is not None]
    return own


def hand_over(
    reference: ContextPlan,
    steps: StepRows,
    step: int,
    *,
    held: Mapping[int, np.ndarray],
    wanted: Sequence[int],
) -> dict[int, np.ndarray]:
    """The reference's log-probabilities of pairs of a step, float64 [1, K] by pair of the batch.

    Collective over the world.

    Args:
        held: of the pairs whose output rank in the reference is this one.
        wanted: the pairs that this rank asks for.
    """
    owners = steps.data_ranks(step, reference.plan)
    output_ranks = np.array([reference.output_rank(d) for d in range(reference.plan.data)])
    return exchange(
        held,
        wanted,
        sources=output_ranks[owners],
        lengths=np.ones_like(owners),
        num_columns=steps.dataset.num_responses,
    )


class StreamedReference:
    """The reference as the policy's ranks see it: what its ranks hand over.

    Steps are asked for in the order in which ``ReferenceTrainer`` runs them.
    """

    def __init__(self, reference: ContextPlan, device: torch.device) -> None:
        self.spec = reference.model
        self._plan = reference
        self._device = device

    def log_probs(self, steps: StepRows, step: int) -> torch.Tensor:
        """Those of a step's B pairs, float64 [B, K]. Collective over the world."""
        return self.log_probs_of(range(steps.batch(step).num_examples), steps, step)

    def log_probs_of(self, pairs: Sequence[int], steps: StepRows, step: int) -> torch.Tensor:
        """As ``log_probs``, of these pairs of the batch; NaN for the others."""
        shape = (steps.batch(step).num_examples, steps.dataset.num_responses)
        table = np.full(shape, np.nan)
        for pair, values in hand_over(self._plan, steps, step, held={}, wanted=pairs).items():
            table[pair] = values[0]
        return copied(table, self._device)


class Concurrent:
    """The reference's forwards of the next batch, on other ranks, while the policy trains."""

    def __init__(
        self,
        policy: Context,
        reference: StreamedReference,
        steps: StepRows,
        num_steps: int,
        tracer: Tracer,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._steps = steps
        self._num_steps = num_steps
        self._tracer = tracer
        self._ahead: dict[int, torch.Tensor] = {}  # by step; at most one

    def accumulate_gradients(self, step: int, loss: RowLoss) -> None:
        """See ``Placement``."""
        table = self._ahead.pop(step, None)
        if table is None:  # a run's first step
            table = self._log_probs(step)
        spans = self._tracer.spans(self._policy.role)
        accumulate_against(table, self._policy, self._steps.rows(step), loss, spans)

    def prepare(self, step: int) -> None:
        """See ``Placement``."""
        self._steps.prepare(step)

    def end_step(self, step: int) -> None:
        """Take over the next step's log-probabilities. Collective over the world."""
        if step + 1 < self._num_steps:
            self._ahead[step + 1] = self._log_probs(step + 1)

    def _log_probs(self, step: int) -> torch.Tensor:
        """Those that this rank's loss is against."""
        has_loss = self._policy.pipeline_rank == self._policy.plan.pipeline - 1
        pairs = self._steps.own_examples(step) if has_loss else ()
        return self._reference.log_probs_of(pairs, self._steps, step)


class ReferenceTrainer(Trainer):
    """The part in the training loop of a rank that holds the reference and no policy."""

    def __init__(self, job: Job, world: World, communicators: Communicators) -> None:
        """Build everything. Collective over the world."""
        config, plan = job.config, job.plan
        self.plan = plan
        self.models = {}
        data = open_data(job, world)
        phase, reference = plan.phase("train"), plan.context("reference", "infer")
        self._reference_plan = reference
        context = open_context(job, reference, world, communicators)
        wait_for_all(world.device)  # as the policy's ranks do
        freeze(context)

        def on_device(loader: ExampleLoader) -> StepRows:
            tokens = objective_of(config).tokens
            return StepRows(loader, reference.options.attention, world.device, tokens=tokens)

        loader = train_loader(config, data, data_view(context))
        self.num_steps = total_steps(config, loader)
        self.num_skipped = 0
        self.data_fingerprint = data.train.fingerprint
        run = predicted_run(job_costs(config), phase, counted(loader, phase), self.num_steps)
        self._tracer = Tracer(config, world, phase, in_steps(run))
        self._reference = LiveReference(context, self._tracer)
        self._train_steps = on_device(loader)
        self._eval_steps = None
        if data.held_out is not None:
            self._eval_steps = on_device(eval_loader(config, data.held_out, context))
        self._handed_over: int | None = None  # the next step, if the policy has it
        self._kl = kl_term(config, plan, {"reference": context}, world.device)

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Run the reference over the batch of the step after ``step``; nothing to report."""
        with self._tracer.step(step):
            self._estimate_kl(self._train_steps, step)
            if self._handed_over != step:
                self._hand_over(self._train_steps, step)
            if step + 1 < self.num_steps:
                self._hand_over(self._train_steps, step + 1)
                self._handed_over = step + 1
        return {}, StepStats()

    def evaluate(self) -> None:
        """Run the reference over the held-out data, ahead of the policy where the loss lets it."""
        if self._eval_steps is not None:
            for step in range(len(self._eval_steps)):
                self._hand_over(self._eval_steps, step)
                self._estimate_kl(self._eval_steps, step)

    def _estimate_kl(self, steps: StepRows, step: int) -> None:
        """The reference's part of the KL term, where the loss has one."""
        if self._kl is not None:
            self._kl.estimate(steps.loader, step)

    def _prepare(self, steps: StepRows, step: int) -> None:
        """Have made what comes after a step's forwards, while the device is at work on them."""
        if step + 1 < (self.num_steps if steps is self._train_steps else len(steps)):
            steps.prepare(step + 1)
        if self._kl is not None:
            self._kl.prepare(steps.loader, step)

    def _hand_over(self, steps: StepRows, step: int) -> None:
        launched = self._reference.own_log_probs(steps, step)
        self._prepare(steps, step)
        made, held = launched.cpu().numpy(), {}
        if self._reference.context.is_output_rank:
            held = {pair: made[pair : pair + 1] for pair in steps.own_examples(step)}
        hand_over(self._reference_plan, steps, step, held=held, wanted=())
