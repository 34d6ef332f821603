"""Built-in environments without a service."""

import json
from typing import Any

from trinity.environments import ENVIRONMENTS
from trinity.sdk.contract import Answer


class InProcess:
    """A built-in environment as the client shows it."""

    def __init__(self, name: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> None:
        self._environment, self._given = ENVIRONMENTS[name](), (task, args, seed)
        self.deterministic = ENVIRONMENTS[name].description.deterministic

    async def __aenter__(self) -> "InProcess":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._environment.close()

    async def reset(self) -> Answer:
        return self._shown(self._environment.reset(*self._given))

    async def step(self, action: str) -> Answer:
        return self._shown(self._environment.step(action))

    def _shown(self, found: Any) -> Answer:
        return Answer(found.text, found.reward, found.done, json.dumps(found.info), found.metrics)
