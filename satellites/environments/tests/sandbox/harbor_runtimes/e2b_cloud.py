"""E2B's API on this machine, for its own SDK: a server by the stubs of the package e2b.

    python e2b_cloud.py FOLDER FAILS

Prints its port. A file in FOLDER stands for each sandbox, and goes with it: by DELETE, or at the end of the time that
the client asked for. FAILS is the share of creations that answer 500 although the sandbox was made, and of deletions
that answer 500. No command runs: each ends at once, with code 0 and without output.
"""

import asyncio
import contextlib
import random
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvicorn
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from e2b.envd.process.process_pb import ProcessEvent, StartRequest, StartResponse
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from protobuf import Oneof

FOLDER, FAILS = Path(sys.argv[1]), float(sys.argv[2])
api, dice, ends = FastAPI(), random.Random(7), dict[str, asyncio.TimerHandle]()


def live_for(name: str, seconds: float) -> None:
    if name in ends:
        ends[name].cancel()
    ends[name] = asyncio.get_running_loop().call_later(seconds, end, name)


def end(name: str) -> None:
    ends.pop(name).cancel()
    (FOLDER / name).unlink()


def refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"code": status, "message": message}, status)


@api.post("/v2/sandboxes", status_code=201)
async def create(request: Request) -> Response:
    asked = await request.json()
    if request.headers.get("x-api-key") != "e2b_" + 40 * "0":
        return refused(401, "no such key")
    name = uuid4().hex
    (FOLDER / name).touch()
    live_for(name, asked["timeout"])
    if dice.random() < FAILS:
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
    if dice.random() < FAILS:
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
with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(api, log_level="error", timeout_keep_alive=600)).run([listener])
