"""Ends the sessions of clients that are gone: a script that was killed does not close its session."""

import asyncio
import time
from collections.abc import Callable

import structlog

from trinity.runtime.errors import TrinityError
from trinity.tinker.commands.log import session_of
from trinity.tinker.gateway.journal import Journal

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 10.0


class Signs:
    """When the client of each session was last heard of: the official one sends a sign of life every ten seconds."""

    def __init__(self, journal: Journal, seconds: float) -> None:
        """seconds: after which a silent session ends."""
        self._journal, self._seconds = journal, seconds
        self._begun = time.monotonic()  # what an earlier gateway heard is not known
        self._heard: dict[str, float] = {}

    def hear(self, name: str) -> None:
        """A client named its session, or a model or sampling session of it."""
        self._heard[session_of(name)] = time.monotonic()

    async def end_silent(self, ended: Callable[[str], None]) -> None:
        """Ends silent sessions, for ever. `ended`: called with each."""
        while True:
            before = time.monotonic() - self._seconds
            for session_id, tenant in self._journal.open_sessions().items():
                if self._heard.get(session_id, self._begun) >= before:
                    continue
                try:
                    await self._journal.end_session(tenant, session_id)
                except TrinityError as error:  # a full log, or NATS is away
                    log.warning("tinker.session.stays", session=session_id, tenant=tenant, error=str(error))
                    break
                log.info("tinker.session.ended", session=session_id, tenant=tenant, silent_seconds=self._seconds)
                self._heard.pop(session_id, None)
                ended(session_id)
            await asyncio.sleep(min(_LOOK_SECONDS, self._seconds))
