"""A server of the package openenv, for the interpreter that has it: guess a digit. Arguments: port, places."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Seen(Observation):
    text: str


class Guessing(Environment[Guess, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Seen:
        self.target = (seed or 0) % 10
        return Seen(text="Guess a digit.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: object) -> Seen:
        if action.guess == "fly":
            raise ValueError("no such move")
        right = action.guess == str(self.target)
        return Seen(text="yes" if right else "no", reward=right, done=right)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Seen, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
