"""Base of the trainers on preference data; each stage's module defines its step.

Every rank has a trainer and makes the same calls, also a rank with only the reference:
``runtime.phases`` runs the contexts that the rank holds.
"""

import time
from dataclasses import replace

import numpy as np
import torch

from puzzle_align.algos.preference import sorted_partners
from puzzle_align.config.resolve import Job
from puzzle_align.config.sections.optimizer import learning_rate
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import Batch, DataView, ExampleLoader, plan_view
from puzzle_align.data.packing import prompt_copies
from puzzle_align.layout.flops import (
    attention_flops,
    backward_of_matrices,
    flops_per_token,
    head_flops_per_token,
)
from puzzle_align.layout.model import ModelSpec
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.batches import DataBatches, data_view
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.columns import Table
from puzzle_align.runtime.context import mix_weights
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.phases import PhaseRunner
from puzzle_align.runtime.row_input import Comparisons
from puzzle_align.stages.costs import costs_everywhere, counted, predicted_run
from puzzle_align.stages.divergence import Update
from puzzle_align.stages.models import open_models
from puzzle_align.stages.preference.data import eval_loader, open_data, total_steps, train_loader
from puzzle_align.stages.preference.objective import (
    ExampleLoss,
    ExampleOutputs,
    Objective,
    objective_of,
    reference_column,
    split,
)
from puzzle_align.stages.preference.reference_table import open_tables
from puzzle_align.stages.tracing import Tracer, in_steps
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import StepStats


class PreferenceTrainer(Trainer):
    """Trainer of a preference run on one rank: its models, optimizer and data."""

    def __init__(self, job: Job, world: World) -> None:
        """Build everything. Collective over the world.

        Raises:
            ValueError: one line, for bad data, weights or a tokenizer.
        """
        self.job, self.world = job, world
        self.config, self.plan = config, plan = job.config, job.plan
        self.phase = plan.phase("train")
        (self.trained,) = self.phase.trained
        self.objective: Objective = objective_of(config)
        self.data = open_data(job)
        self.data_fingerprint = self.data.train.fingerprint
        loader = train_loader(config, self.data, plan_view(self.trained.plan))
        self.num_steps = total_steps(config, loader)
        self.num_skipped = 0
        self._num_tokens = 0  # trained on so far, counted as in TRL
        tables = None
        if any(phase.name == "precompute" for phase in plan.phases):
            tables, self.seconds_before = open_tables(job, world, self.data, self.objective.reading)
        costs = costs_everywhere(config)
        run = predicted_run(costs, self.phase, counted(loader, self.phase), self.num_steps)
        self.tracer = tracer = Tracer(config, world, self.phase, in_steps(run))
        opened = open_models(job, world)
        self.run = PhaseRunner(
            opened.contexts,
            opened.optimizers,
            world.device,
            seed=job.config.seed,
            costs=costs.of,
            reading=lambda _: self.objective.reading,
            spans=lambda phase, name: tracer.spans(name) if phase is self.phase else None,
        )
        self.policy = opened.contexts.get((self.trained.role, "train"))
        for chunk in self.policy.chunks if self.policy else ():
            chunk.statistics = self.objective.statistics
        self.models = opened.trained
        loss = job.config.reference_loss
        if self.policy is not None and loss is not None and loss.sync_ref_model:
            reference = opened.contexts["reference", "infer"]
            self.models["reference"] = Trained(reference, None, is_frozen=True)
        self.batches = self._batches(loader.seen_by(self._view()))
        self._held_out: DataBatches | None = None
        if self.data.eval is not None:
            self._held_out = self._batches(eval_loader(config, self.data.eval, self._view()))
        self.run.open_feed(self.phase, self.batches, self.num_steps, tables)

    def estimate_kl(self, batches: DataBatches, step: int) -> float:
        """KL divergence in a step's loss; 0 for losses without one. Collective."""
        return 0.0

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out examples; None without any, or on ranks without the policy."""
        batches = self._held_out
        if batches is None:
            return None
        dataset = batches.dataset
        every = np.arange(len(dataset))
        length = _mean_nll_length(self.objective, dataset, every)
        pairs_per_example = dataset.num_comparisons(every) / len(dataset)
        values = []
        for step in range(len(batches)):
            batch = batches.batch(step)
            columns = self.run.fed(self.phase, batches, step)
            outputs = self._policy_outputs(batches, step)
            if step + 1 < len(batches):
                batches.prepare(step + 1)
            kl = self.estimate_kl(batches, step)
            if outputs is None:
                continue
            lengths = dataset.num_predicted(batch.example_indices)
            labels = dataset.labels_of(batch.example_indices)
            lengths, labels = (copied(a, outputs.device) for a in (lengths, labels))
            # Complete and equal on every rank: no reduction.
            reference = reference_column(self.objective, columns, lengths)
            examples = ExampleOutputs(
                outputs,
                reference,
                lengths,
                labels,
                length,
                kl=kl,
                comparisons=_comparisons(dataset, batch.example_indices, outputs.device),
                pairs_per_example=pairs_per_example,
            )
            values.append(self.objective.losses(examples)[1])
        if self.policy is None:
            return None
        return {**self.objective.metrics(torch.cat(values).cpu()), "num_tokens": self._num_tokens}

    def partners(self, step: int, table: Table) -> torch.Tensor:
        """Find every pair's partners [P, 3] by a forward of the policy over the whole batch."""
        outputs = self._policy_outputs(self.batches, step)
        assert outputs is not None, "a loss that sorts has its reference on the policy's ranks"
        log_probs = outputs[0] if outputs.dim() == 3 else outputs
        examples = self.batches.batch(step).example_indices
        compared = _comparisons(self.data.train, examples, log_probs.device)
        columns = log_probs, reference_column(self.objective, table.by_response, log_probs)
        return sorted_partners(*(torch.stack(split(c, compared), dim=1) for c in columns))

    def loss_of(
        self, step: int, kl: float = 0.0, partners: torch.Tensor | None = None
    ) -> ExampleLoss:
        """Make the loss of a step's examples."""
        examples, train = self.batches.batch(step).example_indices, self.data.train
        number = train.num_comparisons(examples)
        shape = number, self.objective.num_values
        values = torch.zeros(shape, dtype=torch.float64, device=self.world.device)
        length = _mean_nll_length(self.objective, train, examples)
        return ExampleLoss(self.objective, values, length, kl, partners, number / len(examples))

    def update(self, step: int, loss: ExampleLoss) -> dict[str, float]:
        """Step the optimizer with the accumulated gradients; return the metrics. Collective."""
        self.run.prepare(self.batches, step + 1, self.num_steps)
        self.prepare(step + 1)
        metrics: dict[str, float] = {}
        if self.policy is not None:
            role = self.policy.role
            lr = learning_rate(self.job.optimizer(role), step, self.num_steps)
            updated, grad_norm = self.optimizer.step(lr)
            self.num_skipped += not updated
            self._sync_reference(step)
            # Each loss is on one replica, zero elsewhere: the sum is complete. The host waits once.
            values = loss.values if self.policy.is_output_rank else loss.values.zero_()
            metrics = self.objective.metrics(self.policy.sum_over_ranks(values).cpu())
            self.updates = [Update(role, updated, metrics["loss"], grad_norm, {**metrics})]
            self._num_tokens = self.batches.tokens_seen(step)
            metrics |= {
                "num_tokens": self._num_tokens,
                "grad_norm": grad_norm,
                "learning_rate": lr,
            }
        self.run.end_step(step)
        return metrics

    def prepare(self, step: int) -> None:
        """Prepare other inputs of a step while the device computes, without waiting."""

    def stats(self, step: int, started: float, estimated: float | None = None) -> StepStats:
        """Statistics of the work since ``started``; ``estimated`` is the end of the KL phase."""
        ended, is_pair = time.monotonic(), self.data.train.num_responses > 1
        batch = self.batches.batch(step)
        stats = StepStats(
            seconds=ended - started,
            num_pairs=self.data.train.num_comparisons(batch.example_indices) if is_pair else 0,
            num_responses=0 if is_pair else batch.num_examples,
            num_tokens=batch.num_tokens,
            num_row_tokens=batch.num_row_tokens,
            num_flops=self._flops(batch, again=estimated is not None),
        )
        if estimated is None:
            return stats
        return replace(stats, phases={"kl": estimated - started, "train": ended - estimated})

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the trained model, on ranks that have a part of it."""
        return self.run.optimizers[self.trained.role]

    def _sync_reference(self, step: int) -> None:
        """Mix the policy into the reference (TR-DPO), at the steps that are due."""
        loss, follower = self.config.reference_loss, self.models.get("reference")
        if loss is None or follower is None or (step + 1) % loss.ref_model_sync_steps:
            return
        assert self.policy is not None
        mix_weights(follower.context, self.policy, loss.ref_model_mixup_alpha)

    def _view(self) -> DataView:
        """This rank's view of a batch: by the policy's plan, or else the reference's."""
        return data_view(self.policy or next(iter(self.run.contexts.values())))

    def _batches(self, loader: ExampleLoader) -> DataBatches:
        return DataBatches(loader, self.trained.options.attention, self.world.device)

    def _policy_outputs(self, batches: DataBatches, step: int) -> torch.Tensor | None:
        """Policy's outputs by response, [.., B, K], on all its ranks; None on other ranks."""
        outputs = self.run.infer(self.phase, batches, step, self.trained.role)
        if self.policy is None:
            return None
        shape = batches.batch(step).num_examples, batches.dataset.num_responses
        return self.policy.sum_over_ranks(outputs[self.trained.role].by_response(*shape))

    def _flops(self, batch: Batch, again: bool) -> float:
        """FLOPs of a batch, reference forwards included.

        Args:
            again: both models also ran over the batch's mismatched responses.
        """
        layout, dataset, model = self.config.packing.row_layout, self.data.train, self.trained.model
        matrices, attention = _forward_flops(model, dataset, layout, batch)
        # Mismatched responses are a permutation of the batch's: their passes cost the same.
        flops = (1 + (again or self.objective.sorts_batch)) * (matrices + attention)
        flops += backward_of_matrices(model) * matrices + 2 * attention
        if self.phase.is_fed:
            reference = self.phase.context("reference").model
            flops += (1 + again) * sum(_forward_flops(reference, dataset, layout, batch))
        return flops


def _mean_nll_length(objective: Objective, dataset: ExampleDataset, examples: np.ndarray) -> float:
    """Mean number of tokens in the chosen response's likelihood, over pairs of a data set."""
    example, better, _ = dataset.comparisons(examples).T
    length = dataset.num_predicted(examples)[example, better].mean()
    if objective.reading.predict_prompts:
        length += np.maximum(dataset.prompt_lengths[examples] - 1, 0).mean()
    return float(length)


def _comparisons(
    dataset: ExampleDataset, examples: np.ndarray, device: torch.device
) -> Comparisons | None:
    """Comparisons of all of a batch's rankings; None for pairs."""
    if dataset.levels is None:
        return None
    compared = dataset.comparisons(examples)
    numbered = np.concatenate([np.arange(len(compared))[:, None], compared], axis=1)
    return Comparisons.of(numbered, dataset.num_responses, device)


def _forward_flops(
    spec: ModelSpec, dataset: ExampleDataset, layout: str, batch: Batch
) -> tuple[float, float]:
    """FLOPs of matrices, head included, and of attention in a forward over a batch's used tokens.

    Attention counts (query, key) pairs that attend, the head counts predicted tokens.
    """
    prompts = dataset.prompt_lengths[batch.example_indices].astype(np.int64)
    responses = dataset.response_lengths[batch.example_indices].astype(np.int64)
    seen = (prompt_copies(responses, layout) * (prompts * (prompts + 1) // 2)).sum()
    seen += (responses * prompts[:, None] + responses * (responses + 1) // 2).sum()
    num_predicted = int(dataset.num_predicted(batch.example_indices).sum())
    if spec.head == "scalar":
        num_predicted = np.count_nonzero(responses)
    matrices = batch.num_tokens * flops_per_token(spec)
    matrices += num_predicted * head_flops_per_token(spec)
    return float(matrices), float(attention_flops(spec, int(seen)))
