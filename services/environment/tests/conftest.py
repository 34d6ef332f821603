"""An environment service to attach providers to, for tests that play a provider's part."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from support.servers.attaching import Service, serve


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serve() as running:
        yield running


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened
