"""The interface of a system under test."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Settings:
    """The configuration that all systems share. `model`: a Hugging Face folder; `data`: rows of question and number."""

    model: Path
    data: Path
    rows: int
    tasks: int
    group: int
    tokens: int
    save_every: int
    seed: int
    gpu: bool = False  # on one GPU, sampling in bfloat16
    turns: int = 1  # replies of an episode; `tokens` are of each

    @property
    def steps(self) -> int:
        return self.rows // self.tasks


class System(Protocol):
    """A system, started by the supervisor that its documentation recommends, resuming from its newest checkpoint."""

    name: str
    recovery: str  # the supervisor and the state that it resumes from; printed after the table
    ahead: int  # steps that sampling may be ahead of training
    parts: frozenset[str]  # of "engine", "explorers", "services", "turns", "versions", which some cases need

    def prepare(self, settings: Settings, folder: Path) -> None:
        """Installs what the system needs, and writes its configuration into the folder of the run."""

    def command(self, settings: Settings, folder: Path) -> Sequence[str]:
        """The command that begins the run, and that a user types again after all of it died.

        The run keeps its files below folder/disk, which some cases fill.
        """

    def beside(self, what: str, folder: Path) -> Sequence[str]:
        """Returns the command that a user types during the run, "join" or "rollback", or an attacker, "attack"."""

    def sampler(self, root: psutil.Process) -> psutil.Process | None:
        """The engine's process among those of a run; None without one."""

    def paths(self) -> Sequence[str]:
        """Folders of packages that its processes import from."""
