"""Built-in environments by name. The core finds them by this distribution's entry points `trinity.environments`."""

from trinity.environments.alfworld.environment import AlfWorld
from trinity.environments.bridges.gymnasium import Gymnasium
from trinity.environments.bridges.mcp import McpTools
from trinity.environments.bridges.openenv import OpenEnv
from trinity.environments.bridges.reasoning_gym import ReasoningGym
from trinity.environments.bridges.verifiers import Verifiers
from trinity.environments.countdown import Countdown
from trinity.environments.frozen_lake import FrozenLake
from trinity.environments.gym_card import BlackJack, EZPoints, GymCard, NumberLine, Points24
from trinity.environments.maths import Maths
from trinity.environments.nim import Nim
from trinity.environments.sandbox.environment import Shell
from trinity.environments.scienceworld.environment import ScienceWorld
from trinity.environments.sokoban import Sokoban
from trinity.environments.sudoku import Sudoku
from trinity.environments.webshop.environment import WebShop
from trinity.sdk.environment import Environment

_BUILT_IN: tuple[type[Environment], ...] = (
    Countdown,
    Maths,
    Sokoban,
    FrozenLake,
    Sudoku,
    GymCard,
    NumberLine,
    EZPoints,
    Points24,
    BlackJack,
    Nim,
    WebShop,
    AlfWorld,
    ScienceWorld,
    Gymnasium,
    ReasoningGym,
    Verifiers,
    OpenEnv,
    McpTools,
    Shell,
)

ENVIRONMENTS: dict[str, type[Environment]] = {kind.description.name: kind for kind in _BUILT_IN}
