"""Gymnasium environments that can be played in text."""

import re
from collections.abc import Sequence
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.environment import Description
from trinity.environments.extras import require
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules

_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Gymnasium(TextGame):
    """Any environment whose actions are numbered (Discrete) or text.

    Arguments, or fields of the row: `id` (as for gymnasium.make), `make_args`, `action_names` for numbered actions.
    What is shown is the observation if it is text, else the `ansi` rendering, else the observation's repr. Rewards are
    the environment's; success is an episode's reward of `success_reward` (1) at least.
    """

    description = Description("gymnasium", "A Gymnasium environment in text.", step_timeout_seconds=60)
    defaults = TurnRules(max_steps=100)
    instructions = FORMAT_HINT

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.game: Any = None
        gymnasium = require("gymnasium", "gym")
        name = task.text("id") if "id" in task else args.text("id")
        options = {**args.mapping("make_args"), **task.mapping("make_args")}
        self.success_reward = args.number("success_reward", 1.0)
        names = args.get("action_names", None)
        self.game = self._make(gymnasium, name, options, args)
        self._names = self._name_actions(gymnasium, names, args)
        observation, _ = self.game.reset(seed=task.integer("seed", seed) % 2**31)
        self.goal = f"Play {name}."
        return self._text(observation)

    def _make(self, gymnasium: Any, name: str, options: dict[str, Any], args: Arguments) -> Any:
        try:
            game = gymnasium.make(name, **options)
            if "render_mode" not in options and "ansi" in (game.metadata.get("render_modes") or ()):
                game.close()
                game = gymnasium.make(name, render_mode="ansi", **options)
            return game
        except (gymnasium.error.Error, TypeError, ImportError) as error:
            raise args.wrong("id", name, f"an environment that gymnasium can make ({error})") from None

    def _name_actions(self, gymnasium: Any, names: Any, args: Arguments) -> dict[str, int]:
        """Name -> action of a numbered space; empty for a text space."""
        space = self.game.action_space
        if isinstance(space, gymnasium.spaces.Text):
            return {}
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise args.wrong("id", self.game.spec.id, f"an environment with Discrete or Text actions, not {space}")
        numbers = range(int(space.start), int(space.start) + int(space.n))
        names = [str(number) for number in numbers] if names is None else names
        if not isinstance(names, list) or len(names) != len(numbers) or len({*map(str, names)}) != len(names):
            raise args.wrong("action_names", names, f"a list of {len(numbers)} different names")
        return dict(zip(map(str, names), numbers, strict=True))

    def actions(self) -> Sequence[str]:
        return tuple(self._names)

    def refusal(self, action: str) -> str:
        if self._names:
            return super().refusal(action)
        return "" if self.game.action_space.contains(action) else f"{action!r} is not in {self.game.action_space}"

    def play(self, action: str) -> Turn:
        chosen = self._names.get(action, action)
        observation, reward, terminated, truncated, _ = self.game.step(chosen)
        done = bool(terminated or truncated)
        success = done and self.total_reward + float(reward) >= self.success_reward
        return Turn(self._text(observation), float(reward), done, success)

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        shown = self.game.render() if self.game.render_mode == "ansi" else None
        # A place that is marked by a colour is marked by brackets.
        return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", shown)) if isinstance(shown, str) else repr(observation)

    def close(self) -> None:
        if getattr(self, "game", None) is not None:
            self.game.close()
