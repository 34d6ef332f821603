"""Environments with an image, by a program named docker that runs a provider in place of a container."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity.cli.supervise.processes import services
from trinity.config import Plan, make_plan
from trinity.config.load import parse
from trinity.conformance import Sample, Verdict, check_provider
from trinity.reading.children import stop_all
from trinity.reading.errors import RunError
from trinity.runtime import leases
from trinity.runtime.process import free_port

pytestmark = pytest.mark.core

BASE = """
model: {model_path: m, max_model_len: 64}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  explorer_input: {taskset: {name: t, path: d.jsonl}}
"""
GUESS = Path(__file__).parents[3] / "examples/custom_environment/guess.py"
# `run` is the provider itself, at the published address; `rm` ends the one of that name, as docker does.
FAKE = """#!/bin/bash
printf '%s\\x1f' "$@" >> "$0.log"; echo >> "$0.log"
case "$1" in
  run) while [ "$1" != --publish ]; do [ "$1" = --name ] && name=$2; shift; done
       echo $$ > "$0.$name.pid"; exec {python} {guess} serve "${2%:*}";;
  rm) for name; do :; done; [ -f "$0.$name.pid" ] || { echo "No such container" >&2; exit 1; }
      kill -9 "$(cat "$0.$name.pid")"; rm "$0.$name.pid";;
esac
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "docker"
    path.write_text(FAKE.replace("{python}", sys.executable).replace("{guess}", str(GUESS)))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(leases.CONTAINERS_VARIABLE, "true")
    monkeypatch.setenv(leases.FOLDER_VARIABLE, str(tmp_path / "leases"))
    yield path
    for lease in leases.leases():
        lease.end()


def plan_of(address: str) -> Plan:
    entries = f"[{{name: far, address: '10.0.0.7:1'}}, {{name: guess, address: '{address}', image: my/guess:1}}]"
    return make_plan(parse(BASE, overrides=[f"explorer.environments={entries}"]))


def calls(fake: Path) -> list[list[str]]:
    return [line.split("\x1f")[:-1] for line in fake.with_name("docker.log").read_text().splitlines()]


def running(fake: Path) -> list[int]:
    """Process ids of what plays the containers."""
    found = [int(path.read_text()) for path in fake.parent.glob("docker.*.pid")]
    return [pid for pid in found if leases.started(pid)]


def until(there: bool, fake: Path) -> None:
    deadline = time.monotonic() + 20
    while bool(running(fake)) is not there:
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_it_is_served_from_a_container_with_limits_until_the_run_ends(fake: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    (child,) = services.containers(plan_of(address), tmp_path)
    child.start()
    sample = Sample('{"highest": 20}', action="<answer>3</answer>")
    results = [result async for result in check_provider(address, sample)]
    assert [result for result in results if result.verdict is Verdict.FAILED] == []
    removed, ran = calls(fake)
    (lease,) = leases.leases()
    assert removed == ["rm", "--force", "--volumes", lease.container]
    assert ran == [
        *("run", "--rm", "--name", lease.container, "--label", "trinity.environment"),
        *("--publish", f"{address}:{address.rpartition(':')[2]}", "--network", "bridge", "--pids-limit", "4096"),
        *("--memory", "4096m", "--memory-swap", "4096m", "--ulimit", f"fsize={4096 << 20}"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "my/guess:1"),
    ]
    await stop_all([child], 10)
    until(False, fake)


def test_a_container_that_was_left_is_removed_before_the_next(fake: Path, tmp_path: Path) -> None:
    (child,) = services.containers(plan_of(f"127.0.0.1:{free_port()}"), tmp_path)
    child.start()
    until(True, fake)
    (first,) = running(fake)
    child.start()  # as after the death of the client alone
    deadline = time.monotonic() + 20
    while running(fake) in ([], [first]) or leases.started(first):  # the kernel ends a killed process in its own time
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (lease,) = leases.leases()
    lease.end()
    until(False, fake)
    asyncio.run(stop_all([child], 10))


def test_the_reaper_removes_what_a_killed_run_left(fake: Path, tmp_path: Path) -> None:
    """Its process makes the container and its lease, and is killed before it can end either."""
    code = f"""
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_environments_in_containers import plan_of
from trinity.cli.supervise.processes import services
(child,) = services.containers(plan_of("127.0.0.1:{free_port()}"), Path({str(tmp_path)!r}))
# A container is no child of docker's client: it stays.
line = child.command[child.command.index("/bin/sh"):]
subprocess.Popen(line, start_new_session=True)
print("made", flush=True)
sys.stdin.read()
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdin is not None
    assert run.stdout.readline() == b"made\n"
    until(True, fake)
    assert leases.reap() == 0
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdin.close()
    run.stdout.close()
    assert running(fake)
    assert leases.reap() == 1
    until(False, fake)
    assert leases.leases() == []


def test_without_the_operators_word_no_image_is_run(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(leases.CONTAINERS_VARIABLE)
    with pytest.raises(
        RunError, match=r"explorer.environments.1.image: this machine allows no containers; set .*=true"
    ):
        services.containers(plan_of("127.0.0.1:1"), tmp_path)
    monkeypatch.setenv(leases.CONTAINERS_VARIABLE, "true")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"explorer.environments.1.image: docker is not on PATH"):
        services.containers(plan_of("127.0.0.1:1"), tmp_path)
    assert not fake.with_name("docker.log").exists() and leases.leases() == []
