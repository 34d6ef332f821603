"""Requests at the OpenAI-compatible endpoint: completions, seconds, and JSON schemas that no grammar can hold."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from trinity.explorer.serving.asgi import Refused
from trinity.explorer.serving.bounds import Bounds, bounded, check_schemas

pytestmark = pytest.mark.core

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}
MUTUAL = {
    "$ref": "#/definitions/a",
    "definitions": {"a": {"items": {"$ref": "#/definitions/b"}}, "b": {"anyOf": [{"$ref": "#/definitions/a"}]}},
}
TWICE = {
    "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"}},
    "$defs": {"x": {"items": {"$ref": "#/$defs/y"}}, "y": {"type": "string"}, "unused": {"$ref": "#/$defs/unused"}},
}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def requests_with(schema: Any) -> list[dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
        {"text": {"format": {"type": "json_schema", "schema": schema}}},
        {"tools": tools, "tool_choice": "required"},
    ]


@pytest.mark.parametrize("schema", [TREE, MUTUAL, {"items": {"$ref": "#"}}, deep(2000)])
def test_a_schema_without_end_is_refused_wherever_it_steers_sampling(schema: dict[str, Any]) -> None:
    for body in requests_with(schema):
        with pytest.raises(Refused, match=r"refers to itself by '#|more than 64 levels") as refused:
            check_schemas(body)
        assert (refused.value.status, refused.value.code, refused.value.fails) == (400, "invalid_json_schema", False)


@pytest.mark.parametrize(
    "schema", [TWICE, deep(20), {"$ref": "#/nowhere"}, "no schema", None, {"enum": [{"$ref": "#"}]}]
)
def test_other_schemas_are_vllms_to_judge(schema: Any) -> None:
    for body in requests_with(schema):
        check_schemas(body)
    check_schemas({**requests_with(TREE)[-1], "tool_choice": "auto"})


class Endpoint:
    """An application that answers after `seconds`, within bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self.seconds, self.open, self.ended = 0.0, 0, asyncio.Event()
        routes = [Route("/v1/completions", self.answer, methods=["POST"])]
        transport = httpx.ASGITransport(bounded(Starlette(routes=routes), bounds))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://endpoint")

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.open += 1
        try:
            await asyncio.sleep(self.seconds)
            return JSONResponse({"asked": body})
        finally:
            self.open -= 1

    async def post(self, body: Any, key: str = "one") -> httpx.Response:
        return await self.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 5}, "n"),
        ({"best_of": 10**9}, "best_of"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": [[1], [2], [3]], "n": 2}, "n"),
    ],
)
async def test_a_request_makes_no_more_completions_than_it_may(body: dict[str, Any], param: str) -> None:
    endpoint = Endpoint(Bounds(most_completions=4))
    answer = await endpoint.post(body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "it may make 4 (explorer.request_completions)" in answer.json()["error"]["message"]
    for allowed in ({"n": 4}, {"prompt": [1, 2, 3, 4, 5, 6]}, {"n": None}, {"n": "five"}):
        assert (await endpoint.post(allowed)).json() == {"asked": allowed}


async def test_open_completions_are_counted_by_key() -> None:
    endpoint = Endpoint(Bounds(most_completions=4))
    endpoint.seconds = 0.3
    first = [asyncio.create_task(endpoint.post({"n": 2})) for _ in range(2)]
    while endpoint.open < 2:
        await asyncio.sleep(0.01)
    refused = await endpoint.post({"n": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_completions")
    assert (await endpoint.post({"n": 4}, key="two")).status_code == 200
    assert [(await one).status_code for one in first] == [200, 200]
    assert (await endpoint.post({"n": 4})).status_code == 200


async def test_a_request_takes_no_longer_than_it_may() -> None:
    endpoint = Endpoint(Bounds(seconds=0.1))
    endpoint.seconds = 30.0
    answer = await endpoint.post({"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    assert "longer than 0.1 s (explorer.request_timeout)" in answer.json()["error"]["message"]
    assert endpoint.open == 0
