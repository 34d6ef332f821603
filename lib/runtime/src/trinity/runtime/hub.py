"""Limits for clients of a Hugging Face hub, which wait for ever for a server that sends a byte a second."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TypeVar

from trinity.runtime import waits
from trinity.runtime.errors import Unavailable

T = TypeVar("T")

STALL_SECONDS = 120.0
# This much within STALL_SECONDS is progress: bytes of files, or processor time, which unpacking takes.
_BYTES, _PROCESSOR_SECONDS = 2**20, 2.0
_LOOK_SECONDS = 1.0

# The files that transformers and vLLM load. Other weights are for other programs.
_FETCH = """
import sys
from huggingface_hub import snapshot_download
small = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]
folder = snapshot_download(sys.argv[1], allow_patterns=[*small, "*.safetensors"], ignore_patterns="original/*")
import pathlib
if not any(pathlib.Path(folder).glob("*.safetensors")):
    snapshot_download(sys.argv[1], allow_patterns="*.bin")
"""


def bounded(work: Callable[[], T], whom: str, what: str) -> T:
    """Returns the result of `work`, which runs in a thread, or raises its error.

    Raises Unavailable after STALL_SECONDS in which this process hardly computed. The thread then stays.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="hub").start()
    _watch(lambda: bool(wait_for([done], _LOOK_SECONDS).done), lambda: _share(time.process_time()), whom, what)
    return done.result()


def fetch_model(name: str, whom: str, folder: Path) -> None:
    """Downloads a model's files into `folder`, its place in the cache, in a child process.

    Raises Unavailable if the download stalls. Services that load the model report other errors.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _FETCH, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def has_ended() -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK_SECONDS)
        return child.poll() is not None

    def progress() -> float:
        sizes = 0
        for file in folder.glob("blobs/*"):
            with contextlib.suppress(OSError):
                sizes += file.stat().st_size
        return sizes / _BYTES

    try:
        _watch(has_ended, progress, whom, f"the files of {name}")
    finally:
        child.kill()
        child.wait()


def _share(processor_seconds: float) -> float:
    return processor_seconds / _PROCESSOR_SECONDS


def _watch(has_ended: Callable[[], bool], progress: Callable[[], float], whom: str, what: str) -> None:
    """Waits for the end. Raises Unavailable if progress grows by less than 1 within STALL_SECONDS."""
    limit = f"{STALL_SECONDS:g} s without progress"
    reached, since = progress(), time.monotonic()
    with waits.waiting(whom, f"{what}; gives up after {limit}"):
        while not has_ended():
            if (now := progress()) >= reached + 1:
                reached, since = now, time.monotonic()
            if time.monotonic() - since > STALL_SECONDS:
                raise Unavailable(f"{whom} sends no {what.removeprefix('the ')}: {limit}")
