"""Stage ``ppo``: an iteration samples responses, scores them, and trains actor and critic."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from puzzle_align.algos.advantages import next_kl_coef
from puzzle_align.config.resolve import Job
from puzzle_align.config.sections.rl import GenerationConfig
from puzzle_align.layout.job_plan import Phase
from puzzle_align.runtime.batches import DataBatches
from puzzle_align.runtime.columns import Responses, Table
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Response, Sampling
from puzzle_align.runtime.groups.collectives import (
    gather_everywhere,
    gather_on_rank_zero,
    sum_on_host,
    wait_for_all,
)
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.optimizer.optimizer import set_aside
from puzzle_align.runtime.phases import PhaseRunner
from puzzle_align.stages.costs import costs_everywhere
from puzzle_align.stages.models import open_models
from puzzle_align.stages.rl.experience import (
    Experience,
    columns_to_learn,
    make_experience,
    scored_of,
    shaped_scores,
)
from puzzle_align.stages.rl.filtering import Collected, collected, joined, num_to_learn
from puzzle_align.stages.rl.learning import APPROX_KL, Updates, reading_of
from puzzle_align.stages.rl.prompts import batch_of, num_iterations, open_prompts, sampling_of
from puzzle_align.stages.rl.rewards import Rewarded, Rewards, open_functions
from puzzle_align.stages.rl.rollout import (
    Rollout,
    dataset_of,
    loader_of,
    sample_sources,
    samples_of,
    samples_of_rank,
)
from puzzle_align.stages.tokenizer import open_tokenizer
from puzzle_align.stages.tracing import Tracer, in_phases
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import Sample, StepStats
from puzzle_align.telemetry.ppo_metrics import length_metrics, rollout_metrics, sampling_metrics

NUM_SHOWN = 4  # prompts of an iteration whose responses are logged
_NO_UPDATE = (
    "an iteration without an update: policy/approxkl_avg is %.2g before the first, above"
    " ppo.target_kl=%g"
)
_logger = logging.getLogger(__name__)
# Column that each scoring model writes: by token, or by state before each token and at the end.
_SCORED = {"actor": "logps", "reference": "ref_logps", "critic": "values", "reward": "reward"}


class PPOTrainer(Trainer):
    """Trainer of a PPO run on one rank: its models, optimizers and prompts."""

    def __init__(self, job: Job, world: World) -> None:
        """Build everything. Collective over the world.

        Raises:
            ValueError: one line, for bad data, weights, a tokenizer or a reward function, or if the
                critic's warm-up takes the whole job.
        """
        self.job, self.world = job, world
        self.config, self.plan = config, plan = job.config, job.plan
        tokenizer = open_tokenizer(job.tokenizer)
        prompts = open_prompts(job, tokenizer)
        self.num_steps = num_iterations(config, len(prompts))
        self.num_skipped = 0
        self.data_fingerprint = prompts.fingerprint
        self.data = self._prompts = prompts
        self._sampling = sampling_of(config, tokenizer, job.models["actor"].spec)
        self.stop_token_ids = self._sampling.stop_token_ids
        functions = open_functions(config.reward, world.rank in self._owners())
        self._rewards = Rewards(config, prompts, tokenizer, self.num_steps, functions)
        costs = costs_everywhere(config)
        drawn = [phase for phase in plan.phases if phase.name in ("score", "learn")]
        for phase in drawn:
            costs.of(phase.contexts)  # raises before models are built if a cost was not measured
        self._scoring = next((phase for phase in plan.phases if phase.name == "score"), None)
        self._opened = open_models(job, world)
        self.tracer = tracer = Tracer(config, world, *in_phases(costs, drawn))
        self.run = PhaseRunner(
            self._opened.contexts,
            self._opened.optimizers,
            world.device,
            seed=config.seed,
            costs=costs.of,
            reading=lambda planned: reading_of(config, planned.role, planned.workload),
            spans=lambda phase, name: tracer.spans(name),
        )
        self.models = self._opened.trained
        self._updates = Updates(job, self._opened, self.num_steps, world.device)
        self._kl_coef = config.ppo.kl_coef
        # With ppo.filter_groups: batches sampled by the whole job, and by the last iteration.
        self._num_drawn = self._num_batches = 0
        self._num_sampled = 0, 0  # responses of the iteration and their tokens, kept or not
        self._shown: dict[int, Sample] = {}  # by number of the sample in the iteration

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Run iteration ``step`` (from 0): generate, score, learn; return metrics and work done."""
        seconds: dict[str, float] = {}
        self._num_sampled = 0, 0
        rollout, table, rewarded = self.collect(step, seconds)
        with self._timed("score", step, seconds):
            scored = scored_of(rollout, table, rewarded)
            experience = make_experience(self.config.ppo, scored, self._kl_coef, sum_on_host)
            table.by_token |= experience.columns
            metrics = self.rollout_metrics(rollout, rewarded, experience)
            self._shown = self._first_samples(rollout, rewarded)
        with self._timed("learn", step, seconds):
            metrics |= self.learn(rollout, table)
        self.num_skipped += sum(not update.moved for update in self.updates)
        metrics["objective/kl_coef"] = self._kl_coef
        if step >= self.config.ppo.critic_warmup:  # before, the actor has learned nothing
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
            num_responses=self._num_sampled[0],
            num_tokens=self._num_sampled[1],
            phases=seconds,
        )
        return metrics, stats

    def collect(self, step: int, seconds: dict[str, float]) -> tuple[Rollout, Table, Rewarded]:
        """Sample and score an iteration's responses.

        With ``ppo.filter_groups``, batches are sampled until there are enough groups with unequal
        rewards. Collective over the world.
        """
        found: list[Collected] = []
        limits, number = self.config.ppo.filter_groups, self.config.global_batch_size
        while True:
            with self._timed("generate", step, seconds):
                rollout, greedy = self.generate(step, seconds)
                table = _tokens_of(rollout)
            with self._timed("score", step, seconds):
                self.score(rollout, table)
                rewarded = self._rewards.scores(rollout, table.by_token.get("reward"))
                if greedy is not None:
                    rewarded = replace(rewarded, baselines=self.baselines(rollout, greedy))
            if not limits.enable:
                return rollout, table, rewarded
            with self._timed("score", step, seconds):
                found.append(collected(self.config.ppo, rollout, table, rewarded))
            self._num_drawn += 1
            kept = sum(int(batch.kept.sum()) for batch in found)
            if kept >= number or len(found) == limits.max_num_gen_batches:
                break
        number = num_to_learn(found, number, self.config.ppo.num_mini_batches, limits)
        self._num_batches = len(found)
        return joined(found, number)

    def baselines(self, rollout: Rollout, greedy: Rollout) -> np.ndarray:
        """Scores of the greedy responses to this rank's samples' prompts, float64 [n].

        They are clipped and penalised as the samples'. Collective over the world.
        """
        table = _tokens_of(greedy)
        if "reward" in self.plan.models:
            self.score(greedy, table, "reward")
        rewarded = self._rewards.scores(greedy, table.by_token.get("reward"))
        scores = shaped_scores(self.config.ppo, greedy, rewarded).tolist()
        by_prompt = dict(zip(greedy.sampled, scores, strict=True))
        return np.array([by_prompt[s // rollout.num_generations] for s in rollout.sampled])

    def generate(self, step: int, seconds: dict[str, float]) -> tuple[Rollout, Rollout | None]:
        """Sample a batch of an iteration's responses, and if they are read, greedy ones.

        Collective over the world.

        If sampling has another plan, ``seconds["switch"]`` is set to the time of moving weights, or
        if adapters are merged, of that.
        """
        started = time.monotonic()
        config, planned = self.config, self.plan.context("actor", "generate")
        draws = [(config.generation, self._sampling)]
        if config.ppo.estimator.samples_greedily:
            one = replace(config.generation, num_generations=1)
            draws.append((one, replace(self._sampling, temperature=0.0)))
        batch = self._num_drawn if config.ppo.filter_groups.enable else step
        prompts = batch_of(config, self._prompts, batch)
        with self._only_sampling(), self._opened.opened(planned) as context:
            if self.plan.switches or self.job.settings.merged:
                seconds["switch"] = seconds.get("switch", 0.0) + self._now() - started
            sampled = [self._sample(context, prompts, batch, *draw) for draw in draws]
        rollouts = [
            self._rollout((step, batch), prompts, options.num_generations, responses)
            for (options, _), responses in zip(draws, sampled, strict=True)
        ]
        responses, tokens = self._num_sampled
        responses += sum(len(rollout.lengths) for rollout in rollouts)
        tokens += sum(int(rollout.lengths.sum()) for rollout in rollouts)
        self._num_sampled = responses, tokens
        return rollouts[0], rollouts[1] if len(rollouts) > 1 else None

    def _sample(
        self,
        context: Context | None,
        prompts: np.ndarray,
        batch: int,
        options: GenerationConfig,
        sampling: Sampling,
    ) -> dict[int, Response]:
        """Sample responses to a batch's prompts; return this rank's. Collective over replicas.

        A response's number over all batches seeds its draws.
        """
        if context is None:
            return {}
        k, replicas = options.num_generations, self._replicas(prompts, options.num_generations)
        samples = np.flatnonzero(replicas == context.data_rank).tolist()
        requests = [
            Request(id=batch * len(replicas) + s, prompt=self._prompts.prompt(int(prompts[s // k])))
            for s in samples
        ]
        responses = generate(
            context,
            requests,
            sampling,
            prefill_tokens=options.prefill_tokens,
            decode_batch_size=options.decode_batch_size,
            num_scheduler_steps=options.num_scheduler_steps,
            enforce_eager=options.enforce_eager,
        )
        return dict(zip(samples, responses, strict=True)) if context.is_output_rank else {}

    def _replicas(self, prompts: np.ndarray, k: int) -> np.ndarray:
        """Replica of the sampling actor for each of ``k`` responses to every prompt."""
        data = self.plan.context("actor", "generate").plan.data
        return np.repeat(np.arange(len(prompts)) % data, k)

    def _rollout(
        self, when: tuple[int, int], prompts: np.ndarray, k: int, sampled: Mapping[int, Response]
    ) -> Rollout:
        """Tell all ranks of responses to ``prompts``. Collective over the world.

        Args:
            when: iteration and batch.
        """
        replicas = self._replicas(prompts, k)
        reported = torch.zeros(2, len(replicas), dtype=torch.int64)
        for number, response in sampled.items():
            reported[0, number], reported[1, number] = len(response.tokens), response.stopped
        lengths, stopped = sum_on_host(reported).numpy()
        return Rollout(
            iteration=when[0],
            batch=when[1],
            prompts=prompts,
            prompt_lengths=self._prompts.prompt_lengths[prompts].astype(np.int64),
            stopped=stopped.astype(bool),
            responses=Responses(lengths, self._owners()[replicas]),
            num_generations=k,
            sampled=sampled,
        )

    def rows(
        self, rollout: Rollout, table: Table, phase: Phase, *roles: str, batches: int, steps: range
    ) -> tuple[DataBatches, list[int]]:
        """Make the rows that a phase's models read; with them, the samples in those of this rank.

        Their tokens are fetched from the samples' owners. Collective over the world.

        Args:
            roles: the models; none: all.
            batches, steps: number of batches, and those to read.
        """
        lengths_only = dataset_of(rollout, self._prompts, {}, self.config.packing)
        loader = loader_of(self.config, lengths_only, rollout.num_generations, batches=batches)
        wanted = samples_of_rank(loader, steps, self.run.held(phase, *roles))
        tokens = table.fetch(["tokens"], wanted, np.int64).by_token["tokens"]
        dataset = dataset_of(rollout, self._prompts, tokens, self.config.packing)
        attention = self.plan.contexts[0].options.attention
        return DataBatches(loader.over(dataset), attention, self.world.device), wanted

    def score(self, rollout: Rollout, table: Table, *roles: str) -> None:
        """Run the scoring models; add their columns to the table. Collective over the world.

        Args:
            roles: the models to run; none: all.
        """
        phase = self._scoring
        if phase is not None:
            whole, _ = self.rows(rollout, table, phase, *roles, batches=1, steps=range(1))
            for role, outputs in self.run.infer(phase, whole, 0, *roles).items():
                sources = sample_sources(whole.loader, phase.context(role))
                places = outputs.places(rollout.lengths)
                table.give(_SCORED[role], outputs.by_token(), sources, places)
        if "logps" not in table.by_token:  # not recomputed: use those from sampling
            table.by_token["logps"] = {s: r.log_probs for s, r in rollout.sampled.items()}

    def rollout_metrics(
        self, rollout: Rollout, rewarded: Rewarded, experience: Experience
    ) -> dict[str, float]:
        """Metrics as means over all responses. Collective over the world."""
        metrics = rollout_metrics(sum_on_host(experience.sums()))
        metrics |= length_metrics(rollout.lengths, rollout.stopped)
        if self.config.ppo.filter_groups.enable:
            metrics["filter_groups/num_gen_batches"] = float(self._num_batches)
        if self.config.ppo.recompute_log_probs:
            differences, corrections = zip(*gather_everywhere(experience.off_policy()), strict=True)
            metrics |= sampling_metrics(differences, corrections)
        if "reference" not in self.plan.models:
            del metrics["objective/kl"]  # no reference, no KL
        for name, value in self._rewards.metrics(rollout, rewarded).items():
            metrics.setdefault(name, value)  # a function cannot replace a built-in metric
        return metrics

    def learn(self, rollout: Rollout, table: Table) -> dict[str, float]:
        """Train on an iteration's responses; return metrics, means over its mini-batches.

        A mini-batch on which the policy's KL from the sampling policy exceeds ``ppo.target_kl`` is
        not applied, and ends the iteration. Collective over the world.
        """
        phase, updates = self.plan.phase("learn"), self._updates.of(rollout.iteration)
        roles, batches = self._updates.roles(rollout.iteration), self.config.ppo.num_mini_batches
        parts, wanted = self.rows(rollout, table, phase, *roles, batches=batches, steps=updates)
        names = columns_to_learn(self.config.ppo, "critic" in self.plan.trained)
        trained_columns, loader = table.fetch(names, wanted), parts.loader
        measured: list[dict[str, float]] = []
        reported: list[torch.Tensor] = []
        for update in updates:
            examples, _ = loader.data_ranks(update)
            samples = samples_of(loader, examples)
            lengths, stopped = rollout.lengths[samples], rollout.stopped[samples]
            losses = self._updates.losses(roles, lengths, stopped, self._kl_coef)
            columns = trained_columns.of_examples(examples, loader.dataset.num_responses)
            self.run.train(phase, parts, update, losses, columns)
            self.run.prepare(parts, update + 1, updates.stop)
            measured.append(self._updates.measured(losses))
            if self._updates.goes_too_far(measured[-1]):
                if not reported and self.world.rank == 0:
                    _logger.warning(_NO_UPDATE, measured[-1][APPROX_KL], self.config.ppo.target_kl)
                break
            reported.append(self._updates.step(roles, update))
        metrics, self.updates = self._updates.summary(rollout.iteration, measured, reported)
        return metrics

    @contextmanager
    def _timed(self, name: str, step: int, seconds: dict[str, float]) -> Iterator[None]:
        """Time a phase, and name it as this rank's activity."""
        started = self._now()
        with activity(f"phase {name} of iteration {step + 1}"):
            yield
        seconds[name] = seconds.get(name, 0.0) + self._now() - started

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

    def _first_samples(self, rollout: Rollout, rewarded: Rewarded) -> dict[int, Sample]:
        """First responses to the first prompts, if this rank owns them."""
        k = rollout.num_generations
        return {
            sample: Sample(
                self._prompts.text(rollout.prompt_of(sample)),
                self._rewards.response_text(rollout, sample),
                float(rewarded.scores[place]),
                {name: values[place] for name, values in rewarded.extra.items()},
                self._prompts.ending(rollout.prompt_of(sample)),
            )
            for place, sample in enumerate(rollout.sampled)
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
        drawn = {"num_drawn": self._num_drawn} if self.config.ppo.filter_groups.enable else {}
        return {"kl_coef": self._kl_coef, **drawn}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        self._kl_coef = state_dict["kl_coef"]
        self._num_drawn = state_dict.get("num_drawn", 0)


def _tokens_of(rollout: Rollout) -> Table:
    tokens = {sample: response.tokens for sample, response in rollout.sampled.items()}
    return Table(rollout.responses, by_token={"tokens": tokens})


open_trainer = PPOTrainer
