"""Wiring of the environment service."""

import asyncio
import os
from functools import partial

import grpc.aio

from trinity import plugins
from trinity.api.environment.v1 import environment_pb2, environment_pb2_grpc
from trinity.environment.environments import ENVIRONMENTS
from trinity.environment.episodes import Arena
from trinity.environment.servicer import EnvironmentServicer
from trinity.environment.settings import EnvironmentSettings
from trinity.runtime.metrics import Gauge

EPISODES = Gauge("trinity_environment_episodes_open", "Episodes open now", ["environment"])


class EnvironmentService:
    name = "environment"
    run_id = ""

    def __init__(self, settings: EnvironmentSettings) -> None:
        plugins.load([folder for folder in settings.plugin_dirs.split(os.pathsep) if folder])
        self._arena = Arena(ENVIRONMENTS, settings.threads)
        for name in ENVIRONMENTS:
            EPISODES.labels(name).set_function(partial(self._arena.open.__getitem__, name))

    def register(self, server: grpc.aio.Server) -> list[str]:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(EnvironmentServicer(self._arena), server)
        return [environment_pb2.DESCRIPTOR.services_by_name["EnvironmentService"].full_name]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        ready.set()
        await asyncio.Event().wait()

    async def drain(self, grace_seconds: float) -> None:
        await self._arena.drain(grace_seconds)
