"""Sessions of agents: their keys, their samples and their end.

    open -> calls, each: place -> sampled -> replied ... -> finish(reward), or abandon

A failed session answers no more calls and has no experiences, so a group is never trained on half a session.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from trinity.api.numbers import real_number
from trinity.data.experience import Experience, SamplingParams, is_number
from trinity.explorer.sessions.samples import Place, Said, SampleTree
from trinity.explorer.types import Completion
from trinity.runtime.errors import Conflict, InvalidInput

log = structlog.get_logger(__name__)

_PREFIX = "session-"
_CLOSED = 10_000  # remembered closed sessions, whose calls get a telling error


_warned: set[tuple[str, ...]] = set()


class SessionFailed(Conflict):
    """An agent's session ended without a reward that can be trained on."""


@dataclass
class Session:
    """The session of one agent. `sampling`: the task's, for absent parameters of requests and for the trainer."""

    name: str
    digest: bytes
    sampling: SamplingParams
    tree: SampleTree = field(default_factory=SampleTree)
    tools: set[str] = field(default_factory=set)  # offered so far, or called by the policy
    calls: set["asyncio.Task[None]"] = field(default_factory=set)  # in progress
    untrained: set[str] = field(default_factory=set)  # reasons why replies are not trained
    images: dict[str, bytes] = field(default_factory=dict)  # files of its calls, by the hex of their digests
    failure: Exception | None = None
    closed: bool = False
    on_failure: Callable[[Exception], None] | None = field(default=None, repr=False)

    def fail(self, error: Exception) -> None:
        """Note a failure. The first one is the cause."""
        if self.failure is None:
            self.failure = error
            if self.on_failure is not None:
                self.on_failure(error)

    def finish(self, rollout: int, reward: float | Sequence[float]) -> list[Experience]:
        """Close the session. Returns an experience for each branch, with its number as `step`. `reward`: of the session
        or of each branch, also as numbers of numpy and torch.

        Raises the failure of a call, SessionFailed if there is nothing to train on, InvalidInput for wrong rewards.
        """
        open_calls = len(self.calls)
        self.close()
        if self.failure is not None:
            raise self.failure
        if open_calls:
            raise SessionFailed(f"{open_calls} calls of the session were still open when it ended")
        branches = self.tree.branches()
        if not branches:
            raise SessionFailed("the agent never called the policy")
        given: Any = reward
        several = isinstance(given, Sequence) or getattr(given, "ndim", 0) > 0
        rewards = list(given) if several else [given] * len(branches)
        if len(rewards) != len(branches):
            raise InvalidInput("rewards", f"are {len(rewards)}, the session has {len(branches)} branches")
        for value in rewards:
            if not is_number(real_number(value, "reward")):
                raise InvalidInput("reward", f"is {value!s:.100}, must be finite and fit into float32")
        made = []
        for step, (branch, value) in enumerate(zip(branches, rewards, strict=True)):
            metrics = {"turns": float(branch.turns), "branches": float(len(branches))}
            metrics["response_tokens"] = float(branch.sampled_tokens)
            made.append(replace(branch.experience(rollout, float(value)), step=step, metrics=metrics))
        self._warn_untrained(made)
        return made

    def _warn_untrained(self, made: Sequence[Experience]) -> None:
        """Warn once for each set of reasons, since a run whose sessions train nothing would just not learn."""
        reasons = tuple(sorted(self.untrained))
        if not any(experience.action_mask.any() for experience in made) and reasons not in _warned:
            _warned.add(reasons)
            log.warning("explorer.session.untrained", session=self.name, reasons="; ".join(reasons))

    def close(self) -> None:
        """Refuse further calls, and cancel running ones."""
        self.closed = True
        for call in self.calls:
            call.cancel()


@dataclass
class Call:
    """One request of a session: the place of its replies, the sampled tokens, and which replies were sent."""

    session: Session
    replies: int = 1
    place: Place | None = None
    sampled: dict[int, tuple[Completion, bool]] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    refused: bool = False  # by vLLM, before it sampled; a streamed answer then has status 200 and an error

    @property
    def complete(self) -> bool:
        return len(self.sent) == self.replies

    def reply(self, index: int, said: Said) -> None:
        """Add a reply to the tree before its last part is sent, since the next request may have it in its history."""
        if index in self.sent:
            return
        if self.place is None or index not in self.sampled:
            raise SessionFailed(f"reply {index} was sent, but no tokens of it were recorded")
        completion, trained = self.sampled[index]
        self.session.tree.add(self.place, completion, said, trained)
        self.session.tools.update(name for name, _ in said.calls)  # an agent may answer that there is no such tool
        self.sent.add(index)


CALL: ContextVar[Call | None] = ContextVar("call", default=None)  # answered by this asyncio task


class Sessions:
    """All sessions of a process, by key: `session-<name>.<secret>`. Only a digest of the secret is kept."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, Session] = OrderedDict()  # without their samples

    def open(self, sampling: SamplingParams) -> tuple[Session, str]:
        """A new session and its key."""
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        session = self._open[name] = Session(name, _digest(secret), sampling)
        return session, f"{_PREFIX}{name}.{secret}"

    def close(self, session: Session) -> None:
        session.close()
        if self._open.pop(session.name, None) is not None:
            failure = SessionFailed(str(session.failure)) if session.failure is not None else None
            kept = Session(session.name, session.digest, session.sampling, failure=failure, closed=True)
            self._closed[session.name] = kept
            while len(self._closed) > _CLOSED:
                self._closed.popitem(last=False)

    def find(self, key: str) -> tuple[Session | None, bool]:
        """(session with this key or None, whether it is closed). A closed session only keeps its failure."""
        name, _, secret = key.removeprefix(_PREFIX).partition(".")
        session = self._open.get(name) or self._closed.get(name)
        digest = session.digest if session is not None else b""
        right = key.startswith(_PREFIX) and hmac.compare_digest(_digest(secret), digest)
        found = session if right else None
        return found, found is not None and found.closed


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
