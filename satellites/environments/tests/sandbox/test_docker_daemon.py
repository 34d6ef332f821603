"""Sandboxes by docker where a daemon is: tasks with RUN lines, limits, and what is left after failures and kills.

TRINITY_TEST_DOCKER_IMAGE names an image with bash and coreutils that the daemon has or can pull.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trinity.environments.sandbox import docker
from trinity.environments.sandbox.environment import Shell
from trinity.environments.sandbox.limits import Limits
from trinity.runtime import leases
from trinity.runtime.errors import Unavailable

IMAGE = os.environ.get("TRINITY_TEST_DOCKER_IMAGE", "debian:stable-slim")
# More of them by hand: TRINITY_TEST_CONTAINERS=1000
CONTAINERS = int(os.environ.get("TRINITY_TEST_CONTAINERS", "60"))
TEST = 'bash solve; sleep 0.2; [ "$(<answer)" == "$(<right)" ] && echo 1 > /logs/verifier/reward.txt'


pytestmark = pytest.mark.extended


@pytest.fixture(scope="module", autouse=True)
def daemon() -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        line = ["docker", "run", "--rm", "--network", "none", IMAGE, "true"]
        if not subprocess.run(line, capture_output=True, timeout=100).returncode:
            return
    pytest.skip(f"docker does not run {IMAGE}")


@pytest.fixture(autouse=True)
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leases.CONTAINERS_VARIABLE, "true")
    monkeypatch.setenv(leases.FOLDER_VARIABLE, str(tmp_path / "leases"))


def left() -> list[str]:
    """Containers and leases of this file's sandboxes."""
    line = ["docker", "ps", "--all", "--filter", "label=trinity.sandbox", "--format", "{{.Names}}"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    return [*done.stdout.split(), *(lease.id for lease in leases.leases())]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_task_whose_image_has_run_lines_is_built_and_judged() -> None:
    lines = f"FROM {IMAGE}\nWORKDIR /app\nCOPY forty.txt .\nRUN echo $(( $(cat forty.txt) + 2 )) > right\n"
    row: dict[str, Any] = {
        "instruction": "Write 42 to answer.",
        "environment": [{"path": "Dockerfile", "text": lines}, {"path": "forty.txt", "text": "40"}],
        "tests": [{"path": "test.sh", "text": TEST}],
    }
    game = Shell()
    game.reset(row, {"backend": "docker", "command_seconds": 3, "output_bytes": 100}, 0)
    with contextlib.closing(game):
        assert "[cut after 100 bytes]" in game.step(call("run", command="head -c 9999 /dev/zero | tr '\\0' x")).text
        assert "[ended: it ran longer than 3 s]" in game.step(call("run", command="sleep 60")).text
        assert "exit code" in game.step(call("run", command="exec 3<>/dev/tcp/1.1.1.1/80")).text
        game.step(call("run", command="setsid bash -c 'while sleep 0.01; do echo 0 > answer; done' &"))
        game.step(call("run", command="until [ -s answer ]; do sleep 0.01; done"))
        game.step(call("write_file", path="solve", content="cp right answer"))
        turn = game.step(call("submit"))
    assert (turn.done, turn.reward) == (True, 1.0), turn.text
    assert left() == []


def test_a_container_ends_by_its_time_to_live() -> None:
    sandbox = docker.DockerSandbox(Limits(ttl_seconds=2), IMAGE)
    end = time.monotonic() + 30
    while len(left()) > 1 and time.monotonic() < end:
        time.sleep(0.2)
    assert len(left()) == 1  # the lease
    assert leases.reap() == 1 and left() == []
    with pytest.raises(Unavailable, match="its time to live of 2 s is over"):
        sandbox.run(["true"])


STARTS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from trinity.environments.sandbox.docker import DockerSandbox
from trinity.environments.sandbox.limits import Limits
def start(number):
    DockerSandbox(Limits(), sys.argv[1])
    print("made", flush=True)
list(ThreadPoolExecutor(4).map(start, range(100)))
"""


@pytest.mark.timeout(1200)
def test_containers_of_failed_starts_and_of_a_killed_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the starts fails: the image is unknown, or the answer comes too late, when the container is there."""

    def one(number: int) -> str:
        image = "no/image:1" if number % 20 == 3 else IMAGE
        try:
            with contextlib.closing(docker.DockerSandbox(Limits(processes=60 + number % 20), image)) as made:
                return f"ended with {made.run(['true']).code}"
        except Unavailable as error:
            return str(error)

    real, late = shutil.which("docker"), tmp_path / "bin/docker"
    late.parent.mkdir()
    late.write_text(f'#!/bin/bash\n{real} "$@"; code=$?\n[[ $* == *"--pids-limit 67"* ]] && sleep 9\nexit $code\n')
    late.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{late.parent}{os.pathsep}{os.environ['PATH']}")
        patch.setattr(docker, "_START_SECONDS", 8.0)
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(one, range(CONTAINERS)))
    assert outcomes.count("ended with 0") == CONTAINERS * 9 // 10, outcomes
    assert all("no/image" in one for one in outcomes[3::20]) and all("took longer" in one for one in outcomes[7::20])
    assert sorted(left()) == sorted(lease.id for lease in leases.leases()) and len(left()) == CONTAINERS // 20
    time.sleep(max(lease.expires for lease in leases.leases()) - time.time() + 0.1)
    assert leases.reap() == CONTAINERS // 20 and left() == []

    with subprocess.Popen([sys.executable, "-c", STARTS, IMAGE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(6):
            assert process.stdout.readline() == "made\n"
        process.kill()
    time.sleep(3)  # the daemon finishes the starts that it was asked for
    assert len(left()) >= 12
    leases.reap()
    assert left() == []
