"""Reward functions of a plugin, called over gRPC in the service's own process: what they get, give, and do wrong."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.servers.service import ServiceProcess
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.runtime.errors import EXIT_FOR_GOOD

pytestmark = pytest.mark.core

PLUGIN = '''
import json
from texts import is_short
from trinity.plugins import group_reward_function, reward_function


@reward_function("echo_reward")
def echo(item, args):
    """Raises what it was given, so that the caller reads it."""
    got = dict(prompt=item.prompt, response=item.response, truth=item.truth, token_ids=list(item.token_ids),
               truncated=item.truncated, response_tokens=item.response_tokens, task=item.task, args=args)
    raise RuntimeError(json.dumps(got))


@reward_function("short_reward")
def short(item, args):
    return is_short(item.response, args["limit"])


@reward_function("parts_reward")
def parts(item, args):
    return {"accuracy": item.response == item.truth, "format": 0.25}


NAN = float("nan")
RETURNS = {"nan": NAN, "inf": {"a": float("inf")}, "none": None, "text": "high", "nan_part": {"a": NAN, "b": 1}}


@reward_function("moody_reward")
def moody(item, args):
    if item.response == "raise":
        return 1 / 0
    if item.response == "exit":
        raise SystemExit(3)
    return RETURNS.get(item.response, 1)


@group_reward_function("rank_reward")
def rank(items, args):
    """The share of the group that is longer; the wrong number of results where one says so."""
    if any(item.response == "few" for item in items):
        return [1.0]
    longer = [sum(len(other.response) > len(item.response) for other in items) for item in items]
    return [{"rank": args["weight"] * count / len(items)} for count in longer]


@reward_function("accuracy_reward")
def shadow(item, args):
    return 7.0
'''
TEXTS = "def is_short(text, limit):\n    return len(text) < limit\n"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[environment_pb2_grpc.EnvironmentServiceStub]:
    root = tmp_path_factory.mktemp("environment")
    for folder, name, text in (("first", "my_rewards.py", PLUGIN), ("second", "texts.py", TEXTS)):
        (root / folder).mkdir()
        (root / folder / name).write_text(text)
    folders = os.pathsep.join([str(root / "second"), str(root / "first")])
    service = ServiceProcess("environment", root, PLUGIN_DIRS=folders).start()
    with grpc.insecure_channel(service.address) as channel:
        yield environment_pb2_grpc.EnvironmentServiceStub(channel)
    assert service.stop() == 0


def score(
    stub: environment_pb2_grpc.EnvironmentServiceStub, scorer: str, *responses: str, args: dict[str, Any] | None = None
) -> list[pb.Score]:
    items = [pb.ScoreItem(response=response, truth="42", task_json='{"row": 1}') for response in responses]
    request = pb.ScoreRequest(scorer=scorer, items=items, args_json=json.dumps(args or {}))
    return list(stub.Score(request, timeout=20).scores)


def test_a_function_gets_everything_of_its_item_and_the_yamls_arguments(
    stub: environment_pb2_grpc.EnvironmentServiceStub,
) -> None:
    given = {
        "prompt": "what is 6 x 7?", "response": "vierzig zwei \u2028 \U0001f600", "truth": "42", "truncated": True,
        "response_tokens": 3, "token_ids": [11, 0, 151_643], "task": {"question": "6 x 7", "tags": ["a", {"b": None}]},
        "args": {"limit": 3, "nested": {"x": [1.5]}},
    }  # fmt: skip
    item = pb.ScoreItem(
        prompt=given["prompt"],
        response=given["response"],
        truth=given["truth"],
        task_json=json.dumps(given["task"]),
        truncated=True,
        response_tokens=3,
        response_token_ids=given["token_ids"],
    )
    request = pb.ScoreRequest(scorer="echo_reward", items=[item], args_json=json.dumps(given["args"]))
    (found,) = stub.Score(request, timeout=20).scores
    kind, _, message = found.error.partition(": ")
    assert kind == "RuntimeError"
    assert json.loads(message) == given


def test_a_number_is_the_reward(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    found = score(stub, "short_reward", "four", "longer than ten", args={"limit": 10})
    assert [(one.reward, dict(one.metrics), one.error) for one in found] == [(1.0, {}, ""), (0.0, {}, "")]


def test_a_group_is_scored_as_a_whole(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    found = score(stub, "rank_reward", "a", "aaa", "aa", "a", args={"weight": 4})
    assert [(one.reward, dict(one.metrics)) for one in found] == [
        (2, {"rank": 2}), (0, {"rank": 0}), (1, {"rank": 1}), (2, {"rank": 2})
    ]  # fmt: skip
    assert score(stub, "rank_reward") == []
    few = score(stub, "rank_reward", "a", "few", args={"weight": 1})
    assert {one.error for one in few} == {"ValueError: the scorer gave 1 results for 2 answers"}


def test_a_mapping_is_summed_and_its_parts_are_metrics(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    right, wrong = score(stub, "parts_reward", "42", "41")
    assert (right.reward, dict(right.metrics)) == (1.25, {"accuracy": 1.0, "format": 0.25})
    assert (wrong.reward, dict(wrong.metrics)) == (0.25, {"accuracy": 0.0, "format": 0.25})


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("nan", "nan"),
        ("inf", "inf"),
        ("nan_part", "nan"),
        ("none", "reward: is None, must be a number"),
        ("text", "reward: is 'high', must be a number"),
        ("raise", "ZeroDivisionError: division by zero"),
        ("exit", "SystemExit: 3"),
    ],
)
def test_what_is_no_reward_is_the_error_of_its_item_alone(
    stub: environment_pb2_grpc.EnvironmentServiceStub, response: str, said: str
) -> None:
    before, bad, after = score(stub, "moody_reward", "fine", response, "fine")
    assert [(one.reward, one.error) for one in (before, after)] == [(1.0, ""), (1.0, "")]
    assert said in bad.error
    assert bad.reward == 0


def test_a_missing_argument_of_the_yaml_is_named(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    (found,) = score(stub, "short_reward", "four")
    assert found.error == "KeyError: 'limit'"


def test_a_built_in_name_keeps_its_meaning(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    (found,) = score(stub, "accuracy_reward", "42")
    assert found.reward == 1.0


def test_the_service_announces_what_plugins_added(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    scorers = stub.Describe(pb.DescribeRequest(), timeout=20).scorers
    assert {"echo_reward", "short_reward", "parts_reward", "moody_reward", "math_reward"} <= set(scorers)
    with pytest.raises(grpc.RpcError) as refused:
        score(stub, "shrt_reward", "x")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "short_reward" in refused.value.details()


def test_a_service_with_a_plugin_that_raises_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/broken_one.py").write_text("1 / 0")
    service = ServiceProcess("environment", tmp_path, PLUGIN_DIRS=str(tmp_path / "plugins"))
    service.start(wait_seconds=0)
    assert service.wait(30) == EXIT_FOR_GOOD
    assert "broken_one.py:1: ZeroDivisionError: division by zero" in service.tail()
