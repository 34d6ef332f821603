"""The bridge to OpenEnv plays a server of the package openenv, which runs in a separate virtual environment."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fakes.environments.playing import play
from support.servers import openenv_server
from trinity.environments.bridges.openenv import OpenEnv
from trinity.environments.replies import write
from trinity.runtime.errors import Full

VENV = Path(os.environ.get("OPENENV_VENV", Path(__file__).parents[4] / "build/hubs/openenv"))
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (VENV / "bin/openenv").exists(), reason="openenv is not installed: make hubs"),
]
PROGRAM = Path(openenv_server.__file__).with_name("openenv_program.py")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with subprocess.Popen([str(VENV / "bin/python"), str(PROGRAM), str(port), "1"]) as process:
        end = time.monotonic() + 100
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_an_episode_is_played_with_the_schemas_field_and_rewards(url: str) -> None:
    args = {"url": url, "observation_field": "text"}
    played = play(OpenEnv(), [write("1"), write("fly"), write("3")], {"seed": 3}, args)
    texts = [observation.info["observation"] for observation in played.observations]
    assert texts[:2] == ["Guess a digit.", "no"]
    assert "no such move" in texts[2]
    assert (texts[3], played.reward, played.won) == ("yes", 1, True)


def test_a_server_without_a_free_session_is_full(url: str) -> None:
    first = OpenEnv()
    end = time.monotonic() + 20
    while True:  # the session of the test before may still be closing
        try:
            first.reset({"seed": 3}, {"url": url}, 0)
            break
        except Full:
            assert time.monotonic() < end
    try:
        with pytest.raises(Full):
            play(OpenEnv(), [], {"seed": 3}, {"url": url})
    finally:
        first.close()
