"""Mutations for tests with forked processes and transformers instead of vLLM: the trainer's side."""

from mutations.mutation import Mutation

_TRAINER = "services/trainer/src/trinity/trainer"
_CLI, _READING = "cli/src/trinity/cli", "lib/reading/src/trinity/reading"
_ALGORITHMS = "tests/e2e/test_algorithms.py::test_it_runs_from_its_yaml"
_BAD_STEPS = "tests/e2e/test_bad_steps.py"
_LORA = "tests/e2e/test_lora.py"
_REJECTED = "tests/e2e/test_a_rejected_version_ends_the_run.py"
_SFT = "tests/e2e/test_sft_alone_on_a_given_nats.py"
_REPLAY = "tests/e2e/test_replay_and_dead_letters.py"

MUTATIONS = [
    Mutation(
        f"{_TRAINER}/engine/engine.py",
        'writes.append(self._critic.model.snapshot(folder.with_name("critic"), {}))',
        "pass",
        f"{_ALGORITHMS}[ppo]",
    ),
    Mutation(
        f"{_TRAINER}/engine/critic.py",
        '"critic/value_loss": ',
        '"critic/loss": ',
        f"{_ALGORITHMS}[ppo]",
    ),
    Mutation(
        "services/explorer/src/trinity/explorer/workflows/distill.py",
        "teacher_logprobs=np.minimum(found.logprobs, 0.0).astype(np.float32),",
        "",
        f"{_ALGORITHMS}[on_policy_distill]",
    ),
    Mutation(
        f"{_TRAINER}/engine/step.py", "self.plan.algorithm, experts)", "self.plan.algorithm)", f"{_ALGORITHMS}[mix]"
    ),
    Mutation(
        f"{_TRAINER}/data/examples.py", "(index + 1, -index - 1)", "(index + 1, index + 1)", f"{_ALGORITHMS}[dpo]"
    ),
    Mutation(f"{_TRAINER}/data/examples.py", "elif example.text:", "elif False:", f"{_ALGORITHMS}[cpt]"),
    Mutation(
        f"{_TRAINER}/weights/verification.py",
        "for_good = True",
        "for_good = False",
        f"{_REJECTED}::test_a_version_that_fails_its_canary_ends_the_run_at_once_with_both_numbers",
    ),
    Mutation(
        f"{_TRAINER}/weights/canary.py",
        "return given, given * _LARGEST_OF_MEAN",
        "return _FLOAT32",
        f"{_REJECTED}::test_a_version_that_fails_its_canary_ends_the_run_at_once_with_both_numbers",
    ),
    Mutation(
        f"{_TRAINER}/engine/step.py",
        'if policy == "stop":',
        'if policy == "":',
        f"{_BAD_STEPS}::test_a_loss_that_is_not_finite_stops_the_run_and_the_batch_is_kept",
    ),
    Mutation(
        f"{_TRAINER}/engine/step.py",
        '{"bad_step": 1.0}',
        "{}",
        f"{_BAD_STEPS}::test_the_same_run_goes_on_without_bad_batches_if_it_is_told_to",
    ),
    Mutation(
        f"{_READING}/run_record.py",
        "announcement(record))",
        "record.model_dump_json().encode())",
        f"{_SFT}::test_it_trains_and_leaves_a_model",
    ),
    Mutation(
        f"{_CLI}/supervise/processes/services.py",
        "if not plan.offline:",
        "if True:",
        f"{_SFT}::test_it_trains_and_leaves_a_model",
    ),
    Mutation(
        "services/explorer/src/trinity/explorer/weights/loader.py",
        '"lora": lora.plain()',
        '"lora": {**lora.plain(), "alpha": 2 * lora.alpha}',
        f"{_LORA}::test_the_run_ends_well_and_every_version_is_loaded_and_computes_its_canary",
    ),
    Mutation(
        f"{_TRAINER}/engine/checkpoints.py",
        "write_adapters(folder, lora, model.model_path, weights, model.in_four_bits)",
        "pass",
        f"{_LORA}::test_checkpoints_have_the_adapters_and_the_last_one_a_whole_model",
    ),
    Mutation(
        "satellites/lineage/src/trinity/lineage/replay.py",
        '"save_hf_checkpoint": "last"',
        '"save_hf_checkpoint": "never"',
        f"{_REPLAY}::test_a_replay_of_the_finished_run_from_a_checkpoint_is_identical",
    ),
]
