"""Recorded calls of an endpoint, and their rewards: live traffic that a run learns from."""

import re
from dataclasses import dataclass

from trinity.data.experience import UNLIMITED, Experience, Limits, is_number, reward_problem
from trinity.runtime.errors import InvalidInput

TASKSET = "traffic"  # of the tasks that rewards make, and before the call's id in a task's id
WORKFLOW = "traffic_workflow"
IS_CALL = re.compile(r"[A-Za-z0-9_-]{1,100}")
_SHA256_BYTES = 32


@dataclass(frozen=True)
class RecordedCall:
    """A plain call with its reply. `experience` has reward 0; `client_sha256` is of the client's key."""

    experience: Experience
    client_sha256: bytes
    recorded_at_seconds: float

    def check(self, limits: Limits = UNLIMITED) -> None:
        """Raises InvalidInput naming the wrong field."""
        self.experience.check("call.experience", limits)
        if len(self.client_sha256) != _SHA256_BYTES:
            problem = f"has {len(self.client_sha256)} bytes, must have {_SHA256_BYTES}"
            raise InvalidInput("call.client_sha256", problem)


@dataclass(frozen=True)
class CallReward:
    """The reward of a recorded call. The versions sampled the reply's first and last token."""

    id: str
    reward: float
    oldest_version: int
    newest_version: int

    def check(self, limits: Limits = UNLIMITED) -> None:
        """Raises InvalidInput naming the wrong field."""
        if not IS_CALL.fullmatch(self.id):
            raise InvalidInput("id", f"is {self.id[:100]!r}, must be the id of a response")
        if not is_number(self.reward, limits.reward):
            raise InvalidInput("reward", reward_problem(self.reward, limits.reward))
        if not 0 <= self.oldest_version <= self.newest_version:
            problem = f"are {self.oldest_version} and {self.newest_version}, must not fall and be >= 0"
            raise InvalidInput("oldest_version, newest_version", problem)
