"""The config of a job: every key that a user can write in YAML."""

from dataclasses import dataclass

from puzzle_align.config.schema import key, section
from puzzle_align.config.sections.data import DataConfig, PackingConfig, TokenizerConfig
from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.config.sections.models import (
    CriticConfig,
    PlacementConfig,
    RewardConfig,
    RoleConfig,
)
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.output import CheckpointConfig, TelemetryConfig
from puzzle_align.config.sections.preference import (
    DPOConfig,
    KTOConfig,
    ReferenceLossConfig,
    RewardLossConfig,
)
from puzzle_align.config.sections.rl import SAMPLING_KEYS, GenerationConfig, PPOConfig
from puzzle_align.config.stages import PROMPTS, STAGES, stages_with


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A whole job; a nested field is a dotted key (``dpo.beta``)."""

    stage: str = key(
        "dpo",
        "what to run: preference training, reward model training, or PPO",
        choices=tuple(STAGES),
    )
    output_dir: str = key("runs/dpo", "logs, checkpoints and caches go here", is_path=True)
    seed: int = key(
        42,
        "seed of random weights, data order, packing and sampling",
        at_least=0,
        at_most=2**63 - 1,
        binding=True,
        generate=True,
    )
    global_batch_size: int = key(
        64,
        "pairs (rankings) of an optimizer step; stage kto: responses; stage ppo: prompts",
        unit="pairs",
        at_least=1,
        binding=True,
        generate=True,
    )
    num_train_epochs: int = key(1, "passes over the data", unit="epochs", at_least=1)
    max_steps: int = key(
        -1,
        "number of steps (stage ppo: iterations); -1: as num_train_epochs says",
        unit="steps",
        at_least=1,
        besides=(-1, "by epochs"),
    )
    engine: EngineConfig = section(EngineConfig, "device, precision, kernels", generate=True)
    actor: RoleConfig = section(
        RoleConfig, "the policy", stages=stages_with(role="actor"), generate=("parallel",)
    )
    reference: RoleConfig = section(
        RoleConfig, "the frozen reference", stages=stages_with(role="reference")
    )
    reward: RewardConfig = section(
        RewardConfig, "the reward model", stages=stages_with(role="reward")
    )
    critic: CriticConfig = section(
        CriticConfig, "the value model", stages=stages_with(role="critic")
    )
    placement: PlacementConfig = section(
        PlacementConfig,
        "order of the work of models that share ranks",
        stages=stages_with(role="reference"),
    )
    tokenizer: TokenizerConfig = section(TokenizerConfig, "text to tokens", generate=True)
    data: DataConfig = section(DataConfig, "preference data, or prompts", shapes_data=True)
    packing: PackingConfig = section(
        PackingConfig, "pairs, or prompts with responses, to rows", shapes_data=True
    )
    dpo: DPOConfig = section(
        DPOConfig, "the preference loss", stages=stages_with(loss="dpo"), binding=True
    )
    kto: KTOConfig = section(
        KTOConfig, "the loss of unpaired data", stages=stages_with(loss="kto"), binding=True
    )
    reward_loss: RewardLossConfig = section(
        RewardLossConfig,
        "the reward model's loss",
        stages=stages_with(loss="reward_loss"),
        binding=True,
    )
    generation: GenerationConfig = section(
        GenerationConfig,
        "how responses are sampled",
        stages=PROMPTS,
        generate=SAMPLING_KEYS,
        shapes_data=True,
    )
    ppo: PPOConfig = section(
        PPOConfig, "proximal policy optimization", stages=stages_with(loss="ppo"), binding=True
    )
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW and its schedule")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving and resuming")
    telemetry: TelemetryConfig = section(TelemetryConfig, "logged metrics, samples and traces")

    @property
    def main_role(self) -> str:
        """The role that the stage is for, such as the actor or the reward model."""
        return STAGES[self.stage].trained[0]

    @property
    def reference_loss(self) -> ReferenceLossConfig | None:
        """The loss section of a stage that compares a policy with a reference; else None."""
        loss = getattr(self, STAGES[self.stage].loss)
        return loss if isinstance(loss, ReferenceLossConfig) else None
