"""Stage ``ppo``: an iteration samples responses, scores them, and trains actor and critic."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from puzzle_align.algos.advantages import next_kl_coef
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.data.prompts import PromptDataset, prompt_indices
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.job_plan import Phase
from puzzle_align.runtime.batches import DataBatches
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.columns import Responses, Table
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation import Response
from puzzle_align.runtime.groups.collectives import gather_on_rank_zero, sum_on_host, wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.optimizer.optimizer import learning_rate, set_aside
from puzzle_align.runtime.phases import Outputs, PhaseRunner, num_outputs
from puzzle_align.runtime.shadow import Shadow
from puzzle_align.stages.costs import job_costs
from puzzle_align.stages.divergence import Update
from puzzle_align.stages.models import open_models
from puzzle_align.stages.rewards.rewards import Rewarded, Rewards, open_functions
from puzzle_align.stages.rl.experience import (
    LEARNED,
    VALUED,
    Experience,
    make_experience,
    scored_of,
)
from puzzle_align.stages.rl.losses import ActorLoss, CriticLoss, PPOLoss, reading_of
from puzzle_align.stages.rl.outlook import PromptOutlook
from puzzle_align.stages.rl.prompts import num_iterations, open_prompts, sampling_of
from puzzle_align.stages.rl.rollout import (
    Rollout,
    dataset_of,
    loader_of,
    sample_requests,
    sample_sources,
    sampled_responses,
    samples_of,
    samples_of_rank,
)
from puzzle_align.stages.tokenizer import open_tokenizer
from puzzle_align.stages.tracing import Tracer, in_phases
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import Sample, StepStats
from puzzle_align.telemetry.ppo_metrics import rollout_metrics, rollout_sums, update_metrics

NUM_SHOWN = 4  # prompts of an iteration whose responses are logged
_PREFIXES = {"actor": "policy", "critic": "val"}  # of metric names
_LOSSES = {"actor": "loss/policy_avg", "critic": "loss/value_avg"}
_APPROX_KL = "policy/approxkl_avg"
# Column that each scoring model writes: by token, or by state before each token and at the end.
_SCORED = {"actor": "logps", "reference": "ref_logps", "critic": "values", "reward": "reward"}


class PPOTrainer(Trainer):
    """Trainer of a PPO run on one rank: its models, optimizers and prompts."""

    def __init__(
        self,
        job: Job,
        world: World,
        prompts: PromptDataset,
        tokenizer: Tokenizer,
    ) -> None:
        """Build everything. Collective over the world.

        Raises:
            ValueError: for an unfit model, plan or reward function, or if the critic's warm-up
                takes the whole job.
        """
        self.job = job
        self.config, self.plan = job.config, job.plan
        config, plan = job.config, job.plan
        self.world = world
        self.num_steps = num_iterations(config, len(prompts))
        if config.ppo.critic_warmup >= self.num_steps:
            raise ValueError(
                f"ppo.critic_warmup: {config.ppo.critic_warmup} leaves none of the job's "
                f"{self.num_steps} iterations to the actor; lower it, or raise num_train_epochs"
            )
        self.num_skipped = 0
        self.data_fingerprint = prompts.fingerprint
        self._prompts = prompts
        self._sampling = sampling_of(config, tokenizer)
        functions = open_functions(config.reward, world.rank in self._owners())
        self._rewards = Rewards(config, prompts, tokenizer, self.num_steps, functions)
        costs = job_costs(config)
        drawn = [phase for phase in plan.phases if phase.name in ("score", "learn")]
        for phase in drawn:
            costs.of(phase.contexts)  # raises, before models are built, if one was not measured
        self._opened = open_models(job, world)
        self._opened.train(job)
        self.tracer = tracer = Tracer(config, world, *in_phases(costs, drawn))
        self.run = PhaseRunner(
            self._opened.contexts,
            world.device,
            costs=costs.of,
            reading=lambda planned: reading_of(config, planned.role, planned.workload),
            spans=lambda phase, name: tracer.spans(name),
        )
        self.run.optimizers = self._opened.optimizers
        self.models = {
            role: Trained(self._opened.contexts[role, "train"], optimizer)
            for role, optimizer in self.run.optimizers.items()
        }
        self._updates_each = config.ppo.ppo_epochs * config.ppo.num_mini_batches
        self._kl_coef = config.ppo.kl_coef
        self._shown: dict[int, Sample] = {}  # by number of the sample in the iteration

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Run iteration ``step`` (from 0): generate, score, learn; return metrics and work done."""
        seconds: dict[str, float] = {}
        with self._timed("generate", step, seconds):
            rollout, responses = self.generate(step, seconds)
            whole, parts = self.rows(rollout, responses)
        with self._timed("score", step, seconds):
            table = self.score(rollout, whole, responses)
            rewarded = self.reward(rollout, table, responses)
            experience = self.experience(rollout, table, rewarded)
            metrics = self.rollout_metrics(rollout, rewarded, experience)
            self._take_samples(rollout, responses, rewarded)
        with self._timed("learn", step, seconds):
            learned = self.learn(rollout, parts, table)
        self.num_skipped += sum(not update.moved for update in self.updates)
        metrics |= {**learned, "objective/kl_coef": self._kl_coef}
        self._kl_coef = next_kl_coef(
            self._kl_coef,
            metrics.get("objective/kl", 0.0),
            len(rollout.lengths),
            target=self.config.ppo.kl_target,
            horizon=self.config.ppo.kl_horizon,
        )
        seconds["generate"] -= seconds.get("switch", 0.0)
        stats = StepStats(
            seconds=sum(seconds.values()),
            num_responses=len(rollout.lengths),
            num_tokens=int(rollout.lengths.sum()),
            phases=seconds,
        )
        return metrics, stats

    def generate(self, step: int, seconds: dict[str, float]) -> tuple[Rollout, dict[int, Response]]:
        """Sample an iteration's responses; return the rollout, and this rank's own responses.

        If sampling has another plan, ``seconds["switch"]`` is the time of moving the weights there.
        Collective over the world.
        """
        started = time.monotonic()
        config, planned = self.config, self.plan.context("actor", "generate")
        k = config.generation.num_generations
        prompts = prompt_indices(
            len(self._prompts),
            config.global_batch_size,
            step,
            seed=config.seed,
            shuffle=config.data.shuffle,
        )
        replicas = np.repeat(np.arange(len(prompts)) % planned.plan.data, k)
        reported = torch.zeros(2, len(replicas), dtype=torch.int64)
        sampled: dict[int, Response] = {}
        with self._only_sampling(), self._opened.opened(planned) as context:
            if self._opened.shadows:
                seconds["switch"] = self._now() - started
            if context is not None:
                samples = np.flatnonzero(replicas == context.data_rank).tolist()
                requests = sample_requests(self._prompts, prompts, k, step, samples)
                responses = sampled_responses(context, requests, self._sampling, config.generation)
                if context.is_output_rank:
                    sampled = dict(zip(samples, responses, strict=True))
        for sample, response in sampled.items():
            reported[0, sample], reported[1, sample] = len(response.tokens), response.stopped
        lengths, stopped = sum_on_host(reported).numpy()
        rollout = Rollout(
            iteration=step,
            prompts=prompts,
            prompt_lengths=self._prompts.prompt_lengths[prompts].astype(np.int64),
            stopped=stopped.astype(bool),
            responses=Responses(lengths, self._owners()[replicas]),
            num_generations=k,
        )
        return rollout, sampled

    def rows(
        self, rollout: Rollout, responses: Mapping[int, Response]
    ) -> tuple[DataBatches, DataBatches]:
        """Make the iteration's rows: one batch to score, and mini-batches to train on.

        The tokens that this rank's models need are fetched from the samples' owners, once.
        Collective over the world.
        """
        lengths_only = dataset_of(rollout, self._prompts, {}, self.config.packing)
        whole = loader_of(self.config, lengths_only, batches=1)
        parts = loader_of(self.config, lengths_only, batches=self.config.ppo.num_mini_batches)
        scoring, training = self._at_work("score", None), self._at_work("learn", rollout.iteration)
        wanted = {
            *samples_of_rank(whole, [0], scoring),
            *samples_of_rank(parts, self._updates(rollout), training),
        }
        table = Table(rollout.responses)
        table.by_token["tokens"] = {s: response.tokens for s, response in responses.items()}
        tokens = table.fetch(["tokens"], sorted(wanted), np.int64).by_token["tokens"]
        dataset = dataset_of(rollout, self._prompts, tokens, self.config.packing)
        attention = self.plan.contexts[0].options.attention
        return (
            DataBatches(whole.over(dataset), attention, self.world.device),
            DataBatches(parts.over(dataset), attention, self.world.device),
        )

    def score(
        self, rollout: Rollout, whole: DataBatches, responses: Mapping[int, Response]
    ) -> Table:
        """Run the scoring models; their columns of the samples that this rank owns.

        Collective over the world.
        """
        table = Table(rollout.responses)
        phase = self._phase("score")
        outputs = {} if phase is None else self.run.infer(phase, whole, 0)
        for planned in () if phase is None else phase.contexts:
            kind = reading_of(self.config, planned.role, planned.workload).output_kind
            made = outputs.get(planned.role) or Outputs(self.world.device)
            sources = sample_sources(whole.loader, planned)
            lengths = num_outputs(kind, rollout.lengths)
            table.give(_SCORED[planned.role], made.by_token(kind), sources, lengths)
        if "logps" not in table.by_token:  # not recomputed: use those from sampling
            table.by_token["logps"] = {s: r.log_probs for s, r in responses.items()}
        return table

    def reward(self, rollout: Rollout, table: Table, responses: Mapping[int, Response]) -> Rewarded:
        """Rewards, from reward model and functions, of the samples that this rank owns."""
        samples = rollout.responses.of_rank(self.world.rank)
        return self._rewards.scores(rollout, samples, responses, table.by_token.get("reward"))

    def experience(self, rollout: Rollout, table: Table, rewarded: Rewarded) -> Experience:
        """Add token rewards and advantages to the table. Collective if they are whitened."""
        scored = scored_of(rollout, table, rewarded.samples, rewarded.scores)
        experience = make_experience(self.config.ppo, scored, self._kl_coef, sum_on_host)
        table.by_token |= experience.columns
        return experience

    def rollout_metrics(
        self, rollout: Rollout, rewarded: Rewarded, experience: Experience
    ) -> dict[str, float]:
        """Metrics as means over all responses. Collective over the world."""
        scored = experience.scored
        sums = rollout_sums(
            scores=experience.scores,
            rewards=experience.rewards,
            kls=experience.kls,
            logps=scored.logps,
            stopped=scored.stopped,
            mask=scored.mask,
        )
        metrics = rollout_metrics(sum_on_host(sums))
        if "reference" not in self.plan.models:
            del metrics["objective/kl"]  # no reference, no KL
        for name, value in self._rewards.metrics(rollout, rewarded).items():
            metrics.setdefault(name, value)  # a function cannot replace a metric of ours
        return metrics

    def learn(self, rollout: Rollout, parts: DataBatches, table: Table) -> dict[str, float]:
        """Train on an iteration's responses; return metrics, means over its mini-batches.

        A mini-batch on which the policy's KL from the sampling policy exceeds ``ppo.target_kl`` is
        not applied, and ends the iteration. Collective over the world.
        """
        phase, updates = self.plan.phase("learn"), self._updates(rollout)
        roles, loader = self._roles(rollout.iteration), parts.loader
        names = LEARNED + VALUED * ("critic" in self.plan.trained)
        trained_columns = table.fetch(
            names, samples_of_rank(loader, updates, self._at_work("learn", rollout.iteration))
        )
        measured: list[dict[str, float]] = []
        norms: list[torch.Tensor] = []
        for update in updates:
            examples, _ = loader.data_ranks(update)
            losses = self._losses(roles, rollout, samples_of(loader, examples))
            columns = trained_columns.of_examples(examples, loader.dataset.num_responses)
            self.run.train(phase, parts, update, losses, columns)
            self.run.prepare(parts, update + 1, updates.stop)
            measured.append(self._loss_metrics(losses))
            target_kl = self.config.ppo.target_kl
            if target_kl is not None and measured[-1].get(_APPROX_KL, 0.0) > target_kl:
                break
            norms.append(self._update(roles, update))
        return self._learn_metrics(roles, updates, measured, norms)

    def _at_work(self, phase: str, iteration: int | None) -> list[Context]:
        """This rank's contexts in a phase; with an iteration, only those of its trained roles."""
        roles = None if iteration is None else self._roles(iteration)
        plan_phase = self._phase(phase)
        contexts = [
            self.run.context(planned)
            for planned in (() if plan_phase is None else plan_phase.contexts)
            if roles is None or planned.role in roles
        ]
        return [context for context in contexts if context is not None]

    def _phase(self, name: str) -> Phase | None:
        """Phase of the plan by name; None if no model has work in it."""
        return next((phase for phase in self.plan.phases if phase.name == name), None)

    def _updates(self, rollout: Rollout) -> range:
        """Updates of an iteration, counted over the job: steps of the loader of mini-batches."""
        first = rollout.iteration * self._updates_each
        return range(first, first + self._updates_each)

    def _roles(self, iteration: int) -> tuple[str, ...]:
        """Roles trained in an iteration: during a warm-up the critic alone."""
        warming_up = iteration < self.config.ppo.critic_warmup
        return ("critic",) if warming_up else self.plan.phase("learn").roles

    def _losses(
        self, roles: Sequence[str], rollout: Rollout, samples: np.ndarray
    ) -> dict[str, PPOLoss]:
        """Losses of a mini-batch of these samples, by role."""
        num_tokens = int(rollout.lengths[samples].sum())
        config, device = self.config.ppo, self.world.device
        losses: dict[str, PPOLoss] = {}
        if "actor" in roles:
            losses["actor"] = ActorLoss(config, num_tokens, device, self._kl_coef)
        if "critic" in roles:
            losses["critic"] = CriticLoss(config, num_tokens, device)
        return losses

    def _loss_metrics(self, losses: Mapping[str, PPOLoss]) -> dict[str, float]:
        """Metrics as means over a mini-batch's tokens. Collective over the world."""
        for role, loss in losses.items():
            context = self._opened.contexts.get((role, "train"))
            if context is None or not context.is_output_rank:
                loss.sums.zero_()
        total = sum_on_host(torch.cat([loss.sums for loss in losses.values()]).cpu())
        names = [name for loss in losses.values() for name in loss.names]
        num_tokens = next(iter(losses.values())).num_tokens
        return dict(zip(names, (total / num_tokens).tolist(), strict=True))

    def _update(self, roles: Sequence[str], update: int) -> torch.Tensor:
        """Step the optimizers; return gradient norms, and 1 for a skipped step.

        float64 [2, roles]; zeros for a model that another rank reports.
        """
        reported = torch.zeros(2, len(roles), dtype=torch.float64)
        for number, role in enumerate(roles):
            optimizer, rate = self.run.optimizers.get(role), self._learning_rate(role, update)
            shadow = self._to_fill(role, update)
            if shadow is not None:
                updated, norm = shadow.step(optimizer, rate)
            elif optimizer is not None:
                updated, norm = optimizer.step(rate)
            if optimizer is not None and _speaks(self._opened.contexts[role, "train"]):
                reported[0, number], reported[1, number] = norm, not updated
        return reported

    def _to_fill(self, role: str, update: int) -> Shadow | None:
        """Copy that receives a role's weights during the update: at an iteration's last update,
        if another iteration follows.
        """
        last = (update + 1) % self._updates_each == 0
        follows = update + 1 < self.num_steps * self._updates_each
        if not (self.config.generation.overlap_switch and last and follows):
            return None
        return self._opened.shadows.get((role, "generate"))

    def _learning_rate(self, role: str, update: int) -> float:
        """Learning rate of a role at an update of the job; the actor's begin after the warm-up."""
        not_trained = self.config.ppo.critic_warmup if role == "actor" else 0
        before = not_trained * self._updates_each
        total = self.num_steps * self._updates_each
        return learning_rate(self.job.optimizer(role), update - before, total - before)

    def _learn_metrics(
        self,
        roles: Sequence[str],
        updates: range,
        measured: Sequence[Mapping[str, float]],
        norms: Sequence[torch.Tensor],
    ) -> dict[str, float]:
        """Metrics as means over an iteration's mini-batches; also sets ``updates``."""
        metrics = update_metrics(measured)
        for role in roles:
            metrics[f"{_PREFIXES[role]}/learning_rate"] = self._learning_rate(role, updates[0])
        self.updates = []
        if norms:
            reported = sum_on_host(torch.stack(list(norms)))
            for role, norm in zip(roles, reported[:, 0].mean(dim=0).tolist(), strict=True):
                metrics[f"{_PREFIXES[role]}/grad_norm"] = norm
            self.updates = [
                Update(role, not skipped, means[_LOSSES[role]], norm)
                for means, (sizes, skips) in zip(measured, reported.tolist(), strict=False)
                for role, norm, skipped in zip(roles, sizes, skips, strict=True)
            ]
        return metrics

    @contextmanager
    def _timed(self, name: str, step: int, seconds: dict[str, float]) -> Iterator[None]:
        """Time a phase, and name it as this rank's activity."""
        started = self._now()
        with activity(f"phase {name} of iteration {step + 1}"):
            yield
        seconds[name] = self._now() - started

    def _now(self) -> float:
        """Read the clock between two phases."""
        if self.waits_between_phases:
            wait_for_all(self.world.device)
        return time.monotonic()

    def _owners(self) -> np.ndarray:
        """Ranks that own responses, by replica of the sampling actor."""
        actor = self.plan.context("actor", "generate")
        return np.array([actor.output_rank(d) for d in range(actor.plan.data)])

    def _only_sampling(self) -> AbstractContextManager[None]:
        """Offload optimizer state during generation, if configured."""
        if not self.config.generation.offload_optimizer:
            return nullcontext()
        return set_aside(self.run.optimizers.values())

    def _take_samples(
        self, rollout: Rollout, sampled: Mapping[int, Response], rewarded: Rewarded
    ) -> None:
        """Keep some of this rank's responses for ``samples``."""
        k, extra = rollout.num_generations, rewarded.extra
        self._shown = {
            sample: Sample(
                self._rewards.prompt_text(rollout, sample),
                self._rewards.response_text(rollout, sample, sampled[sample]),
                float(rewarded.scores[place]),
                {name: values[place] for name, values in extra.items()},
            )
            for place, sample in enumerate(rewarded.samples)
            if sample < NUM_SHOWN * k and sample % k == 0
        }

    def samples(self) -> list[Sample]:
        """First response to each of the last iteration's first prompts, on rank 0.

        Collective over the world.
        """
        everyone = gather_on_rank_zero(self._shown) or []
        together = {number: shown for each in everyone for number, shown in each.items()}
        return [together[number] for number in sorted(together)]

    def state_dict(self) -> dict[str, Any]:
        """State to save beside the models."""
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        self._kl_coef = state_dict["kl_coef"]


def _speaks(context: Context) -> bool:
    """Whether this rank reports for the whole model."""
    return context.is_output_rank and context.data_rank == 0


def open_trainer(job: Job, world: World) -> PPOTrainer:
    """Build this rank's trainer. Collective over the world.

    Raises:
        ValueError: one line, for bad data, weights, a tokenizer or a reward function.
    """
    tokenizer = open_tokenizer(job.tokenizer)
    return PPOTrainer(job, world, open_prompts(job, tokenizer), tokenizer)


def outlook(config: JobConfig) -> PromptOutlook:
    """Describe the stage's work from its config and data, before anything runs."""
    return PromptOutlook(config)
