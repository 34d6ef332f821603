"""One game on ALFWorld's own engine (TextWorld and Fast Downward).

The engine is not thread safe: its parser is one global object, and its planner takes over sys.stdout. Every call holds
a lock of this process; games run in parallel only in processes of their own. Each loads a copy of the planner's
library, which cannot be unloaded (it leaves a handler for the end of the process): games that are closed leave theirs
to the next.
"""

import json
import sys
import threading
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from trinity.environments.alfworld.rooms import Room, problem
from trinity.environments.extras import require

_lock = threading.RLock()
_idle: list[Any] = []
_TRANSLATED = 16  # translations that a process keeps; a game has two
_TEXTS = 1024  # texts of grammars that a process keeps parsed
NOTE = " (Python up to 3.12; compiles for minutes and needs g++ and make; brings GPL parts)"


class Engine:
    """A loaded game; `close` it."""

    def __init__(self, game: Path | Room, plan: bool = False) -> None:
        require("alfworld", "alfworld", NOTE)
        with _lock:
            self._game: Any = _idle.pop() if _idle else _new_game()
            arguments = sys.argv  # the planner's parser of problems replaces them
            try:
                self._game.request_infos.policy_commands = plan
                self._game.load(str(game) if isinstance(game, Path) else _game_data(game))
            except BaseException:
                self.close()
                raise
            finally:
                sys.argv = arguments

    def reset(self) -> tuple[str, list[str]]:
        """The first observation and the admissible commands."""
        with _lock:
            arguments = sys.argv
            self._state = self._game.reset()
            sys.argv = arguments
            return str(self._state.feedback), list(self._state["admissible_commands"])

    def step(self, command: str) -> tuple[str, list[str], bool]:
        """The observation, the admissible commands, and whether the task is done."""
        with _lock:
            self._state, _, _ = self._game.step(command)
            return str(self._state.feedback), list(self._state["admissible_commands"]), bool(self._state["won"])

    def plan(self) -> list[str]:
        """Commands from here to the goal; needs `plan`. Empty if the planner finds none."""
        return list(self._state["policy_commands"] or [])

    def close(self) -> None:
        """Leave the library to the next game. May be called again."""
        with _lock:
            if self._game is not None:
                _idle.append(self._game)
                self._game = None


def _new_game() -> Any:
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld import EnvInfos
    from textworld.envs.pddl import PddlEnv, logic, textgen

    planner = logic.fast_downward
    if not hasattr(planner.pddl2sas, "cache_info"):  # PddlEnv translates a game for `load` and for each `reset`
        planner.pddl2sas = lru_cache(_TRANSLATED)(planner.pddl2sas)
        logic._parse_and_convert = lru_cache(_TRANSLATED)(logic._parse_and_convert)
        parsed = lru_cache(_TEXTS)(textgen._parse_and_convert)  # each observation parses its text again
        textgen._parse_and_convert = lambda *args, **kwargs: deepcopy(parsed(*args, **kwargs))  # `derive` changes it
        textgen.Rule.parse_conjunctive_query = staticmethod(lru_cache(_TEXTS)(textgen.Rule.parse_conjunctive_query))
    return AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)))


def _game_data(room: Room) -> dict[str, Any]:
    """A room as ALFWorld's game file would hold it."""
    from alfworld.gen.goal_library import gdict
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    goal = gdict[room.task_type]["pddl"].format(obj=room.thing, recep=room.place, toggle="DeskLamp").replace("#", "-")
    grammar = Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL.", room.wish)
    return {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "pddl_problem": problem(room, goal),
        "grammar": grammar,
        "solvable": True,
        "walkthrough": None,
    }


def write_game(room: Room, path: Path) -> None:
    """A room as a game file that ALFWorld's own tools can play."""
    require("alfworld", "alfworld", NOTE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock:
        path.write_text(json.dumps(_game_data(room)))
