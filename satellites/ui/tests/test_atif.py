"""`trinity atif`: episodes as ATIF trajectories, checked by the models of that form, and trajectories as rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trinity.archive.reader import read_experiences
from trinity.reading.errors import RunError
from trinity.ui import atif, atif_form

pytestmark = pytest.mark.core

atif_models = pytest.importorskip("atif", reason="the models of the form are not installed: pip install atif")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PARTS = [("What is 1 + 1?", False), (f"I ask. {CALL}", True), (" -> 2\n", False), ("It is 2", True)]


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tokenizer with a token for each character."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(n): n for n in range(128)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path / "tiny"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Two rollouts of one task, of two turns with a call of a tool."""
    path = tmp_path / "kept.jsonl"
    rows = []
    for rollout in range(2):
        response = [(token, trained) for text, trained in PARTS[1:] for token in ids(text)]
        rows.append(
            {
                "run": "r",
                "task_id": "sums/1",
                "log_sequence": 7,
                "index_in_group": rollout,
                "rollout": rollout,
                "token_ids": ids(PARTS[0][0]) + [token for token, _ in response],
                "prompt_length": len(PARTS[0][0]),
                "action_mask": [trained for _, trained in response],
                "logprobs": [-0.5 - rollout if trained else 0.0 for _, trained in response],
                "reward": float(rollout),
                "metrics": {"turns": 2.0},
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def exported(archive: Path, model: Path, tmp_path: Path) -> list[Path]:
    atif.export(str(archive), model, tmp_path / "out")
    return sorted((tmp_path / "out").iterdir())


def test_an_episode_is_a_trajectory_that_the_models_of_the_form_accept(exported: list[Path]) -> None:
    assert [path.name for path in exported] == ["sums_1-0-0-0.json", "sums_1-0-1-1.json"]
    found = atif_models.Trajectory.model_validate_json(exported[1].read_text())
    assert found.schema_version == "ATIF-v1.8"
    assert [(step.source, step.message) for step in found.steps] == [
        ("user", PARTS[0][0]),
        ("agent", PARTS[1][0]),
        ("agent", PARTS[3][0]),
    ]
    (call,) = found.steps[1].tool_calls
    assert (call.function_name, call.arguments) == ("add", {"a": 1})
    (result,) = found.steps[1].observation.results
    assert (result.source_call_id, result.content) == (call.tool_call_id, PARTS[2][0])
    assert found.steps[2].metrics.completion_token_ids == ids(PARTS[3][0])
    assert found.steps[2].metrics.prompt_token_ids == ids("".join(text for text, _ in PARTS[:3]))
    assert set(found.steps[2].metrics.logprobs) == {-1.5}
    assert found.final_metrics.extra == {"reward": 1.0, "turns": 2.0}
    assert found.extra["task_id"] == "sums/1"


def test_tokens_masks_and_rewards_come_back_as_they_were(exported: list[Path], archive: Path, tmp_path: Path) -> None:
    atif.import_(exported, tmp_path / "rows.jsonl", "experience")
    (before,) = read_experiences(str(archive), "before")
    (after,) = read_experiences(str(tmp_path / "rows.jsonl"), "after")
    assert after.task.task_id == "sums/1"
    for was, now in zip(before.experiences, after.experiences, strict=True):
        assert (now.rollout, now.step, now.reward, now.prompt_length) == (
            was.rollout,
            was.step,
            was.reward,
            was.prompt_length,
        )
        for name in ("token_ids", "action_mask", "logprobs"):
            np.testing.assert_array_equal(getattr(now, name), getattr(was, name))


def test_conversations_have_calls_and_results_of_tools(exported: list[Path], tmp_path: Path) -> None:
    atif.import_(exported[1:], tmp_path / "rows.jsonl", "messages")
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    said, answered = row["messages"][1:3]
    assert said["content"] == "I ask."
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert answered["tool_call_id"] == said["tool_calls"][0]["id"]
    assert (row["reward"], row["task_id"]) == (1.0, "sums/1")


@pytest.mark.parametrize("value", ["NaN", "1e999", r'"\ud800"'])
def test_a_call_that_is_no_json_is_only_text(value: str, archive: Path, model: Path, tmp_path: Path) -> None:
    said = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
    row = json.loads(archive.read_text().splitlines()[0])
    length, said_ids = row["prompt_length"], ids(said)
    row |= {"token_ids": [*row["token_ids"][:length], *said_ids], "action_mask": [True] * len(said_ids)}
    archive.write_text(json.dumps(row | {"logprobs": [-1.0] * len(said_ids)}) + "\n")
    atif.export(str(archive), model, tmp_path / "out")
    (file,) = (tmp_path / "out").iterdir()
    step = atif_models.Trajectory.model_validate_json(file.read_text()).steps[1]
    assert (step.message, step.tool_calls) == (said, None)


@pytest.mark.parametrize("task", ["t" * 220, "\u8a9e" * 150])
def test_each_rollout_of_a_task_with_a_long_id_has_its_file(
    task: str, archive: Path, model: Path, tmp_path: Path
) -> None:
    archive.write_text(archive.read_text().replace("sums/1", task))
    atif.export(str(archive), model, tmp_path / "out")
    found = {path.name: json.loads(path.read_text())["extra"] for path in (tmp_path / "out").iterdir()}
    assert {name[-11:]: (extra["task_id"], extra["rollout"]) for name, extra in found.items()} == {
        "-0-0-0.json": (task, 0),
        "-0-1-1.json": (task, 1),
    }


def trial(tmp_path: Path, name: str = "trial", reward: float = 0.25, **changes: Any) -> Path:
    """A trial as Harbor keeps it."""
    steps = [
        {"step_id": 1, "source": "user", "message": "Hi"},
        {
            "step_id": 2,
            "source": "agent",
            "message": [{"type": "text", "text": "Hello"}],
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3]},
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "Bye",
            "metrics": {"prompt_token_ids": [9], "completion_token_ids": [4, 5]},
        },
    ]
    found = {"schema_version": "ATIF-v1.4", "agent": {"name": "a", "version": "1"}, "steps": steps, **changes}
    atif_models.Trajectory.model_validate(found)
    (tmp_path / name / "agent").mkdir(parents=True)
    (tmp_path / name / "agent/trajectory.json").write_text(json.dumps(found))
    (tmp_path / name / "verifier").mkdir()
    (tmp_path / name / "verifier/reward.txt").write_text(f"{reward}\n")
    (tmp_path / name / "result.json").write_text('{"task_name": "greet"}')
    return tmp_path / name


def test_a_trial_of_harbor_has_its_task_and_its_reward(tmp_path: Path) -> None:
    atif.import_([trial(tmp_path)], tmp_path / "rows.jsonl", "experience")
    (group,) = read_experiences(str(tmp_path / "rows.jsonl"), "x")
    assert group.task.task_id == "greet"
    assert [(one.step, one.reward, one.token_ids.tolist()) for one in group.experiences] == [
        (0, 0.25, [1, 2, 3]),
        (1, 0.25, [9, 4, 5]),
    ], "a prompt that does not continue the tokens before it is a row"


def test_trials_of_a_task_and_their_sub_agents_are_rollouts(tmp_path: Path) -> None:
    """As one rollout, a failed trial got the advantage of one that succeeded."""
    helper = {"schema_version": "ATIF-v1.8", "agent": {"name": "b", "version": "1"}, "steps": [metrics()]}
    inner = {"schema_version": "ATIF-v1.8", "subagent_trajectories": [helper | {"trajectory_id": "helper"}]}
    given = [trial(tmp_path, "failed", 0.0, **inner), trial(tmp_path, "solved", 1.0)]
    atif.import_(given, tmp_path / "rows.jsonl", "experience")
    (group,) = read_experiences(str(tmp_path / "rows.jsonl"), "x")
    assert [(one.rollout, one.step, one.reward) for one in group.experiences] == [
        (0, 0, 0.0),
        (0, 1, 0.0),
        (1, 0, 0.0),
        (2, 0, 1.0),
        (2, 1, 1.0),
    ]


@pytest.mark.parametrize("value", ["grp-a", [1], {}, None, 1.5, True])
@pytest.mark.parametrize("name", ["group", "rollout", "step"])
def test_what_others_keep_in_extra_is_no_number_of_ours(name: str, value: Any, tmp_path: Path) -> None:
    given = [trial(tmp_path, one, extra={"reward": 1, name: value}) for one in ("first", "second")]
    atif.import_(given, tmp_path / "rows.jsonl", "experience")
    (group,) = read_experiences(str(tmp_path / "rows.jsonl"), "x")
    assert [(one.rollout, one.step) for one in group.experiences] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_files_that_are_given_twice_are_refused(exported: list[Path], tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"sums_1-0-0-0\.json: extra\.rollout: is 0, and step 0 of that rollout is there"
    ):
        atif.import_([*exported, *exported], tmp_path / "rows.jsonl", "experience")


def test_copied_steps_are_not_trained(tmp_path: Path) -> None:
    steps = [
        {
            "step_id": 1,
            "source": "agent",
            "message": "Hi",
            "is_copied_context": True,
            "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2]},
        },
        {
            "step_id": 2,
            "source": "agent",
            "message": "Hi",
            "metrics": {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4]},
        },
    ]
    atif.import_([trial(tmp_path, steps=steps)], tmp_path / "rows.jsonl", "experience")
    ((experience,),) = [group.experiences for group in read_experiences(str(tmp_path / "rows.jsonl"), "x")]
    assert experience.action_mask.tolist() == [False, False, True]
    with pytest.raises(RunError, match=r"steps\.0\.is_copied_context: is True: .*remove the step"):
        atif.import_([tmp_path / "trial"], tmp_path / "talk.jsonl", "messages")


STEP = {"step_id": 1, "source": "user", "message": "Hi"}
AGENT = {"step_id": 1, "source": "agent", "message": "Hi"}


def metrics(**values: Any) -> dict[str, Any]:
    return {**AGENT, "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2, 3], **values}}


def called(**arguments: Any) -> dict[str, Any]:
    return {**AGENT, "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": arguments}]}


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"schema_version": "ATIF-v2.0"}, "messages", "schema_version: is 'ATIF-v2.0', must be ATIF-v1.0 to ATIF-v1.8"),
        ({"steps": []}, "messages", "steps: is []"),
        ({"steps": [{**STEP, "step_id": 2}]}, "messages", "steps.0.step_id: is 2, must be 1"),
        ({"steps": [{**STEP, "mesage": "x"}]}, "messages", "steps.0.mesage: is 'x'"),
        ({"steps": [{**STEP, "message": 5}]}, "messages", "is 5: "),
        ({"steps": [{**STEP, "metrics": {}}]}, "messages", "steps.0.metrics: is given, and source is 'user'"),
        (
            {"steps": [{**AGENT, "observation": {"results": [{"source_call_id": "c", "content": "x"}]}}]},
            "messages",
            "source_call_id: is 'c', must be one of the step's calls (none)",
        ),
        (
            {"steps": [{**STEP, "message": [{"type": "image", "source": {"path": "a"}}]}]},
            "messages",
            "steps.0.message.0: is of type 'image'",
        ),
        ({"steps": [STEP]}, "experience", "steps: has no step of an agent"),
        ({"steps": [AGENT]}, "experience", "steps.0.metrics.prompt_token_ids: is None"),
        ({"steps": [metrics(logprobs=[-1.0])]}, "experience", "steps.0.metrics.logprobs: has 1 values"),
        ({"steps": [metrics(logprobs=[-1.0, float("nan")])]}, "experience", "steps.0.metrics.logprobs.1: is nan"),
        ({"steps": [metrics(completion_token_ids=[2, -3])]}, "experience", "has -3; ids are >= 0"),
        ({"steps": [metrics()], "extra": {"reward": "much"}}, "experience", "reward: is 'much', must be a finite"),
        ({"steps": [metrics()], "extra": {}}, "experience", "extra.reward: is missing; add it"),
        ({"extra": {"reward": 10**400}}, "messages", "0000..., must be a finite number"),
        ({"extra": {"reward": "1_0"}}, "messages", "reward: is '1_0', must be a finite number"),
        ({"steps": [{**STEP, "message": "a\ud800"}]}, "messages", r"messages.0.content: is 'a\ud800', must be"),
        ({"extra": {"task_id": "\udfff"}}, "messages", r"task_id: is '\udfff', must be"),
        ({"steps": [called(x=[1, float("nan")])]}, "messages", "tool_calls.0.function.arguments.x.1: is nan, must be"),
        ({"steps": [called(**{"\ud800": 1})]}, "messages", r"tool_calls.0.function.arguments: is '\ud800', must be"),
    ],
)
def test_bad_files_are_refused_with_field_value_and_fix(
    tmp_path: Path, changes: dict[str, Any], kind: str, said: str
) -> None:
    path = tmp_path / "bad.json"
    good = {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": [STEP]}
    path.write_text(json.dumps({**good, "extra": {"reward": 1}, **changes}))
    with pytest.raises(RunError) as refused:
        atif.import_([path], tmp_path / "rows.jsonl", kind)
    assert str(refused.value).startswith(str(path))
    assert said in str(refused.value)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("reward.txt", "1".encode("utf-16")),
        ("reward.txt", b"1_0"),
        ("reward.json", b'{"reward": 1%s}' % (b"0" * 400)),
    ],
)
def test_what_a_verifier_wrote_must_be_a_finite_number(name: str, content: bytes, tmp_path: Path) -> None:
    (trial(tmp_path) / "verifier" / name).write_bytes(content)
    with pytest.raises(RunError, match=r"reward: is .*, must be a finite number"):
        atif.import_([tmp_path / "trial"], tmp_path / "rows.jsonl", "experience")


@pytest.mark.parametrize("text", ["", "[", "[]", '"x"', "[" * 100_000, "\\ud800"])
def test_what_is_no_trajectory_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"bad\.json"):
        atif.import_([path], tmp_path / "rows.jsonl", "messages")


def test_fields_of_the_form_are_those_of_its_models() -> None:
    for ours, theirs in (
        (atif_form.Trajectory, atif_models.Trajectory),
        (atif_form.Step, atif_models.Step),
        (atif_form.Agent, atif_models.Agent),
        (atif_form.Metrics, atif_models.Metrics),
        (atif_form.FinalMetrics, atif_models.FinalMetrics),
        (atif_form.ToolCall, atif_models.ToolCall),
        (atif_form.Result, atif_models.ObservationResult),
        (atif_form.Content, atif_models.ContentPart),
    ):
        assert set(ours.model_fields) == set(theirs.model_fields), ours.__name__


def test_what_is_there_is_not_overwritten(archive: Path, model: Path, exported: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no empty folder"):
        atif.export(str(archive), model, tmp_path / "out")
    with pytest.raises(RunError, match=r"tokenizer\.json"):
        atif.export(str(archive), tmp_path / "none", tmp_path / "new")
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(RunError, match="new file"):
        atif.import_(exported, tmp_path / "rows.jsonl", "messages")
