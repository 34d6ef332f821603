"""An episode as the policy's side sees it, where its environment keeps states: known answers are not asked for again.

What an interrupted episode was answered is in its journal. At the first answer that is not there the environment gets
the state back in which the policy replied, and continues.
"""

import dataclasses
from typing import Any

from trinity.explorer.environments.types import EnvironmentCause, StateRefused, Step
from trinity.explorer.journal.journal import EpisodeJournal


class Continued:
    """reset once -> step until done, as trinity.explorer.environments.episode.Episode."""

    def __init__(self, remote: Any, journal: EpisodeJournal) -> None:
        """`remote`: the episode at its provider, which is not reset yet."""
        self._remote, self._journal = remote, journal
        self._live = False
        self._last: Step | None = None

    @property
    def durable(self) -> bool:
        """Whether another explorer can continue it. False before reset."""
        return not self._live or self._remote.snapshots or self._remote.deterministic

    async def reset(self) -> Step:
        """Raises EnvironmentFailed."""
        self._last = self._journal.answer(0)
        if self._last is None:
            self._live = True
            self._last = self._heard(await self._remote.reset(keep_states=True))
        return self._last

    async def step(self, text: str) -> Step:
        """Raises EnvironmentFailed, and StateRefused where the episode has to begin again."""
        assert self._last is not None
        if not self._live:
            known = self._journal.answer(self._last.turn + 1)
            if known is not None:
                self._last = known
                return known
            await self._restore(self._last)
        self._last = self._heard(await self._remote.step(text))
        return self._last

    async def _restore(self, last: Step) -> None:
        if not last.state:
            raise StateRefused(f"the journal has no state after {last.turn} actions", EnvironmentCause.REFUSED)
        await self._remote.restore(last.state, last.turn)
        self._live = True

    def _heard(self, step: Step) -> Step:
        if self._remote.snapshots:
            self._journal.heard(step)
            return dataclasses.replace(step, state=b"")  # in the journal
        return step
