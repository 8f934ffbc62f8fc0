"""PPO: an iteration samples responses, scores them, and trains actor and critic on them."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from puzzle_align.algos.advantages import next_kl_coef
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.data.prompts import PromptDataset, prompt_indices
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.context import Context, freeze
from puzzle_align.runtime.exchange import exchange
from puzzle_align.runtime.generation import Request, Response, Sampling, generate
from puzzle_align.runtime.groups.collectives import gather_on_rank_zero, sum_on_host, wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.optimizer.optimizer import set_aside
from puzzle_align.stages.rewards.rewards import Rewarded, Rewards, open_functions
from puzzle_align.stages.rl.experience import Scored, make_experience, padded
from puzzle_align.stages.rl.learn import Learner
from puzzle_align.stages.rl.models import open_models
from puzzle_align.stages.rl.rollout import Rollout, dataset_of, loader_of, own_samples_of_all
from puzzle_align.stages.rl.score import score
from puzzle_align.stages.rl.tracing import iteration_tracer
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import Sample, StepStats
from puzzle_align.telemetry.ppo_metrics import rollout_metrics, rollout_sums

NUM_SHOWN = 4  # prompts, of an iteration, whose responses go to the log


class PPOTrainer(Trainer):
    """Models, optimizers and prompts of one PPO run, as one rank holds them."""

    def __init__(
        self,
        job: Job,
        world: World,
        prompts: PromptDataset,
        tokenizer: Tokenizer,
    ) -> None:
        """Build everything. Collective over the world.

        Raises:
            ValueError: for a model, a plan or a reward function that does not fit, or where the
                critic's warm-up is the whole job.
        """
        self._config = config = job.config
        self._world = world
        self._prompts = prompts
        self.num_steps = num_iterations(config, len(prompts))
        if config.ppo.critic_warmup >= self.num_steps:
            raise ValueError(
                f"ppo.critic_warmup: {config.ppo.critic_warmup} leaves none of the job's "
                f"{self.num_steps} iterations to the actor; lower it, or raise num_train_epochs"
            )
        self._sampling = sampling_of(config, tokenizer)
        self.plan = plan = job.plan
        self._generate_plan = plan.context("actor", "generate")
        functions = open_functions(config.reward, world.rank in self._owners())
        self._rewards = Rewards(config, prompts, tokenizer, self.num_steps, functions)
        self._models = open_models(job, world)
        for (role, _), context in self._models.contexts.items():
            if role not in plan.trained:
                freeze(context)
        self._tracer = iteration_tracer(config, plan, world, self._models.job_costs)
        self._learner = Learner(job, self._models, world, self.num_steps, self._tracer)
        self.models = {
            role: Trained(self._models.contexts[role, "train"], optimizer)
            for role, optimizer in self._learner.optimizers.items()
        }
        self.num_skipped = 0
        self.data_fingerprint = prompts.fingerprint
        self._kl_coef = config.ppo.kl_coef
        self._shown: dict[int, Sample] = {}  # by number in the iteration

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Iteration ``step`` (from 0): metrics of all its responses, and the work done."""
        with self._tracer.step(step):
            return self._train_step(step)

    def _train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        started = self._now()
        with activity(f"generation of iteration {step + 1}"):
            rollout, sampled, switch = self._generate(step)
            whole, parts = self._loaders(rollout, sampled)
        generated = self._now()
        with activity(f"scoring of iteration {step + 1}"):
            scored, rewarded = self._score(rollout, whole, sampled)
            experience = make_experience(self._config.ppo, scored, self._kl_coef, sum_on_host)
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
                del metrics["objective/kl"]  # there is nothing to measure it from
            for name, value in self._rewards.metrics(rollout, rewarded).items():
                metrics.setdefault(name, value)  # a function cannot take the place of our own
            self._take_samples(rollout, sampled, rewarded)
        learning = self._now()
        with activity(f"learning of iteration {step + 1}"):
            learned, self.updates = self._learner.learn(
                rollout, parts, experience.columns, self._kl_coef
            )
        self.num_skipped += sum(not update.moved for update in self.updates)
        metrics |= {**learned, "objective/kl_coef": self._kl_coef}
        self._kl_coef = next_kl_coef(
            self._kl_coef,
            metrics.get("objective/kl", 0.0),
            len(rollout.lengths),
            target=self._config.ppo.kl_target,
            horizon=self._config.ppo.kl_horizon,
        )
        ended = self._now()
        stats = StepStats(
            seconds=ended - started,
            num_responses=len(rollout.lengths),
            num_tokens=int(rollout.lengths.sum()),
            phases={
                **switch,
                "generate": generated - started - sum(switch.values()),
                "score": learning - generated,
                "learn": ended - learning,
            },
        )
        return metrics, stats

    def _now(self) -> float:
        """The clock between two phases."""
        if self.waits_between_phases:
            wait_for_all(self._world.device)
        return time.monotonic()

    def _generate(self, step: int) -> tuple[Rollout, dict[int, Response], dict[str, float]]:
        """Sample an iteration's responses: all, those that this rank owns, and seconds of a switch
        to another plan, if there is one. Collective over the world.
        """
        started = time.monotonic()
        switch: dict[str, float] = {}
        config = self._config
        k, actor = config.generation.num_generations, self._generate_plan
        prompts = prompt_indices(
            len(self._prompts),
            config.global_batch_size,
            step,
            seed=config.seed,
            shuffle=config.data.shuffle,
        )
        replicas = np.repeat(np.arange(len(prompts)) % actor.plan.data, k)
        reported = torch.zeros(2, len(replicas), dtype=torch.int64)
        sampled: dict[int, Response] = {}
        with self._only_sampling(), self._models.opened(actor) as context:
            if self._models.shadows:
                switch["switch"] = self._now() - started
            if context is not None:
                own = np.flatnonzero(replicas == context.data_rank).tolist()
                responses = self._responses(context, step, prompts, own)
                if context.is_output_rank:
                    sampled = dict(zip(own, responses, strict=True))
        for sample, response in sampled.items():
            reported[0, sample], reported[1, sample] = len(response.tokens), response.stopped
        lengths, stopped = sum_on_host(reported).numpy()
        rollout = Rollout(
            iteration=step,
            prompts=prompts,
            prompt_lengths=self._prompts.prompt_lengths[prompts].astype(np.int64),
            lengths=lengths,
            stopped=stopped.astype(bool),
            owners=self._owners()[replicas],
            num_generations=k,
        )
        return rollout, sampled, switch

    def _owners(self) -> np.ndarray:
        """The rank that owns the responses of each of the sampling actor's replicas."""
        actor = self._generate_plan
        return np.array([actor.output_rank(d) for d in range(actor.plan.data)])

    def _only_sampling(self) -> AbstractContextManager[None]:
        """While what trains models is set aside, if it is to be."""
        if not self._config.generation.offload_optimizer:
            return nullcontext()
        return set_aside(self._learner.optimizers.values())

    def _responses(
        self, context: Context, step: int, prompts: np.ndarray, samples: list[int]
    ) -> list[Response]:
        """This replica's part of an iteration; a sample's number seeds its draws."""
        generation = self._config.generation
        num_samples = len(prompts) * generation.num_generations
        requests = [
            Request(
                id=step * num_samples + sample,
                prompt=self._prompts.prompt(int(prompts[sample // generation.num_generations])),
            )
            for sample in samples
        ]
        return generate(
            context,
            requests,
            self._sampling,
            prefill_tokens=generation.prefill_tokens,
            decode_batch_size=generation.decode_batch_size,
            num_scheduler_steps=generation.num_scheduler_steps,
            enforce_eager=generation.enforce_eager,
        )

    def _loaders(
        self, rollout: Rollout, sampled: Mapping[int, Response]
    ) -> tuple[ExampleLoader, ExampleLoader]:
        """The iteration's rows in one batch, to score, and in mini-batches, to learn from.

        Tokens of the rows that this rank will run over come here from the samples' owners, once.
        Collective over the world.
        """
        lengths_only = dataset_of(rollout, self._prompts, {}, self._config.packing)
        whole = loader_of(self._config, lengths_only, batches=1)
        parts = loader_of(self._config, lengths_only, batches=self._config.ppo.num_mini_batches)
        held = [self._models.of(context) for context in self.plan.phase("score").contexts]
        scoring = [context for context in held if context is not None]
        updates, training = self._learner.updates(rollout), self._learner.contexts(rollout)
        tokens = exchange(
            {sample: response.tokens[:, None] for sample, response in sampled.items()},
            sorted(
                {
                    *own_samples_of_all(whole, [0], scoring),
                    *own_samples_of_all(parts, updates, training),
                }
            ),
            sources=rollout.owners,
            lengths=rollout.lengths,
            num_columns=1,
            dtype=np.int64,
        )
        here = {sample: column[:, 0] for sample, column in tokens.items()}
        dataset = dataset_of(rollout, self._prompts, here, self._config.packing)
        return whole.over(dataset), parts.over(dataset)

    def _score(
        self, rollout: Rollout, loader: ExampleLoader, sampled: Mapping[int, Response]
    ) -> tuple[Scored, Rewarded]:
        """What the scoring models and the reward functions make of the samples that this rank owns.

        Collective over the world.
        """
        found = score(self._config, self._models, self._world, rollout, loader, self._tracer)
        samples = rollout.at(self._world.rank)
        rewarded = self._rewards.scores(rollout, samples, sampled, found.get("reward"))
        lengths = torch.from_numpy(rollout.lengths[samples])
        width = int(lengths.max()) if samples else 0
        logps = found.get("actor")
        if logps is None:
            logps = {s: response.log_probs[:, None] for s, response in sampled.items()}
        logps = padded(logps, samples, width)
        values = found["critic"]
        scored = Scored(
            samples=samples,
            mask=torch.arange(width) < lengths[:, None],
            stopped=torch.from_numpy(rollout.stopped[samples]),
            logps=logps,
            ref_logps=padded(found["reference"], samples, width) if "reference" in found else logps,
            values=padded(values, samples, width),
            final_values=torch.tensor([values[s][-1, 0] for s in samples], dtype=torch.float64),
            scores=torch.from_numpy(rewarded.scores),
        )
        return scored, rewarded

    def _take_samples(
        self, rollout: Rollout, sampled: Mapping[int, Response], rewarded: Rewarded
    ) -> None:
        """Keep some of the responses that this rank owns for ``samples``."""
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
        """The first response to each of the last iteration's first prompts, on rank 0.

        Collective over the world.
        """
        everyone = gather_on_rank_zero(self._shown) or []
        together = {number: shown for each in everyone for number, shown in each.items()}
        return [together[number] for number in sorted(together)]

    def state_dict(self) -> dict[str, Any]:
        """What is saved beside the models."""
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._kl_coef = state_dict["kl_coef"]


def num_iterations(config: JobConfig, num_prompts: int) -> int:
    """Iterations of the whole job: ``max_steps``, else as many as see every prompt so often."""
    if config.max_steps > 0:
        return config.max_steps
    return -(-config.num_train_epochs * num_prompts // config.global_batch_size)


def sampling_of(config: JobConfig, tokenizer: Tokenizer) -> Sampling:
    """How the config says that responses are sampled.

    Raises:
        ValueError: if nothing would end a response.
    """
    own = config.generation
    stop_ids = own.stop_token_ids
    if stop_ids is None:
        if tokenizer.eos_id is None:
            raise ValueError(
                "generation.stop_token_ids: null, and the tokenizer has no end-of-sequence token; "
                "name the tokens that end a response ([] for none)"
            )
        stop_ids = [tokenizer.eos_id]
    return Sampling(
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        min_new_tokens=own.min_new_tokens,
        max_new_tokens=own.max_new_tokens,
        stop_token_ids=tuple(stop_ids),
        seed=config.seed,
    )
