"""Images of chat completions are checked before vLLM reads the call, which then holds their digests."""

import asyncio
import base64
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.fakes.data.pictures import picture
from trinity.data.experience import SamplingParams
from trinity.data.images import LARGEST_BYTES, MOST_IMAGES, digest
from trinity.data.vision import ImageRules
from trinity.explorer.serving import endpoint
from trinity.explorer.sessions.gateway import Gateway
from trinity.explorer.sessions.session import Sessions

pytestmark = pytest.mark.core

RULES = ImageRules(token=47, patch=4, merge=2, least_pixels=64, most_pixels=128 * 128)
RED, BLUE = picture(colour="red"), picture(colour="blue")


class Served:
    """A gateway before an application that refuses every call."""

    def __init__(self) -> None:
        self.sessions, self.calls = Sessions(), list[Any]()
        self.session, self.key = self.sessions.open(SamplingParams())
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        self.gateway = Gateway(app, self.sessions, "policy", images=RULES)

    async def answer(self, request: Request) -> Response:
        self.calls.append(await request.json())
        return JSONResponse({"error": "seen"}, 418)

    async def post(self, *parts: Any) -> tuple[int, str, str, str]:
        """(status, code, param, message) of the answer to a message of these parts."""
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, *parts]}]}
        async with httpx.AsyncClient(timeout=60) as http:
            headers = {"Authorization": f"Bearer {self.key}"}
            answer = await http.post(f"{self.url}/chat/completions", headers=headers, json=body)
        error = answer.json()["error"]
        if error == "seen":
            return answer.status_code, "", "", ""
        return answer.status_code, error["code"], error["param"], error["message"]


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    server = asyncio.create_task(endpoint.run(made.gateway, [made.listening]))
    yield made
    server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await server


def part(file: bytes) -> dict[str, Any]:
    return of_url(f"data:image/png;base64,{base64.b64encode(file).decode()}")


def of_url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


async def test_the_application_gets_digests_and_the_session_keeps_the_files(served: Served) -> None:
    for _ in range(2):
        assert await served.post(part(RED), part(BLUE), part(RED)) == (418, "", "", "")
    assert served.session.images == {digest(file).hex(): file for file in (RED, BLUE)}
    shown = [one["uuid"] for one in served.calls[1]["messages"][0]["content"][1:]]
    assert shown == [digest(file).hex() for file in (RED, BLUE, RED)]
    assert "base64" not in str(served.calls)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (of_url("http://127.0.0.1:1/a.png"), "is 'http://127.0.0.1:1/a.png', must be data:image/png;base64,..."),
        (of_url("https://example.org/a.png"), "must be data:"),
        (of_url("file:///etc/passwd"), "must be data:"),
        (of_url(7), "is 7, must be data:"),
        ({"type": "image_url", "image_url": None}, "is None, must be data:"),
        (of_url("data:image/png;base64,?"), "is no base64"),
        (of_url("data:image/png;base64,é"), "is no base64"),
        (of_url("data:image/png,abc"), "no image that Pillow reads (0 bytes)"),
        (part(b"no image"), "no image that Pillow reads (8 bytes)"),
        (part(RED[:60]), "cannot be decoded"),
        (part(picture(mode="CMYK", form="JPEG")), "has Pillow's mode 'CMYK'"),
        (part(picture(8, 1608)), "more than 200 times"),
        (part(picture(8001, 8000, mode="1")), "64,008,000 pixels|8001 x 8000 pixels"),
    ],
)
async def test_a_wrong_image_is_a_400(served: Served, given: Any, problem: str) -> None:
    status, code, param, message = await served.post(part(BLUE), given)
    assert (status, code, param) == (400, "invalid_image", "messages[0].content[2].image_url.url")
    assert any(one in message for one in problem.split("|")), message
    assert not served.calls and not served.session.images and served.session.failure is None


async def test_images_beyond_a_bound_are_a_400(served: Served) -> None:
    status, code, param, message = await served.post(*[part(RED)] * (MOST_IMAGES + 1))
    assert (status, code, param) == (400, "invalid_image", "messages") and "129 images; a call takes 128" in message
    status, code, param, message = await served.post(*[part(picture(4000, 3000, mode="1"))] * 6)
    assert (status, code) == (400, "invalid_image") and "72,000,000 pixels; a call takes 64,000,000" in message
    noise = picture(1000, 1200, mode="RGB", form="BMP")  # 3.6 MB without compression
    assert (await served.post(part(noise)))[0] == 418
    other = picture(1000, 1200, colour="red", form="BMP")
    status, code, param, message = await served.post(part(other))
    assert (status, code) == (400, "invalid_image") and f"it takes {LARGEST_BYTES:,}" in message
    assert (await served.post(part(noise), part(RED)))[0] == 418


@pytest.mark.parametrize(
    "given",
    [
        {"image_url": {"url": "data:,"}},
        {**part(RED), "uuid": "a"},
        {"type": "image_pil", "image_pil": None},
        {"type": "input_image", "image_url": "data:,"},
        {"type": "video_url", "video_url": {"url": "data:,"}},
        {"type": "text", "text": "?", "content": [part(RED)]},
    ],
)
async def test_other_parts_are_refused_as_of_a_text_model(served: Served, given: Any) -> None:
    status, code, param, message = await served.post(given)
    assert (status, code, param) == (400, "unsupported_content", "messages")
    assert "or an image_url in /v1/chat/completions" in message
