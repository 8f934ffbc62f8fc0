"""Names that others have for our keys: TRL and Megatron-LM (flat), verl and NeMo-RL (dotted)."""

_NAMES = {
    "global_batch_size": "per_device_train_batch_size gradient_accumulation_steps"
    " data.train_batch_size policy.train_global_batch_size grpo.num_prompts_per_step",
    "num_train_epochs": "num_epochs trainer.total_epochs dpo.max_num_epochs grpo.max_num_epochs",
    "max_steps": "train_iters trainer.total_training_steps dpo.max_num_steps grpo.max_num_steps",
    "output_dir": "logger.log_dir",
    "engine.dtype": "bf16 fp16 torch_dtype policy.precision",
    "engine.attention": "attn_implementation",
    "actor.model.path": "model_name_or_path sft_model_path actor_rollout_ref.model.path"
    " policy.model_name",
    "actor.parallel.tensor_model_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
    "actor.parallel.recompute": "gradient_checkpointing activation_checkpointing"
    " recompute_granularity"
    " actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor.lora.r": "use_peft rank lora_r lora_rank lora_dim actor_rollout_ref.model.lora_rank"
    " policy.dtensor_cfg.lora_cfg.dim",
    "actor.lora.lora_alpha": "alpha actor_rollout_ref.model.lora_alpha"
    " policy.dtensor_cfg.lora_cfg.alpha",
    "actor.lora.lora_dropout": "disable_dropout policy.dtensor_cfg.lora_cfg.dropout",
    "actor.lora.target_modules": "lora_target_modules actor_rollout_ref.model.target_modules"
    " policy.dtensor_cfg.lora_cfg.target_modules",
    "actor.lora.path": "actor_rollout_ref.model.lora_adapter_path",
    "reference.model.path": "ref_model",
    "reward.model.path": "reward_model_path reward_model.model.path reward.reward_model.model_path",
    "reward.function": "reward_funcs custom_reward_function.path"
    " reward.custom_reward_function.path",
    "reward.weights": "reward_weights",
    "critic.optimizer.lr": "critic_learning_rate critic.optim.lr",
    "tokenizer.path": "policy.tokenizer.name",
    "tokenizer.chat_template": "chat_template_path",
    "data.train": "dataset_name data.train_files",
    "data.eval": "data.val_files",
    "data.columns": "data.prompt_key",
    "data.max_length": "policy.max_total_sequence_length data.max_input_seq_length",
    "data.truncation_mode": "data.truncation",
    "data.num_proc": "dataset_num_proc",
    "packing.enabled": "padding_free actor_rollout_ref.model.use_remove_padding"
    " policy.sequence_packing.enabled",
    "packing.row_tokens": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu policy.train_micro_batch_size",
    "dpo.beta": "dpo.reference_policy_kl_penalty",
    "dpo.sft_loss_weight": "rpo_alpha cpo_alpha",
    "generation.num_generations": "actor_rollout_ref.rollout.n grpo.num_generations_per_prompt",
    "generation.max_new_tokens": "max_completion_length response_length data.max_response_length",
    "generation.parallel.tensor_model_parallel_size": "vllm_tensor_parallel_size"
    " actor_rollout_ref.rollout.tensor_model_parallel_size"
    " policy.generation.vllm_cfg.tensor_parallel_size",
    "ppo.ppo_epochs": "num_ppo_epochs num_iterations",
    "ppo.num_mini_batches": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "ppo.clip_ratio": "cliprange epsilon",
    "ppo.clip_ratio_low": "epsilon_low loss_fn.ratio_clip_min",
    "ppo.clip_ratio_high": "epsilon_high loss_fn.ratio_clip_max",
    "ppo.clip_ratio_c": "delta loss_fn.ratio_clip_c",
    "ppo.advantage_estimator": "algorithm.adv_estimator grpo.adv_estimator.name",
    "ppo.scale_rewards": "scale_rewards algorithm.norm_adv_by_std_in_grpo grpo.normalize_rewards",
    "ppo.loss_mode": "importance_sampling_level actor_rollout_ref.actor.policy_loss.loss_mode"
    " loss_fn.sequence_level_importance_ratios",
    "ppo.loss_agg_mode": "loss_type actor_rollout_ref.actor.loss_agg_mode loss_fn.token_level_loss",
    "ppo.mask_truncated_completions": "mask_truncated_completions grpo.overlong_filtering",
    "ppo.use_kl_loss": "use_kl_loss algorithm.use_kl_in_reward",
    "ppo.filter_groups.enable": "algorithm.filter_groups.enable grpo.use_dynamic_sampling",
    "ppo.filter_groups.max_num_gen_batches": "algorithm.filter_groups.max_num_gen_batches"
    " grpo.dynamic_sampling_max_gen_batches",
    "ppo.importance_sampling_mode": "vllm_importance_sampling_mode"
    " algorithm.rollout_correction.rollout_is",
    "ppo.importance_sampling_cap": "vllm_importance_sampling_clip_max"
    " algorithm.rollout_correction.rollout_is_threshold"
    " loss_fn.truncated_importance_sampling_ratio",
    "ppo.kl_coef": "beta algorithm.kl_ctrl.kl_coef actor_rollout_ref.actor.kl_loss_coef"
    " loss_fn.reference_policy_kl_penalty",
    "ppo.kl_target": "algorithm.kl_ctrl.target_kl",
    "ppo.kl_horizon": "algorithm.kl_ctrl.horizon",
    "ppo.use_bias_correction_kl": "use_bias_correction_kl",
    "ppo.kl_estimator": "algorithm.kl_penalty actor_rollout_ref.actor.kl_loss_type",
    "optimizer.lr": "learning_rate actor_rollout_ref.actor.optim.lr policy.optimizer.kwargs.lr",
    "optimizer.lr_scheduler_type": "lr_decay_style policy.megatron_cfg.scheduler.lr_decay_style",
    "optimizer.warmup_steps": "warmup_ratio lr_warmup_iters"
    " actor_rollout_ref.actor.optim.lr_warmup_steps"
    " policy.megatron_cfg.scheduler.lr_warmup_iters",
    "optimizer.adam_eps": "adam_epsilon",
    "optimizer.max_grad_norm": "clip_grad gradient_clipping actor_rollout_ref.actor.grad_clip"
    " actor_rollout_ref.actor.optim.clip_grad policy.megatron_cfg.optimizer.clip_grad",
    "optimizer.cpu_offload": "policy.megatron_cfg.optimizer.optimizer_cpu_offload",
    "checkpoint.dir": "trainer.default_local_dir checkpointing.checkpoint_dir",
    "checkpoint.save_every": "save_steps trainer.save_freq checkpointing.save_period",
    "checkpoint.keep_last": "save_total_limit trainer.max_actor_ckpt_to_keep"
    " checkpointing.keep_top_k",
    "checkpoint.resume": "resume_from_checkpoint trainer.resume_mode",
    "telemetry.log_every": "logging_steps",
    "telemetry.eval_every": "eval_steps trainer.test_freq dpo.val_period grpo.val_period",
    "telemetry.wandb_project": "report_to trainer.project_name logger.wandb.project",
}
NAMES = {ours: tuple(theirs.split()) for ours, theirs in _NAMES.items()}
OURS = {theirs: ours for ours, names in NAMES.items() for theirs in names}
SECTIONS = {name.partition(".")[0] for name in OURS if "." in name}  # some are ours, too
