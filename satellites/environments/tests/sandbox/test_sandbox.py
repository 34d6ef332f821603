"""The environment `sandbox`: commands and files, tests that judge, and limits that hold."""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity.environments.sandbox import bubblewrap, limits, sandbox
from trinity.environments.sandbox.environment import Shell
from trinity.environments.sandbox.sandbox import problem
from trinity.runtime import leases
from trinity.runtime.errors import Conflict, InvalidInput
from trinity.sdk.environment import Observation

pytestmark = [pytest.mark.core, pytest.mark.skipif(bool(problem()), reason=f"no sandbox: {problem()}")]

TEST = 'mkdir -p /logs/verifier; cat /app/answer > /logs/verifier/reward.txt; echo "hidden" > /tests/seen'


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leases.FOLDER_VARIABLE, str(tmp_path / "leases"))


def row(test: str = TEST, **parts: Any) -> dict[str, Any]:
    return {"instruction": "Write 1 to answer.", "tests": [{"path": "test.sh", "text": test}], **parts}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Played:
    def __init__(self) -> None:
        self.game = Shell()

    def begin(self, task: dict[str, Any], **args: Any) -> Observation:
        return self.game.reset(task, args, seed=0)

    def run(self, command: str) -> str:
        return self.game.step(call("run", command=command)).text


@pytest.fixture
def played() -> Iterator[Played]:
    made = Played()
    yield made
    made.game.close()


def test_files_and_commands_share_a_folder_until_the_end(played: Played) -> None:
    assert "Write 1 to answer." in played.begin(row()).text
    assert "exit code 0" in played.game.step(call("write_file", path="deep/er/a.txt", content="one\n")).text
    assert "one" in played.game.step(call("read_file", path="/app/deep/er/a.txt")).text
    assert "[exit code 3]" in played.run("exit 3")
    assert "no tool" in played.game.step(call("fly")).text
    assert "that is shell" in played.game.step("```bash\necho that is shell\n```").text
    assert "No such file" in played.run("cat /tests/test.sh")
    played.run("echo 0.25 > answer")
    last = played.game.step(call("submit"))
    assert (last.done, last.reward, last.metrics["score"], last.info["success"]) == (True, 0.25, 0.25, False)
    assert last.metrics["tool_errors"] == 2


def test_the_last_step_is_judged_too(played: Played) -> None:
    played.begin(row(), max_steps=1)
    last = played.game.step(call("run", command="echo 1 > answer"))
    assert (last.done, last.reward, last.metrics["success"]) == (True, 1, 1)


def test_nothing_of_the_policy_is_there_while_the_tests_run(played: Played) -> None:
    played.begin(row("ps ax -o args | grep -c '[s]leep 77' > /app/left; cp /app/left /logs/verifier/reward.txt"))
    played.run("for i in $(seq 20); do sleep 77 & done; mkdir -p /logs/verifier")
    played.run("ln -s /app/x /logs/verifier/reward.txt; echo 1 > /app/x")
    assert played.game.step(call("submit")).reward == 0


@pytest.mark.parametrize(
    "test", ["true", "echo nan > /logs/verifier/reward.txt", "echo [] > /logs/verifier/reward.json"]
)
def test_tests_that_write_no_reward_fail_the_episode(played: Played, test: str) -> None:
    played.begin(row(test))
    with pytest.raises(Conflict, match=r"must be a number in /logs/verifier/reward\.txt"):
        played.game.step(call("submit"))


def test_a_reward_in_json_counts(played: Played) -> None:
    played.begin(row("echo '{\"reward\": 0.5}' > /logs/verifier/reward.json"))
    assert played.game.step(call("submit")).reward == 0.5


def test_a_broken_limit_ends_the_episode_with_its_cause(played: Played) -> None:
    played.begin(row(), memory_mib=64, command_seconds=20)
    hog = "for i in 1 2 3; do python3 -c 'import time; x = bytearray(40 << 20); time.sleep(9)' & done; wait"
    last = played.game.step(call("run", command=hog))
    assert (last.done, last.reward, last.metrics["limit_memory"]) == (True, 0, 1)
    assert "used more than 64 MiB" in last.text


def test_a_slow_command_is_ended_and_the_episode_continues(played: Played) -> None:
    played.begin(row(), command_seconds=0.5)
    assert "[ended: it ran longer than 0.5 s]" in played.run("sleep 60")
    assert "still here" in played.run("echo still here")


def test_output_is_cut(played: Played) -> None:
    played.begin(row(), output_bytes=100)
    assert "[cut after 100 bytes]" in played.run("seq 1000")


def test_a_sandbox_ends_with_its_time_to_live(played: Played) -> None:
    played.begin(row(), ttl_seconds=1)
    played.run("sleep 5")
    with pytest.raises(Exception, match="time to live of 1 s is over"):
        played.run("true")
    played.game.close()
    assert leases.leases() == []


def test_a_dockerfile_says_where_files_go(played: Played) -> None:
    docker = "FROM x\nENV A=b C='d e'\nWORKDIR /work\nCOPY --chmod=755 \\\n  one two/ ./\nCOPY one /data/renamed\n"
    files = [("Dockerfile", docker), ("one", "1"), ("two/three", "3")]
    played.begin(row(environment=[{"path": path, "text": text} for path, text in files]))
    assert "/work b d e 131" in played.run("echo $PWD $A $C $(cat one three /data/renamed)")


@pytest.mark.parametrize(
    ("parts", "args", "field"),
    [
        ({"instruction": ""}, {}, "task.instruction"),
        ({"tests": []}, {}, "task.tests"),
        ({"tests": [{"path": "../x", "text": ""}]}, {}, "task.tests"),
        ({"environment": [{"path": "Dockerfile", "text": "FROM x\nRUN apt-get update"}]}, {}, "task.environment"),
        ({"environment": [{"path": "Dockerfile", "text": "WORKDIR /usr/x"}]}, {}, "task.environment"),
        (
            {"environment": [{"path": "Dockerfile", "text": "COPY a /etc/"}, {"path": "a", "text": ""}]},
            {},
            "task.environment",
        ),
        ({"environment": [{"path": "Dockerfile", "text": "COPY gone /app/"}]}, {}, "task.environment"),
        ({"environment": [{"path": "a"}]}, {}, "task.environment"),
        ({"config": {"verifier": {"timeout_sec": "x"}}}, {}, "task.config.verifier.timeout_sec"),
        ({}, {"network": True}, "args.network"),
        ({}, {"memory_mib": 10**6}, "args.memory_mib"),
        ({}, {"memory": 64}, "args.memory"),
    ],
)
def test_a_wrong_row_or_argument_is_named(
    played: Played, parts: dict[str, Any], args: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        played.begin(row(**parts), **args)
    assert raised.value.field == field


def test_the_network_of_the_machine_needs_its_operator(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.NETWORK_VARIABLE, "true")
    played.begin(row(), network=True)
    assert os.readlink("/proc/self/ns/net") in played.run("readlink /proc/self/ns/net")


def test_where_no_namespaces_can_be_made_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "binary", lambda: str(fake))
    monkeypatch.setattr(sandbox, "_usable", type(sandbox._usable)())
    with pytest.raises(Conflict, match=r"makes no namespaces here .*No permissions to create a new namespace"):
        Shell().reset(row(), {}, 0)


@pytest.fixture
def restored() -> Iterator[Shell]:
    made = Shell()
    yield made
    made.close()


def test_a_restored_sandbox_has_the_files_and_the_counts_and_the_first_one_goes_on(
    played: Played, restored: Shell
) -> None:
    files = [{"path": "given", "text": "1"}, {"path": "Dockerfile", "text": "COPY given /data/given\n"}]
    played.begin(row("cat answer > /logs/verifier/reward.txt", environment=files), max_steps=4)
    made = (
        "rm /data/given; mkdir -p d/e; echo secret > d/e/f; ln -s e d/link; chmod 500 d/e; printf '\\377' > /tmp/byte"
    )
    played.run(f"{made}; echo 0.25 > answer")
    assert "no tool" in played.game.step(call("fly")).text
    state = played.game.snapshot()
    played.run("echo 0.75 > answer")
    restored.restore(state)
    seen = "cat answer d/link/f; stat -c %a d/e; od -An -tx1 /tmp/byte; ls /data"
    last = restored.step(call("run", command=seen))
    assert last.text.split() == ["<tool_response>", "0.25", "secret", "500", "ff", "</tool_response>"]
    assert (last.metrics["steps"], last.metrics["invalid_action"], last.metrics["tool_calls"]) == (3, 1, 2)
    assert restored.step(call("submit")).reward == 0.25
    assert played.game.step(call("submit")).reward == 0.75


@pytest.mark.parametrize("command", ["sleep 60 &", "head -c 900000 /dev/urandom > big", "mkdir shut; chmod 0 shut"])
def test_what_no_state_can_hold_has_none(played: Played, command: str) -> None:
    played.begin(row())
    assert played.game.snapshot()
    played.run(command)
    assert played.game.snapshot() == b""


def test_a_damaged_state_is_refused_and_ends_its_sandbox(played: Played, restored: Shell) -> None:
    played.begin(row())
    given, counted, _ = json.loads(zlib.decompress(played.game.snapshot()))
    with pytest.raises(Conflict, match="the files of a state cannot be written"):
        restored.restore(zlib.compress(json.dumps([given, counted, "bm8gYXJjaGl2ZQ=="]).encode()))
    restored.close()
    assert len(leases.leases()) == 1
