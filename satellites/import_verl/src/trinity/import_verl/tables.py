"""Which option of veRL is which key of the YAML, in the YAML's order. The rules that need code are in `rules`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REFERENCE = "actor_rollout_ref.ref"
PROJECT, NAME = "verl_examples", "gsm8k"  # veRL's name of a run without one
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Row:
    """`option` of veRL goes to `key`. `default` is veRL's own, written when the script leaves the option out.

    `names`: values that are spelt otherwise here. `only`: these names are all there are; another value is kept, so that
    `trinity check` refuses it, and listed. `when`: the advantage functions that have the key.
    `text`: the value is always text.
    """

    key: str
    option: str
    default: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    only: bool = False
    when: tuple[str, ...] = ()
    text: bool = False


ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforceplusplus",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "opmd": "opmd",
}
# veRL's k3 is bounded, as low_var_kl is. A `+` takes the gradient of k2: so does k2 itself, and a reward has none.
KL = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"} | {name: name for name in ("k1", "k2", "abs", "low_var_kl")}
KL_IN_LOSS = KL | {f"{name}+": "k2" for name in KL}
KL_IN_REWARD = KL | {f"{name}+": ours for name, ours in KL.items()}
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "gpg": "opmd"}
LOSSES |= {"geo_mean": "gmpo", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl"}
# Options that are arguments of veRL's losses, in addition to the clips; veRL's default where ours differs.
LOSS_ARGS: Mapping[str, Mapping[str, str]] = {
    "vanilla": {"clip_ratio_c": "clip_ratio_c"},
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "clip_cov": {f"policy_loss.{name}": name for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    "kl_cov": {f"policy_loss.{name}": name for name in ("kl_cov_ratio", "ppo_kl_coef")},
    "dppo_tv": {"clip_ratio_c": "clip_ratio_c"},
    "dppo_kl": {"clip_ratio_c": "clip_ratio_c"},
}
# Options whose null differs from veRL's default; any other null counts as not given.
NULL_COUNTS = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
CLIPPED = ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl")
BY_SEQUENCE = ("gspo", "sapo")
CORRECTION = "algorithm.rollout_correction"
LOGGERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
_OPTIM = f"{ACTOR}.optim"
_OPTIMIZER = "algorithm.optimizer"
_BY_STD = {"True": "group", "true": "group", "False": '"none"', "false": '"none"'}  # a text, not null
_RESUME = {"auto": "true", "disable": "false", "resume_path": "true"}

# A text is a rule of `rules.RULES`, whose value depends on several options.
LAYOUT: tuple[Row | str, ...] = (
    Row("project", "trainer.project_name", PROJECT, text=True),
    Row("name", "trainer.experiment_name", NAME, text=True),
    "checkpoint_root_dir",
    Row("continue_from_checkpoint", "trainer.resume_mode", None, _RESUME),
    Row("algorithm.algorithm_type", "algorithm.adv_estimator", "gae", ESTIMATORS, only=True),
    Row("algorithm.repeat_times", f"{ROLLOUT}.n", "1"),
    Row(f"{_OPTIMIZER}.optimizer_type", f"{_OPTIM}.optimizer"),
    Row(f"{_OPTIMIZER}.lr", f"{_OPTIM}.lr"),
    Row(f"{_OPTIMIZER}.lr_warmup_steps", f"{_OPTIM}.lr_warmup_steps"),
    Row(f"{_OPTIMIZER}.lr_warmup_steps_ratio", f"{_OPTIM}.lr_warmup_steps_ratio"),
    Row(f"{_OPTIMIZER}.lr_scheduler_type", f"{_OPTIM}.warmup_style"),
    Row(f"{_OPTIMIZER}.lr_scheduler_type", f"{_OPTIM}.lr_scheduler_type"),
    Row(f"{_OPTIMIZER}.min_lr_ratio", f"{_OPTIM}.min_lr_ratio"),
    Row(f"{_OPTIMIZER}.betas", f"{_OPTIM}.betas"),
    Row(f"{_OPTIMIZER}.weight_decay", f"{_OPTIM}.weight_decay"),
    Row("algorithm.advantage_fn", "algorithm.adv_estimator", "gae", ESTIMATORS, only=True),
    Row("algorithm.advantage_fn_args.gamma", "algorithm.gamma", when=("ppo", "reinforceplusplus")),
    Row("algorithm.advantage_fn_args.lam", "algorithm.lam", when=("ppo",)),
    Row(
        "algorithm.advantage_fn_args.std_cal_level", "algorithm.norm_adv_by_std_in_grpo", None, _BY_STD, when=("grpo",)
    ),
    "algorithm.kl_penalty_fn",
    "algorithm.kl_penalty_fn_args",
    "algorithm.kl_loss_fn",
    "algorithm.kl_loss_fn_args",
    "algorithm.policy_loss_fn",
    "algorithm.policy_loss_fn_args",
    "algorithm.loss_agg_mode",
    "algorithm.rollout_correction",
    Row("algorithm.entropy_loss_fn_args.entropy_coef", f"{ACTOR}.entropy_coeff"),
    Row("model.model_path", f"{MODEL}.path"),
    Row("model.critic_model_path", "critic.model.path", when=("ppo",)),
    Row("model.trust_remote_code", f"{MODEL}.trust_remote_code"),
    Row("model.custom_chat_template", f"{MODEL}.custom_chat_template"),
    "model.lora_configs",
    Row("model.temperature", f"{ROLLOUT}.temperature"),
    Row("model.top_p", f"{ROLLOUT}.top_p"),
    Row("model.top_k", f"{ROLLOUT}.top_k"),
    Row("model.max_prompt_tokens", "data.max_prompt_length", "512"),
    Row("model.max_response_tokens", "data.max_response_length", "512"),
    Row("model.enable_prompt_truncation", "data.filter_overlong_prompts"),
    Row("cluster.node_num", "trainer.nnodes", "1"),
    Row("cluster.gpu_per_node", "trainer.n_gpus_per_node", "8"),
    Row("buffer.total_epochs", "trainer.total_epochs", "30"),
    Row("buffer.total_steps", "trainer.total_training_steps"),
    Row("buffer.batch_size", f"{ACTOR}.ppo_mini_batch_size", "256"),
    "buffer.train_batch_size",
    "buffer.explorer_input.tasksets",
    "buffer.explorer_input.eval_tasksets",
    "buffer.explorer_input.default_reward_fn_type",
    "explorer.eval_interval",
    Row("explorer.eval_on_startup", "trainer.val_before_train"),
    "explorer.rollout_model.engine_num",
    "explorer.rollout_model.tensor_parallel_size",
    Row("explorer.rollout_model.gpu_memory_utilization", f"{ROLLOUT}.gpu_memory_utilization"),
    Row("explorer.rollout_model.enforce_eager", f"{ROLLOUT}.enforce_eager"),
    Row("explorer.rollout_model.enable_chunked_prefill", f"{ROLLOUT}.enable_chunked_prefill"),
    Row("explorer.rollout_model.enable_prefix_caching", f"{ROLLOUT}.enable_prefix_caching"),
    Row("explorer.rollout_model.max_num_seqs", f"{ROLLOUT}.max_num_seqs"),
    Row("explorer.rollout_model.dtype", f"{ROLLOUT}.dtype"),
    Row("explorer.rollout_model.seed", f"{ROLLOUT}.seed"),
    "explorer.auxiliary_models",
    "synchronizer",
    "trainer.save_interval",
    Row("trainer.max_checkpoints_to_keep", "trainer.max_actor_ckpt_to_keep"),
    Row("trainer.grad_clip", f"{ACTOR}.grad_clip"),
    Row("trainer.use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"),
    Row("trainer.max_token_len_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    Row("trainer.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"),
    Row("trainer.freeze_vision_tower", f"{ACTOR}.freeze_vision_tower"),
    "trainer.trainer_config",
    Row("trainer.trainer_config.trainer.critic_warmup", "trainer.critic_warmup"),
    "monitor.monitor_type",
)

_ENGINE = "an explorer loads and runs its engine in its own way"
_RAY = "there is no Ray"
_KERNELS = "trainer.fused_kernels says it, and is on by itself where it gains time"
_FSDP = [f"{place}.fsdp_config" for place in (ACTOR, REFERENCE, "critic.model")]

# Options that need no counterpart, and why. A name that ends in `.` stands for everything below it.
NOT_NEEDED: Mapping[str, str] = {
    f"{ROLLOUT}.name": "the engine is always vLLM",
    f"{ROLLOUT}.mode": "rollout is always asynchronous",
    f"{ROLLOUT}.load_format": _ENGINE,
    f"{ROLLOUT}.layered_summon": _ENGINE,
    f"{ROLLOUT}.free_cache_engine": "explorers have GPUs of their own",
    f"{ROLLOUT}.do_sample": "rollouts are always sampled; model.temperature: 0 is greedy",
    f"{ROLLOUT}.disable_log_stats": _ENGINE,
    f"{ROLLOUT}.calculate_log_probs": "the sampled tokens' log-probabilities are always recorded",
    **{f"{place}.use_torch_compile": _KERNELS for place in (ACTOR, REFERENCE, *_FSDP)},
    f"{MODEL}.use_liger": _KERNELS,
    f"{ACTOR}.calculate_entropy": "the entropy is always measured",
    **{f"{place}.use_orig_params": "the sharding is trainer.deepspeed.zero_stage" for place in _FSDP},
    "data.truncation": "a prompt that is too long is cut on the right and kept out of the loss, always",
    "data.filter_overlong_prompts_workers": "prompts are measured as they are used",
    "data.return_raw_chat": "tasks keep their messages, always",
    "data.return_raw_input_ids": "tasks keep their messages, always",
    "data.val_batch_size": "all tasks of an evaluation are sent at once",
    "data.dataloader_num_workers": "the buffer feeds the tasks",
    "trainer.balance_batch": "tokens are always balanced over the GPUs",
    "trainer.device": "what the machine has is found by itself",
    "trainer.default_hdfs_dir": "checkpoints are written to the job folder",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds actor and critic",
    "trainer.del_local_ckpt_after_load": "trainer.max_checkpoints_to_keep says what stays",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_checkpoints_to_keep says what stays",
    "trainer.ray_wait_register_center_timeout": _RAY,
    "ray_init.": _RAY,
    "ray_kwargs.": _RAY,
    "hydra.": "there is no Hydra",
    "reward_model.": "a separate engine serves the reward model (explorer.auxiliary_models)",
}

_OWN_REWARD = "register a reward function (docs/plugins.md) by the name in default_reward_fn_type"
_OVERLONG = "if DAPO's length penalty is on, use the operator overlong_reward_shaping (docs/operators.md)"

# Options whose place is known, without a counterpart that could be written.
NO_COUNTERPART: Mapping[str, str] = {
    "custom_reward_function.": _OWN_REWARD,
    "reward.custom_reward_function.": _OWN_REWARD,
    "reward_model.overlong_buffer.": _OVERLONG,
    "reward_model.reward_kwargs.overlong_buffer_cfg.": _OVERLONG,
    "reward.reward_kwargs.overlong_buffer_cfg.": _OVERLONG,
    "reward_model.reward_manager": "name a reward function in buffer.explorer_input.default_reward_fn_type",
    "reward_model.launch_reward_fn_async": "rewards are computed while other rollouts continue",
    f"{ROLLOUT}.multi_turn.": "a workflow plays the turns; name it in default_workflow_type",
    f"{ROLLOUT}.agent.": "a workflow plays the turns; name it in default_workflow_type",
    "data.custom_cls.": "datasets are files; a workflow makes the prompt",
    "algorithm.filter_groups.": "groups are not filtered by their rewards",
    "trainer.resume_from_path": "a run resumes from the newest checkpoint in its job folder",
}

# Kept below trainer.trainer_config where `trinity check` takes them. Of the rollout options the trainer knows
# log_prob_*, which has no effect there.
PASSED = (f"{MODEL}.", f"{ACTOR}.", f"{REFERENCE}.", "critic.")
PASSED_WITHOUT_EFFECT = f"{ROLLOUT}.log_prob_"


def reason(table: Mapping[str, str], option: str) -> str | None:
    """A table's entry for an option: under its own name, else under its section."""
    if option in table:
        return table[option]
    return next((why for name, why in table.items() if name.endswith(".") and option.startswith(name)), None)
