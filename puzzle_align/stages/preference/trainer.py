"""Training on preference data: a policy against a frozen reference, or a reward model."""

import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from puzzle_align.algos.preference import sorted_partners
from puzzle_align.config.resolve import Job
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import Batch, ExampleLoader
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.context import Context, freeze, make_trainable, mix_weights
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes, wait_for_all
from puzzle_align.runtime.groups.communicators import Communicators
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer, learning_rate
from puzzle_align.runtime.passes import response_outputs
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.stages.costs import job_costs
from puzzle_align.stages.data_view import data_view, plan_view
from puzzle_align.stages.divergence import Update
from puzzle_align.stages.flops import forward_flops
from puzzle_align.stages.prediction import counted, predicted_run
from puzzle_align.stages.preference.concurrent import Concurrent, StreamedReference
from puzzle_align.stages.preference.data import (
    PreferenceData,
    eval_loader,
    open_data,
    total_steps,
    train_loader,
)
from puzzle_align.stages.preference.kl_term import kl_term
from puzzle_align.stages.preference.objective import (
    CHOSEN,
    ExampleOutputs,
    Objective,
    objective_of,
)
from puzzle_align.stages.preference.placement import (
    Placement,
    RowLoss,
    Sequential,
    TimeShared,
    accumulate_against,
)
from puzzle_align.stages.preference.reference import (
    KeptTable,
    LiveReference,
    NoReference,
    Reference,
    TableReference,
    compute_table,
)
from puzzle_align.stages.preference.step_rows import StepRows
from puzzle_align.stages.setup import model_fingerprint, open_context
from puzzle_align.stages.tracing import Tracer, in_steps
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import StepStats


class PreferenceTrainer(Trainer):
    """Models, optimizer and data of one preference run, as one rank holds them."""

    def __init__(
        self,
        job: Job,
        world: World,
        communicators: Communicators | None = None,
    ) -> None:
        """Build everything. Collective over the world.

        Args:
            communicators: of a trained model that has some of the ranks; None: it has all.
        """
        self._job = job
        self.config = config = job.config
        self.world = world
        self.plan = plan = job.plan
        self._phase = plan.phase("train")
        (self._trained,) = self._phase.trained
        self._objective: Objective = objective_of(config)
        self._data: PreferenceData = open_data(job, world)
        loader = train_loader(config, self._data, plan_view(self._trained.plan, data_rank=0))
        self.num_steps = total_steps(config, loader)
        counts = counted(loader, self._phase)
        run = predicted_run(job_costs(config), self._phase, counts, self.num_steps)
        self._costs = run.costs
        self._tracer = Tracer(config, world, self._phase, in_steps(run))
        self._reference = self._open_reference()
        self.policy = open_context(job, self._trained, world, communicators)
        wait_for_all(world.device)  # some have more to read than others
        for chunk in self.policy.chunks:
            chunk.statistics = self._objective.statistics
        make_trainable(self.policy, config.optimizer)
        self.optimizer = Optimizer(self.policy, config.optimizer)
        self.models = {self.policy.role: Trained(self.policy, self.optimizer)}
        self._synced = self._follower()
        if self._synced is not None:
            self.models["reference"] = Trained(self._synced, None, is_frozen=True)
        self._train_steps = self._on_device(loader.seen_by(**data_view(self.policy)))
        self._eval_steps = None
        if self._data.held_out is not None:
            loader = eval_loader(config, self._data.held_out, self.policy)
            self._eval_steps = self._on_device(loader)
        self._placement = self._place()
        self._is_cold = self._phase.order == "time_shared" and world.device.type == "cuda"
        self._kl = kl_term(config, plan, self._contexts(), world.device)
        self._partners: torch.Tensor | None = None  # of the step's pairs, where the loss sorts
        self.num_skipped = 0
        self._num_tokens = 0  # trained on so far, as TRL counts them
        self.data_fingerprint = self._data.train.fingerprint

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Optimizer step ``step`` (from 0): metrics of the global batch, and the work done."""
        with self._tracer.step(step):
            return self._train_step(step)

    def _train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        started = time.monotonic()
        batch = self._train_steps.batch(step)
        shape = batch.num_examples, self._objective.num_values
        values = torch.zeros(shape, dtype=torch.float64, device=self.world.device)
        self.optimizer.zero_grad()
        length = self._mean_nll_length(self._data.train, batch.example_indices)
        kl = self._kl_of(self._train_steps, step)
        estimated = time.monotonic()
        loss = partial(self._loss, values=values, mean_nll_length=length, kl=kl)
        if self._is_cold:
            self._warm_up(step, loss)
        self._placement.accumulate_gradients(step, loss)
        self.optimizer.reduce_gradients()
        self._prepare(step + 1)
        lr = learning_rate(self.config.optimizer, step, self.num_steps)
        updated, grad_norm = self.optimizer.step(lr)
        self.num_skipped += not updated
        self._sync_reference(step)
        # A pair is on one replica: adding zeros puts the table together. The host waits once.
        metrics = self._objective.metrics(self.policy.sum_over_ranks(values).cpu())
        self.updates = [Update(self.policy.role, updated, metrics["loss"], grad_norm, {**metrics})]
        self._num_tokens = self._train_steps.tokens_seen(step)
        metrics |= {"num_tokens": self._num_tokens, "grad_norm": grad_norm, "learning_rate": lr}
        self._placement.end_step(step)
        return metrics, self._stats(batch, started, estimated)

    def _warm_up(self, step: int, loss: RowLoss) -> None:
        """Do a step's passes once, model after model, and forget what they give. Collective.

        Kernels and collectives that run for the first time are loaded, connected and given memory,
        for which the whole device may have to wait: here, and not among the transfers of a list in
        which two models take turns.
        """
        self._is_cold = False
        table = self._reference.log_probs(self._train_steps, step)
        accumulate_against(table, self.policy, self._train_steps.rows(step), loss, None)
        self.optimizer.reduce_gradients()
        self.optimizer.zero_grad()

    def _stats(self, batch: Batch, started: float, estimated: float) -> StepStats:
        """The work done, from when the step began and when its KL term was there."""
        ended, is_pair = time.monotonic(), self._data.train.num_responses > 1
        stats = StepStats(
            seconds=ended - started,
            num_pairs=batch.num_examples if is_pair else 0,
            num_responses=0 if is_pair else batch.num_examples,
            num_tokens=batch.num_tokens,
            num_row_tokens=batch.num_row_tokens,
            num_flops=self._flops(batch),
        )
        if self._kl is None:
            return stats
        return replace(stats, phases={"kl": estimated - started, "train": ended - estimated})

    def evaluate(self) -> dict[str, float] | None:
        """Metrics over the held-out pairs; None where there are none."""
        steps = self._eval_steps
        if steps is None:
            return None
        dataset = steps.dataset
        length = self._mean_nll_length(dataset, np.arange(len(dataset)))
        values = []
        for step in range(len(steps)):
            batch = steps.batch(step)
            reference = self._reference.log_probs(steps, step)
            outputs = response_outputs(
                self.policy, steps.rows(step), batch.num_examples, dataset.num_responses
            )
            if step + 1 < len(steps):
                steps.prepare(step + 1)
            lengths = dataset.num_predicted(batch.example_indices)
            labels = dataset.labels_of(batch.example_indices)
            lengths, labels = (copied(a, outputs.device) for a in (lengths, labels))
            kl = self._kl_of(steps, step)
            # Whole and the same on every rank: there is nothing to reduce.
            examples = ExampleOutputs(outputs, reference, lengths, labels, length, kl=kl)
            values.append(self._objective.losses(examples)[1])
        return {**self._objective.metrics(torch.cat(values).cpu()), "num_tokens": self._num_tokens}

    def _prepare(self, step: int) -> None:
        """Have a step's data made while the device is at work."""
        if step < self.num_steps:
            self._placement.prepare(step)
            if self._kl is not None:
                self._kl.prepare(self._train_steps.loader, step)

    def _flops(self, batch: Batch) -> float:
        """Those of a batch, wherever its reference forwards were run: maybe a step before."""
        layout, dataset = self.config.packing.row_layout, self._data.train
        # Mismatched responses are the batch's own, so that their passes cost as much.
        again = self._objective.sorts_batch or self._kl is not None
        passes = 4 if again else 3  # the backward's are two forwards'
        flops = passes * forward_flops(self._trained.model, dataset, layout, batch)
        if isinstance(self._reference, LiveReference | StreamedReference):
            passes = 1 if self._kl is None else 2
            flops += passes * forward_flops(self._reference.spec, dataset, layout, batch)
        return flops

    def _contexts(self) -> dict[str, Context]:
        """The models of this rank, by role."""
        found = {self.policy.role: self.policy}
        if isinstance(self._reference, LiveReference):
            found["reference"] = self._reference.context
        return found

    def _kl_of(self, steps: StepRows, step: int) -> float:
        """The KL divergence that a step's loss is against. Collective over the world."""
        return 0.0 if self._kl is None else self._kl.estimate(steps.loader, step)

    def _loss(
        self,
        row: RowInput,
        outputs: torch.Tensor,
        reference: torch.Tensor,
        *,
        values: torch.Tensor,
        mean_nll_length: float,
        kl: float,
    ) -> torch.Tensor:
        """One row's share of the mean over the global batch; notes its examples' values."""
        partners = None if self._partners is None else self._partners[row.examples]
        examples = ExampleOutputs(
            outputs, reference, row.lengths, row.labels, mean_nll_length, partners, kl
        )
        losses, of_row = self._objective.losses(examples)
        if self.policy.is_output_rank:
            values[row.examples] = of_row
        return losses.sum() / len(values)

    def _mean_nll_length(self, dataset: ExampleDataset, examples: np.ndarray) -> float:
        """Tokens of the chosen response's likelihood, in the mean over pairs of a data set."""
        length = dataset.num_predicted(examples)[:, CHOSEN].mean()
        if self._objective.tokens.predict_prompts:
            length += np.maximum(dataset.prompt_lengths[examples] - 1, 0).mean()
        return float(length)

    def _on_device(self, loader: ExampleLoader) -> StepRows:
        attention, head = self._trained.options.attention, self._trained.model.head
        return StepRows(loader, attention, self.world.device, head, self._objective.tokens)

    def _place(self) -> Placement:
        policy, reference, steps = self.policy, self._reference, self._train_steps
        if self._phase.order == "time_shared":
            assert isinstance(reference, LiveReference)
            context = reference.context
            return TimeShared(policy, context, steps, self.num_steps, self._costs, self._tracer)
        if isinstance(reference, StreamedReference):
            return Concurrent(policy, reference, steps, self.num_steps, self._tracer)
        prepare = self._sort if self._objective.sorts_batch else None
        return Sequential(policy, reference, steps, self._tracer, prepare)

    def _follower(self) -> Context | None:
        """The reference, where it is to follow the policy."""
        loss = self._job.reference_loss
        if loss is None or not loss.sync_ref_model:
            return None
        assert isinstance(self._reference, LiveReference)
        return self._reference.context

    def _sync_reference(self, step: int) -> None:
        """TR-DPO: the reference follows the policy, where it is time to."""
        loss = self._job.reference_loss
        if loss is None or self._synced is None or (step + 1) % loss.ref_model_sync_steps:
            return
        mix_weights(self._synced, self.policy, loss.ref_model_mixup_alpha)

    def _sort(self, step: int, reference: torch.Tensor) -> None:
        """Find every pair's partners, by a forward of the policy over the whole batch."""
        rows, batch = self._train_steps.rows(step), self._train_steps.batch(step)
        num_responses = self._data.train.num_responses
        outputs = response_outputs(self.policy, rows, batch.num_examples, num_responses)
        log_probs = outputs[0] if outputs.dim() == 3 else outputs
        self._partners = sorted_partners(log_probs, reference)

    def _open_reference(self) -> Reference | StreamedReference:
        device = self.world.device
        if "reference" not in self.plan.models:
            return NoReference(device)
        reference = self.plan.context("reference", "infer")
        if not self._phase.is_fed:
            return TableReference(self._tables(reference), device)
        if self._phase.order == "concurrent":
            return StreamedReference(reference, device)
        return self._live(reference)

    def _live(self, reference: ContextPlan) -> LiveReference:
        context = open_context(self._job, reference, self.world)
        wait_for_all(self.world.device)  # some have more to read than others
        freeze(context)
        return LiveReference(context, self._tracer)

    def _tables(self, reference: ContextPlan) -> dict[str, np.ndarray]:
        """Tables of all data sets, from disk where they are; else the model is built and let go."""
        live = None
        tables = {}
        fingerprint = from_rank_zero(lambda: model_fingerprint(self._job, reference))
        tail_weight = self._objective.tokens.tail_weight
        for dataset in self._data.datasets():
            kept = KeptTable(self._data.cache_folder, fingerprint, dataset, tail_weight)
            if not (from_rank_zero(kept.is_there) and all(on_other_nodes(kept.is_there))):
                live = live or self._live(reference)
                loader = eval_loader(self.config, dataset, live.context)
                write = partial(kept.write, compute_table(live, self._on_device(loader)))
                from_rank_zero(write)
                on_other_nodes(write)
            tables[dataset.fingerprint] = kept.opened()
        return tables
