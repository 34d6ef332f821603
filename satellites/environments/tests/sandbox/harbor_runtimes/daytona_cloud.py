"""Daytona's API, for its own SDK (held.py). A minute of a time to live lasts 20 s here: the SDK asks for whole ones."""

import json
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from held import begin, end, ends, fails, live_for, serve

MINUTE_SECONDS = 20.0
QUOTAS = {"target": "here", "cpu": 1, "gpu": 0, "memory": 1, "disk": 1, "kvm": False, "networkBlockAll": True}

api, labels = FastAPI(), dict[str, dict[str, str]]()


def refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"statusCode": status, "message": message}, status)


def told(name: str, request: Request) -> dict[str, Any]:
    whose = {"organizationId": "x", "name": name, "user": "root", "env": {}, "public": False, "labels": labels[name]}
    return {"id": name, **whose, **QUOTAS, "state": "started", "toolboxProxyUrl": f"{request.base_url}toolbox"}


@api.post("/sandbox")
async def create(request: Request) -> Any:
    asked = await request.json()
    if request.headers.get("authorization") != "Bearer key":
        return refused(401, "no such key")
    begin(asked["ttlMinutes"] * MINUTE_SECONDS, name := uuid4().hex)
    labels[name] = asked["labels"]
    return refused(500, "no runner") if fails() else told(name, request)


@api.get("/sandbox")
async def found(request: Request) -> dict[str, Any]:
    wanted = json.loads(request.query_params["labels"]).items()
    return {"items": [told(one, request) for one in ends if wanted <= labels[one].items()], "nextCursor": None}


@api.post("/sandbox/{name}/ttl/{minutes}")
async def prolong(name: str, minutes: int, request: Request) -> Any:
    if name not in ends:
        return refused(404, "no such sandbox")
    live_for(name, minutes * MINUTE_SECONDS)
    return told(name, request)


@api.post("/sandbox/{name}/last-activity")
async def active(name: str) -> None: ...


@api.delete("/sandbox/{name}")
async def delete(name: str, request: Request) -> Any:
    if fails():
        return refused(500, "try again")
    if name not in ends:
        return refused(404, "no such sandbox")
    end(name)
    return {**told(name, request), "state": "destroyed"}


@api.post("/toolbox/{name}/files/bulk-upload")
async def write(name: str) -> None: ...


@api.post("/toolbox/{name}/process/session", status_code=201)
async def session(name: str) -> None: ...


@api.post("/toolbox/{name}/process/session/{of}/exec")
async def execute(name: str, of: str) -> dict[str, Any]:
    return {"cmdId": "command"}


@api.get("/toolbox/{name}/process/session/{of}/command/{command}")
async def ended(name: str, of: str, command: str) -> dict[str, Any]:
    return {"id": command, "command": command, "exitCode": 0}


@api.get("/toolbox/{name}/process/session/{of}/command/{command}/logs")
async def output(name: str, of: str, command: str) -> dict[str, str]:
    return {"output": "", "stdout": "", "stderr": ""}


serve(api)
