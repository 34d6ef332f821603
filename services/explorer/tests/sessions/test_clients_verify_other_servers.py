"""An agent may turn its client to a server elsewhere: that one has to show a certificate of a known authority."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import openai
import pytest

from trinity.explorer.sessions.agents import AgentSession
from trinity.runtime.trust import ca

pytestmark = pytest.mark.core


async def unknown_server(folder: Path) -> asyncio.Server:
    authority = ca.make_authority(1)
    pair = ca.issue(authority, "one", role="explorer", hosts=["127.0.0.1"], days=1)
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)


@pytest.mark.parametrize("kind", ["asynchronous", "sync"])
async def test_a_server_of_an_unknown_authority_is_sent_nothing(kind: str, tmp_path: Path) -> None:
    async def app() -> Any:
        raise AssertionError("the gateway is not asked")

    session: Any = None
    agent = AgentSession(session, "http://127.0.0.1:9/v1", "key", 10, app)
    async with await unknown_server(tmp_path) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        elsewhere = getattr(agent, kind).with_options(base_url=url, max_retries=0)
        with pytest.raises(openai.APIConnectionError) as raised:
            if kind == "sync":
                await asyncio.to_thread(elsewhere.models.list)
            else:
                await elsewhere.models.list()
    assert "CERTIFICATE_VERIFY_FAILED" in repr(raised.value.__cause__)
    await agent.close()


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "socks4://127.0.0.1:9", "http://[::1"])
async def test_the_gateway_is_reached_past_a_proxy_of_the_shell(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also past a proxy that the client's library cannot use."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def app() -> Any:
        raise AssertionError("a thread's client has a socket")

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setenv("no_proxy", "models.example")
    session: Any = None
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        agent = AgentSession(session, url, "key", 10, app)
        with pytest.raises(openai.NotFoundError):
            await asyncio.to_thread(agent.sync.with_options(max_retries=0).models.list)
        assert agent.asynchronous
        await agent.close()
    assert agent.environment["no_proxy"] == agent.environment["NO_PROXY"] == "models.example,127.0.0.1"
