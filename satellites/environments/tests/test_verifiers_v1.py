"""The bridge to verifiers' v1 interface, on the real package, and runs that train on environments of the package index.

An environment service with verifiers 0.4, in a separate virtual environment, plays episodes for a client.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.fakes.environments import playing
from support.programs.run import TrinityRun, write_config
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.archive.reader import read_experiences

VENV = Path(os.environ.get("VERIFIERS_VENV", Path(__file__).parents[3] / "build/hubs/verifiers"))
pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(450),
    pytest.mark.skipif(
        not (VENV / "bin/trinity-environment").exists(), reason="verifiers 0.4 is not installed: make hubs"
    ),
]

STARDATA = VENV.with_name("stardata")  # an environment of the classic interface
FAKES = Path(playing.__file__).parent
SUMS, GUESSES, PAIRS = "verifiers_tasksets", "verifiers_guesses", "verifiers_pairs"
CALL = '<tool_call>{"name": "sums_add", "arguments": {"a": 1, "b": 1}}</tool_call>'
FIRST = "Answer with a number.\n\nWhat is 1 + 1?"


@dataclass
class Played:
    answers: list[Any] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [answer.observation for answer in self.answers]

    @property
    def last(self) -> Any:
        return self.answers[-1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Returns the address of the service."""
    folder = tmp_path_factory.mktemp("verifiers")
    words = folder / "nltk_data/corpora/words"  # of TextArena, which would download them
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("apple\n")
    changes = {
        "PYTHONPATH": str(FAKES),
        "HOME": str(folder),
        "TRINITY_INSECURE": "1",
        "TRINITY_ENVIRONMENT_LISTEN": "127.0.0.1:0",
        "TRINITY_ENVIRONMENT_ALLOWED_MODULES": f"{SUMS},{GUESSES},{PAIRS},json,textarena",
    }
    command = [str(VENV / "bin/trinity-environment"), "serve"]
    with subprocess.Popen(
        command, env={**os.environ, **changes}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "service.started" in line:
                yield line.partition("address='")[2].partition("'")[0]
                break
        process.terminate()
        process.stdout.read()


def episode(address: str, module: str, replies: list[str], index: int = 0, **args: Any) -> Played:
    """Raises grpc.RpcError."""
    played = Played()
    with grpc.insecure_channel(address) as channel:
        reset = pb.Reset(
            environment="verifiers",
            task_json=json.dumps({"index": index}),
            args_json=json.dumps({"env_id": module, **args}),
        )
        requests = [pb.EpisodeRequest(reset=reset)]
        requests += [pb.EpisodeRequest(action=pb.Action(text=text, turn=n)) for n, text in enumerate(replies, 1)]
        for answer in environment_pb2_grpc.EnvironmentServiceStub(channel).Episode(iter(requests), timeout=200):
            played.answers.append(answer)
            if answer.done:
                break
    return played


def refusal(address: str, module: str, **args: Any) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        episode(address, module, ["2"], **args)
    return f"{refused.value.code().name}: {refused.value.details()}"


def test_one_turn_is_a_prompt_and_the_weighted_rewards(service: str) -> None:
    played = episode(service, SUMS, ["2"])
    assert played.texts[0] == FIRST
    assert json.loads(played.answers[0].info_json)["instructions"] == "Answer with a number."
    assert (played.last.done, played.last.reward) == (True, 1.5)
    metrics = dict(played.last.metrics)
    assert {name: metrics[f"rubric_{name}"] for name in ("exact", "short", "length", "num_turns")} == {
        "exact": 1,
        "short": 1,
        "length": 1,
        "num_turns": 1,
    }
    assert metrics["success"] == 1


def test_a_wrong_answer_is_no_success(service: str) -> None:
    played = episode(service, SUMS, ["3"], index=1)
    assert (played.last.reward, played.last.metrics["success"]) == (0.5, 0)


def test_tools_of_the_task_are_listed_and_called(service: str) -> None:
    played = episode(service, SUMS, [f"Let me see. {CALL}", "2"], env_args={"task": {"tools": True}})
    (tool,) = json.loads(played.answers[0].info_json)["tools"]
    assert (tool["name"], tool["parameters"]["required"]) == ("sums_add", ["a", "b"])
    assert played.texts[1] == "<tool_response>\n2\n</tool_response>"
    assert (played.last.reward, played.last.metrics["rubric_num_turns"]) == (1.5, 2)


def test_calls_that_cannot_be_made_are_told(service: str) -> None:
    bad = ["<tool_call>{</tool_call>", '<tool_call>{"name": "no"}</tool_call>', CALL.replace(": 1", ': "x"')]
    played = episode(service, SUMS, [*bad, "2"], env_args={"task": {"tools": True}})
    assert all(text.startswith("<tool_response>\n") for text in played.texts[1:4])
    assert "there is no tool 'no'; known: sums_add" in played.texts[2]
    assert played.last.reward == 1.5


def test_an_environment_that_plays_the_user_is_told_turn_by_turn(service: str) -> None:
    played = episode(service, GUESSES, ["1", "9", "4"], index=14)
    assert played.texts[:3] == ["Reply with a digit.\n\nGuess a number.", "It is higher.", "It is lower."]
    assert all(not answer.info_json or "new" not in answer.info_json for answer in played.answers[1:])
    assert played.last.reward == pytest.approx(1 / 3)


def test_a_conversation_over_the_limit_is_scored_as_it_stands(service: str) -> None:
    played = episode(service, GUESSES, ["1"] * 9, index=3, max_steps=2)
    assert (len(played.answers), played.last.done, played.last.reward) == (3, True, 0)


def test_an_episode_that_is_given_up_leaves_the_next_one_alone(service: str) -> None:
    episode(service, GUESSES, ["1"], index=9)
    assert episode(service, GUESSES, ["9"], index=9).last.reward == 1


@pytest.mark.parametrize(
    ("kind", "said"), [("broken", "TaskError: task setup: RuntimeError: the machine is gone"), ("unscored", "no score")]
)
def test_errors_of_the_environment_fail_the_episode(service: str, kind: str, said: str) -> None:
    problem = refusal(service, SUMS, env_args={"kind": kind})
    assert problem.startswith("UNAVAILABLE: ")
    assert said in problem


@pytest.mark.parametrize(
    ("module", "args", "said"),
    [
        (PAIRS, {}, "args.env_id: is 'verifiers_pairs', must be an environment of one agent; it has solver, judge"),
        (SUMS, {"env_args": {"kind": "picture"}}, "task.index: is 0, whose task needs the container image 'debian'"),
        (SUMS, {"env_args": {"nope": 1}}, "args.env_id: is 'verifiers_tasksets', must be a taskset that verifiers 0.4"),
        (SUMS, {"index": 3}, "task.index: is 3, must be from 0 to 2"),
        (SUMS, {"split": "eval"}, "args.split: is unknown"),
        ("json", {}, "args.env_id: is 'json', must be a taskset"),
        ("not-there", {}, "args.env_id: names the module 'not_there'"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_begin(
    service: str, module: str, args: dict[str, Any], said: str
) -> None:
    problem = refusal(service, module, **args)
    assert problem.startswith("INVALID_ARGUMENT: ")
    assert said in problem


def test_an_environment_of_the_package_index_is_played(service: str) -> None:
    first = episode(service, "marble-v1", [], index=2).texts[0]
    assert "passing through the ring" in first
    played = episode(service, "marble-v1", ["no layout"], index=2)
    assert (played.texts[0], played.last.done, played.last.reward) == (first, True, 0)
    assert {"rubric_scored", "rubric_closeness", "rubric_answered_legally"} <= set(played.last.metrics)


def test_a_game_of_textarena_is_played_to_its_end(service: str) -> None:
    played = episode(service, "textarena", ["[A]", "[P]", "[L]", "[E]"], env_args={"game": "Hangman-v0"})
    assert "You are playing Hangman" in played.texts[0]
    assert (played.last.done, played.last.reward) == (True, 1), played.texts[-2:]


def trained(repository: Path, model: Path, folder: Path, tasksets: list[Any], address: str, **variables: str) -> Any:
    """Trains two steps on the tasksets' first rows. Returns the experiences by taskset.

    tasksets: (name, environment_args), of verifiers. address: of the service that plays them; empty for the run's own.
    """
    (folder / "train.jsonl").write_text("".join(f'{{"index": {n}, "text": ""}}\n' for n in range(3)))
    given = [
        {
            "name": name,
            "path": str(folder),
            "split": "train",
            "format": {"prompt_key": "text", "response_key": "text"},
            "default_workflow_type": "environment_workflow",
            "workflow_args": {"environment": "verifiers", "environment_args": {"max_steps": 2, **args}},
        }
        for name, args in tasksets
    ]
    archive = {"path": str(folder / "trained.jsonl"), "storage_type": "file"}
    changes: dict[str, Any] = {
        "name": "verifiers",
        "model": {"model_path": str(model), "max_prompt_tokens": 4000, "max_model_len": 4096},
        "algorithm": {"repeat_times": 4},
        "buffer": {
            "batch_size": len(given),
            "total_steps": 2,
            "explorer_input": {"taskset": None, "tasksets": given, "eval_tasksets": []},
            "trainer_input": {"experience_buffer": archive},
        },
        "explorer": {"runner_per_model": 2},
        "stages": [],
    }
    if address:
        changes["explorer"]["environments"] = [{"name": "verifiers", "address": address}]
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "run.yaml", changes)
    run = TrinityRun(config, folder, **variables)
    try:
        run.start()
        assert run.finish(380) == 0, run.tail()
    finally:
        run.end()
    found: dict[str, list[Any]] = {}
    for group in read_experiences(str(folder / "trained.jsonl"), "experience_buffer"):
        found.setdefault(group.task.taskset, []).extend(group.experiences)
    assert sum(map(len, found.values())) == 2 * len(given) * 4
    for one in (one for experiences in found.values() for one in experiences):
        assert any(name.startswith("rubric_") for name in one.metrics), "the rewards by name come along"
    return found


def test_a_run_trains_on_environments_of_the_package_index(
    service: str, repository: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    hangman = {"env_id": "textarena", "env_args": {"game": "Hangman-v0"}}
    tasksets = [("marble", {"env_id": "marble-v1"}), ("hangman", hangman), ("sums", {"env_id": SUMS})]
    assert set(trained(repository, quickstart_model, tmp_path, tasksets, service)) == {"marble", "hangman", "sums"}


@pytest.mark.skipif(not STARDATA.exists(), reason="staros-stardata is not installed: make hubs")
def test_a_run_trains_on_an_environment_of_the_classic_interface(
    repository: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    poems = "stardata.envs.constraint_gym"
    variables = {"PYTHONPATH": str(STARDATA), "TRINITY_ENVIRONMENT_ALLOWED_MODULES": poems}
    found = trained(repository, quickstart_model, tmp_path, [("poems", {"env_id": poems})], "", **variables)
    assert "rubric_prosody_reward" in found["poems"][0].metrics
