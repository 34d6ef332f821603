"""Programs outside open sessions of tasks, over HTTP, gRPC and by the SDK; what is not whole fails the attempt."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.fakes.data.experience import make_task
from trinity.api.explorer.v1 import explorer_pb2 as pb
from trinity.data.experience import AttemptFailure, Group, Outcome, SamplingParams, Task, VersionSpan
from trinity.data.wire import encode_outcome
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.servicer import ExplorerServicer
from trinity.explorer.serving import endpoint
from trinity.explorer.serving.bounds import Bounds
from trinity.explorer.sessions.agents import AgentSession
from trinity.explorer.sessions.server import AgentGateway, OpenTo
from trinity.explorer.sessions.session import CALL
from trinity.explorer.types import Completion
from trinity.runtime.errors import Conflict, FailureCause, InvalidInput, Unauthenticated, Unavailable
from trinity.runtime.process import free_port
from trinity.runtime.trust.keys import KeyFile
from trinity.sdk import Session, SessionRefused, open_session

pytestmark = pytest.mark.core

KEY = "key-of-the-endpoint"
ASKED: list[Any] = [{"role": "user", "content": "1+1"}]
ROW = {"question": "1+1", "answer": "2"}


async def answer_two(request: Request) -> Response:
    """As vLLM's application does: in a session's call it places the reply and notes what was sampled."""
    call = CALL.get()
    if call is not None:
        messages = (await request.json())["messages"]
        call.place = call.session.tree.place([[len(messages)]], [])
        ids, logprobs = np.array([7, 8], np.int32), np.zeros(2, np.float32)
        call.sampled[0] = (Completion(ids, logprobs, (VersionSpan(0, 0, 2),), "stop"), True)
    message = {"role": "assistant", "content": "2" if call is not None else "not recorded"}
    return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


class Explorer:
    """The parts of an explorer that sessions need, with tasks as a test gives them."""

    def __init__(self, folder: Path) -> None:
        (folder / "keys").write_text(f"{KEY}\n")
        listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{listen}/v1"
        pool: Any = SimpleNamespace()
        unused = dict.fromkeys(("prompt", "next_turn", "placed", "tokens", "observed"))
        said = dict.fromkeys(("text", "reply"), lambda ids: str(list(ids)))
        tokenizer: Any = SimpleNamespace(model_path="", **unused, **said)
        open_to = OpenTo(listen, KeyFile(folder / "keys", "keys"), "sums")
        bounds = Bounds(reward=1e6)
        self.gateway = AgentGateway(pool, "model", "", False, open_to=open_to, bounds=bounds)
        nowhere = EnvironmentClient("127.0.0.1:1")
        self.tools = ExplorerTools(pool, tokenizer, nowhere, AuxiliaryModels({}), 100, 100, self.gateway)
        service: Any = SimpleNamespace(outside=self.gateway.outside)
        self.servicer = ExplorerServicer(service)
        self.running: list[asyncio.Task[Outcome]] = []

    def explore(self, **changes: Any) -> "asyncio.Task[Outcome]":
        given = {"repeat_times": 2, "timeout_seconds": 60.0, "row_json": json.dumps(ROW), **changes}
        task: Task = make_task(workflow="external_agent_workflow", **given)
        self.running.append(asyncio.create_task(attempt.explore(task, 1, "me", self.tools)))
        return self.running[-1]

    async def post(self, path: str, key: str, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as http:
            sent = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            return await http.post(f"{self.url}{path}", headers=sent, content=json.dumps(body))

    async def open(self, **asked: Any) -> dict[str, Any]:
        answer = await self.post("/sessions", KEY, wait_seconds=30.0, **asked)
        assert answer.status_code == 200, answer.text
        opened: dict[str, Any] = answer.json()
        return opened

    async def chat(self, key: str, messages: Any = ASKED) -> Any:
        async with openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0) as client:
            return await client.chat.completions.create(model="any", messages=messages)


@pytest_asyncio.fixture
async def explorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Explorer]:
    async def application(*_: Any) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", answer_two, methods=["POST"])])

    monkeypatch.setattr(endpoint, "application", application)
    made = Explorer(tmp_path)
    made.gateway.start()
    yield made
    for task in made.running:
        task.cancel()
    await asyncio.gather(*made.running, return_exceptions=True)
    await made.tools.close()


async def outcome(task: "asyncio.Task[Outcome]") -> Any:
    return await asyncio.wait_for(task, 60)


def play(explorer: Explorer, agent: Callable[[Session], None], **options: Any) -> None:
    """The three lines of docs/agents.md, in a thread: a program of its own."""
    with open_session(explorer.url, KEY, wait_seconds=30, **options) as session:
        agent(session)


def right(session: Session) -> None:
    with openai.OpenAI(base_url=session.base_url, api_key=session.key) as client:
        reply = client.chat.completions.create(model="any", messages=ASKED).choices[0].message.content
    session.reward = float(reply == session.row["answer"]) + session.rollout
    session.metrics = {"calls": 1.0}


async def test_a_program_plays_a_group_in_three_lines(explorer: Explorer) -> None:
    running = explorer.explore()
    for _ in range(2):
        await asyncio.to_thread(play, explorer, right)
    group = await outcome(running)
    assert isinstance(group, Group), group
    assert [(e.rollout, e.reward, e.metrics["calls"]) for e in group.experiences] == [(0, 1.0, 1.0), (1, 2.0, 1.0)]
    assert [e.token_ids.tolist() for e in group.experiences] == [[1, 7, 8]] * 2
    assert all(e.action_mask.all() for e in group.experiences)


async def test_a_session_is_of_the_task_that_is_asked_for_and_says_so(explorer: Explorer) -> None:
    for name in ("first", "second"):
        explorer.explore(task_id=name, taskset=f"of-{name}", ordinal=5)
    opened = await explorer.open(taskset="of-second")
    other = await explorer.open(task_id=opened["task_id"], limit_seconds=20.0)
    assert (opened["task_id"], opened["taskset"], opened["row"]) == ("second", "of-second", ROW)
    assert (opened["repeat_times"], opened["limit_seconds"], opened["evaluation"]) == (2, 60.0, False)
    assert {opened["rollout"], other["rollout"]} == {0, 1} and other["limit_seconds"] == 20
    refused = await explorer.post("/sessions", KEY, task_id="second", wait_seconds=0.1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_rollout_waits")
    assert (explorer.gateway.outside.waiting, explorer.gateway.outside.open_now) == (2, 2)


async def test_the_sdk_reaches_the_explorer_past_a_proxy_of_the_shell(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(SessionRefused) as raised:
        await asyncio.to_thread(open_session(explorer.url, "no key of this explorer").__enter__)
    assert raised.value.status == 401


async def test_each_branch_has_a_reward_of_its_own(explorer: Explorer) -> None:
    running = explorer.explore(repeat_times=1)
    key = (await explorer.open())["key"]
    await explorer.chat(key)
    await explorer.chat(key, [*ASKED, *ASKED])
    closed = await explorer.post("/sessions/close", key, rewards=[0.25, 0.75])
    assert closed.json() == {"branches": 2, "sampled_tokens": 4, "trained_tokens": 4}
    assert [(e.step, e.reward) for e in (await outcome(running)).experiences] == [(0, 0.25), (1, 0.75)]


async def test_a_call_with_a_key_of_the_endpoint_is_not_recorded(explorer: Explorer) -> None:
    assert (await explorer.chat(KEY)).choices[0].message.content == "not recorded"


async def test_options_without_a_key_do_not_reach_vllm(explorer: Explorer) -> None:
    async with httpx.AsyncClient() as client:
        codes = [
            (await client.options(f"{explorer.url}/chat/completions", headers=headers)).status_code
            for headers in ({}, {"Authorization": f"Bearer {KEY}"})
        ]
    assert codes == [401, 405]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"reward": float("nan")}, "reward: is nan, must be finite"),
        ({"reward": float("inf")}, "reward: is inf"),
        ({"rewards": [1.0, 2.0]}, "rewards: are 2, the session has 1 branches"),
        ({"reward": 1.0, "metrics": {"x": float("nan")}}, "metrics.x: is nan"),
        ({"reward": -1e7}, "reward: is -1e+07, must be in [-1e+06, 1e+06]; scale it, or raise explorer.reward_bound"),
        ({"reward": 1.0, "metrics": {"n" * 300: 1.0}}, "metrics: have a name of 300 characters"),
        ({"reward": 1.0, "metrics": dict.fromkeys(map(str, range(999)), 1.0)}, "metrics: are 999"),
    ],
)
async def test_a_wrong_reward_is_a_400_and_fails_the_attempt(
    explorer: Explorer, body: dict[str, Any], reason: str
) -> None:
    running = explorer.explore(repeat_times=1)
    key = (await explorer.open())["key"]
    await explorer.chat(key)
    refused = await explorer.post("/sessions/close", key, **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value"), refused.text
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and failure.cause is FailureCause.WORKFLOW_ERROR
    assert reason in failure.error and reason in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/sessions/close", {}, 400, "invalid_value", "rewards"),
        ("/sessions/close", {"reward": "1"}, 400, "invalid_value", "reward"),
        ("/sessions/close", {"reward": 1.0, "rewards": [1.0]}, 400, "invalid_value", "rewards"),
        ("/sessions/close", {"reward": 1.0, "x" * 9_000_000: 1}, 413, "request_too_large", None),
        ("/sessions/abandon", {"reason": 3}, 400, "invalid_value", "reason"),
    ],
)
async def test_a_call_that_says_nothing_is_refused_and_the_session_goes_on(
    explorer: Explorer, path: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    running = explorer.explore(repeat_times=1)
    key = (await explorer.open())["key"]
    await explorer.chat(key)
    refused = await explorer.post(path, key, **body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (status, code, param)
    assert (await explorer.post("/sessions/close", key, reward=1)).status_code == 200
    assert isinstance(await outcome(running), Group)


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"wait_seconds": 61.0}, "wait_seconds"), ({"limit_seconds": float("nan")}, "limit_seconds"), ({"a": 1}, "a")],
)
async def test_a_wrong_opening_is_a_400(explorer: Explorer, asked: dict[str, Any], param: str) -> None:
    refused = await explorer.post("/sessions", KEY, **asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_forged_keys_and_ended_sessions_have_each_an_answer(explorer: Explorer) -> None:
    running = explorer.explore(repeat_times=1)
    for path in ("/sessions", "/sessions/close", "/sessions/abandon"):
        refused = await explorer.post(path, "session-1.x", **({"reward": 1.0} if path.endswith("close") else {}))
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), path
    key = (await explorer.open())["key"]
    await explorer.chat(key)
    assert (await explorer.post("/sessions/close", key, reward=1.0)).status_code == 200
    assert isinstance(await outcome(running), Group)
    again = await explorer.post("/sessions/close", key, reward=2.0)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_ended")
    with pytest.raises(openai.PermissionDeniedError, match="session is closed"):
        await explorer.chat(key)


async def test_an_agent_that_raises_fails_its_group_whose_other_sessions_are_told(explorer: Explorer) -> None:
    running = explorer.explore()
    other = (await explorer.open())["key"]
    await explorer.chat(other)

    def raises(session: Session) -> None:
        raise RuntimeError("no idea")

    with pytest.raises(RuntimeError, match="no idea"):
        await asyncio.to_thread(play, explorer, raises)
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and "abandoned the session: RuntimeError: no idea" in failure.error
    refused = await explorer.post("/sessions/close", other, reward=1.0)
    assert refused.status_code == 409 and "another session of the group failed" in refused.text
    with pytest.raises(openai.PermissionDeniedError, match="another session of the group failed"):
        await explorer.chat(other)


async def test_a_program_that_sets_no_reward_abandons_its_session(explorer: Explorer) -> None:
    running = explorer.explore(repeat_times=1)
    await asyncio.to_thread(play, explorer, lambda session: None)
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and "its program set no reward" in failure.error


@pytest.mark.parametrize(
    ("call", "given", "status", "error"),
    [
        ("close", {"reward": 1.0, "metrics": {"\ud83d": 1.0}}, 400, "metrics: have a name with half a surrogate pair"),
        ("abandon", {"reason": "bad reply \ud83d"}, 200, "abandoned the session: bad reply ?"),
    ],
)
async def test_half_a_surrogate_pair_of_a_program_leaves_a_failure_that_can_be_stored(
    explorer: Explorer, call: str, given: dict[str, Any], status: int, error: str
) -> None:
    running = explorer.explore(repeat_times=1)
    key = (await explorer.open())["key"]
    await explorer.chat(key)
    assert (await explorer.post(f"/sessions/{call}", key, **given)).status_code == status
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and error in failure.error
    encode_outcome(failure)


async def test_a_failed_call_fails_the_attempt_at_once(explorer: Explorer) -> None:
    running = explorer.explore(repeat_times=1)
    key = (await explorer.open())["key"]
    with suppress(openai.APIError):
        await explorer.chat(key, [{"role": "user", "content": "x" * 9_000_000}])
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and "bytes" in failure.error


async def test_time_runs_from_the_first_opening_on(explorer: Explorer) -> None:
    running = explorer.explore(timeout_seconds=0.3)
    await asyncio.sleep(0.6)
    assert not running.done(), "a task that no program has opened is not late"
    await explorer.open()
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and failure.cause is FailureCause.TIMEOUT


async def test_a_task_that_no_program_opens_fails_with_its_cause(explorer: Explorer) -> None:
    explorer.gateway.outside._wait_seconds = 0.2
    failure = await outcome(explorer.explore())
    assert isinstance(failure, AttemptFailure) and failure.cause is FailureCause.WORKFLOW_ERROR
    assert "no program opened a session of the task within 0.2 s (explorer.agent_wait)" in failure.error
    assert explorer.gateway.outside.waiting == 0


async def test_a_group_whose_first_session_is_open_waits_for_its_others(explorer: Explorer) -> None:
    explorer.gateway.outside._wait_seconds = 0.3
    running = explorer.explore()
    for number in range(2):
        key = (await explorer.open())["key"]
        await explorer.chat(key)
        await asyncio.sleep(0.6 * (1 - number))
        assert (await explorer.post("/sessions/close", key, reward=1.0)).status_code == 200
    assert isinstance(await outcome(running), Group)


async def test_a_session_that_its_program_leaves_ends_with_its_own_limit(explorer: Explorer) -> None:
    running = explorer.explore(repeat_times=1)
    await explorer.open(limit_seconds=0.2)
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and "not ended within 0.2 s of its opening" in failure.error


async def test_a_program_that_leaves_before_a_rollout_is_there_opens_none(explorer: Explorer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        async with httpx.AsyncClient(timeout=0.3) as http:
            await http.post(f"{explorer.url}/sessions", headers={"x-api-key": KEY}, json={"wait_seconds": 60.0})
    await asyncio.sleep(0.5)  # until the server hears of it
    running = explorer.explore(repeat_times=1)
    key = (await explorer.open())["key"]
    await explorer.chat(key)
    await explorer.post("/sessions/close", key, reward=1.0)
    assert isinstance(await outcome(running), Group)


async def test_grpc_opens_closes_and_abandons(explorer: Explorer) -> None:
    context: Any = None
    running = explorer.explore()
    opened = await explorer.servicer.OpenSession(pb.OpenSessionRequest(wait_seconds=30), context)
    assert json.loads(opened.row_json) == ROW and opened.base_url == explorer.url
    await explorer.chat(opened.key)
    closed = await explorer.servicer.CloseSession(pb.CloseSessionRequest(key=opened.key, rewards=[1.0]), context)
    assert (closed.branches, closed.sampled_tokens, closed.trained_tokens) == (1, 2, 2)
    with pytest.raises(Conflict, match="closed"):
        await explorer.servicer.CloseSession(pb.CloseSessionRequest(key=opened.key, rewards=[1.0]), context)
    with pytest.raises(Unauthenticated):
        await explorer.servicer.AbandonSession(pb.AbandonSessionRequest(key=f"{opened.key}x"), context)
    other = await explorer.servicer.OpenSession(pb.OpenSessionRequest(task_id=opened.task_id), context)
    with pytest.raises(Unavailable):
        await explorer.servicer.OpenSession(pb.OpenSessionRequest(task_id=opened.task_id), context)
    with pytest.raises(InvalidInput, match="rewards: is empty"):
        await explorer.servicer.CloseSession(pb.CloseSessionRequest(key=other.key), context)
    await explorer.servicer.AbandonSession(pb.AbandonSessionRequest(key=other.key, reason="tired"), context)
    failure = await outcome(running)
    assert isinstance(failure, AttemptFailure) and "abandoned the session: tired" in failure.error
    assert Conflict.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_sdk_names_the_refusal(explorer: Explorer) -> None:
    def nothing(session: Session) -> None:
        session.reward = 1.0

    running = explorer.explore(repeat_times=1)
    with pytest.raises(SessionRefused, match="never called the policy") as refused:
        await asyncio.to_thread(play, explorer, nothing)
    assert (refused.value.status, refused.value.reason) == (409, "session_ended")
    assert isinstance(await outcome(running), AttemptFailure)


async def test_an_agent_that_closes_its_clients_ends_no_other_session(explorer: Explorer) -> None:
    async def ask(agent: AgentSession) -> None:
        await agent.asynchronous.chat.completions.create(model="any", messages=ASKED)
        await asyncio.to_thread(agent.sync.chat.completions.create, model="any", messages=ASKED)

    open_one = partial(explorer.gateway.session, SamplingParams(), 60)
    async with open_one() as one, open_one() as other:
        await ask(other)
        async with one.asynchronous:
            await ask(one)
        one.sync.close()
        await ask(other)
        assert [len(agent.session.tree.turns) for agent in (one, other)] == [2, 4]


async def test_an_agent_is_told_that_the_application_was_refused(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def refused(*_: Any) -> Any:
        await asyncio.sleep(0.1)  # the first call comes before it
        raise ValueError("no such parser")

    monkeypatch.setattr(endpoint, "application", refused)
    gateway = Explorer(tmp_path).gateway
    async with gateway.session(SamplingParams(), 60) as agent:
        with pytest.raises(openai.APIConnectionError) as failed:
            await agent.asynchronous.with_options(max_retries=0).chat.completions.create(model="any", messages=ASKED)
    assert "the gateway of agents did not start" in str(failed.value.__cause__)
    with pytest.raises(InvalidInput, match="no such parser"):
        await gateway.check()
    await gateway.close()
