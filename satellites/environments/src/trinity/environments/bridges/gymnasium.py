"""Gymnasium environments that can be played in text."""

import re
from collections.abc import Sequence
from typing import Any

from trinity.api.numbers import real_number
from trinity.environments.allowed import check_module
from trinity.environments.arguments import Arguments
from trinity.environments.extras import needs, require
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules
from trinity.runtime.errors import InvalidInput
from trinity.sdk.environment import Description

# A run of resets, a colour, any other escape.
_ESCAPE = re.compile(r"((?:\x1b\[0?m)+)|\x1b\[([0-9;]+)m|\x1b\[[0-9;?]*[A-Za-z]")
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_BRACKETS = {"blue": "()", "magenta": "<>"}
# What the colours of an environment's rendering mean, by the beginning of its id.
_MEANINGS = {
    "Taxi-": {
        "yellow background": "the taxi, empty",
        "green background": "the taxi with the passenger in it",
        "blue": "the passenger",
        "magenta": "the goal",
    }
}


def refuse_paths(value: Any, field: str) -> None:
    """Raises InvalidInput for text that may be a path, a URL or `module:name`: some environments open or import it."""
    if isinstance(value, dict):
        for name, part in value.items():
            refuse_paths(part, f"{field}.{name}")
    elif isinstance(value, list):
        for part in value:
            refuse_paths(part, field)
    elif isinstance(value, str) and (value.startswith((".", "~")) or any(mark in value for mark in "/\\:\0")):
        raise InvalidInput(
            field,
            f"is {value[:200]!r}, which may be a path, a URL or a module, and the environment service would open it; "
            "register an environment that has it already, in a package that the service's operator installs",
        )


def without_colours(text: str, name: str = "") -> str:
    """Colours as brackets: [x] has a coloured background, (x) is blue, <x> magenta, {x} any other colour.

    Where there are several colours, a last line says which bracket is which, or what each means in the environment
    `name`.
    """
    open_brackets: list[str] = []
    shown: dict[str, str] = {}

    def mark(found: re.Match[str]) -> str:
        if found[1]:
            closed = "".join(brackets[1] for brackets in reversed(open_brackets))
            open_brackets.clear()
            return closed
        colour = _colour(found[2] or "")
        if not colour:
            return ""
        brackets = "[]" if colour.endswith("background") else _BRACKETS.get(colour, "{}")
        open_brackets.append(brackets)
        shown[colour] = brackets
        return brackets[0]

    marked = _ESCAPE.sub(mark, text)
    if len(shown) < 2:
        return marked
    meanings: dict[str, str] = next((known for prefix, known in _MEANINGS.items() if name.startswith(prefix)), {})
    legend = ", ".join(f"{b[0]}x{b[1]} {meanings.get(colour, colour)}" for colour, b in sorted(shown.items()))
    return f"{marked.rstrip()}\nMarks: {legend}."


def _colour(codes: str) -> str:
    """Name of a colour, "background" after that of a background; empty for codes that are none."""
    for code in filter(None, codes.split(";")):
        place, ground = int(code) % 10, int(code) // 10
        if ground in (3, 4, 9, 10) and place < len(_COLOURS):
            return _COLOURS[place] + (" background" if ground in (4, 10) else "")
    return ""


@needs("gymnasium", "gymnasium", "gym")
class Gymnasium(TextGame):
    """Any environment whose actions are numbered (Discrete) or text.

    Arguments, or fields of the row: `id` (as for gymnasium.make), `make_args` (without paths), `action_names` for
    numbered actions. The policy sees the observation if it is text, else the `ansi` rendering, else the observation's
    repr. Rewards are the environment's; success is an episode's reward of `success_reward` (1) at least.
    """

    description = Description("gymnasium", "A Gymnasium environment in text.", step_timeout_seconds=60)
    defaults = TurnRules(max_steps=100)
    instructions = FORMAT_HINT

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        gymnasium = require("gymnasium", "gym")
        name = task.text("id") if "id" in task else args.text("id")
        module, colon, _ = name.partition(":")
        if colon:  # gymnasium.make would import it
            check_module(module, "task.id" if "id" in task else "args.id")
        options: dict[str, Any] = {}
        for where, given in (("args", args), ("task", task)):
            refuse_paths(given.mapping("make_args"), f"{where}.make_args")
            options |= given.mapping("make_args")
        self.success_reward = args.number("success_reward", 1.0)
        names = args.get("action_names", None)
        self.game = self._make(gymnasium, name, options, args)
        self.held.callback(self.game.close)
        self._names = self._name_actions(gymnasium, names, args)
        try:
            observation, _ = self.game.reset(seed=task.integer("seed", seed) % 2**31)
        except gymnasium.error.Error as error:  # a package that only some ways to render need
            raise args.wrong("id", name, f"an environment that gymnasium can reset ({error})") from None
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
        done, gained = bool(terminated or truncated), real_number(reward, "the reward of step")
        success = done and self.total_reward + gained >= self.success_reward
        return Turn(self._text(observation), gained, done, success)

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        shown = self.game.render() if self.game.render_mode == "ansi" else None
        return without_colours(shown, self.game.spec.id) if isinstance(shown, str) else repr(observation)
