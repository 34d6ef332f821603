"""The sandboxes of a provider's API on this machine: `python <provider>_cloud.py FOLDER FAILS`, which prints its port.

A file in FOLDER stands for each sandbox, and goes with it: by a call, or at the end of the time that the client asked
for. FAILS is the share of creations that answer 500 although the sandbox was made, and of deletions that answer 500.
No command runs: each ends at once, with code 0 and without output.
"""

import asyncio
import contextlib
import os
import random
import socket
import sys
import time
from pathlib import Path

import uvicorn
from fastapi import FastAPI

_folder, _dice, ends = Path(sys.argv[1]), random.Random(7), dict[str, asyncio.TimerHandle]()


def begin(seconds: float, name: str) -> None:
    (_folder / name).touch()
    live_for(name, seconds)


def live_for(name: str, seconds: float) -> None:
    if name in ends:
        ends[name].cancel()
    os.utime(_folder / name, (0, time.time() + seconds))
    ends[name] = asyncio.get_running_loop().call_later(seconds, end, name)


def end(name: str) -> None:
    ends.pop(name).cancel()
    (_folder / name).unlink()


def fails() -> bool:
    return _dice.random() < float(sys.argv[2])


def serve(api: FastAPI) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(api, log_level="error", timeout_keep_alive=600)).run([listener])
