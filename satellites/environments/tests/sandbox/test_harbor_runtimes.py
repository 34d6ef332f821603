"""Sandboxes by runtimes of Harbor's, on a provider of this machine (harbor_runtimes/cloud.py).

They run on a stand-in for Harbor's package, and on Harbor itself where `make hubs` has installed it. Then Harbor's
runtimes of E2B and Daytona also run, by the provider's own SDK, on a server of its API (harbor_runtimes/*_cloud.py).
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from support.servers.service import ServiceProcess
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environments.arguments import Arguments
from trinity.environments.sandbox import environment, harbor_worker, runtimes
from trinity.environments.sandbox.environment import Shell
from trinity.environments.sandbox.harbor import Harbor
from trinity.environments.sandbox.limits import Limits
from trinity.environments.sandbox.sandbox import problem
from trinity.reading.children import Child
from trinity.runtime.errors import InvalidInput, Unavailable

pytestmark = [pytest.mark.skipif(bool(problem()), reason=f"no sandbox: {problem()}")]

HERE = Path(__file__).parent / "harbor_runtimes"
INSTALLED = Path(__file__).parents[4] / "build/hubs/harbor/bin/python"
CLOUD = "cloud:Cloud"
# More of them by hand: TRINITY_TEST_API_CREATIONS=1000
CREATIONS = int(os.environ.get("TRINITY_TEST_API_CREATIONS", "100"))
LEASE_SECONDS = 20
E2B = {"API_URL": "{url}", "SANDBOX_URL": "{url}", "HTTP_VERSION": "1.1", "API_KEY": f"e2b_{0:040}"}
# By runtime: variables for its SDK, and its options.
APIS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "e2b": (
        {f"E2B_{name}": value for name, value in E2B.items()},
        {"prebuilt_template_id": "base", "sandbox_timeout_sec": LEASE_SECONDS, "renew_interval_sec": 5},
    ),
    "daytona": ({"DAYTONA_API_URL": "{url}", "DAYTONA_API_KEY": "key"}, {"ttl_minutes": 1}),
    "modal": (
        {"MODAL_SERVER_URL": "{url}", "MODAL_TOKEN_ID": "ak-key", "MODAL_TOKEN_SECRET": "as-key"},
        {"sandbox_timeout_secs": LEASE_SECONDS},
    ),
    "agent-sandbox": ({"KUBECONFIG": "{folder}/kubernetes"}, {"lease_seconds": LEASE_SECONDS, "namespace": "tasks"}),
}
ROW = {
    "instruction": "Write 42 to answer.",
    "tests": [{"path": "test.sh", "text": "echo $(( $(cat answer) == 42 )) > /logs/verifier/reward.txt"}],
    "environment": [{"path": "Dockerfile", "text": "FROM debian\nRUN true\n"}],
    "config": {"environment": {"memory_mb": 256}},
}
IMAGE_ROW = {
    **ROW,
    "environment": [{"path": "forty.txt", "text": "40"}],
    "config": {"environment": {"memory_mb": 256, "docker_image": "debian", "workdir": "/app"}},
}
Allow = Callable[..., None]


class Elsewhere(NamedTuple):
    """A runtime, and the folder with a file for each sandbox that its provider holds."""

    name: str
    folder: Path


@pytest.fixture(params=["a stand-in", "Harbor"])
def provider(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with a file for each sandbox that the provider holds."""
    real = request.param == "Harbor"
    if real and not INSTALLED.exists():
        pytest.skip("make hubs installs Harbor, where there is a Python 3.12")
    paths = [HERE] if real else [HERE, HERE / "package", *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv(runtimes.PYTHON_VARIABLE, str(INSTALLED if real else sys.executable))
    monkeypatch.setattr(runtimes, "_running", [])
    runtimes._require_harbor.cache_clear()
    (tmp_path / "cloud").mkdir()
    yield tmp_path / "cloud"
    for one in runtimes._running:
        one._process.kill()


@pytest.fixture
def allow(provider: Path, monkeypatch: pytest.MonkeyPatch) -> Allow:
    def allow(**options: Any) -> None:
        allowed = {CLOUD: {"folder": str(provider), **options}, "e2b": {}, "agent-sandbox": {}}
        monkeypatch.setenv(runtimes.RUNTIMES_VARIABLE, json.dumps(allowed))

    allow()
    return allow


@contextlib.contextmanager
def begun(row: dict[str, Any] = ROW, **args: Any) -> Iterator[Shell]:
    game = Shell()
    try:
        game.reset(row, {"backend": CLOUD, **args}, 0)
        yield game
    finally:
        game.close()


def sandbox(runtime: str = CLOUD, row: dict[str, Any] | None = None, **limits: Any) -> runtimes.HarborSandbox:
    row = row or (IMAGE_ROW if runtime == "agent-sandbox" else ROW)
    task = Harbor.read(Arguments(row, "task"), builds=True)
    return runtimes.HarborSandbox(Limits(**limits), runtime, runtimes.options_of(runtime), task)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def held(provider: Path) -> list[str]:
    """Those whose time, that of their file, is not over."""
    found = []
    for file in provider.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_mtime > time.time():
                found.append(file.name)
    return sorted(found)


def until_empty(provider: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while held(provider) and time.monotonic() < end:
        time.sleep(0.05)
    assert held(provider) == []


@pytest.mark.core
def test_a_task_is_played_and_judged_and_its_sandbox_ends(provider: Path, allow: Allow) -> None:
    with begun() as game:
        assert len(held(provider)) == 1
        assert "3\n" in game.step(call("run", command="echo $((1 + 2)); echo oops >&2; exit 4")).text
        game.step(call("write_file", path="answer", content="42"))
        end = game.step(call("submit"))
    assert end.done and end.reward == 1.0
    until_empty(provider)


@pytest.mark.core
def test_output_is_cut_and_long_commands_end(provider: Path, allow: Allow) -> None:
    one = sandbox(output_bytes=1000)
    with contextlib.closing(one):
        flood = one.run(["bash", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"])
        assert (flood.code, len(flood.text), flood.cut) == (0, 1000, True)
        assert one.run(["sleep", "30"], seconds=0.5).ended == "time"
        assert one.run(["cat"], stdin=b"\xff given").text == "\ufffd given"
        assert one.run(["bash", "-c", "exit 7"]).code == 7


@pytest.mark.core
def test_nothing_of_the_policy_runs_beside_the_tests(provider: Path, allow: Allow) -> None:
    one = sandbox()
    with contextlib.closing(one):
        one.run(["bash", "-c", "setsid bash -c 'while true; do date +%s.%N > /app/alive; sleep 0.05; done' &"])
        one.run(["bash", "-c", "until [ -e /app/alive ]; do sleep 0.05; done"])
        one.run(["true"], alone=True)
        left = one.run(["bash", "-c", "rm /app/alive; sleep 0.5; ls /app"])
        assert left.text == ""


def creations(number: int, done: Callable[[int], None]) -> list[str]:
    """Makes and ends sandboxes, 32 at a time; `done` gets the count of ended ones."""
    outcomes: list[str] = []
    numbers = count(1)

    def one(_: int) -> None:
        try:
            with contextlib.closing(sandbox()):
                outcomes.append("made")
        except Unavailable as error:
            outcomes.append(str(error))
        done(next(numbers))

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, range(number)))
    return outcomes


CREATIONS_OF_A_SERVICE = """
import sys
sys.path[:] = {path!r}
import test_harbor_runtimes as tests
tests.runtimes._START_SECONDS = 1.0
tests.creations(1000, lambda done: done == 300 and print("some", flush=True))
"""


@pytest.mark.extended
def test_a_thousand_creations_of_which_a_tenth_fails_leave_nothing(
    provider: Path, allow: Allow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By errors, starts without an end, and answers that are lost; the service and Harbor's process are killed, too."""

    def known() -> list[str]:
        return [name for name in held(provider) if not name.endswith(".lost")]

    def files() -> list[Path]:
        """With those of leases, but without the folder of these."""
        return [file for file in (tmp_path / "tmp").rglob("*") if not file.name.startswith("trinity-sandboxes-")]

    def processes() -> list[bytes]:
        lines = (line.read_bytes() for line in Path("/proc").glob("[0-9]*/cmdline"))
        return [line for line in lines if str(tmp_path / "tmp").encode() in line]

    def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not holds() and time.monotonic() < end:
            time.sleep(0.05)
        return holds()

    allow(fails=0.1, empty=True, lease_seconds=LEASE_SECONDS)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(runtimes, "_START_SECONDS", 1.0)

    code = CREATIONS_OF_A_SERVICE.format(path=[str(HERE.parent), *sys.path])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "some\n"
        service.kill()
    assert wait_until(lambda: not processes(), 0.7 * LEASE_SECONDS), processes()
    assert known() == [] and files() == []

    killed: list[str] = []

    def kill(done: int) -> None:
        if done == 350:
            os.kill(runtimes.worker().pid, signal.SIGKILL)
            killed.extend(known())

    outcomes = creations(700, kill)
    gone = {one for one in outcomes if "the process that runs Harbor ended" in one}
    refused = {f"{CLOUD} starts no sandbox: {why}" for why in ("503: no capacity", "TimeoutError")}
    assert set(outcomes) <= {"made", *gone, *refused} and gone
    assert outcomes.count("made") > 700 - 32 - 20
    assert wait_until(lambda: set(known()) <= set(killed), 0.7 * LEASE_SECONDS), known()
    (last,) = runtimes._running
    assert len(processes()) == 1 and not last._waiting and list(last.folder.iterdir()) == []
    assert last._process.stdin is not None
    last._process.stdin.close()
    assert last._process.wait(10) == 0  # nothing was left to end
    assert files() == []
    until_empty(provider)


@pytest.mark.core
def test_a_sandbox_ends_after_its_time(provider: Path, allow: Allow) -> None:
    one, other = sandbox(ttl_seconds=2), sandbox()
    end = time.monotonic() + 20
    while len(held(provider)) == 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert held(provider) == [f"{other.name}-0"]
    with pytest.raises(Unavailable, match="its time to live is over"):
        one.run(["true"])
    other.close()


@pytest.mark.core
def test_the_service_plays_it_by_the_settings_of_its_operator(provider: Path, allow: Allow, tmp_path: Path) -> None:
    service = ServiceProcess("environment", tmp_path).start()  # with the variables of `allow` and `provider`
    replies = [call("write_file", path="answer", content="42"), call("submit")]
    reset = pb.Reset(environment="sandbox", task_json=json.dumps(ROW), args_json=json.dumps({"backend": CLOUD}))
    requests = [pb.EpisodeRequest(reset=reset)]
    requests += [pb.EpisodeRequest(action=pb.Action(text=reply, turn=turn)) for turn, reply in enumerate(replies, 1)]
    try:
        with grpc.insecure_channel(service.address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            answers = list(stub.Episode(iter(requests), timeout=100))
        assert [(answer.reward, answer.done) for answer in answers] == [(0.0, False), (0.0, False), (1.0, True)]
    finally:
        service.kill()
    until_empty(provider)


SERVICE = """
import sys, threading
sys.path[:] = {path!r}
from test_harbor_runtimes import sandbox
kept = [sandbox(), sandbox()]
print("made", flush=True)
threading.Event().wait()
"""


@pytest.mark.core
def test_sandboxes_end_with_a_service_whose_group_is_killed(provider: Path, allow: Allow, tmp_path: Path) -> None:
    """The supervisor kills the group of a dead service."""

    async def dead(name: str, reason: str) -> bool:
        raise ChildProcessError(reason)

    allow(slow=0.5)
    line = [sys.executable, "-c", SERVICE.format(path=[str(HERE.parent), *sys.path])]
    service = Child("environment", "environment", line, {}, "", tmp_path / "service.log", hold=dead)
    service.start()
    end = time.monotonic() + 60
    while not service.has_printed("made") and time.monotonic() < end:
        time.sleep(0.05)
    assert len(held(provider)) == 2
    os.kill(service.pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="killed by SIGKILL"):
        asyncio.run(service.keep_running(asyncio.Event()))
    until_empty(provider)


@pytest.mark.core
def test_after_the_death_of_harbors_process_another_is_started(provider: Path, allow: Allow) -> None:
    one = sandbox()
    os.kill(runtimes.worker().pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(Unavailable, match="the process that runs Harbor ended"):
            one.run(["true"])
    one.close()
    with contextlib.closing(sandbox()) as other:
        assert other.run(["echo", "again"]).text == "again\n"


@pytest.mark.core
def test_a_sandbox_for_which_nobody_waits_any_more_is_not_made(
    provider: Path, allow: Allow, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(empty=True, slow=1.5)
    monkeypatch.setattr(runtimes, "_CREATE_SECONDS", 0.8)
    with pytest.raises(Unavailable, match=r"starts no sandbox: no answer in 0\.8 s"):
        sandbox()
    time.sleep(2)
    assert held(provider) == []


@pytest.mark.core
def test_a_task_reads_nothing_of_the_service(provider: Path, allow: Allow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harbor fills variables of a task from its own environment, which has the keys of providers."""
    monkeypatch.setenv("E2B_API_KEY", "secret")
    allow(empty=True)
    asks = {"memory_mb": 64, "env": {"MINE": "${E2B_API_KEY}"}}
    task = Harbor.read(Arguments({**ROW, "config": {"environment": asks}}, "task"), builds=True)
    with contextlib.closing(runtimes.HarborSandbox(Limits(), CLOUD, runtimes.options_of(CLOUD), task)):
        (file,) = provider.iterdir()
        assert file.read_text() == "{}"
    composed = {**ROW, "environment": [{"path": "docker-compose.yaml", "text": "services: {}"}]}
    with pytest.raises(InvalidInput, match=r"has docker-compose\.yaml, which may reach this machine"), begun(composed):
        pass


@pytest.mark.core
def test_a_provider_that_answers_nonsense_is_unavailable(provider: Path, allow: Allow) -> None:
    allow(empty=True)
    with contextlib.closing(sandbox()) as one, pytest.raises(Unavailable, match="answers nonsense"):
        one.run(["true"])


@pytest.mark.core
def test_each_of_64_episodes_may_run_a_command(provider: Path, allow: Allow) -> None:
    allow(empty=True)
    with ThreadPoolExecutor(64) as pool, contextlib.ExitStack() as held:
        made = [held.enter_context(contextlib.closing(one)) for one in pool.map(lambda _: sandbox(), range(64))]
        assert {done.code for done in pool.map(lambda one: one.run(["together"]), made)} == {0}


@pytest.mark.core
def test_an_error_of_a_library_is_no_refusal(provider: Path, allow: Allow) -> None:
    allow(empty=True)
    with contextlib.closing(sandbox()) as one, pytest.raises(Unavailable, match="of a library"):
        one.run(["odd"])


@pytest.mark.core
def test_what_a_provider_and_its_children_print_is_no_answer(provider: Path, allow: Allow) -> None:
    allow(empty=True)
    with contextlib.closing(sandbox()) as one:
        assert [one.run(["print"]).code for _ in range(2)] == [0, 0]


@pytest.mark.core
def test_a_result_of_other_types_is_refused_by_the_name_of_the_runtime(provider: Path, allow: Allow) -> None:
    allow(empty=True)
    with contextlib.closing(sandbox()) as one:
        for command, said in (
            ("no-code", "return_code None, stdout None"),
            ("code-of-text", "return_code '0'"),
            ("bytes", "return_code 0, stdout b''"),
        ):
            with pytest.raises(Unavailable, match=f"exec of {CLOUD} returned {said}.*; must be an integer"):
                one.run([command])


@pytest.fixture
def stray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], runtimes.Worker]]:
    """Starts another program in the place of harbor_worker.py."""
    with contextlib.ExitStack() as started:

        def start(program: str) -> runtimes.Worker:
            (tmp_path / "worker.py").write_text(program)
            monkeypatch.setattr(runtimes, "_WORKER", tmp_path / "worker.py")
            made = runtimes.Worker(sys.executable)
            started.callback(made._process.kill)
            return made

        yield start


@pytest.mark.core
def test_lines_that_are_no_answers_are_skipped(stray: Callable[[str], runtimes.Worker]) -> None:
    lines = ["pulling layer", "", "7", "{}", '{"id": []}', '{"id": "8f1"}', "[" * 100_000, "\ufffd"]
    program = f"for line in {lines!r}: print(line)\n"
    assert stray(program + """print('{"id": 0, "done": {"code": 3}}'); input(); input()""").ask(20) == {"code": 3}


@pytest.mark.core
def test_a_process_whose_output_ends_is_killed(stray: Callable[[str], runtimes.Worker]) -> None:
    worker = stray("import os, time; input(); os.close(1); time.sleep(300)")
    with pytest.raises(Unavailable, match="the process that runs Harbor ended"):
        worker.ask(20)
    assert not worker.is_running


@pytest.mark.core
def test_no_provider_is_asked_for_more_than_its_day() -> None:
    asked = harbor_worker._leases(86_400 + 95)
    assert asked["e2b"]["sandbox_timeout_sec"] == asked["modal"]["sandbox_timeout_secs"] == 86_400
    assert asked["daytona"]["ttl_minutes"] == 1442 and asked["agent-sandbox"]["lease_seconds"] == 86_495


@pytest.mark.core
def test_what_cannot_be_done_is_refused_in_one_sentence(
    provider: Path, allow: Allow, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(
            InvalidInput, match=r"must be bubblewrap, docker or a runtime .*agent-sandbox, cloud:Cloud, e2b\)"
        ),
        begun(backend="modal"),
    ):
        pass
    with (
        pytest.raises(InvalidInput, match=r"args\.backend: e2b starts no sandbox: .*(E2B_API_KEY|extra)"),
        begun(backend="e2b"),
    ):
        pass
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    lacks = r"args\.backend: agent-sandbox starts no sandbox: .*(pip install 'harbor\[gke\]'|Set KUBECONFIG)"
    with pytest.raises(InvalidInput, match=lacks), begun(IMAGE_ROW, backend="agent-sandbox"):
        pass
    broken = {**ROW, "environment": [{"path": "Dockerfile", "text": "broken"}]}
    with pytest.raises(InvalidInput, match=r"task\.environment: .* no FROM"), begun(broken):
        pass
    assert held(provider) == []
    monkeypatch.setenv(runtimes.RUNTIMES_VARIABLE, "e2b")
    with pytest.raises(InvalidInput, match="must be an object of options by runtime"), begun():
        pass


@pytest.mark.core
def test_an_interpreter_without_harbor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_running", [])
    monkeypatch.setenv(runtimes.RUNTIMES_VARIABLE, '{"e2b": {}}')
    runtimes._require_harbor.cache_clear()
    with (
        pytest.raises(InvalidInput, match=r"args\.backend: .* has no Harbor: .*pip install 'harbor\[e2b\]'"),
        begun(backend="e2b"),
    ):
        pass
    monkeypatch.setenv(runtimes.PYTHON_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(InvalidInput, match="does not start"), begun(backend="e2b"):
        pass


@pytest.mark.core
def test_a_machine_without_namespaces_offers_sandboxes_where_they_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "problem", lambda: "bubblewrap makes no namespaces here")
    assert Shell.unplayable() == "bubblewrap makes no namespaces here"
    monkeypatch.setenv(runtimes.RUNTIMES_VARIABLE, '{"e2b": {}}')
    assert Shell.unplayable() == ""


@pytest.fixture(params=list(APIS))
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """A server of the provider's API; a tenth of its answers are errors."""
    if not INSTALLED.exists():
        pytest.skip("make hubs installs Harbor, where there is a Python 3.12")
    name, (variables, options) = request.param, APIS[request.param]
    (tmp_path / "cloud").mkdir()
    line = [str(INSTALLED), str(HERE / f"{name.replace('-', '_')}_cloud.py"), str(tmp_path / "cloud"), "0.1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value.format(url=url, folder=tmp_path))
        (tmp_path / "kubernetes").write_text(json.dumps(kubernetes_config(url)))
        monkeypatch.setenv(runtimes.RUNTIMES_VARIABLE, json.dumps({name: options}))
        monkeypatch.setenv(runtimes.PYTHON_VARIABLE, str(INSTALLED))
        monkeypatch.setattr(runtimes, "_running", [])
        runtimes._require_harbor.cache_clear()
        yield Elsewhere(name, tmp_path / "cloud")
        server.kill()
        for one in runtimes._running:
            one._process.kill()


def kubernetes_config(url: str) -> dict[str, Any]:
    """Returns a kubeconfig."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {"token": "key"}}],
        "contexts": [{"name": "it", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "it",
    }


@pytest.mark.core
@pytest.mark.parametrize("elsewhere", ["agent-sandbox"], indirect=True)
def test_agent_sandbox_plays_a_task_whose_image_is_there(elsewhere: Elsewhere) -> None:
    with begun(IMAGE_ROW, backend="agent-sandbox") as game:
        assert "exit code 3" in game.step(call("run", command="exit 3")).text
        game.step(call("run", command="(sleep 60 &); echo $(( $(cat forty.txt) + 2 )) > answer"))
        assert game.step(call("submit")).reward == 1.0
    until_empty(elsewhere.folder, LEASE_SECONDS)
    with pytest.raises(InvalidInput, match=r"docker_image: is not there, and agent-sandbox"):
        begun(ROW, backend="agent-sandbox").__enter__()


@pytest.mark.core
@pytest.mark.parametrize("elsewhere", ["agent-sandbox"], indirect=True)
def test_the_first_process_of_a_pod_starts_no_others(elsewhere: Elsewhere) -> None:
    """A child of process 1 would be ended with the policy's processes, and would come back until clearing fails."""
    with contextlib.closing(sandbox(elsewhere.name)) as one:
        twice = one.run(["bash", "-c", f"{harbor_worker._LIST}; sleep 1.5; {harbor_worker._LIST}"]).text.split()
        assert twice[: len(twice) // 2] == twice[len(twice) // 2 :]
        one.run(["true"], alone=True)
        assert "trap exit TERM" in one.run(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).text


@pytest.mark.core
@pytest.mark.parametrize("elsewhere", ["agent-sandbox"], indirect=True)
def test_agent_sandbox_says_what_it_waits_for(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_CREATE_SECONDS", 25.0)  # too little for another try
    options = {**APIS["agent-sandbox"][1], "ready_seconds": 1.5}
    monkeypatch.setenv(runtimes.RUNTIMES_VARIABLE, json.dumps({"agent-sandbox": options}))
    image = {"memory_mb": 256, "docker_image": "nowhere"}
    said = r"not ready in 1\.5 s: DependenciesNotReady: .*; ErrImagePull: nowhere: not found"
    with pytest.raises(Unavailable, match=said):
        sandbox(elsewhere.name, {**IMAGE_ROW, "config": {"environment": image}})
    until_empty(elsewhere.folder)


@pytest.mark.core
@pytest.mark.parametrize("elsewhere", ["agent-sandbox"], indirect=True)
def test_agent_sandbox_names_a_broken_connection(elsewhere: Elsewhere) -> None:
    with contextlib.closing(sandbox(elsewhere.name)) as one:
        with pytest.raises(Unavailable, match="the connection of a command broke: without a reason"):
            one.run(["unplug"])
        with pytest.raises(Unavailable, match="Kubernetes refuses: Handshake status 403"):
            one.run(["unauthorized"])


@pytest.mark.core
@pytest.mark.parametrize("elsewhere", ["agent-sandbox"], indirect=True)
def test_agent_sandbox_without_rights_is_refused_at_once(elsewhere: Elsewhere) -> None:
    config = Path(os.environ["KUBECONFIG"])
    config.write_text(config.read_text().replace('"key"', '"other"'))
    begun = time.monotonic()
    with pytest.raises(
        InvalidInput, match=r"args\.backend: agent-sandbox starts no sandbox: Kubernetes refuses: .*no such key"
    ):
        sandbox(elsewhere.name)
    assert time.monotonic() - begun < 20


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_creations_by_a_providers_api_of_which_a_tenth_fails_leave_nothing(elsewhere: Elsewhere) -> None:
    """Some sandboxes were made although the answer was an error: E2B's end by their leases."""
    outcomes: list[str] = []

    def one(number: int) -> None:
        try:
            with contextlib.closing(sandbox(elsewhere.name)) as made:
                outcomes.append(f"ended with {made.run(['true']).code}")
        except Unavailable as error:
            outcomes.append(str(error))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(CREATIONS)))
    assert len(outcomes) == CREATIONS and outcomes.count("ended with 0") >= 0.95 * CREATIONS, outcomes
    refusals = set(outcomes) - {"ended with 0"}
    assert all(one.startswith(f"{elsewhere.name} starts no sandbox: ") for one in refusals), refusals
    until_empty(elsewhere.folder, 10 * LEASE_SECONDS)


@pytest.mark.extended
def test_sandboxes_of_a_provider_end_by_their_leases_if_harbors_process_dies(elsewhere: Elsewhere) -> None:
    kept = [sandbox(elsewhere.name), sandbox(elsewhere.name)]
    os.kill(runtimes.worker().pid, signal.SIGKILL)
    assert len(held(elsewhere.folder)) >= len(kept)
    until_empty(elsewhere.folder, 2 * LEASE_SECONDS)
    with pytest.raises(Unavailable, match="the process that runs Harbor ended"):
        kept[0].run(["true"])
