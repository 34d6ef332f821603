"""Sessions of outside agents: a program plays rollouts of a live run with its own agent, and sets their rewards.

with open_session("http://127.0.0.1:8010/v1", key, wait_seconds=60) as session:
    answer = my_agent(OpenAI(base_url=session.base_url, api_key=session.key), session.row["question"])
    session.reward = float(answer == session.row["answer"])
"""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from trinity.api.numbers import real_number
from trinity.sdk.errors import InvalidInput, TrinityError

_ANSWER_SECONDS = 60.0  # beyond the wait for a rollout


class CallRefused(TrinityError):
    """The explorer refused what a program sent about a session or a call.

    `status` is HTTP's; `reason` is the answer's code, such as no_rollout_waits (503: try again), session_ended,
    unknown_id or invalid_value.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class SessionRefused(CallRefused):
    """The explorer refused a call about a session."""


@dataclass
class Session:
    """An open session of one rollout. `row` is the task's.

    `reward`, or `rewards` with one for each branch, must be set before the session ends; else it is abandoned. The
    session may take `limit_seconds`.
    """

    base_url: str
    key: str = field(repr=False)
    task_id: str
    taskset: str
    row: dict[str, Any]
    rollout: int
    repeat_times: int
    evaluation: bool
    limit_seconds: float
    reward: float | None = None
    rewards: Sequence[float] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    ended: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables that OpenAI's and Anthropic's clients read, for an agent in another process."""
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.key}
        root = self.base_url.removesuffix("/v1")
        return {**openai, "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": self.key}

    def close(self) -> dict[str, int]:
        """Ends the session with its rewards; returns branches, sampled_tokens and trained_tokens.

        Raises InvalidInput for values that are no numbers, after which the session stays open; SessionRefused, after
        which the attempt at the task has failed.
        """
        if self.reward is not None and len(self.rewards):
            raise InvalidInput("rewards", "are given, and so is reward; give one of them")
        given: dict[str, Any] = {"metrics": {str(k): real_number(v, f"metrics.{k}") for k, v in self.metrics.items()}}
        if self.reward is not None:
            given["reward"] = real_number(self.reward, "reward")
        else:
            given["rewards"] = [real_number(value, f"rewards[{at}]") for at, value in enumerate(self.rewards)]
        self.ended = True
        answer: dict[str, int] = _post(f"{self.base_url}/sessions/close", self.key, given)
        return answer

    def abandon(self, reason: str) -> None:
        """Ends the session without a reward: the attempt at the task fails for this reason."""
        self.ended = True
        _post(f"{self.base_url}/sessions/abandon", self.key, {"reason": reason})


@contextlib.contextmanager
def open_session(
    base_url: str,
    key: str,
    *,
    taskset: str = "",
    task_id: str = "",
    wait_seconds: float = 0.0,
    limit_seconds: float = 0.0,
) -> Iterator[Session]:
    """Opens a session of a waiting rollout. The context's end closes it; an error in the body abandons it.

    `base_url` and `key` belong to the endpoint of a run with `explorer.record: true`, "http://host:port/v1". `taskset`
    and `task_id` restrict the rollouts. `wait_seconds`: longest wait for a rollout, 0 to 60. `limit_seconds`: limit of
    the session, at most the task's. Raises SessionRefused, InvalidInput for rewards and metrics that are no numbers,
    and OSError if no server answers.
    """
    asked = {"taskset": taskset, "task_id": task_id, "wait_seconds": wait_seconds, "limit_seconds": limit_seconds}
    session = Session(**_post(f"{base_url.rstrip('/')}/sessions", key, asked, wait_seconds))
    try:
        yield session
        if session.ended:
            return
        if session.reward is None and not len(session.rewards):
            session.abandon("its program set no reward")
        else:
            session.close()
    except BaseException as error:
        if not session.ended:
            with contextlib.suppress(SessionRefused, OSError):
                session.abandon(f"{type(error).__name__}: {error}")
        raise


# A run's explorer is never reached through a web proxy of the shell.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _post(url: str, key: str, body: Mapping[str, Any], wait_seconds: float = 0.0) -> Any:
    try:
        return send("POST", url, key, body, wait_seconds)
    except CallRefused as refused:
        raise SessionRefused(refused.status, refused.reason, str(refused)) from None


def send(method: str, url: str, key: str, body: Mapping[str, Any] | None = None, wait_seconds: float = 0.0) -> Any:
    """Returns the JSON that an explorer answers. Raises CallRefused, and OSError if no server answers."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with _DIRECT.open(request, timeout=wait_seconds + _ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(error.read())["error"]
            raise CallRefused(error.code, str(told["code"]), str(told["message"])) from None
        raise CallRefused(error.code, "", f"{url} answered HTTP {error.code}") from None
