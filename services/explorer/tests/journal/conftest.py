from collections.abc import AsyncIterator

import pytest

from support.fakes.explorers.dying_explorer import RUN
from support.servers.nats import NatsServer
from trinity.buffer.state.streams import stream_specs
from trinity.runtime.broker import Broker, connect, ensure_streams


@pytest.fixture
async def broker(nats_server: NatsServer) -> AsyncIterator[Broker]:
    async with await connect(nats_server.url, "tests") as connected:
        await ensure_streams(connected, stream_specs(RUN, log_bytes=2**26, replicas=1))
        yield connected
