"""The command lines of sandboxes by docker, as a program named docker on PATH gets them: no daemon is needed."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from trinity.environments.sandbox import docker
from trinity.environments.sandbox.environment import Shell
from trinity.runtime import leases
from trinity.runtime.errors import Conflict, InvalidInput, Unavailable

pytestmark = pytest.mark.core

# Notes its arguments. A command in a container says that it ran, the reward is 0.5, and `sleepy` hangs.
FAKE = """#!/bin/bash
printf '%s\\x1f' "$@" >> "$0.log"; echo >> "$0.log"
case "$1" in
  image) exit 1;;
  build) cat > "$0.tar"; echo sha256:1;;
  rm) if [[ "$*" == *stuck* ]]; then echo "device or resource busy" >&2; exit 1; fi;;
  run) [[ "$*" == *broken* ]] && { echo "no such image" >&2; exit 125; }; [[ "$*" == *late* ]] && sleep 9; echo id;;
  exec) case "$*" in
    *sleepy*) sleep 1; exit 137;;
    *"cat /logs/verifier/reward.txt"*) echo 0.5;;
    *"tar -x"*) cat > /dev/null;;
    *) head -c 100 > "$0.stdin"; echo "ran";;
  esac;;
esac
"""
ROW = {
    "instruction": "Do it.",
    "tests": [{"path": "test.sh", "text": "true"}],
    "environment": [{"path": "Dockerfile", "text": "FROM x\nRUN apt-get update"}],
}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    fake = tmp_path / "docker"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(leases.CONTAINERS_VARIABLE, "true")
    monkeypatch.setenv(leases.FOLDER_VARIABLE, str(tmp_path / "leases"))
    return lambda: [line.split("\x1f")[:-1] for line in (tmp_path / "docker.log").read_text().splitlines()]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def begin(row: dict[str, Any], **args: Any) -> Shell:
    game = Shell()
    game.reset(row, {"backend": "docker", **args}, 0)
    return game


def test_an_episode_builds_runs_and_removes_a_container(calls: Callable[[], list[list[str]]]) -> None:
    game = begin(ROW, memory_mib=100, disk_mib=7, processes=9, command_seconds=0.5, ttl_seconds=60)
    (lease,) = leases.leases()
    assert "ran" in game.step(call("run", command="echo hi")).text
    assert "[ended: it ran longer than 0.5 s]" in game.step(call("run", command="sleepy")).text
    last = game.step(call("submit"))
    assert (last.done, last.reward) == (True, 0.5)
    game.close()
    assert leases.leases() == []
    made = calls()
    assert [line[0] for line in made[:3]] == ["image", "build", "run"]
    tag, run = made[1][made[1].index("--tag") + 1], made[2]
    assert run[-3] == tag
    assert "[ $i -lt 60 ]" in run[-1]
    for option, value in (
        ("--name", lease.container), ("--network", "none"), ("--memory", "100m"), ("--memory-swap", "100m"),
        ("--pids-limit", "9"), ("--ulimit", f"fsize={7 << 20}"), ("--cap-drop", "ALL"),
    ):  # fmt: skip
        assert run[run.index(option) + 1] == value
    ended = [line for line in made if line[-1:] == ["kill -9 -1"]]
    assert len(ended) == 2  # before the tests, and before the reward is read
    assert made[-1] == ["rm", "--force", "--volumes", lease.container]


def test_an_image_by_name_is_not_built(calls: Callable[[], list[list[str]]]) -> None:
    begin({**ROW, "config": {"environment": {"docker_image": "made/before:1"}}}).close()
    assert calls()[0][0] == "run"
    assert "made/before:1" in calls()[0]


def test_a_container_that_does_not_start_leaves_nothing(
    calls: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "_PAUSES", (0.0, 0.0))
    with pytest.raises(Unavailable, match="starts no container of broken: no such image"):
        begin({**ROW, "config": {"environment": {"docker_image": "broken"}}})
    assert leases.leases() == [] and [line[0] for line in calls()] == 3 * ["run", "rm"]


def test_a_start_without_an_answer_is_removed_now_and_by_the_reaper_again(
    calls: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "_START_SECONDS", 0.5)
    with pytest.raises(Unavailable, match=r"docker run took longer than 0\.5 s"):
        begin({**ROW, "config": {"environment": {"docker_image": "late"}}})
    (lease,) = leases.leases()
    removed = ["rm", "--force", "--volumes", lease.container]
    assert calls()[-1] == removed
    time.sleep(max(lease.expires - time.time(), 0))
    assert leases.reap() == 1 and calls()[-2:] == [removed, removed]


def test_the_reaper_removes_containers_of_dead_owners(calls: Callable[[], list[list[str]]]) -> None:
    lease = leases.Lease.take(600, container="trinity-left")
    assert leases.reap() == 0
    path = leases.folder() / f"{lease.id}.json"
    path.write_text(json.dumps(vars(replace(lease, owner_started="1"))))
    assert leases.reap() == 1
    assert calls()[-1] == ["rm", "--force", "--volumes", "trinity-left"]
    assert leases.leases() == []


def test_only_what_ended_is_reaped(calls: Callable[[], list[list[str]]]) -> None:
    kept, _ = (leases.Lease.take(0, container=name) for name in ("stuck", "trinity-left"))
    with capture_logs() as logs:
        assert [leases.reap(), leases.reap()] == [1, 0]
    assert [line["container"] for line in logs if line["event"] == "sandbox.lease.reaped"] == ["trinity-left"]
    assert leases.leases() == [kept]


def test_a_lease_that_cannot_be_read_now_stays(
    calls: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = leases.Lease.take(600, container="trinity-kept")
    (leases.folder() / "broken.json").write_text("{")

    def fail(path: Path) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        assert leases.leases() == []
    assert leases.leases() == [kept]
    assert [path.name for path in leases.folder().glob("*.json")] == [f"{kept.id}.json"]


def test_containers_need_the_operator_and_docker(
    calls: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for row in (ROW, {**ROW, "config": {"environment": {"docker_image": "made/before:1"}}}):
        with pytest.raises(Conflict, match="docker is not on PATH"):
            begin(row)
    assert leases.leases() == []
    monkeypatch.delenv(leases.CONTAINERS_VARIABLE)
    with pytest.raises(InvalidInput, match="TRINITY_ENVIRONMENT_SANDBOX_DOCKER=true"):
        begin(ROW)
