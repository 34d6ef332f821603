"""`trinity ui` as a process: the address it prints, how it ends, and what it refuses."""

import http.cookiejar
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support.fakes.pages.recorded_run import make_job

pytestmark = pytest.mark.core


def trinity_ui(*options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trinity.cli.main", "ui", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_prints_its_address_serves_and_ends_well(tmp_path: Path) -> None:
    process = trinity_ui("--job", str(make_job(tmp_path / "job")))
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        page = browser.open(address, timeout=30).read().decode()
        assert "<h1>tests/job" in page
        assert "key=" not in page
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_and_a_folder_without_a_run_are_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        out, err = trinity_ui("--job", str(make_job(tmp_path / "job")), "--port", port).communicate(timeout=60)
    assert out == ""
    assert err.startswith(f"trinity: --port {port}: Address already in use")
    process = trinity_ui("--job", str(tmp_path / "empty"))
    assert process.communicate(timeout=60)[1] == f"trinity: no run has begun in {tmp_path / 'empty'}\n"
    assert process.returncode == 1
