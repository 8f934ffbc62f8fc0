"""A seeded family of clusters and jobs to plan for, with declared instead of measured times.

A draw decides a device's rates and memory; links within and between nodes of 4 or 8 ranks; 8 to 64
ranks, not only powers of two; models of 350M to 33B, with all or grouped key/value heads, and
critics of other sizes; lengths and batches; and which state is sharded or offloaded. Most jobs are
PPO, some are DPO, and some train a reward model.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from puzzle_align.config.roles import PhaseRoles
from puzzle_align.config.stages import STAGES
from puzzle_align.layout.job_plan import OptimizerStates, Settings, Workload
from puzzle_align.layout.model import ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.declared import OPTIONS, Device, Sizes, declared_profile
from puzzle_align.planning.costs.links import Wire, Wires, declared_links
from puzzle_align.planning.costs.measured import Measured, RowShape
from puzzle_align.planning.costs.profile import Link
from puzzle_align.planning.iteration import Times
from puzzle_align.planning.load import GenerationLoad, Load, PassLoad
from puzzle_align.planning.search.space import Cluster, JobToPlan, Space

# Hidden size, width of the MLP, layers, heads, key/value heads, vocabulary.
MODELS = {
    "350M": (1024, 2816, 24, 16, 16, 32000),
    "1.3B": (2048, 5504, 24, 16, 16, 32000),
    "3B": (3072, 8192, 28, 24, 8, 128256),
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "13B": (5120, 13824, 40, 40, 40, 32000),
    "14B": (5120, 17408, 40, 40, 8, 151936),
    "33B": (6656, 17920, 64, 52, 52, 32000),
}
A100 = Device(name="A100", flops=200e12, bandwidth=1.6e12, memory_bytes=80 * 10**9)
_RANKS = (8, 8, 12, 16, 16, 24, 32, 32, 48, 64, 64)
_MARGIN = 0.1  # share of the memory that is kept free


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job on a cluster."""

    text: str
    job: JobToPlan
    load: Load
    cluster: Cluster
    measured: Measured

    def space(self) -> Space:
        """Its space of plans."""
        times = Times(self.measured, self.load, self.job.settings)
        return Space(self.job, self.cluster, times)


def llama(name: str) -> ModelSpec:
    """A Llama of the dimensions in ``MODELS``."""
    hidden, width, layers, heads, groups, vocabulary = MODELS[name]
    return ModelSpec(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden // heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
    )


def links_of(
    node: float, network: float, node_latency: float = 8e-6, network_latency: float = 20e-6
) -> tuple[Link, ...]:
    """Links of these bandwidths (bytes/s) and latencies (s)."""
    wires = Wires(node=Wire(node, node_latency), network=Wire(network, network_latency))
    return declared_links("data sheet", wires)


def draw_case(seed: int, number: int, attempt: int = 0) -> Case:
    """Draw the family's case of a number; each attempt draws another one."""
    draw = random.Random(f"{seed} {number} {attempt}")
    stage = draw.choices(("ppo", "dpo", "reward"), (8, 1, 1))[0]
    models, names = _models(draw, stage)
    device = Device(
        name="drawn",
        flops=_between(draw, 60e12, 700e12),
        bandwidth=_between(draw, 0.7e12, 4e12),
        memory_bytes=draw.choice((24, 40, 48, 80, 80, 96, 141)) * 10**9,
        launch=_between(draw, 20e-6, 100e-6),
    )
    node, network = _between(draw, 20e9, 400e9), _between(draw, 3e9, 50e9)
    latencies = _between(draw, 4e-6, 15e-6), _between(draw, 10e-6, 50e-6)
    links = links_of(node, network, *latencies)
    each, ranks = draw.choice((4, 8)), draw.choice(_RANKS)
    prompt, response = draw.choice((64, 128, 256, 512)), draw.choice((64, 128, 256, 512))
    longest = prompt + response * (1 if stage == "ppo" else 2)
    sizes = Sizes(rows=tuple(size for size in (1024, 2048, 4096) if size >= longest))
    profile = declared_profile(models.values(), device, links, ranks_per_node=each, sizes=sizes)
    load = _load(draw, stage, prompt, response)
    job = _job(draw, stage, models, sizes.rows[0])
    text = (
        f"{stage} {names} on {ranks} ranks, {each} a node, {device.memory_bytes // 10**9} GB, "
        f"{load.num_examples} examples of {prompt}+{response} tokens"
    )
    memory = int(device.memory_bytes * (1 - _MARGIN))
    cluster = Cluster(num_ranks=ranks, ranks_per_node=each, memory_bytes=memory)
    return Case(text=text, job=job, load=load, cluster=cluster, measured=Measured(profile))


def paper_case(num_ranks: int = 64) -> Case:
    """PPO of an actor of 33B and a critic of 7B."""
    actor, critic = llama("33B"), with_scalar_head(llama("7B"))
    models = {"actor": actor, "critic": critic, "reference": actor, "reward": critic}
    measured = Measured(declared_profile(models.values(), A100, links_of(200e9, 12e9)))
    load = load_of(256, 1, 256, 256, 1, 1, sampled=True)
    job = job_of("ppo", models, Settings(row_tokens=2048), recomputes=False)
    cluster = Cluster(num_ranks=num_ranks, ranks_per_node=8, memory_bytes=72 * 10**9)
    return Case(
        text=f"33B/7B on {num_ranks}", job=job, load=load, cluster=cluster, measured=measured
    )


def _between(draw: random.Random, low: float, high: float) -> float:
    """Draw log-uniformly: each doubling is equally likely."""
    return low * (high / low) ** draw.random()


def _models(draw: random.Random, stage: str) -> tuple[dict[str, ModelSpec], str]:
    name = draw.choice(list(MODELS))
    actor = llama(name)
    if stage == "reward":
        return {"reward": with_scalar_head(actor)}, name
    if stage == "dpo":
        return {"actor": actor, "reference": actor}, name
    other = draw.choice(list(MODELS)) if draw.random() < 0.7 else name
    critic = with_scalar_head(llama(other))
    models = {"actor": actor, "critic": critic, "reference": actor, "reward": critic}
    return models, f"{name}/{other}"


def _job(
    draw: random.Random, stage: str, models: Mapping[str, ModelSpec], row_tokens: int
) -> JobToPlan:
    trained = STAGES[stage].trained
    sharded = tuple(trained) if draw.random() < 0.6 else ()
    aside = ("gradients", "optimizer") if stage == "ppo" and draw.random() < 0.3 else ()
    settings = Settings(
        row_tokens=row_tokens,
        optimizers=OptimizerStates(sharded=sharded),
        set_aside=aside,
        overlap_switch=stage == "ppo" and bool(sharded) and draw.random() < 0.2,
    )
    return job_of(stage, models, settings, recomputes=draw.random() < 0.3)


def job_of(
    stage: str, models: Mapping[str, ModelSpec], settings: Settings, *, recomputes: bool
) -> JobToPlan:
    """A job of the stage; ``recomputes``: the actor's log-probabilities are scored, not sampled."""
    infer: Workload = "infer"
    both = PhaseRoles("train", (("reference", infer), ("actor", "train")), "auto")
    before: tuple[PhaseRoles, ...] = ()
    if stage == "ppo":
        roles = ("actor", "reference", "reward", "critic")[0 if recomputes else 1 :]
        phases = (
            PhaseRoles("generate", (("actor", "generate"),)),
            PhaseRoles("score", tuple((role, infer) for role in roles), "auto"),
            PhaseRoles("learn", (("actor", "train"), ("critic", "train")), "auto"),
        )
    elif stage == "dpo":
        phases = (both,)
        once = PhaseRoles("precompute", (("reference", infer),), once=True)
        before = (once, PhaseRoles("train", (("actor", "train"),)))
    else:
        phases = (PhaseRoles("train", (("reward", "train"),)),)
    return JobToPlan(
        stage=stage,
        trained=STAGES[stage].trained,
        phases=phases,
        before=before,
        models=models,
        options=OPTIONS,
        settings=settings,
        sequence_parallel=True,
        ranks_by_role=STAGES[stage].ranks_by_role,
    )


def _load(draw: random.Random, stage: str, prompt: int, response: int) -> Load:
    number = draw.choice((64, 128, 256, 512))
    if stage != "ppo":
        return load_of(number, 2, prompt, response, 1, 1, sampled=False)
    generations = draw.choice((1, 1, 1, 4))
    batches, epochs = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2))
    return load_of(number, generations, prompt, response, batches, epochs, sampled=True)


def load_of(
    number: int,
    responses: int,
    prompt: int,
    response: int,
    mini_batches: int,
    epochs: int,
    *,
    sampled: bool,
) -> Load:
    """Load of ``number`` prompts; a row has both responses of a pair, but one sampled response."""
    together = 1 if sampled else responses
    tokens, examples = prompt + together * response, number * (responses // together)

    def rows(row_tokens: int, batches: int, plan: ParallelPlan) -> PassLoad:
        multiple = plan.microbatch_multiple
        in_row = row_tokens // tokens
        count = ceil(examples / batches / in_row)
        microbatches = ceil(count / (plan.data * multiple)) * multiple
        shape = RowShape(
            row_tokens=row_tokens,
            pairs=in_row * tokens**2 / 2,
            predictions=in_row * together * response,
        )
        return PassLoad(microbatches=float(microbatches), row=shape)

    def most_rows(row_tokens: int) -> int:
        return ceil(examples / mini_batches / (row_tokens // tokens))

    generation = GenerationLoad(
        num_prompts=number,
        num_generations=responses,
        prompt_tokens=prompt,
        response_tokens=response,
        longest_prompt=prompt,
        longest_response=response,
    )
    return Load(
        rows=rows,
        most_rows=most_rows,
        num_examples=examples,
        num_iterations=1000,
        least_row_tokens=tokens,
        mini_batches=mini_batches,
        epochs=epochs,
        generation=generation if sampled else None,
    )
