"""E2B's API, for its own SDK: a server by the stubs of the package e2b (held.py)."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from e2b.envd.process.process_pb import ProcessEvent, StartRequest, StartResponse
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from held import begin, end, ends, fails, live_for, serve
from protobuf import Oneof

api = FastAPI()


def refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"code": status, "message": message}, status)


@api.post("/v2/sandboxes", status_code=201)
async def create(request: Request) -> Response:
    asked = await request.json()
    if request.headers.get("x-api-key") != "e2b_" + 40 * "0":
        return refused(401, "no such key")
    begin(asked["timeout"], name := uuid4().hex)
    if fails():
        return refused(500, "no capacity")
    made = {"templateID": asked["templateID"], "sandboxID": name, "clientID": "x", "envdVersion": "0.5.0"}
    return JSONResponse({**made, "envdAccessToken": "token", "domain": None}, 201)


@api.post("/sandboxes/{name}/timeout")
async def prolong(name: str, request: Request) -> Response:
    if name not in ends:
        return refused(404, "no such sandbox")
    live_for(name, (await request.json())["timeout"])
    return Response(status_code=204)


@api.delete("/sandboxes/{name}")
async def delete(name: str) -> Response:
    if fails():
        return refused(500, "try again")
    if name not in ends:
        return refused(404, "no such sandbox")
    end(name)
    return Response(status_code=204)


@api.get("/health")
async def health() -> Response:
    return Response(status_code=204)


@api.post("/files")
async def write(path: str = "") -> list[dict[str, Any]]:
    return [{"name": Path(path).name, "type": "file", "path": path}]


class Commands(Process):
    async def start(self, request: StartRequest, ctx: Any, /) -> AsyncIterator[StartResponse]:
        started, ended = ProcessEvent.StartEvent(pid=1), ProcessEvent.EndEvent(exited=True, status="exit status 0")
        yield StartResponse(event=ProcessEvent(event=Oneof("start", started)))
        yield StartResponse(event=ProcessEvent(event=Oneof("end", ended)))


api.mount("/", ProcessASGIApplication(Commands()))
serve(api)
