"""Wiring of the environment service."""

import asyncio
import os
from dataclasses import replace
from functools import partial

import grpc.aio
import structlog

from trinity import plugins
from trinity.environment.hub import Hub
from trinity.environment.servicer import EnvironmentServicer
from trinity.environment.settings import EnvironmentSettings
from trinity.plugins.environments import built_in_environments, built_in_scorers, installed_environments, unplayable
from trinity.runtime import leases
from trinity.runtime.errors import TrinityError
from trinity.runtime.metrics import Gauge
from trinity.runtime.trust.attach_tokens import AttachTokens
from trinity.sdk.arena import Arena
from trinity.sdk.environment import EnvironmentClass
from trinity.sdk.scoring import GroupScorer, Scorer

log = structlog.get_logger(__name__)

_REAP_SECONDS = 10.0

EPISODES = Gauge("trinity_environment_episodes_open", "Episodes open now", ["environment"])
ATTACHED = Gauge("trinity_environment_providers_attached", "Providers attached now")
ATTACHED_EPISODES = Gauge("trinity_environment_attached_episodes_open", "Episodes that attached providers play now")


class EnvironmentService:
    name = "environment"
    run_id = ""

    def __init__(self, settings: EnvironmentSettings) -> None:
        for notice in plugins.load([folder for folder in settings.plugin_dirs.split(os.pathsep) if folder]):
            log.warning("environment.plugins.changeable", reason=notice)
        self._settings = settings
        self._arena = Arena(environments().values(), _scorers(), settings.threads, settings.max_episodes)
        self._hub = Hub(self._arena, AttachTokens(settings.attach_token, settings.attach_tokens_file))
        for name, source in self._arena.sources.items():
            EPISODES.labels(name).set_function(partial(getattr, source, "open"))
        ATTACHED.set_function(lambda: len(self._hub.attachments))
        ATTACHED_EPISODES.set_function(lambda: self._hub.open)

    def register(self, server: grpc.aio.Server) -> list[str]:
        return EnvironmentServicer(self._arena, self._hub, self._settings.idle_seconds).register(server)

    async def work(self, ready: asyncio.Event, address: str) -> None:
        ready.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hub.follow_tokens())
            tasks.create_task(_reap())

    async def drain(self, grace_seconds: float) -> None:
        await self._arena.drain(grace_seconds)


def environments() -> dict[str, EnvironmentClass]:
    """Returns the built-in environments, those of installed packages and those of plugins. Raises PluginError."""
    built_in = built_in_environments()
    found: dict[str, EnvironmentClass] = {**built_in}
    if sandbox := built_in.get("sandbox"):
        found["sandbox"] = _here(sandbox)
    for place, added in (("an installed package", installed_environments()), ("a plugin", plugins.ENVIRONMENTS)):
        if taken := sorted(added.keys() & found.keys()):
            other = "a built-in environment" if taken[0] in built_in else "an environment of an installed package"
            raise plugins.PluginError(f"{place} offers {taken[0]!r}, the name of {other}")
        found |= added
    return found


async def _reap() -> None:
    """Ends sandboxes that dead services left, and sandboxes whose time is over."""
    while True:
        try:
            await asyncio.to_thread(leases.reap)
        except (OSError, TrinityError) as error:  # the next pass looks again
            log.warning("environment.sandbox.not_reaped", error=repr(error))
        await asyncio.sleep(_REAP_SECONDS)


def _here(kind: EnvironmentClass) -> EnvironmentClass:
    """Returns the environment; where it cannot be played, its summary says why."""
    if not (reason := unplayable(kind)):
        return kind
    log.warning("environment.sandbox.unusable", reason=reason)
    summary = f"cannot be played here: {reason}"
    return type(kind.__name__, (kind,), {"description": replace(kind.description, summary=summary)})


def _scorers() -> dict[str, Scorer]:
    """Returns the built-in scoring functions and those of plugins."""
    grouped = plugins.GROUP_REWARD_FUNCTIONS
    own = {name: GroupScorer(one) if name in grouped else one for name, one in plugins.REWARD_FUNCTIONS.items()}
    return {**own, **built_in_scorers()}
