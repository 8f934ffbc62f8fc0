"""The models of a job: weights, parallel plans, ranks and execution order."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from puzzle_align.config.schema import LONGEST_WAIT, key, section
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.stages import AGAINST_REFERENCE, PROMPTS, RANKS_BY_ROLE
from puzzle_align.layout.model import LORA_TARGETS, LoraSpec, Recompute
from puzzle_align.layout.plan import MOST_RANKS
from puzzle_align.schedules.registry import SCHEDULES

MOST_STAGES = 128
MOST_LORA_RANK = 4096


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The source of a model's architecture and weights."""

    path: str | None = key(
        None,
        "directory of a Hugging Face model, a checkpoint, or a folder of them such as output_dir",
        is_path=True,
    )
    config: dict[str, Any] | None = key(
        None,
        "keys of a config.json, for random weights; not read if path is set",
        binding=True,
    )
    random_weights: bool = key(
        False,
        "draw weights from seed, even if path is set; required for random weights on real data",
        binding=True,
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The parallel plan of one model."""

    pipeline_model_parallel_size: int = key(
        1, "P: pipeline ranks", unit="ranks", at_least=1, at_most=MOST_STAGES
    )
    data_parallel_size: int | None = key(
        None,
        "D: replicas; null: the number of ranks over P*T",
        unit="ranks",
        at_least=1,
        at_most=MOST_RANKS,
    )
    tensor_model_parallel_size: int = key(
        1, "T: tensor ranks", unit="ranks", at_least=1, at_most=MOST_RANKS
    )
    virtual_pipeline_model_parallel_size: int = key(
        1,
        "model chunks on a pipeline rank; above 1: interleaved 1F1B",
        unit="chunks",
        at_least=1,
        at_most=MOST_STAGES,
    )
    pipeline_layers: list[int] | Literal["auto"] | None = key(
        None,
        "layers by pipeline position, chunk by chunk; auto: balance FLOPs; null: equal, else auto",
        unit="list of integers, or auto",
    )
    pipeline_schedule: str | None = key(
        None,
        "order of a pipeline's actions; null: 1f1b, interleaved if a rank has several chunks",
        choices=tuple(SCHEDULES),
    )
    sequence_parallel: bool = key(False, "shard norms and residuals over the tensor ranks")
    recompute: Recompute = key(
        "none", "activations that the backward pass computes again instead of keeping them"
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of a trained model, with the names and meanings of PEFT's LoraConfig."""

    r: int = key(8, "rank of the adapters", at_least=1, at_most=MOST_LORA_RANK, binding=True)
    lora_alpha: float = key(
        8.0, "an adapter's output is scaled by lora_alpha / r", above=0, binding=True
    )
    lora_dropout: float = key(
        0.0, "dropout of the adapters' inputs", at_least=0, below=1, binding=True
    )
    target_modules: str | list[str] = key(
        "all-linear",
        "linear layers with adapters: all-linear, or a list, as q_proj and v_proj",
        binding=True,
    )
    use_rslora: bool = key(False, "scale by lora_alpha / sqrt(r)", binding=True)
    init_lora_weights: bool | Literal["gaussian"] = key(
        True,
        "A's distribution: true: uniform, as Kaiming; gaussian: normal; B is 0 in both",
        binding=True,
    )
    path: str | None = key(
        None, "PEFT directory (adapter_model.safetensors) to start from", is_path=True
    )
    merge: bool | None = key(
        None, "sample from weights with them added; null: in fp32, or with ppo.recompute_log_probs"
    )

    @property
    def spec(self) -> LoraSpec:
        """The adapters that this describes."""
        asked = self.target_modules
        asked = [asked] if isinstance(asked, str) else asked
        targets = LORA_TARGETS if asked == ["all-linear"] else asked
        return LoraSpec(
            r=self.r,
            lora_alpha=self.lora_alpha,
            target_modules=tuple(target for target in LORA_TARGETS if target in targets),
            lora_dropout=self.lora_dropout,
            use_rslora=self.use_rslora,
        )


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """One model of the job."""

    model: ModelConfig = section(
        ModelConfig,
        "the model; empty: of the reference, the actor's; of the critic, the reward model's or "
        "the actor's",
    )
    base: Literal["actor"] | None = key(
        None, "actor: its model is the actor's, which is in memory once where adapters are trained"
    )
    lora: LoraConfig | None = key(
        None,
        "adapters, which alone are trained, on the frozen model; null: all weights are trained",
    )
    parallel: ParallelConfig | None = key(
        None,
        "its plan (unset keys as below); null: P=1, T=1, of reference and stage ppo the actor's",
    )
    ranks: str | None = key(
        None,
        "ranks that hold it, as 0-3; null: all, or the actor's if it has no plan of its own",
        stages=RANKS_BY_ROLE,
    )

    @property
    def has_model(self) -> bool:
        """Whether this role's section names a model."""
        named = (self.model.path, self.model.config, self.base)
        return any(value is not None for value in named)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(RoleConfig):
    """The rewards of responses: a reward model, functions, or both, summed."""

    function: str | list[str] | None = key(
        None,
        "module:function, or a list; called with the arguments that TRL's GRPOTrainer gives",
        stages=PROMPTS,
        binding=True,
    )
    url: str | list[str] | None = key(
        None,
        "server that scores responses, or a list: JSON of prompts, completions and columns in",
        stages=PROMPTS,
        binding=True,
    )
    weights: list[float] | None = key(
        None,
        "factor of each function's rewards, then of each server's; null: 1 each",
        stages=PROMPTS,
        binding=True,
    )
    timeout: float | None = key(
        600.0,
        "a call or the import of a function that takes longer ends the job; null: no limit",
        unit="s",
        above=0,
        at_most=LONGEST_WAIT,
        stages=PROMPTS,
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all servers."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of all reward functions, and the addresses of servers."""
        given = self.function
        return (*((given,) if isinstance(given, str) else given or ()), *self.urls)

    def longest_wait(self, calls: int) -> float:
        """Seconds that ranks may wait for another to import the functions or call each so often."""
        each = LONGEST_WAIT if self.timeout is None else self.timeout
        # One more timeout covers the worker's start and its work between functions.
        longest = (calls * len(self.functions) + 1) * each
        return min(longest, LONGEST_WAIT) if self.functions else 0.0


def is_url(name: str) -> bool:
    """Whether a reward's name is a server's address, with a host."""
    return re.match("https?://[^/:]", name) is not None


@dataclass(frozen=True, kw_only=True)
class CriticConfig(RoleConfig):
    """The value model."""

    optimizer: OptimizerConfig | None = key(
        None, "its optimizer; what is not set here is as the actor's"
    )


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Execution order of models that share ranks."""

    reference: str = key(
        "auto",
        "before the policy, in its bubbles (auto: if their plans are equal), or on the last ranks",
        choices=("auto", "sequential", "time_shared", "concurrent"),
        stages=AGAINST_REFERENCE,
    )
    profile: str | None = key(
        None,
        "profile.json whose times order the work of models that share ranks; null: by FLOPs",
        is_path=True,
    )
    score: str = key(
        "auto",
        "reference, reward and critic: one by one, or as one pipeline (auto: if possible)",
        choices=("auto", "sequential", "time_shared"),
        stages=PROMPTS,
    )
    learn: str = key(
        "auto",
        "training of actor and critic: one by one, or as one pipeline (auto: if possible)",
        choices=("auto", "sequential", "time_shared"),
        stages=PROMPTS,
    )
