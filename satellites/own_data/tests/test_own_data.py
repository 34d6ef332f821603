"""A run of a model and data without a YAML: the columns choose algorithm and format, or a sentence asks for more."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trinity.cli.main import app
from trinity.cli.supervise.stage import supervisor
from trinity.config import Config, load
from trinity.own_data import yaml as own_data
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core

ASKED = [{"role": "user", "content": "2+3"}]
TOLD = [*ASKED, {"role": "assistant", "content": "5"}]
PROSE = "Bees make honey from nectar, which they collect from flowers in spring, and store it in combs for the winter."


@pytest.mark.parametrize(
    ("row", "algorithm", "columns"),
    [
        ({"id": 1, "question": "2+3", "answer": "2+3=5\n#### 5"}, "grpo",
         {"prompt_key": "question", "response_key": "answer"}),
        ({"problem": "x", "solution": "so \\boxed{7}"}, "grpo", {"prompt_key": "problem", "response_key": "solution"}),
        ({"input": "2+3", "output": 5}, "grpo", {"prompt_key": "input", "response_key": "output"}),
        ({"query": "capital of France", "label": "Paris"}, "grpo", {"prompt_key": "query", "response_key": "label"}),
        ({"prompt": ASKED, "data_source": "own", "reward_model": {"ground_truth": "5"}}, "grpo",
         {"prompt_key": "prompt", "response_key": "reward_model.ground_truth"}),
        ({"messages": ASKED, "answer": ["5", "five"]}, "grpo", {"prompt_key": "messages", "response_key": "answer"}),
        ({"instruction": "Write on bees.", "output": PROSE}, "sft",
         {"prompt_type": "plaintext", "prompt_key": "instruction", "response_key": "output"}),
        ({"conversations": TOLD}, "sft", {"messages_key": "conversations"}),
        ({"conversations": json.dumps(TOLD)}, "sft", {"messages_key": "conversations"}),
        ({"conversations": [{"from": "human", "value": "2+3"}, {"from": "gpt", "value": "5"}]}, "sft",
         {"messages_key": "conversations"}),
        ({"system": "Be brief.", "conversations": TOLD}, "sft",
         {"messages_key": "conversations", "system_prompt_key": "system"}),
        ({"prompt": ASKED, "completion": TOLD[1:]}, "sft",
         {"prompt_type": "plaintext", "prompt_key": "prompt", "response_key": "completion"}),
        ({"conversation": [{"from": "user", "value": "2+3"}, {"from": "assistant", "value": "5"}]}, "sft",
         {"messages_key": "conversation"}),
        ({"messages": TOLD, "answer": "5"}, "sft", {"messages_key": "messages"}),
        ({"system": "Be brief.", "question": "2+3", "chosen": "5", "rejected": "6"}, "dpo",
         {"prompt_key": "question", "system_prompt_key": "system", "chosen_key": "chosen", "rejected_key": "rejected"}),
        ({"system": None, "question": "2+3", "answer": "5"}, "grpo",
         {"prompt_key": "question", "system_prompt_key": "system", "response_key": "answer"}),
        ({"Question": "2+3", "Answer": 5}, "grpo", {"prompt_key": "Question", "response_key": "Answer"}),
        ({"prompt": "2+3", "chosen": "5", "rejected": "6"}, "dpo",
         {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}),
        ({"chosen": TOLD, "rejected": TOLD}, "dpo", {"chosen_key": "chosen", "rejected_key": "rejected"}),
        ({"system": "Be brief.", "chosen": TOLD, "rejected": TOLD}, "dpo",
         {"system_prompt_key": "system", "chosen_key": "chosen", "rejected_key": "rejected"}),
        ({"conversations": [{"from": "human", "value": "2+3"}], "chosen": {"from": "gpt", "value": "5"},
          "rejected": {"from": "gpt", "value": "6"}}, "dpo",
         {"prompt_key": "conversations", "chosen_key": "chosen", "rejected_key": "rejected"}),
    ],
)  # fmt: skip
def test_the_columns_choose_algorithm_and_format(
    row: dict[str, Any], algorithm: str, columns: dict[str, str], tmp_path: Path
) -> None:
    rows = [row] * 3
    form = own_data.guessed_form(rows, "a model")
    assert (form.algorithm, form.columns) == (algorithm, columns)
    data, file = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    data.write_text("\n".join(map(json.dumps, rows)))
    file.write_text(own_data.text_of("a model", str(data), rows, form, place=str(file), name="mine", gpus=0))
    loaded = load(file)
    assert loaded.algorithm.algorithm_type == algorithm
    source = (
        loaded.buffer.explorer_input.taskset if algorithm == "grpo" else loaded.buffer.trainer_input.experience_buffer
    )
    assert source is not None and source.path == str(data) and source.data_selector.selector_type == "shuffle"
    assert {key: getattr(source.format, key) for key in columns} == columns


def test_missing_answers_leave_the_algorithm_to_the_others() -> None:
    for answer, algorithm in (("5", "grpo"), (PROSE, "sft")):
        rows = [{"question": "2+3", "answer": None}, {"question": "2+3", "answer": answer}]
        assert own_data.guessed_form(rows, "a model").algorithm == algorithm


@pytest.mark.parametrize(
    ("row", "given", "said"),
    [
        ({"text": PROSE}, {}, "no column of text has a well-known name for right answers; give --answer; rows without "
         r"answers need a reward function of your own: write a YAML \(docs/plugins.md\); to train on 'text' itself, "
         "write a YAML of algorithm_type cpt"),
        ({"text": PROSE}, {"algorithm": "sft"}, "for prompts; give --prompt; to train on 'text' itself"),
        ({"prompt": "Write on bees."}, {"algorithm": "sft"}, "for right answers; give --answer$"),
        ({"prompt": "Write on bees."}, {"algorithm": "grpo"}, "need a reward function of your own: write a YAML"),
        ({"frage": "2+3", "answer": "5"}, {},
         "no column of frage, answer has a well-known name for prompts; give --prompt"),
        ({"instruction": "Add.", "input": "2+3", "output": "5"}, {},
         "--prompt: instruction and input belong together; write both into one column and name it with --prompt"),
        ({"instruction": "Add.", "input": "2+3", "chosen": "5", "rejected": "6"}, {},
         "--prompt: instruction and input belong together"),
        ({"chosen": "Human: 2+3 Assistant: 5", "rejected": "Human: 2+3 Assistant: 6"}, {},
         "no column of chosen, rejected has a well-known name for prompts; give --prompt"),
        ({"conversations": [*TOLD, *ASKED]}, {}, "'conversations' does not end with a message of the assistant"),
        ({"question": "2+3", "choices": ["5", "6"], "answer": "A"}, {}, "question and choices belong together"),
        *(
            ({"prompt": "2+3", "completion": reply, "label": True}, given,
             r"--answer: 'label' rates the reply in 'completion' \(KTO\).*keep the rows with true and give --answer")
            for reply, given in (("5", {}), (TOLD[1:], {"algorithm": "sft"}))
        ),
        ({"question": "2+3", "answer": "5"}, {"answer": "truth"}, "--answer truth: is no column of the data"),
        ({"question": "2+3", "answer": "5"}, {"algorithm": "dpo"},
         "--algorithm dpo: needs the columns chosen and rejected"),
        ({"question": "2+3", "answer": "5"}, {"algorithm": "ppo2"},
         "--algorithm ppo2: is unknown here; grpo, sft, dpo"),
    ],
)  # fmt: skip
def test_what_cannot_be_guessed_is_said(row: dict[str, Any], given: dict[str, str], said: str) -> None:
    with pytest.raises(RunError, match=said) as raised:
        own_data.guessed_form([row], "a model", **given)
    assert raised.value.code == 2


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"problem": "2+3", "answer": "5", "solution": PROSE}, {"prompt_key": "problem", "response_key": "solution"}),
        ({"problem": "2+3", "answer": "5", "messages": TOLD}, {"messages_key": "messages"}),
        ({"question": "2+3", "answer": "5"}, {"prompt_key": "question", "response_key": "answer"}),
    ],
)
def test_sft_trains_conversations_and_worked_solutions_before_short_answers(
    row: dict[str, Any], columns: dict[str, str]
) -> None:
    found = own_data.guessed_form([row], "a model", algorithm="sft").columns
    assert {key: name for key, name in found.items() if key != "prompt_type"} == columns


def test_a_prompt_that_is_given_or_whole_is_taken() -> None:
    assert own_data.guessed_form([{"instruction": "2+3", "input": "", "output": "5"}], "a model").algorithm == "grpo"
    row = {"question": "2+3: A) 5, B) 6", "options": ["5", "6"], "answer": "A"}
    assert own_data.guessed_form([row], "a model", prompt="question").columns["prompt_key"] == "question"


def test_a_label_beside_another_answer_is_no_rating() -> None:
    row = {"question": "2+3", "answer": "5", "solution": PROSE, "label": True}
    assert own_data.guessed_form([row], "a model").columns["response_key"] == "answer"


def test_images_that_the_model_cannot_read_are_said_to_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    form = own_data.guessed_form([{"question": "2+3", "answer": "5", "image": "a.png"}], str(tmp_path))
    assert "image_key" not in form.columns
    assert str(form).endswith(f"; image: left out: the model {str(tmp_path)!r} reads no images")


def test_columns_of_prompts_and_answers_may_be_named_alone() -> None:
    row = {"frage": "2+3", "antwort": "5"}
    form = own_data.guessed_form([row], "a model", prompt="frage", answer="antwort")
    assert (form.algorithm, form.columns) == ("grpo", {"prompt_key": "frage", "response_key": "antwort"})


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, str]]:
    """A folder with a model and data, and the runs that commands would start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRINITY_CHECKPOINT_ROOT_DIR", raising=False)
    found: list[tuple[Config, str]] = []
    monkeypatch.setattr(supervisor, "run", lambda config, source: found.append((config, source)))
    rows = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(5)]
    for split in ("train", "test"):
        Path("sums").mkdir(exist_ok=True)
        Path(f"sums/{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("small").mkdir()
    return found


def _trinity(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, " ".join(done.output.split())


def test_a_run_without_a_yaml_writes_it_into_the_job_folder(started: list[tuple[Config, str]], tmp_path: Path) -> None:
    command = ("run", "--model", "small", "--data", "sums", "buffer.total_steps=3")
    code, output = _trinity(*command)
    file = tmp_path / "checkpoints/trinity/sums-small/run.yaml"
    assert (code, started[0][1]) == (0, str(file))
    assert f"YAML of the run, with comments: {file}" in output
    assert "grpo (accuracy_reward compares each reply with the row's answer)" in output
    written = load(file)
    assert started[0][0].buffer.total_steps == 3 and written.buffer.total_steps is None
    assert (written.model.model_path, written.checkpoint_root_dir) == (
        str(tmp_path / "small"),
        str(tmp_path / "checkpoints"),
    )
    assert [taskset.split for taskset in written.buffer.explorer_input.eval_tasksets] == ["test"]
    assert _trinity(*command)[0] == 0  # continues


def test_overrides_may_move_the_job_folder(started: list[tuple[Config, str]], tmp_path: Path) -> None:
    _trinity("run", "--model", "small", "--data", "sums", "name=two", "group=g", f"checkpoint_root_dir={tmp_path}/else")
    assert started[0][1] == f"{tmp_path}/else/trinity/g/two/run.yaml"
    assert load(started[0][1]).group == "g"


def test_a_run_that_began_with_other_data_is_not_continued(started: list[tuple[Config, str]], tmp_path: Path) -> None:
    command = ["run", "--model", "small", "--data", "sums"]
    assert _trinity(*command)[0] == 0
    Path("sums/train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    assert _trinity(*command)[0] == 0  # nothing has begun, so the YAML is written again
    (tmp_path / "checkpoints/trinity/sums-small/summary.json").write_text("{}")
    Path("sums/train.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    code, output = _trinity(*command)
    assert code == 2 and "has begun with another YAML" in output and "name=..." in output
    assert len(started) == 2


def test_a_yaml_that_was_changed_by_hand_is_kept(started: list[tuple[Config, str]], tmp_path: Path) -> None:
    command = ["run", "--model", "small", "--data", "sums"]
    assert _trinity(*command)[0] == 0
    file = tmp_path / "checkpoints/trinity/sums-small/run.yaml"
    changed = file.read_text().replace("total_epochs: 1", "total_epochs: 2")
    file.write_text(changed)
    code, output = _trinity(*command)
    assert (code, len(started), file.read_text()) == (2, 1, changed)
    assert f"{file} was changed by hand; run it by `trinity run {file}`, or remove it" in output


@pytest.mark.parametrize("test", ['{"question": "1+1", "answer": ""}', '{"problem": "1+1"}'])
def test_a_split_without_answers_is_not_evaluated(started: list[tuple[Config, str]], tmp_path: Path, test: str) -> None:
    Path("sums/test.jsonl").write_text(test + "\n")
    code, output = _trinity("run", "--model", "small", "--data", "sums")
    assert code == 0, output
    text = (tmp_path / "checkpoints/trinity/sums-small/run.yaml").read_text()
    assert "# not evaluated: the split test, as not every row has " in text
    assert not load(started[0][1]).buffer.explorer_input.eval_tasksets


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--model", "small"), "--model needs --data too"),
        (("run", "--answer", "a"), "--answer needs --model and --data too"),
        (("run", "own.yaml", "--model", "small", "--data", "sums"), "own.yaml and --model, --data: a YAML names both"),
        (("check", "--data", "sums"), "--data needs --model too"),
        (("run", "--model", "small", "--data", "none.jsonl"), "--data 'none.jsonl' does not exist"),
        *(((command, "sums/train.jsonl"), "sums/train.jsonl: is data, which a YAML names; without one: trinity run "
           "--model MODEL --data sums/train.jsonl") for command in ("run", "check")),
        (("run",), "no YAML; give it as --config FILE, or give `trinity run` --model and --data"),
    ],
)  # fmt: skip
def test_options_that_do_not_describe_a_run_are_refused(
    started: list[tuple[Config, str]], arguments: tuple[str, ...], said: str
) -> None:
    code, output = _trinity(*arguments)
    assert code == 2 and said in output
    assert not started and not Path("checkpoints").exists()


def test_a_check_without_a_yaml_writes_nothing(started: list[tuple[Config, str]]) -> None:
    code, output = _trinity("check", "--model", "small", "--data", "sums", "name=other")
    assert code == 0 and "trinity/other" in output and "sums-test every 100 steps" in output
    assert _trinity("run", "--dry-run", "--model", "small", "--data", "sums")[0] == 0
    assert not started and not Path("checkpoints").exists()


def test_a_subset_is_written_for_training_and_evaluation(started: list[tuple[Config, str]]) -> None:
    Path("set").mkdir()
    Path("sums").rename("set/main")
    code, output = _trinity("run", "--model", "small", "--data", "set", "--subset", "main")
    assert code == 0, output
    source = started[0][0].buffer.explorer_input
    assert source.taskset is not None
    assert [one.subset_name for one in (source.taskset, *source.eval_tasksets)] == ["main", "main"]
    assert _trinity("check", "--model", "small", "--data", "set", "--subset", "other")[0] == 2
