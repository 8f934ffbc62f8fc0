"""Stage ``grpo``: stage ``ppo`` without a critic; ``config.stages`` has its defaults."""

from puzzle_align.stages.ppo import PPOTrainer

open_trainer = PPOTrainer
