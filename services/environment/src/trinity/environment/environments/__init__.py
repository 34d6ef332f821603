"""Built-in environments by name."""

from trinity.environment.environment import Environment
from trinity.environment.environments.countdown import Countdown

ENVIRONMENTS: dict[str, type[Environment]] = {kind.description.name: kind for kind in (Countdown,)}
