"""As much of Kubernetes' API as agent-sandbox needs, for Kubernetes' own client (held.py). Bubblewrap makes the pods.

A command's input has no end by the protocol v4.channel.k8s.io: this server reads as many bytes as the command says.
"""

import asyncio
import json
import re
import time
from datetime import datetime
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from held import begin, end, ends, fails, serve

from trinity.environments.sandbox.limits import Limits
from trinity.environments.sandbox.sandbox import BubblewrapSandbox

SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/tasks/sandboxes"

api, objects, pods, policies = FastAPI(), dict[str, Any](), dict[str, BubblewrapSandbox](), list[Any]()


def refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"kind": "Status", "status": "Failure", "code": status, "message": message}, status)


@api.post("/apis/networking.k8s.io/v1/namespaces/tasks/networkpolicies", status_code=201)
async def cut(request: Request) -> Any:
    if policies:
        return refused(409, "AlreadyExists")
    policies.append(await request.json())
    return policies[0]


@api.post(SANDBOXES, status_code=201)
async def create(request: Request) -> Any:
    if request.headers.get("authorization") != "Bearer key":
        return refused(401, "no such key")
    asked = await request.json()
    spec, name = asked["spec"], asked["metadata"]["name"]
    (label,) = policies[0]["spec"]["podSelector"]["matchLabels"].items()
    assert label in spec["podTemplate"]["metadata"]["labels"].items() and spec["shutdownPolicy"] == "Delete"
    begin(datetime.fromisoformat(spec["shutdownTime"]).timestamp() - time.time(), name)
    objects[name] = asked
    return refused(500, "no capacity") if fails() else asked


@api.get(SANDBOXES + "/{name}")
async def found(name: str) -> Any:
    if name not in ends:
        return refused(404, "NotFound")
    told = dict(objects[name])
    ready = {"type": "Ready", "status": "True", "reason": "DependenciesReady"}
    if container(name)["image"] == "nowhere":
        ready |= {"status": "False", "reason": "DependenciesNotReady", "message": "Pod exists with phase: Pending"}
    objects[name]["status"] = {"conditions": [ready]}
    return told


def container(name: str) -> Any:
    return objects[name]["spec"]["podTemplate"]["spec"]["containers"][0]


@api.get("/api/v1/namespaces/tasks/pods/{name}")
async def pod(name: str) -> Any:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "nowhere: not found"}}
    state = {"name": "task", "image": "nowhere", "imageID": "", "ready": False, "restartCount": 0, "state": waiting}
    return {"kind": "Pod", "status": {"phase": "Pending", "containerStatuses": [state]}}


@api.delete(SANDBOXES + "/{name}")
async def delete(name: str) -> Any:
    if fails():
        return refused(500, "try again")
    if name not in ends:
        return refused(404, "NotFound")
    end(name)
    if name in pods:
        pods.pop(name).close()
    return {"kind": "Status", "status": "Success"}


@api.websocket("/api/v1/namespaces/tasks/pods/{name}/exec")
async def execute(name: str, channel: WebSocket) -> None:
    line, given = channel.query_params.getlist("command"), b""
    if "unauthorized" in line[2]:
        await channel.close()  # which refuses the handshake with 403
        return
    await channel.accept("v4.channel.k8s.io")
    if "unplug" in line[2]:
        await channel.close()
        return
    wanted = re.search(r"^head -c (\d+) ", line[2])
    while wanted and len(given) < int(wanted[1]):
        given += (await channel.receive_bytes()).removeprefix(b"\0")
    if name not in pods:
        pods[name] = BubblewrapSandbox(Limits(ttl_seconds=120, output_bytes=1 << 20))
        begun = ["bash", "-c", '"$@" > /dev/null 2>&1 &', "bash", *container(name)["command"]]
        await asyncio.to_thread(pods[name].run, begun)
    done = await asyncio.to_thread(pods[name].run, line, stdin=given)
    await channel.send_bytes(b"\1" + done.text.encode())
    code = {"causes": [{"reason": "ExitCode", "message": str(done.code)}]}
    failure = {"status": "Failure", "reason": "NonZeroExitCode", "details": code}
    await channel.send_bytes(b"\3" + json.dumps(failure if done.code else {"status": "Success"}).encode())
    await channel.close()


serve(api)
