"""Built-in environments by name."""

from trinity.environment.environment import Environment
from trinity.environment.environments.alfworld.environment import AlfWorld
from trinity.environment.environments.bridges.gymnasium import Gymnasium
from trinity.environment.environments.bridges.mcp import McpTools
from trinity.environment.environments.bridges.openenv import OpenEnv
from trinity.environment.environments.bridges.reasoning_gym import ReasoningGym
from trinity.environment.environments.bridges.verifiers import Verifiers
from trinity.environment.environments.countdown import Countdown
from trinity.environment.environments.frozen_lake import FrozenLake
from trinity.environment.environments.gym_card.blackjack import BlackJack
from trinity.environment.environments.gym_card.environment import GymCard
from trinity.environment.environments.gym_card.number_line import NumberLine
from trinity.environment.environments.gym_card.points import EZPoints, Points24
from trinity.environment.environments.maths import Maths
from trinity.environment.environments.scienceworld.environment import ScienceWorld
from trinity.environment.environments.sokoban.environment import Sokoban
from trinity.environment.environments.webshop.environment import WebShop

_BUILT_IN: tuple[type[Environment], ...] = (
    Countdown,
    Maths,
    Sokoban,
    FrozenLake,
    GymCard,
    NumberLine,
    EZPoints,
    Points24,
    BlackJack,
    WebShop,
    AlfWorld,
    ScienceWorld,
    Gymnasium,
    ReasoningGym,
    Verifiers,
    OpenEnv,
    McpTools,
)

ENVIRONMENTS: dict[str, type[Environment]] = {kind.description.name: kind for kind in _BUILT_IN}
