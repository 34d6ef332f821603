"""Which option of veRL becomes which key, and what is said of those that become none."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checks.verl_scripts import Importer
from trinity.compat_rft.translate import translate

pytestmark = pytest.mark.core


@pytest.fixture
def read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Importer:
    return Importer(tmp_path, capsys)


NAMES = {"gae": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforceplusplus", "rloo": "rloo", "remax": "remax"}


@pytest.mark.parametrize(("estimator", "ours"), [*NAMES.items(), ("opmd", "opmd")])
def test_estimators_have_our_names(read: Importer, estimator: str, ours: str) -> None:
    result = read.options(f"algorithm.adv_estimator={estimator}", "algorithm.gamma=0.9", "algorithm.lam=0.8")
    assert (result.at("algorithm.algorithm_type"), result.at("algorithm.advantage_fn")) == (ours, ours)
    gamma, lam = (result.at(f"algorithm.advantage_fn_args.{name}") for name in ("gamma", "lam"))
    assert gamma == (0.9 if ours in ("ppo", "reinforceplusplus") else "absent")
    assert lam == (0.8 if ours == "ppo" else "absent")
    assert ("not needed: algorithm.lam=0.8" in result.err) == (lam == "absent")


def test_an_estimator_that_we_do_not_have_is_kept_and_said(read: Importer) -> None:
    result = read.options("algorithm.adv_estimator=gpg")
    assert result.at("algorithm.advantage_fn") == "gpg"
    assert "no counterpart" in result.err


ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
MODEL = "actor_rollout_ref.model"
LOSS_ARGS, ADVANTAGE, AGGREGATION = (
    "algorithm.policy_loss_fn_args",
    "algorithm.advantage_fn_args",
    "algorithm.loss_agg_mode",
)
CRITIC = {"critic": {"optim": {"lr": "1e-5"}}}  # what veRL's own ppo is without an option
# (options, keys they give)
CASES: list[tuple[str, dict[str, Any]]] = [
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.01",
        {"algorithm.kl_penalty_fn": "k1", "algorithm.kl_penalty_fn_args": {"kl_coef": 0.01}},
    ),
    (
        "algorithm.use_kl_in_reward=False algorithm.kl_penalty=k2 algorithm.kl_ctrl.kl_coef=0.01",
        {"algorithm.kl_penalty_fn": "none", "algorithm.kl_penalty_fn_args": "absent"},
    ),
    ("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False", {f"{ADVANTAGE}.std_cal_level": "none"}),
    ("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=True", {f"{ADVANTAGE}.std_cal_level": "group"}),
    (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3", {"algorithm.kl_loss_fn": "low_var_kl"}),
    (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3+", {"algorithm.kl_loss_fn": "k2"}),
    ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3+", {"algorithm.kl_penalty_fn": "low_var_kl"}),
    (
        f"{MODEL}.lora_rank=8 {MODEL}.target_modules=[q_proj,v_proj] {MODEL}.exclude_modules='.*visual.*'",
        {
            "model.lora_configs": [
                {
                    "lora_rank": 8,
                    "lora_alpha": 16,
                    "target_modules": ["q_proj", "v_proj"],
                    "exclude_modules": ".*visual.*",
                }
            ],
            "trainer.trainer_config.actor_rollout_ref": "absent",
        },
    ),
    (
        f"{MODEL}.lora_rank=${{RANK:-32}} {MODEL}.lora_alpha=64",
        {"model.lora_configs": [{"lora_rank": "${oc.env:RANK,32}", "lora_alpha": 64}]},
    ),
    (
        f"{MODEL}.lora_rank=0 {MODEL}.lora_alpha=32 {MODEL}.target_modules=all-linear",
        {"model.lora_configs": "absent", "trainer.trainer_config.actor_rollout_ref": "absent"},
    ),
    (f"{ACTOR}.clip_ratio_high=0.28", {LOSS_ARGS: {"clip_range_low": 0.2, "clip_range_high": 0.28}}),
    (f"{ACTOR}.clip_ratio=0.1", {LOSS_ARGS: {"clip_range_low": 0.2, "clip_range_high": 0.2}}),
    (
        f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=null {ACTOR}.clip_ratio_c=4",
        {LOSS_ARGS: {"clip_range_low": 0.1, "clip_range_high": 0.1, "clip_ratio_c": 4}},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        {LOSS_ARGS: {"clip_range_low": 0.2, "clip_range_high": 0.2}, AGGREGATION: "seq-mean-token-mean"},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10",
        {LOSS_ARGS: {"clip_range_low": 10, "clip_range_high": 0.2}, AGGREGATION: "absent"},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.tau_neg=1.2",
        {LOSS_ARGS: {"tau_neg": 1.2}, AGGREGATION: "seq-mean-token-mean"},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio_low=0.4",
        {"algorithm.policy_loss_fn": "gmpo", LOSS_ARGS: {"clip_range_low": 0.4, "clip_range_high": 0.2}},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=dppo_kl {ACTOR}.clip_ratio_high=0.05",
        {
            "algorithm.policy_loss_fn": "dppo_kl",
            LOSS_ARGS: {"clip_ratio_c": 3.0, "clip_range_low": 0.2, "clip_range_high": 0.05},
        },
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=dppo_tv {ACTOR}.clip_ratio_c=10",
        {LOSS_ARGS: {"clip_ratio_c": 10, "clip_range_low": 0.2, "clip_range_high": 0.2}},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.policy_loss.kl_cov_ratio=0.002",
        {"algorithm.policy_loss_fn": "kl_cov", LOSS_ARGS: {"ppo_kl_coef": 0.1, "kl_cov_ratio": 0.002}},
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=clip_cov {ACTOR}.policy_loss.clip_cov_lb=0.5",
        {LOSS_ARGS: {"clip_range_low": 0.2, "clip_range_high": 0.2, "clip_cov_lb": 0.5}},
    ),
    (f"{ACTOR}.policy_loss.loss_mode=gpg", {"algorithm.policy_loss_fn": "opmd", LOSS_ARGS: {"tau": 0}}),
    (f"{CORRECTION}.bypass_mode=True", {"algorithm.rollout_correction": {"decoupled": False}}),
    (
        f"{CORRECTION}.bypass_mode=True {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean",
        {"algorithm.policy_loss_fn": "ppo", LOSS_ARGS: "absent", AGGREGATION: "token-mean"},
    ),
    (
        f"{CORRECTION}.bypass_mode=False {ACTOR}.policy_loss.loss_mode=cispo",
        {"algorithm.policy_loss_fn": "cispo", LOSS_ARGS: {"clip_range_low": 0.2, "clip_range_high": 0.2}},
    ),
    (
        f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=3.0",
        {"algorithm.rollout_correction": {"decoupled": True, "token_cap": 3.0}},
    ),
    (
        f"{CORRECTION}.rollout_rs=seq_mean_k1 {CORRECTION}.rollout_rs_threshold=0.5_2.0",
        {"algorithm.rollout_correction": {"decoupled": True, "geometric_range": [0.5, 2.0]}},
    ),
    (f"{ACTOR}.tis_imp_ratio_cap=2", {"algorithm.rollout_correction": {"decoupled": True, "token_cap": 2.0}}),
    (f"{ACTOR}.tis_imp_ratio_cap=null", {"algorithm.rollout_correction": "absent"}),
    (
        f"{ACTOR}.tis_imp_ratio_cap=${{TIS_CAP:-2}}",
        {"algorithm.rollout_correction": {"decoupled": True, "token_cap": "${oc.env:TIS_CAP,2}"}},
    ),
    (
        f"{CORRECTION}.bypass_mode=${{BYPASS:-True}} {ACTOR}.policy_loss.loss_mode=gspo",
        {"algorithm.rollout_correction": {"decoupled": False}, "algorithm.policy_loss_fn": "ppo"},
    ),
    (f"{CORRECTION}.rollout_is=null", {"algorithm.rollout_correction": "absent"}),
    ("trainer.total_training_steps=100", {"buffer.total_steps": 100}),
    ("trainer.total_training_steps=null", {"buffer.total_steps": "absent"}),
    (f"{MODEL}.lora_rank=null {MODEL}.lora_alpha=32", {"model.lora_configs": "absent"}),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu=null critic.x=null", {"trainer.trainer_config": CRITIC}),
    ("trainer.save_freq=null trainer.test_freq=null", {"trainer.save_interval": 0, "explorer.eval_interval": 10**9}),
    ("trainer.project_name=null trainer.logger=null", {"project": "verl_examples", "monitor.monitor_type": "wandb"}),
    (
        "data.train_files=/d/train.parquet data.seed=null data.reward_fn_key=None",
        {
            "buffer.explorer_input.tasksets.0.data_selector": {"selector_type": "shuffle"},
            "buffer.explorer_input.tasksets.0.format.reward_fn_key": "data_source",
        },
    ),
    ("trainer.project_name=12 trainer.experiment_name=true", {"project": "12", "name": "true"}),
    ("trainer.project_name=2026-13-01", {"project": "2026-13-01"}),
    ("trainer.val_before_train=True", {"explorer.eval_on_startup": True}),
    ("trainer.resume_mode=auto", {"continue_from_checkpoint": True}),
    ("trainer.resume_mode=disable", {"continue_from_checkpoint": False}),
    ("trainer.save_freq=-1 trainer.test_freq=-1", {"trainer.save_interval": 0, "explorer.eval_interval": 10**9}),
    ("trainer.logger=console", {"monitor": "absent"}),
    ("trainer.logger=['console','tensorboard']", {"monitor.monitor_type": "tensorboard"}),
    ("trainer.default_local_dir='/c/${trainer.project_name}/gsm8k'", {"checkpoint_root_dir": "/c"}),
    ("trainer.n_gpus_per_node=8 trainer.nnodes=2", {"explorer.rollout_model.engine_num": 2}),
    ("trainer.n_gpus_per_node=2", {"explorer.rollout_model": {"engine_num": 1, "tensor_parallel_size": 1}}),
    ("critic.ppo_epochs=2", {"trainer.trainer_config.critic": {"ppo_epochs": 2, "optim": {"lr": "1e-5"}}}),
    ("critic.optim.lr=2e-5 critic.optim.weight_decay=0", {"trainer.trainer_config.critic.optim.lr": "2e-5"}),
    ("critic.optim={weight_decay:0}", {"trainer.trainer_config.critic.optim": {"weight_decay": 0, "lr": "1e-5"}}),
    ("algorithm.adv_estimator=grpo critic.ppo_epochs=2", {"trainer.trainer_config": "absent"}),
    (
        f"+{ACTOR}.fsdp_config.wrap_policy='{{a: [1,b]}}'",
        {f"trainer.trainer_config.{ACTOR}.fsdp_config.wrap_policy": {"a": [1, "b"]}},
    ),
    (
        f"{ACTOR}.strategy=${{STRATEGY:-fsdp2}}",
        {f"trainer.trainer_config.{ACTOR}.strategy": "${oc.env:STRATEGY,fsdp2}"},
    ),
    (f"{ACTOR}.freeze_vision_tower=True", {"trainer.freeze_vision_tower": True}),
    (
        "data.val_files=/d/test.parquet actor_rollout_ref.rollout.val_kwargs.n=4 "
        "actor_rollout_ref.rollout.val_kwargs.do_sample=False",
        {
            "buffer.explorer_input.eval_tasksets.0.repeat_times": 4,
            "buffer.explorer_input.eval_tasksets.0.rollout_args": {"temperature": 0},
        },
    ),
    *(
        (
            f"data.val_files=/d/test.parquet {given}",
            {"buffer.explorer_input.eval_tasksets.0.rollout_args": {"temperature": 0, **args}},
        )
        for given, args in [
            ("actor_rollout_ref.rollout.temperature=0.8", {}),
            ("actor_rollout_ref.rollout.val_kwargs.do_sample=True", {}),
            ("actor_rollout_ref.rollout.val_kwargs.top_p=0.9", {"top_p": 0.9}),
            ("actor_rollout_ref.rollout.val_kwargs.temperature=0.6", {"temperature": 0.6}),
            ("actor_rollout_ref.rollout.top_p=0.9", {"top_p": 1.0}),
            ("actor_rollout_ref.rollout.top_k=20", {"top_k": -1}),
        ]
    ),
    (
        "data.train_files=/d/train.parquet data.val_files=/d/test.parquet",
        {
            "buffer.explorer_input.tasksets.0.data_selector": {"selector_type": "shuffle"},
            "buffer.explorer_input.eval_tasksets.0.data_selector": "absent",
        },
    ),
    (
        "data.train_files=/d/train.parquet data.shuffle=False data.seed=3",
        {"buffer.explorer_input.tasksets.0.data_selector": {"selector_type": "sequential", "seed": 3}},
    ),
    ("reward_model.enable=False reward_model.model.path=x", {"explorer.auxiliary_models": "absent"}),
]


@pytest.mark.parametrize(("given", "expected"), CASES, ids=[given for given, _ in CASES])
def test_options_and_their_keys(read: Importer, given: str, expected: dict[str, Any]) -> None:
    result = read.options(given)
    assert {path: result.at(path) for path in expected} == expected
    assert "not mapped" not in result.err


REFERENCE = "actor_rollout_ref.ref"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"{ACTOR}.use_torch_compile=False", "not needed: {}: trainer.fused_kernels says it"),
        (f"{REFERENCE}.fsdp_config.use_torch_compile=False", "not needed: {}: trainer.fused_kernels says it"),
        (f"{MODEL}.use_liger=True", "not needed: {}: trainer.fused_kernels says it"),
        (f"{ACTOR}.calculate_entropy=True", "not needed: {}: the entropy is always measured"),
        (f"{ACTOR}.fsdp_config.use_orig_params=True", "not needed: {}: the sharding is trainer.deepspeed.zero_stage"),
        (f"{MODEL}.tokenizer_path=/t", "not mapped: {}: no counterpart"),
        (f"{ACTOR}.optim.num_cycles=0.5", "not mapped: {}: no counterpart"),
        (f"{ACTOR}.qat.enable=False", "not mapped: {}: no counterpart"),
        (f"{ACTOR}.loss_scale_factor=4096", "not mapped: {}: no counterpart"),
        ("critic.optim.num_cycles=0.5", "not mapped: {}: no counterpart"),
        (f"{ACTOR}.optim={{lr_typo:1}}", "not mapped: {}: no counterpart"),
        (f"{ACTOR}.strategy=megatron", "not mapped: {}: the trainer is DeepSpeed; its sharding is"),
        (f"{ACTOR}.megatron.pipeline_model_parallel_size=2", "not mapped: {}: there is no Megatron; use trainer.deep"),
    ],
)
def test_what_check_would_refuse_is_said_and_left_out(read: Importer, given: str, said: str) -> None:
    result = read.options("data.train_files=/d/train.parquet", given)
    assert result.line(said.format(given))
    assert result.at("trainer.trainer_config") == CRITIC
    assert translate(yaml.safe_load(result.out)).refused == []


def test_what_has_no_effect_or_no_counterpart_in_a_loss_is_said(read: Importer) -> None:
    result = read.options(
        f"{ACTOR}.clip_ratio=0.1",
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.loss_agg_mode=token-mean",
        f"{CORRECTION}.rollout_rs=token_k3",
        f"{CORRECTION}.rollout_rs_threshold=0.1",
    )
    assert "clip_ratio_low and clip_ratio_high decide" in result.line(f"not needed: {ACTOR}.clip_ratio=0.1")
    aggregation = result.line(f"not mapped: {ACTOR}.loss_agg_mode=token-mean")
    assert "only for its KL and entropy terms" in aggregation
    assert "since veRL 0.9 gspo's own term has it too" in aggregation
    assert "token_k3 is not there" in result.line(f"not mapped: {CORRECTION}.rollout_rs=token_k3")


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        (f"{ACTOR}.tis_imp_ratio_cap=$TIS_CAP", "algorithm.rollout_correction", "absent"),
        (f"{CORRECTION}.rollout_is=[", "algorithm.rollout_correction", "absent"),
        ("trainer.project_name=[]", "project", "verl_examples"),
        ("algorithm.adv_estimator=[]", "algorithm.advantage_fn", "[]"),
        (f"{ACTOR}.policy_loss.loss_mode=[]", "algorithm.policy_loss_fn", "[]"),
    ],
)
def test_what_cannot_be_read_is_not_mapped(read: Importer, given: str, path: str, expected: str) -> None:
    result = read.options(given)
    assert result.at(path) == expected
    assert result.line(f"not mapped: {given.partition('=')[0]}=")


def test_steps_of_verl_are_larger_and_that_is_said(read: Importer) -> None:
    warmup = f"{ACTOR}.optim.lr_warmup_steps"
    result = read.options("trainer.total_training_steps=100", "trainer.save_freq=20", f"{warmup}=10")
    assert (result.at("buffer.total_steps"), result.at("trainer.save_interval")) == (100, 20)
    for option, as_many in (
        ("trainer.total_training_steps=100", 400),
        ("trainer.save_freq=20", 80),
        (f"{warmup}=10", 40),
    ):
        assert f"of 256; {as_many} would mean as many" in result.line(f"note: {option}")


def test_datasets_that_are_not_given_are_named_by_their_keys(read: Importer) -> None:
    result = read("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n")
    assert "data.train_files is not given; set buffer.explorer_input.tasksets yourself" in result.err
    assert "data.val_files is not given; set buffer.explorer_input.eval_tasksets yourself" in result.err


def test_one_gpu_is_shared(read: Importer) -> None:
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    one, two = (read.options("trainer.n_gpus_per_node=1", f"{size}={parallel}") for parallel in (1, 2))
    assert one.line("note: the engines") == "note: the engines take all GPUs (1), and the trainer shares them"
    assert two.line("note: the engines").startswith("note: the engines take 2 of 1 GPUs; lower explorer.*.tensor")
