"""`trinity check --deep` reads every row: what is wrong in one of them is said before anything starts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from support.fakes.models.tokenizer_folder import make_tokenizer_folder
from trinity.cli.main import app
from trinity.cli.supervise.checks import preflight
from trinity.config import Config, make_plan
from trinity.data.datasets import read

pytestmark = pytest.mark.core

GOOD = {"question": "1+1", "answer": "2", "easy": 0.5, "how": "math_workflow", "judge": "accuracy_reward",
        "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}  # fmt: skip
_MESSAGES = {"format": {"prompt_type": "messages", "messages_key": "messages"}}


def check(
    folder: Path,
    wrong: dict[str, Any],
    offline: bool,
    model: dict[str, Any] | None = None,
    environments: list[dict[str, Any]] | None = None,
    explorer: dict[str, Any] | None = None,
    wrong_rows: int = 1,
    **taskset: Any,
) -> tuple[int, str]:
    """Exit code and output for a dataset whose third row is changed, and more behind it."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    rows = [GOOD, GOOD, *[{**GOOD, **wrong}] * wrong_rows, GOOD]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt_key": "question", "response_key": "answer", **taskset.pop("format", {})}
    dataset = {"name": "rows", "path": str(folder / "rows.jsonl"), "format": columns, **taskset}
    config: dict[str, Any] = {
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(folder / "model"), "max_model_len": 64, **(model or {})},
        "explorer": {"environments": environments or [], **(explorer or {})},
        "algorithm": {"algorithm_type": "sft" if offline else "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": dataset}},
    }
    if offline:
        config |= {"mode": "train"}
        config["buffer"] = {"train_batch_size": 2, "trainer_input": {"experience_buffer": dataset}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["check", "--deep", str(folder / "run.yaml")])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("wrong", "offline", "taskset", "said"),
    [
        ({"answer": 2}, True, {}, "row 2: 'answer' is 2, must be text"),
        ({"how": 3}, True, {"format": {"system_prompt_key": "how"}}, "row 2: 'how' is 3, must be text: a system"),
        ({"question": GOOD["messages"]}, False, {}, "row 2: 'question' must end with a user's message"),
        ({"easy": "x"}, False, {"data_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["easy"]}},
         "row 2: 'easy' is 'x', must be a number"),
        ({"how": "maths"}, False, {"format": {"workflow_key": "how"}}, "row 2: 'how' is 'maths'; known:"),
        ({"question": "[{'role': 'user', 'content': '1+1'}]"}, False, {},
         "row 2: 'question' is a list of messages written as text"),
        ({"answer": '{"style": "rule", "ground_truth": "2"}'}, False, {}, "save the rows as jsonl or parquet, which"),
        ({"answer": "{'ground_truth': '2'}"}, False, {}, "row 2: 'answer' is a mapping written as text, "),
        ({"question": None}, False, {}, "row 2: 'question' is None, must be text"),
        ({"question": " "}, False, {}, "row 2: 'question' is ' ', must be text"),
        ({"question": ["1+1"]}, False, {}, "row 2: 'question' has no role of system, user, assistant or no text"),
        ({"question": "\ud800"}, False, {}, "row 2: has half of a surrogate pair"),
        ({"question": "\udfff"}, True, {}, "row 2: has half of a surrogate pair"),
        ({"answer": None}, False, {}, "row 2: 'answer' is None, must be text: the reference answer, which math_reward"),
        ({"extra": json.loads("[" * 150 + "]" * 150)}, False, {}, "row 2: is nested more than 100 deep"),
        ({"extra": "x" * 7_000_000}, False, {}, "row 2: has 6.7 MiB as JSON, a task may have 6 MiB"),
        ({"judge": "x"}, False, {"format": {"reward_fn_key": "judge"}}, "row 2: 'judge' is 'x'; known:"),
        ({"judge": "my/qa"}, False, {"format": {"reward_fn_key": "judge"}}, "register a reward function of that name"),
        ({"answer": ["2", None]}, False, {}, "row 2: 'answer' is None, must be text or a list of texts"),
        ({"answer": ["2", " "]}, False, {}, "row 2: 'answer' has an empty text"),
        ({"answer": {"target": ["2"]}}, False, {}, "name a column inside of it, such as 'target'"),
        ({}, False, {"format": {"response_key": "answer.text"}}, "row 0: 'answer.text' is missing, must be text"),
        ({"messages": [1, {"role": "assistant", "content": "2"}]}, True, _MESSAGES, "row 2: 'messages' has 1, must be"),
        ({"messages": [{"role": "assistant"}]}, True, _MESSAGES, "has a message with the content None, must"),
        ({"messages": [{"role": "user", "content": 3}, GOOD["messages"][1]]}, True, _MESSAGES, "the content 3, must"),
        ({"messages": [{"role": "assistant", "content": ["2"]}]}, True, _MESSAGES, "the content ['2'], must"),
        ({"question": float("nan")}, False, {}, "row 2: 'question' is nan, must be text"),
        ({"answer": float("inf")}, False, {}, "row 2: 'answer' is inf, must be text"),
        ({"how": ["math_workflow"]}, False, {"format": {"workflow_key": "how"}}, "'how' is ['math_workflow']; known"),
        ({"easy": ["x"]}, False, {"format": {"system_prompt_key": "easy"}}, "'easy' is ['x'], must be text: the"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path: Path, wrong: Any, offline: bool, taskset: Any, said: str) -> None:
    code, error = check(tmp_path, wrong, offline, **taskset)
    assert code == 2
    assert said in error
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize("offline", [True, False])
def test_further_wrong_rows_are_numbered(tmp_path: Path, offline: bool) -> None:
    code, error = check(tmp_path, {"answer": None}, offline, wrong_rows=5)
    assert code == 2 and "row 2: 'answer' is None, must be text" in error
    assert "; row(s) 3, 4, 5 and 1 more are refused too: mend or remove them" in error


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("key", ["system_prompt_key", "workflow_key", "reward_fn_key"])
def test_a_column_that_no_row_has_is_refused(tmp_path: Path, key: str, offline: bool) -> None:
    code, error = check(tmp_path, {}, offline, format={key: "nope"})
    assert (code, f"format.{key} is 'nope', and no row has such a column; they have question" in error) == (2, True)


@pytest.mark.parametrize("offline", [True, False])
def test_good_rows_are_taken(tmp_path: Path, offline: bool) -> None:
    selector = {"selector_type": "offline_easy2hard", "feature_keys": ["easy"]}
    code, error = check(
        tmp_path, {}, offline, format={} if offline else {"workflow_key": "how"}, data_selector=selector
    )
    assert code == 0, error


def test_an_empty_system_prompt_is_none(tmp_path: Path) -> None:
    code, error = check(tmp_path, {"how": ""}, False, format={"system_prompt_key": "how"})
    assert code == 0, error


def test_a_column_without_a_name_is_not_read(tmp_path: Path) -> None:
    """`DataFrame.to_csv` writes such a column for its index."""
    code, error = check(tmp_path, {"": "0"}, False)
    assert code == 0, error


def test_rows_of_an_environment_need_no_prompt(tmp_path: Path) -> None:
    plays = {"default_workflow_type": "environment_workflow", "workflow_args": {"environment": "countdown"}}
    for name, given, needs in (("plays", plays, False), ("asks", {}, True)):
        (tmp_path / name).mkdir()
        _, output = check(tmp_path / name, {}, False, format={"prompt_key": "none"}, **given)
        assert ("the rows have no column 'none'" in output) is needs, output


def test_an_answer_that_nothing_compares_with_may_be_missing(tmp_path: Path) -> None:
    code, error = check(tmp_path, {"answer": None}, False, default_reward_fn_type="format_reward")
    assert code == 0, error


@pytest.mark.parametrize(
    ("reward", "flag"), [("math_boxed_reward", "with_think"), ("math_dapo_reward", "enable_overlong_penalty")]
)
def test_a_flag_of_a_reward_function_is_true_or_false(tmp_path: Path, reward: str, flag: str) -> None:
    code, error = check(tmp_path, {}, False, default_reward_fn_type=reward, reward_fn_args={flag: "false"})
    assert (code, f"reward_fn_args.{flag}: is 'false', must be true or false" in error) == (2, True), error


def test_a_byte_order_mark_before_the_rows_is_no_part_of_them(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\ufeff" + json.dumps(GOOD), encoding="utf-8")
    assert list(read(str(rows))) == [GOOD]


def test_the_critics_folder_must_be_there(tmp_path: Path) -> None:
    code, error = check(tmp_path, {}, False, {"critic_model_path": "/no/such/critic"})
    assert (code, "model.critic_model_path: '/no/such/critic' does not exist" in error) == (2, True)


@pytest.mark.parametrize(
    ("limit", "code", "said"), [(2, 2, "every prompt"), (4, 0, "1 of 4 measured prompts"), (50, 0, "")]
)
def test_prompts_that_would_be_cut_are_counted(
    tmp_path: Path, tokenizer_folder: Path, limit: int, code: int, said: str
) -> None:
    model = {"model_path": str(tokenizer_folder), "max_model_len": limit + 8, "max_prompt_tokens": limit}
    found, text = check(tmp_path, {"question": "1 + 1 + 1 + 1"}, False, model)
    assert (found, said in text) == (code, True), text


def test_a_template_that_does_not_compile_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    model = {"model_path": str(tokenizer_folder), "custom_chat_template": "{% if %}"}
    code, text = check(tmp_path, {}, False, model)
    assert (code, "model.custom_chat_template: does not compile" in text) == (2, True), text


def test_a_provider_that_does_not_answer_is_named(tmp_path: Path) -> None:
    code, text = check(tmp_path, {}, False, {}, environments=[{"name": "a", "address": "127.0.0.1:9"}])
    assert (code, "explorer.environments.0.address: 127.0.0.1:9 does not answer" in text) == (0, True), text


def test_a_template_that_renders_nothing_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    model = {"model_path": str(tokenizer_folder), "custom_chat_template": "{# nothing #}"}
    code, text = check(tmp_path, {}, False, model)
    assert (code, "model.custom_chat_template: renders nothing of a user's message" in text) == (2, True), text


def test_a_template_that_is_not_there_is_named_once(tmp_path: Path, tokenizer_folder: Path) -> None:
    code, text = check(tmp_path, {}, False, {"model_path": str(tokenizer_folder), "chat_template_path": "/no/such"})
    assert (code, "yaml: model.chat_template_path: '/no/such' cannot be read" in text) == (2, True), text


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ nothing() }}", "{{ 1 / 0 }}"])
def test_a_template_that_renders_no_prompt_is_refused(tmp_path: Path, tokenizer_folder: Path, template: str) -> None:
    model = {"model_path": str(tokenizer_folder), "custom_chat_template": template}
    code, text = check(tmp_path, {}, False, model)
    assert (code, "model.custom_chat_template: renders no prompt of buffer.explorer" in text) == (2, True), text


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "[]", "a config.json that is no JSON object"),
        ("config.json", "{", "a config.json that is no JSON object"),
        ("tokenizer.json", "{", "has no usable tokenizer: "),
        ("tokenizer.json", "{}", "has no usable tokenizer: "),
    ],
)
def test_files_of_a_model_that_hold_something_else_are_refused(
    tmp_path: Path, tokenizer_folder: Path, file: str, content: str, said: str
) -> None:
    (tokenizer_folder / file).write_text(content)
    code, text = check(tmp_path, {}, False, {"model_path": str(tokenizer_folder)})
    assert (code, said in text) == (2, True), text


def test_what_is_no_file_is_not_read(tmp_path: Path, tokenizer_folder: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.jsonl")
    code, text = check(tmp_path, {}, False, {"model_path": str(tokenizer_folder), "chat_template_path": str(pipe)})
    assert (code, "cannot be read: it is no file" in text) == (2, True), text
    (folder := tmp_path / "folder").mkdir()
    os.mkfifo(folder / "train.jsonl")
    for number, path in enumerate((pipe, folder, "/dev/zero")):
        (again := tmp_path / str(number)).mkdir()
        code, text = check(again, {}, False, path=str(path))
        assert (code, "does not exist" in text or "has no train.jsonl" in text) == (2, True), text


@pytest.mark.parametrize("names", [{"split": "/etc/*"}, {"split": "\0"}, {"subset_name": "x" * 300}, {"split": "[a"}])
def test_a_split_that_is_no_name_is_one_sentence(tmp_path: Path, names: dict[str, str]) -> None:
    (folder := tmp_path / "folder").mkdir()
    code, text = check(tmp_path, {}, False, path=str(folder), **names)
    assert (code, "buffer.explorer_input.taskset: " in text, "Traceback" in text) == (2, True, False), text


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    return make_tokenizer_folder(tmp_path / "with_tokenizer")


@pytest.mark.parametrize("depth", [700, 3000])  # json reads the one, and writes neither
def test_a_row_that_is_nested_too_deeply_is_named(tmp_path: Path, depth: int) -> None:
    (tmp_path / "deep.jsonl").write_text(json.dumps(GOOD) + "\n" + '{"question": ' + "[" * depth + "]" * depth + "}\n")
    code, error = check(tmp_path, {}, False, path=str(tmp_path / "deep.jsonl"))
    assert code == 2
    assert "deep.jsonl line 2: is not JSON" in error or "row 1: " in error, error
    assert "Traceback" not in error


@pytest.mark.parametrize("text", ["[]", '{"max_position_embeddings": "many"}', "[" * 3000, "7"])
def test_a_config_json_that_is_none_says_no_length(tmp_path: Path, text: str) -> None:
    longest = preflight._longest
    (tmp_path / "config.json").write_text(text)
    assert longest(tmp_path) == 0


@pytest.mark.parametrize(
    ("architecture", "kind", "refused"),
    [
        ("LlamaForSequenceClassification", "auto", False),
        ("LlamaForCausalLM", "auto", True),
        ("LlamaForCausalLM", "score", False),
        (None, "auto", False),
    ],
)
def test_a_model_that_writes_is_refused_as_a_reward_model(
    tmp_path: Path, architecture: str | None, kind: str, refused: bool
) -> None:
    if architecture:
        (tmp_path / "rater").mkdir()
        (tmp_path / "rater/config.json").write_text(json.dumps({"architectures": [architecture]}))
    path = str(tmp_path / "rater") if architecture else "owner/rater"
    rater = {"auxiliary_models": [{"model_path": path, "kind": kind}]}
    code, said = check(tmp_path, {}, False, explorer=rater, workflow_args={"reward_model": ""})
    assert ("explorer.auxiliary_models: are to score rows, and write text; add a sequence" in said) == refused
    assert code == 2 or not refused


SAMPLED = {"mode": "both", "algorithm": {"algorithm_type": "grpo", "repeat_times": 2}}
OF_DATA = {"mode": "train", "algorithm": {"algorithm_type": "sft"}}


@pytest.mark.parametrize(
    ("run", "quantization", "refused"),
    [
        (SAMPLED, {"quant_method": "mxfp4"}, "mxfp4"),
        (SAMPLED, {"quant_method": "fp8"}, "fp8"),
        (SAMPLED, {}, "unknown"),
        (SAMPLED, None, ""),
        (OF_DATA, {"quant_method": "mxfp4"}, ""),
        (OF_DATA, {"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
)
def test_quantized_weights_are_refused_where_an_engine_shares_them(
    tmp_path: Path, run: dict[str, Any], quantization: dict[str, Any] | None, refused: str
) -> None:
    config = {"model_type": "gpt_oss"} | ({} if quantization is None else {"quantization_config": quantization})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"model_path": str(tmp_path), "max_prompt_tokens": 4, "max_response_tokens": 4}
    place = {"path": "d", "format": {"prompt_key": "q", "response_key": "a"}}
    data = {"trainer_input": {"experience_buffer": place}} if run is OF_DATA else {"explorer_input": {"taskset": place}}
    buffer = {"train_batch_size": 2} if run is OF_DATA else {"batch_size": 2}
    values = {"project": "p", "name": "n", "model": model, "buffer": buffer | {"total_steps": 1} | data, **run}
    said = [str(problem) for problem in preflight._check_model(make_plan(Config.model_validate(values)))]
    assert len(said) == bool(refused), said
    assert all(f"is quantized ({refused}), which engines and trainer do not share" in text for text in said)
