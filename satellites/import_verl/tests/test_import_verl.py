"""A script that runs veRL becomes the same run as our YAML; what does not come along is said, with the reason."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checks.verl_scripts import Importer
from trinity.import_verl import import_verl
from trinity.reading.errors import ending_well
from trinity.runtime.process import time_limit

pytestmark = pytest.mark.core

# The two examples of the guide for people who come from veRL, and the YAMLs that it gives for them.
_GUIDE = Path(__file__).parents[3] / "satellites/trinity_rft/tests/trinity_rft"
PPO_SCRIPT, GRPO_SCRIPT = ((_GUIDE / f"verl_{name}_example.sh").read_text() for name in ("ppo", "grpo"))
PPO_YAML, GRPO_YAML = ((_GUIDE / f"{name}_example.yaml").read_text() for name in ("ppo", "grpo"))


@pytest.fixture
def read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Importer:
    return Importer(tmp_path, capsys)


def with_verls_columns(expected: str, script: str) -> dict[str, Any]:
    """The guide's YAML. Its rows have an answer of their own; veRL's files have a reference and a data source."""
    guide: dict[str, Any] = yaml.safe_load(expected)
    columns = {"prompt_key": "prompt", "response_key": "reward_model.ground_truth", "reward_fn_key": "data_source"}
    if "reward_model.enable" in script:  # then its model scores
        del columns["reward_fn_key"]
    for key in ("tasksets", "eval_tasksets"):
        for taskset in guide["buffer"]["explorer_input"][key]:
            assert taskset["format"] == {"prompt_key": "prompt", "response_key": "answer"}
            taskset["format"] = columns
    for taskset in guide["buffer"]["explorer_input"]["tasksets"]:  # veRL shuffles by default
        taskset["data_selector"] = {"selector_type": "shuffle"}
    for taskset in guide["buffer"]["explorer_input"]["eval_tasksets"]:  # and evaluates greedily
        taskset["rollout_args"] = {"temperature": 0}
    return guide


@pytest.mark.parametrize(("script", "expected"), [(PPO_SCRIPT, PPO_YAML), (GRPO_SCRIPT, GRPO_YAML)])
def test_the_guides_examples_are_equal_key_for_key(read: Importer, script: str, expected: str) -> None:
    result, guide = read(script), with_verls_columns(expected, script)
    assert result.code == 0
    assert yaml.safe_load(result.out) == guide
    assert list(yaml.safe_load(result.out)) == list(guide)
    assert "not mapped" not in result.err
    assert "  batch_size: 256  # actor_rollout_ref.actor.ppo_mini_batch_size\n" in result.out
    assert "\n\nbuffer:\n" in result.out


def test_what_is_not_needed_is_said_apart_and_is_in_the_heading(read: Importer) -> None:
    result = read(PPO_SCRIPT)
    assert "vLLM" in result.line("not needed: actor_rollout_ref.rollout.name=vllm: ")
    assert "on the right" in result.line("not needed: data.truncation=error: ")
    assert "no effect" in result.line("not needed: actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16: ")
    assert "#   data.truncation=error: " in result.out


def test_what_has_no_counterpart_is_listed_with_its_reason(read: Importer) -> None:
    result = read.options(
        "trainer.foo=1", "custom_reward_function.path=score.py", "algorithm.filter_groups.enable=True"
    )
    assert result.line("not mapped: trainer.foo") == "not mapped: trainer.foo=1: no counterpart"
    assert "default_reward_fn_type" in result.line("not mapped: custom_reward_function.path=score.py: ")
    assert "not filtered" in result.line("not mapped: algorithm.filter_groups.enable=True")
    assert "#   trainer.foo=1: no counterpart" in result.out


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("reward.custom_reward_function.path=score.py", "register a reward function"),
        ("reward_model.overlong_buffer.len=512", "operator overlong_reward_shaping"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=512", "operator overlong_reward_shaping"),
        ("reward_model.reward_manager=dapo", "name a reward function"),
    ],
)
def test_rewards_without_counterpart_have_a_fix(read: Importer, option: str, fix: str) -> None:
    said = read.options(option).line(f"not mapped: {option}: ")
    assert fix in said and "no counterpart" not in said


SHELL = r"""
# it's a comment; python3 -m verl.trainer.main_ppo trainer.nnodes=9
set -x
export MINI=$((32 * 2))
BATCH=$(( (MINI + 0) * 4 ))  # of prompts
ROOT=${DATA_ROOT:-$HOME/data}
MORE="data.seed=7 data.shuffle=True"
LIST=(trainer.nnodes=2)
LIST+=(
    'trainer.project_name=$literal'  # quoted
)
cat <<END
this isn't read: trainer.nnodes=5
END
WANDB_MODE=offline nohup python3 -u -m verl.trainer.main_ppo \
    +data.train_batch_size=$BATCH \
    # data.max_prompt_length=5 \
    ++actor_rollout_ref.actor.ppo_mini_batch_size="${MINI}" \
    data.train_files="${ROOT}/gsm8k/train.parquet" \
    data.val_files="[
        '$ROOT/gsm8k/test.parquet', '/sets/math/val.parquet']" \
    actor_rollout_ref.model.path=${MODEL} \
    actor_rollout_ref.rollout.n=${N:-4} \
    trainer.experiment_name="two words" \
    ~trainer.logger \
    $MORE "${LIST[@]}" "$@" 2>&1 | tee log.txt
echo data.max_response_length=5
"""


def test_the_script_is_read_as_a_shell_would(read: Importer) -> None:
    result = read(SHELL)
    assert result.code == 0, result.err
    expected = {
        "project": "$literal",
        "name": "two words",
        "cluster.node_num": 2,
        "model.model_path": "${oc.env:MODEL}",
        "model.max_prompt_tokens": 512,
        "model.max_response_tokens": 512,
        "algorithm.repeat_times": "${oc.env:N,4}",
        "buffer.batch_size": 64,
        "buffer.train_batch_size": 256,
        "synchronizer.sync_interval": 4,
        "buffer.explorer_input.tasksets.0.path": "${oc.env:DATA_ROOT,${oc.env:HOME}/data}/gsm8k",
        "buffer.explorer_input.tasksets.0.data_selector": {"selector_type": "shuffle", "seed": 7},
        "buffer.explorer_input.eval_tasksets.1.name": "math_eval",
        "buffer.explorer_input.eval_tasksets.1.path": "/sets/math",
        "buffer.explorer_input.eval_tasksets.1.split": "val",
    }
    assert {path: result.at(path) for path in expected} == expected
    assert "a shell ends the command at this comment" in result.line("note: line 17")
    assert "with 4 of ${oc.env:N,4}" in result.err


def test_what_only_a_running_shell_knows_is_not_guessed(read: Importer) -> None:
    result = read(
        'NAME=run_$(date +%s)\nif [ -z "$LR" ]; then\n  LR=1e-5\nfi\nfor N in 2 4; do\n'
        "python3 -m verl.trainer.main_ppo trainer.experiment_name=$NAME actor_rollout_ref.actor.optim.lr=$LR "
        "actor_rollout_ref.rollout.n=$N trainer.nnodes=$1 --config-name small $EXTRA\ndone\n"
    )
    assert result.code == 0
    assert "$(date +%s)" in result.line("not mapped: trainer.experiment_name: line 6")
    for option in ("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n", "trainer.nnodes"):
        assert "only a running shell" in result.line(f"not mapped: {option}")
    assert "--config-name small" in result.err and "not mapped: $EXTRA" in result.err
    assert result.at("algorithm.optimizer") == "absent"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo nothing\n", "no command runs `python3 -m verl.trainer.main_ppo`"),
        ("python3 -m verl.trainer.main_ppo a.b=1\n\npython3 -m verl.trainer.main_ppo a.b=2\n", "(lines 1, 3)"),
        ("python3 -m verl.trainer.main_ppo a.b=1 \\\n  trainer.nnodes 2\n", "line 2: 'trainer.nnodes' is no option"),
        ("python3 -m verl.trainer.main_ppo \\\n a.b='1\n", "line 2: a quote or bracket"),
    ],
)
def test_a_script_without_one_readable_run_is_refused(read: Importer, script: str, said: str) -> None:
    result = read(script)
    assert (result.code, result.out) == (2, "")
    assert said in result.err and "run.sh: " in result.err
    assert len(result.err.splitlines()) == 1


ARRAY = """
ARGS=(
  algorithm.adv_estimator=rloo
  actor_rollout_ref.rollout.n=4  # replies
)
if [ "${DEBUG:-0}" = "1" ]; then
  ARGS+=( trainer.total_training_steps=3 )
fi
function run() {
  python -m verl.trainer.main_ppo "${ARGS[@]}" trainer.val_before_train=False "$@"
}
run trainer.total_epochs=2
"""
SHIFTED = """
train() { local model=$1; shift; python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$model "$@"; }
MORE="trainer.nnodes=2"
[ -n "$LONG" ] && MORE="$MORE trainer.total_epochs=9"
train /m/Qwen $MORE algorithm.adv_estimator=rloo
"""
CASE = """
train() {
  python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "$@"
}
case $1 in
  long) train trainer.total_epochs=9 ;;
esac
"""
UNCALLED = CASE.partition("case")[0]


def test_an_array_that_grows_in_a_condition_keeps_what_is_certain(read: Importer) -> None:
    result = read(ARRAY)
    assert (result.code, result.at("algorithm.algorithm_type"), result.at("algorithm.repeat_times")) == (0, "rloo", 4)
    assert (result.at("buffer.total_epochs"), result.at("explorer.eval_on_startup")) == (2, False)
    grown = "not mapped: what ARGS gains (set inside a condition or a loop): trainer.total_training_steps=3: "
    assert "only a running shell" in result.line(grown)


def test_arguments_of_a_function_are_those_of_its_call(read: Importer) -> None:
    result = read(SHIFTED)
    assert (result.at("model.model_path"), result.at("algorithm.algorithm_type")) == ("/m/Qwen", "rloo")
    assert result.at("cluster.node_num") == 2
    assert "trainer.total_epochs=9" in result.line("not mapped: what MORE gains")
    assert read(CASE).at("buffer.total_epochs") == 9
    assert "only a running shell" in read(UNCALLED).line("not mapped: $@ (arguments of train)")


@pytest.mark.parametrize(
    "script", ['python3 -m verl.trainer.main_ppo "$1"\n', UNCALLED.replace("algorithm.adv_estimator=grpo", "")]
)
def test_a_call_without_a_readable_option_makes_no_yaml(read: Importer, script: str) -> None:
    result = read(script)
    assert (result.code, result.out) == (1, "")
    assert "no option of veRL can be read; no YAML was made" in result.err


def test_a_brace_that_is_not_closed_is_read_at_once(read: Importer) -> None:
    with time_limit(10):
        assert read("X=${A:-" + "${b}" * 40 + "\npython3 -m verl.trainer.main_ppo a.b=1\n").code == 0


@pytest.mark.parametrize("sum", ["1" + "+1" * 100_000, "-" * 100_000 + "1", "3if 1 else 2"])
def test_arithmetic_that_python_cannot_read_is_not_mapped(read: Importer, sum: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = read(f"python3 -m verl.trainer.main_ppo trainer.total_epochs=$(({sum}))\n")
    assert (result.code, caught) == (0, [])
    assert "only a running shell" in result.line("not mapped: trainer.total_epochs")


def test_files_are_written_and_what_happened_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, output = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(GRPO_SCRIPT)
    said = []
    for before in (None, None, "other: true\n"):
        if before:
            output.write_text(before)
        assert ending_well(lambda: import_verl(script, output)) == 0
        assert yaml.safe_load(output.read_text()) == with_verls_columns(GRPO_YAML, GRPO_SCRIPT)
        printed = capsys.readouterr()
        assert printed.out == ""
        said.append(printed.err.splitlines()[-1])
    assert ["written." in said[0], "nothing was written" in said[1], "overwritten" in said[2]] == [True] * 3
    assert ending_well(lambda: import_verl(script, tmp_path / "no" / "run.yaml")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert ending_well(lambda: import_verl(tmp_path / "none.sh", None)) == 2
    assert capsys.readouterr().err == f"trinity: {tmp_path / 'none.sh'}: no such file\n"
