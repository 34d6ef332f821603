"""Keys that Trinity-RFT's YAMLs and veRL hold and Trinity's schema does not; `compat` takes them out of a document.

RENAMED: an old or veRL name of one of ours; VALUES holds old names of values. IGNORED: without effect, with the reason,
which `trinity check` shows. UNSUPPORTED: refused with the reason, unless its value asks for nothing. `*` stands for any
list index; a path that ends in `.**` for everything below it, where others' free-form arguments live.
"""

_VERL = "trainer.trainer_config"
_ACTOR = f"{_VERL}.actor_rollout_ref"
_INPUT = "buffer.explorer_input"
_TASKSETS = (f"{_INPUT}.taskset", f"{_INPUT}.tasksets.*", f"{_INPUT}.eval_tasksets.*")
_ENGINES = ("explorer.rollout_model", "explorer.auxiliary_models.*")
_CRITIC = f"{_VERL}.critic"
_EXPERIENCE = "buffer.trainer_input.experience_buffer"
_BUFFERS = (_EXPERIENCE, "buffer.trainer_input.auxiliary_buffers.*")


def _under(path: str, keys: str, reason: str) -> dict[str, str]:
    """One reason for several keys of a section."""
    return {f"{path}.{key}": reason for key in keys.split()}


def _at(places: tuple[str, ...], keys: str, reason: str) -> dict[str, str]:
    """One reason for several keys of several sections."""
    return {f"{place}.{key}": reason for place in places for key in keys.split()}


# key -> old value -> ours
VALUES: dict[str, dict[str, str]] = {
    "synchronizer.sync_method": {"online": "nccl", "offline": "checkpoint", "hccl": "nccl"},
    "synchronizer.sync_style": {"dynamic_by_explorer": "explorer_driven", "dynamic_by_trainer": "trainer_driven"},
    **{f"{place}.storage_type": {} for place in _BUFFERS},
    # Names of their own alone, in any case.
    **{f"{place}.storage_type": {} for place in _TASKSETS},
    **{f"{place}.format.prompt_type": {} for place in (*_TASKSETS, *_BUFFERS)},
}

RENAMED: dict[str, str] = {
    "algorithm.policy_loss_fn_args.delta": "algorithm.policy_loss_fn_args.delta_sequence_masking",
    "explorer.runner_num": "explorer.runner_per_model",
    "explorer.api_port": "explorer.proxy_port",
    "data_processor.experience_pipeline.save_input": "buffer.save_experiences",
    "buffer.expert_data_ratio": "algorithm.sample_strategy_args.expert_data_ratio",
    f"{_EXPERIENCE}.use_priority_queue": f"{_EXPERIENCE}.replay_buffer.enable",
    f"{_EXPERIENCE}.reuse_cooldown_time": f"{_EXPERIENCE}.replay_buffer.reuse_cooldown_time",
    f"{_EXPERIENCE}.replay_buffer_kwargs.priority_fn": f"{_EXPERIENCE}.replay_buffer.priority_fn",
    **{
        f"{_EXPERIENCE}.replay_buffer_kwargs.{name}": f"{_EXPERIENCE}.replay_buffer.priority_fn_args.{name}"
        for name in ("decay", "use_count_limit", "sigma")
    },
    "algorithm.optimizer.warmup_style": "algorithm.optimizer.lr_scheduler_type",
    "algorithm.optimizer.clip_grad": "trainer.grad_clip",
    f"{_ACTOR}.actor.optim.lr": "algorithm.optimizer.lr",
    f"{_ACTOR}.actor.optim.lr_warmup_steps": "algorithm.optimizer.lr_warmup_steps",
    f"{_ACTOR}.actor.optim.lr_warmup_steps_ratio": "algorithm.optimizer.lr_warmup_steps_ratio",
    f"{_ACTOR}.actor.optim.lr_scheduler_type": "algorithm.optimizer.lr_scheduler_type",
    f"{_ACTOR}.actor.optim.warmup_style": "algorithm.optimizer.lr_scheduler_type",
    f"{_ACTOR}.actor.optim.min_lr_ratio": "algorithm.optimizer.min_lr_ratio",
    f"{_ACTOR}.actor.optim.betas": "algorithm.optimizer.betas",
    f"{_ACTOR}.actor.optim.weight_decay": "algorithm.optimizer.weight_decay",
    f"{_ACTOR}.actor.optim.clip_grad": "trainer.grad_clip",
    f"{_ACTOR}.actor.grad_clip": "trainer.grad_clip",
    f"{_ACTOR}.actor.ppo_epochs": "trainer.epochs_per_batch",
    f"{_ACTOR}.actor.use_dynamic_bsz": "trainer.use_dynamic_bsz",
    f"{_ACTOR}.actor.ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
    f"{_ACTOR}.actor.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_size_per_gpu",
    f"{_ACTOR}.actor.ulysses_sequence_parallel_size": "trainer.ulysses_sequence_parallel_size",
    f"{_ACTOR}.actor.fsdp_config.optimizer_offload": "trainer.deepspeed.offload_optimizer",
    f"{_ACTOR}.actor.fsdp_config.param_offload": "trainer.deepspeed.offload_param",
    f"{_ACTOR}.ref.fsdp_config.param_offload": "trainer.deepspeed.offload_reference",
    f"{_ACTOR}.model.use_remove_padding": "trainer.use_remove_padding",
    f"{_ACTOR}.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    f"{_VERL}.trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
    f"{_VERL}.trainer.critic_warmup": "trainer.critic.warmup_steps",
    f"{_CRITIC}.optim.lr": "trainer.critic.optimizer.lr",
    f"{_CRITIC}.optim.lr_warmup_steps": "trainer.critic.optimizer.lr_warmup_steps",
    f"{_CRITIC}.optim.lr_warmup_steps_ratio": "trainer.critic.optimizer.lr_warmup_steps_ratio",
    f"{_CRITIC}.optim.lr_scheduler_type": "trainer.critic.optimizer.lr_scheduler_type",
    f"{_CRITIC}.optim.warmup_style": "trainer.critic.optimizer.lr_scheduler_type",
    f"{_CRITIC}.optim.min_lr_ratio": "trainer.critic.optimizer.min_lr_ratio",
    f"{_CRITIC}.optim.betas": "trainer.critic.optimizer.betas",
    f"{_CRITIC}.optim.weight_decay": "trainer.critic.optimizer.weight_decay",
    f"{_CRITIC}.model.path": "model.critic_model_path",
    f"{_CRITIC}.cliprange_value": "trainer.critic.cliprange_value",
    f"{_CRITIC}.grad_clip": "trainer.critic.grad_clip",
    **{f"{place}.task_selector": f"{place}.data_selector" for place in (*_TASKSETS, *_BUFFERS)},
    **{
        f"{_ACTOR}.rollout.{section}update_weights_bucket_megabytes": "synchronizer.bucket_mib"
        for section in ("", "checkpoint_engine.")
    },
    "buffer.read_batch_size": "buffer.train_batch_size",
}

_OPTIMIZER = (
    "optimizer optimizer_impl total_training_steps lr_warmup_init lr_decay_steps lr_decay_style min_lr "
    "weight_decay_incr_style lr_wsd_decay_style lr_wsd_decay_steps use_checkpoint_opt_param_scheduler "
    "override_optimizer_config.**"
)
_FSDP = (
    "offload_policy reshard_after_forward wrap_policy.** fsdp_size forward_prefetch model_dtype dtype "
    "mixed_precision.**"
)
_NO_RAY = "there is no Ray; processes are started by `trinity run` or by your cluster"
_OWN_TRAINER = "Trinity's trainer decides this itself"
_POLLS = ("max_retry_times", "max_retry_interval")
_NO_POLL = "experience arrives by subscription; nothing polls"

IGNORED: dict[str, str] = {
    "algorithm.advantage_fn_args.chunk_size": "advantages need little memory, and change by no chunk",
    "ray_namespace": _NO_RAY,
    "cluster.ray_address": _NO_RAY,
    "ignore_validator_suggestions": "advice never stops a run",
    "checkpoint_job_dir": "follows from checkpoint_root_dir, project, group and name",
    **_under(
        "log", "level group_by_node save_dir", "every service logs to <job>/log; TRINITY_LOG_LEVEL sets the level"
    ),
    "monitor.enable_ray_timeline": "spans go to an OTLP collector: OTEL_EXPORTER_OTLP_ENDPOINT",
    "monitor.cache_dir": "metrics are in <job>/monitor",
    "monitor.shared_run": "explorer and trainer are two runs of the monitor",
    **_under(
        "cluster",
        "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_gpu_num trainer_node_num "
        "trainer_gpu_num_per_node",
        "follows from engine_num and tensor_parallel_size; `trinity check` shows it",
    ),
    "algorithm.optimizer.optimizer_type": "the optimizer is AdamW",
    **_under("model.lora_configs.*", "name base_model_name is_dummy", "adapters are merged where they are loaded"),
    **_under("model", "fully_sharded_loras max_cpu_loras", "adapters are merged where they are loaded"),
    "model.logprobs": "the sampled token's log-probability is always recorded",
    "model.enable_prompt_truncation": "a prompt that is too long is kept out of the loss, always",
    "buffer.cache_dir": "everything of a run is in its job folder",
    "buffer.explorer_output": "experience goes to the log",
    "buffer.pad_token_id": "follows from the model",
    "buffer.tokenizer_path": "follows from the model",
    **{f"{place}.wrap_in_ray": _NO_RAY for place in _BUFFERS},
    "explorer.runner_prepare_concurrency": "workflows run in the explorer's own process",
    "explorer.runner_prepare_max_retries": "workflows run in the explorer's own process",
    "explorer.runner_state_report_interval": "`trinity status` asks on demand",
    "explorer.concurrent_mode": "the rollouts of a group are always sampled together",
    "explorer.max_repeat_times_per_runner": "the rollouts of a group are always sampled together",
    "explorer.service_status_check_interval": "new versions are announced; there is no polling",
    "explorer.min_running_model_num": "an engine that fails is started again",
    **_at(_ENGINES, "engine_type", "the engine is vLLM"),
    **_at(_ENGINES, "use_v1", "vLLM has one engine"),
    **_at(_ENGINES, "enable_history", "token ids and log-probabilities are always recorded"),
    **_at(_ENGINES, "enable_log_requests", "set TRINITY_LOG_LEVEL=DEBUG"),
    **_at(_ENGINES, "enable_openai_api base_port", "mode serve is the OpenAI-compatible endpoint"),
    **_at(
        _ENGINES,
        "temperature top_p top_k logprobs max_prompt_tokens max_response_tokens min_response_tokens "
        "enable_prompt_truncation repetition_penalty",
        "sampling is model.* and rollout_args",
    ),
    **_at(
        _ENGINES,
        "bundle_indices engine_id ray_namespace cuda_visible_devices enable_lora enable_runtime_lora_updating "
        "lora_modules.** lora_kwargs.** node_rank rope_scaling rope_theta",
        "set by the process that starts the engine",
    ),
    **_under("explorer.rollout_model", "model_path name trust_remote_code max_model_len", "model.* says it"),
    "synchronizer.wait_for_checkpoint": "explorers load complete versions only, and versions are no checkpoints",
    "synchronizer.explorer_world_size": "explorers join and leave at any time; there is no fixed number",
    "synchronizer.ray_namespace": _NO_RAY,
    "trainer.trainer_type": "the trainer is DeepSpeed",
    "trainer.trainer_strategy": "the sharding is trainer.deepspeed.zero_stage",
    "trainer.enable_preview": _OWN_TRAINER,
    "trainer.save_strategy": "one checkpoint is written at a time, by every rank its own part",
    "trainer.fix_actor_microbatch_loss_scale": "the loss never depends on how a batch is split",
    **_under(f"{_ACTOR}.model", "lora_alpha target_modules exclude_modules", "adapters are model.lora_configs"),
    **_under(_ACTOR, "hybrid_engine explorer_name synchronizer.**", "Trinity's synchronizer section says it"),
    f"{_ACTOR}.nccl_timeout": "synchronizer.collective_timeout is the deadline; who misses it takes the version "
    "from storage",
    f"{_ACTOR}.rollout.checkpoint_engine.backend": "synchronizer.sync_method says how weights travel",
    f"{_ACTOR}.rollout.checkpoint_engine.engine_kwargs.**": "synchronizer.sync_method says how weights travel",
    **_under(
        f"{_ACTOR}.rollout",
        "temperature n top_k top_p val_kwargs.** multi_turn.** log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu",
        "rollout settings are model.*, explorer.rollout_model.* and rollout_args",
    ),
    f"{_ACTOR}.actor.ppo_mini_batch_size": "buffer.batch_size and train_batch_size say how much a step learns from",
    f"{_ACTOR}.actor.ppo_micro_batch_size": "trainer.micro_batch_size_per_gpu says it for each rank",
    f"{_ACTOR}.actor.strategy": "the sharding is trainer.deepspeed.zero_stage",
    f"{_ACTOR}.actor.checkpoint.**": _OWN_TRAINER,
    **_under(f"{_ACTOR}.actor.fsdp_config", _FSDP, "the sharding is trainer.deepspeed.zero_stage"),
    **_under(f"{_ACTOR}.actor.optim", _OPTIMIZER, "the optimizer is AdamW with algorithm.optimizer"),
    **_under(
        f"{_ACTOR}.ref.fsdp_config",
        f"{_FSDP} optimizer_offload",
        "the reference model is frozen, whole, and used without gradients",
    ),
    **_under(
        f"{_ACTOR}.ref",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size entropy_from_logits_with_chunking "
        "entropy_checkpointing checkpoint.** megatron.** strategy load_weight profile.** profiler.** "
        "router_replay.**",
        "the reference model is frozen, whole, and used without gradients",
    ),
    **_under(
        f"{_ACTOR}.actor",
        "shuffle fix_actor_microbatch_loss_scale entropy_from_logits_with_chunking entropy_checkpointing "
        "data_loader_seed load_weight policy_loss.** profile.** profiler.** loss_agg_mode "
        "clip_ratio clip_ratio_low clip_ratio_high entropy_coeff use_kl_loss",
        "Trinity's algorithm section says it",
    ),
    **_under(
        f"{_ACTOR}.model",
        "path external_lib enable_activation_offload use_shm trust_remote_code custom_chat_template override_config.**",
        "Trinity's model section says it",
    ),
    **_under(
        f"{_ACTOR}.model",
        "use_fused_kernels fused_kernel_options.**",
        "trainer.fused_kernels says it, and is on by itself where it gains time",
    ),
    **_under(
        f"{_VERL}.trainer",
        "resume_mode resume_from_path default_hdfs_dir remove_previous_ckpt_in_save del_local_ckpt_after_load "
        "max_critic_ckpt_to_keep device",
        "a run resumes from its newest checkpoint; continue_from_checkpoint: false starts from step 0",
    ),
    **_under(
        f"{_VERL}.trainer",
        "total_epochs total_training_steps project_name group_name experiment_name logger nnodes n_gpus_per_node "
        "val_generations_to_log_to_wandb val_before_train val_only save_freq test_freq sync_freq default_local_dir "
        "training_rollout_mode enable_exp_buffer ray_wait_register_center_timeout",
        "Trinity's project, cluster, buffer, explorer, trainer and monitor say it",
    ),
    **_under(_VERL, "enable_preview synchronizer.** ray_init.**", _OWN_TRAINER),
    f"{_VERL}.data.**": _OWN_TRAINER,
    f"{_VERL}.global_profiler.**": _OWN_TRAINER,
    f"{_VERL}.trainer.balance_batch": "tokens are always balanced over the ranks",
    **_under(f"{_CRITIC}.optim", _OPTIMIZER + " clip_grad", "the optimizer is AdamW with trainer.critic.optimizer"),
    **_under(
        f"{_CRITIC}.model",
        "tokenizer_path use_remove_padding enable_gradient_checkpointing external_lib override_config.** "
        "trust_remote_code use_shm enable_activation_offload lora_rank lora_alpha target_modules",
        "the critic is trained as the policy is",
    ),
    **_under(
        f"{_CRITIC}.model.fsdp_config",
        f"{_FSDP} param_offload optimizer_offload",
        "the sharding is trainer.deepspeed.zero_stage",
    ),
    **_under(
        _CRITIC,
        "enable strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "forward_micro_batch_size forward_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu "
        "forward_max_token_len_per_gpu ppo_epochs shuffle rollout_n loss_agg_mode checkpoint.** profiler.** "
        "ulysses_sequence_parallel_size data_loader_seed load_weight profile.**",
        "the critic is trained as the policy is",
    ),
    **_at(
        tuple(f"{place}.format" for place in (*_TASKSETS, *_BUFFERS)),
        "tools_key enable_concatenated_multi_turn",
        "a conversation is one experience, however many turns it has",
    ),
    **_at(
        _TASKSETS,
        "capacity max_read_timeout schema_type tokenizer_path wrap_in_ray use_priority_queue reuse_cooldown_time "
        "replay_buffer.** replay_buffer_kwargs.**",
        "is of experience buffers; a taskset is read whole when the run starts",
    ),
    **_at(
        _BUFFERS,
        "default_workflow_type default_reward_fn_type workflow_args.** reward_fn_args.** rollout_args.** repeat_times "
        "is_eval",
        "is of tasksets; an experience buffer holds what was rolled out already",
    ),
    **_under(
        _BUFFERS[1],
        "use_priority_queue reuse_cooldown_time replay_buffer_kwargs.**",
        "rows of an auxiliary buffer come in the order of its data_selector",
    ),
    **_at(_TASKSETS, "index is_eval batch_size total_epochs total_steps ray_namespace", "follows from the run"),
    **_at(
        _BUFFERS,
        "schema_type index batch_size tokenizer_path total_epochs total_steps ray_namespace",
        "follows from the run",
    ),
    **{f"{place}.{key}": _NO_POLL for place in (*_TASKSETS, *_BUFFERS) for key in _POLLS},
    **{f"{place}.enable_progress_bar": "progress is on the run's own display" for place in (*_TASKSETS, *_BUFFERS)},
    **{
        f"{place}.rollout_args.logprobs": "the sampled token's log-probability is always recorded"
        for place in _TASKSETS
    },
    **{
        f"{place}.rollout_args.n": "algorithm.repeat_times (or repeat_times of an evaluation) says it"
        for place in _TASKSETS
    },
}

_NO_ROUTES = (
    "engines do not record which experts a token took; rollout_correction.token_range leaves out tokens that differ"
)

UNSUPPORTED: dict[str, str] = {
    "algorithm.enable_router_replay": _NO_ROUTES,
    f"{_ACTOR}.actor.router_replay.**": _NO_ROUTES,
    **_under("cod", "task_pack_size eval_task_pack_size cod_workflow_args.**", "packs of tasks are not supported"),
    "data_processor.task_pipeline.config_path": "put the operators themselves under operators",
    **_under(
        "data_processor.experience_pipeline",
        "inputs.** output.**",
        "it works on the experience log; buffer.trainer_input.experience_buffer.path archives what it keeps",
    ),
    "service.data_juicer.**": "external services are not supported yet",
    "model.lora_configs.*.path": "adapters start new; merge old ones into the model first, and give it as model_path",
    "model.rope_scaling": "put it into the model's own config.json",
    "model.rope_theta": "put it into the model's own config.json",
    "model.enable_thinking": "put it into the chat template",
    **_under(
        "model.tinker",
        "enable rank seed train_mlp train_attn train_unembed base_url",
        "the remote Tinker backend is not supported",
    ),
    **_under("model.external_model", "enable base_url_env api_key_env model_name", "external models are not supported"),
    "buffer.trainer_input.sft_warmup_dataset": "use a stage of its own: stages, see examples/quickstart",
    "buffer.trainer_input.sft_warmup_steps": "use a stage of its own: stages, see examples/quickstart",
    **_under(
        "explorer.over_rollout",
        "ratio wait_after_min return_partial_tasks",
        "a batch waits for its slowest group, so that nothing is dropped by length",
    ),
    **_under("explorer.dynamic_timeout", "enable ratio warmup_min_steps", "explorer.max_timeout is the limit"),
    "explorer.db_url": "a history of requests is not supported yet",
    **_at(_ENGINES, "enable_multimodal", "multimodal models are not supported"),
    **_at(_ENGINES, "chat_template", "use model.custom_chat_template"),
    **_at(_ENGINES, "enable_thinking", "put it into the chat template"),
    **_at(_ENGINES, "nnodes", "an engine lives on one machine"),
    **_at(_ENGINES, "ignore_eos", "a response ends where the model ends it"),
    **_at(_ENGINES, "external_model_config.**", "external models are not supported"),
    **_at(
        _ENGINES,
        "enable_auto_tool_choice tool_call_parser reasoning_parser",
        "workflows see the text as it was sampled",
    ),
    **_at(
        tuple(f"{place}.format" for place in (*_TASKSETS, *_BUFFERS)),
        "image_key video_key",
        "multimodal models are not supported",
    ),
    **_at(
        tuple(f"{place}.format" for place in (*_TASKSETS, *_BUFFERS)),
        "chat_template enable_thinking",
        "use model.custom_chat_template",
    ),
    **_under(f"{_ACTOR}.model", "lora_rank lora_adapter_path", "adapters are model.lora_configs"),
    **_at(
        (f"{_ACTOR}.model", f"{_CRITIC}.model"), "rope_scaling rope_theta", "put it into the model's own config.json"
    ),
    f"{_CRITIC}.megatron.**": "there is no Megatron; use trainer.deepspeed",
    f"{_ACTOR}.actor.megatron.**": "there is no Megatron; use trainer.deepspeed",
    f"{_VERL}.algorithm.**": "Trinity's own algorithm section says it",
    f"{_VERL}.reward_model.**": "reward functions are default_reward_fn_type",
    f"{_VERL}.custom_reward_function.**": "reward functions are default_reward_fn_type",
    "trainer.trainer_config_path": "put what it holds into the YAML itself",
}

# Sections that the schema does not have.
FOREIGN_SECTIONS = (
    "log", "service", "cod", _VERL, "model.tinker", "model.external_model",
    "explorer.over_rollout", "explorer.dynamic_timeout", f"{_EXPERIENCE}.replay_buffer_kwargs",
)  # fmt: skip
