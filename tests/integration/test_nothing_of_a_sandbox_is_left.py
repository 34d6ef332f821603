"""Sandboxes hold what runs in them, and leave nothing: by the environment service, with kills of it and of clients."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.servers.service import ServiceProcess
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environments.sandbox.sandbox import problem
from trinity.runtime import leases

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(problem()), reason=f"no sandbox: {problem()}"),
]

# More of them by hand: TRINITY_TEST_SANDBOX_EPISODES=1000
EPISODES = int(os.environ.get("TRINITY_TEST_SANDBOX_EPISODES", "60"))
TEST = "(cat /app/answer || echo 0) > /logs/verifier/reward.txt"
ROW = {"instruction": "Write 1 to answer.", "tests": [{"path": "test.sh", "text": TEST}]}
TTL = 20.0
DISK_MIB = 17  # by which the sandboxes of this file are known
ESCAPES = {
    "a fork bomb": ":(){ :|:& };:; sleep 0.3",
    "memory": "for i in 1 2 3 4; do python3 -c 'import time; x = bytearray(50 << 20); time.sleep(9)' & done; wait",
    "disk": "for f in /app/big /dev/shm/big; do dd if=/dev/zero of=$f bs=1M count=900; done; true > /usr/x",
    "network": "exec 3<>/dev/tcp/127.0.0.1/{port} && echo REACHED; exec 3<>/dev/tcp/1.1.1.1/80 && echo REACHED",
    "paths": "cat {secret} /app/../../..{secret} /proc/1/root{secret} /etc/shadow; ls /proc/1/cwd; chroot / id",
    "symbolic links": "ln -s {secret} /app/link; cat /app/link; ln -sf /etc /app/dir; cat /app/dir/shadow",
    "namespaces": "unshare -Ur mount -t tmpfs x /app && echo REACHED; echo x > /proc/sys/kernel/core_pattern && "
    "echo REACHED",
    "signals": "kill -9 -1; kill -9 1; kill -9 {pid}; gdb -p 1",
}


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceProcess]:
    folder = tmp_path / "leases"
    monkeypatch.setenv(leases.FOLDER_VARIABLE, str(folder))
    made = ServiceProcess("environment", tmp_path, SANDBOX_LEASES=str(folder)).start()
    yield made
    made.kill()


def episode(address: str, commands: list[str], args: dict[str, Any] | None = None) -> list[pb.EpisodeResponse]:
    """The answers. Raises grpc.RpcError with the cause of one that failed."""
    answers: list[pb.EpisodeResponse] = []
    came = threading.Semaphore(0)

    def requests() -> Iterator[pb.EpisodeRequest]:
        given = json.dumps({"ttl_seconds": TTL, "command_seconds": 5, "disk_mib": DISK_MIB, **(args or {})})
        yield pb.EpisodeRequest(
            reset=pb.Reset(environment="sandbox", task_json=json.dumps(ROW), args_json=given, seed=1)
        )
        for turn, text in enumerate(commands, 1):
            came.acquire(timeout=60)
            if not answers or answers[-1].done:
                return
            yield pb.EpisodeRequest(action=pb.Action(text=text, turn=turn))

    with grpc.insecure_channel(address) as channel:
        for answer in environment_pb2_grpc.EnvironmentServiceStub(channel).Episode(requests(), timeout=90):
            answers.append(answer)
            came.release()
    return answers


def run(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'run', 'arguments': {'command': command}})}</tool_call>"


SUBMIT = '<tool_call>{"name": "submit"}</tool_call>'


def sandboxed() -> set[int]:
    """Processes inside the sandboxes of this file, and those that started them."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mounts, line = (folder / "mounts").read_text(), (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        inside = f"/logs tmpfs rw,nosuid,nodev,relatime,size={DISK_MIB * 1024}k" in mounts
        if inside or str(DISK_MIB << 20).encode() in line:
            found.add(int(folder.name))
    return found


def left() -> str:
    """What is left, by name."""
    found = [*map(str, leases.leases())]
    for pid in sandboxed():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found.append(f"{pid} {Path(f'/proc/{pid}/stat').read_text()} {command:.300}")
    return "\n".join(found)


def namespaces(processes: Iterable[int | str]) -> set[str]:
    """Those of networks and of mounts that processes are in, without this one's."""
    found = set()
    for pid in processes:
        for kind in ("net", "mnt"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    return found - {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")}


def everybody() -> list[str]:
    return [folder.name for folder in Path("/proc").glob("[0-9]*")]


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.1)
    return holds()


@pytest.mark.parametrize("name", ESCAPES)
def test_an_attempt_to_break_out_stays_inside(service: ServiceProcess, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("REACHED")
    here = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    command = ESCAPES[name].replace("{secret}", str(secret)).replace("{pid}", str(here.pid))
    command = command.replace("{port}", service.address.rpartition(":")[2])
    try:
        args = {"memory_mib": 100, "processes": 40, "on_limit": "continue"}
        answers = episode(service.address, [run(command), run("rm -f big; echo 1 > answer"), SUBMIT], args)
        assert here.poll() is None
    finally:
        here.kill()
        here.wait()
    assert "REACHED" not in answers[1].observation
    assert answers[-1].done
    if name == "memory":
        assert "used more than 100 MiB" in answers[1].observation
    if name == "disk":
        assert "File too large" in answers[1].observation or "No space left" in answers[1].observation
    assert not Path("/usr/x").exists()
    assert service.is_running()
    # What the machine's other users see of it: nothing, from the next episode on.
    assert wait_until(lambda: leases.leases() == [], 5)
    again = episode(service.address, [run("echo 1 > answer; ls /app"), SUBMIT])
    assert (again[-1].reward, "big" in again[1].observation) == (1, False)


def test_a_killed_service_leaves_no_process_and_the_next_one_no_lease(service: ServiceProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        played = [pool.submit(episode, service.address, [run("sleep 60 & sleep 60")] * 3) for _ in range(4)]
        assert wait_until(lambda: len(leases.leases()) == 4, 20)
        service.kill()
        for one in played:
            with pytest.raises(grpc.RpcError):
                one.result(30)
    assert wait_until(lambda: not sandboxed(), 10)
    assert len(leases.leases()) == 4
    service.start()
    assert wait_until(lambda: leases.leases() == [], 10)


def test_a_sandbox_whose_owner_is_frozen_ends_with_its_time_to_live(service: ServiceProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(episode, service.address, [run("sleep 60")], {"ttl_seconds": 3})
        assert wait_until(lambda: len(sandboxed()) >= 3, 20)
        os.kill(service.pid, signal.SIGSTOP)
        try:
            # A process that ended waits for its parent: a zombie has no namespace that can be read.
            assert wait_until(lambda: not sandboxed(), 10)
        finally:
            os.kill(service.pid, signal.SIGCONT)
        if (error := played.exception(60)) is None:
            assert played.result()[-1].observation
        else:  # the service was busy for longer than the answer of the command was waited for
            assert isinstance(error, grpc.RpcError) and "its time to live of 3 s is over" in str(error)


def test_many_episodes_with_kills_of_service_and_clients_leave_nothing(service: ServiceProcess) -> None:
    """The service is killed again and again, and every tenth client in the middle of its episode."""
    seen: set[str] = set()
    kills = 0
    dice, ends = random.Random(7), {"won": 0, "failed": 0, "killed": 0, "failed without a cause": 0}
    lock = threading.Lock()

    def play(number: int) -> None:
        commands = [run("echo 1 > /app/answer; (sleep 300 &); sleep 0.05"), SUBMIT]
        if number % 10 == 9:
            kill_client(service.address, number)
            how = "killed"
        else:
            try:
                how = "won" if episode(service.address, commands)[-1].reward == 1 else "failed"
            except grpc.RpcError as error:
                how = "failed" if error.details() else "failed without a cause"
                time.sleep(0.2)
        with lock:
            ends[how] += 1

    with ThreadPoolExecutor(8) as pool:
        played = [pool.submit(play, number) for number in range(EPISODES)]
        until = time.monotonic() + 6
        while not all(one.done() for one in played):
            time.sleep(0.2)
            seen.update(namespaces(sandboxed()))
            if time.monotonic() >= until:
                service.kill()
                service.start()  # in this thread: the service ends with the thread that started it
                kills += 1
                until = time.monotonic() + dice.uniform(4, 8)
    for one in played:
        one.result()
    assert sum(ends.values()) == EPISODES
    assert not ends["failed without a cause"]
    assert service.is_running(), service.tail()
    assert ends["won"] > EPISODES / 4, ends
    print(ends, "kills of the service:", kills)
    assert wait_until(lambda: not sandboxed() and leases.leases() == [], TTL + 15), left()
    assert seen
    assert not seen & namespaces(everybody())
    assert not re.findall(r"/app |/logs ", Path("/proc/mounts").read_text())


def kill_client(address: str, number: int) -> None:
    """A client in a process of its own, killed in the middle."""
    code = ("import sys; from tests_module import episode, run; episode(sys.argv[1], [run('sleep 30')] * 3)").replace(
        "tests_module", "client_of_sandboxes"
    )
    folder = Path(os.environ[leases.FOLDER_VARIABLE])
    (folder / "client_of_sandboxes.py").write_text(Path(__file__).read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    client = subprocess.Popen([sys.executable, "-c", code, address], env=environment, stderr=subprocess.DEVNULL)
    time.sleep(1 + (number % 5) / 5)
    client.kill()
    client.wait()
