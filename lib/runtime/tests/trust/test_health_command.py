"""`trinity-<service> health` asks the service with its own identity: exit code 0 for SERVING, else 1 and the reason."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.servers.certificates import tls_settings
from support.servers.service import ServiceProcess
from trinity.cluster.certs import certs

pytestmark = pytest.mark.core


def health(**settings: str) -> "subprocess.CompletedProcess[str]":
    given = {f"TRINITY_ENVIRONMENT_{key}": value for key, value in settings.items()}
    command = [sys.executable, "-m", "trinity.environment.main", "health"]
    return subprocess.run(command, env={**_PLAIN, **given}, capture_output=True, text=True, timeout=120)


_PLAIN = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}


@pytest.mark.timeout(300)
def test_a_service_whose_certificate_is_for_another_host_is_healthy(tmp_path: Path) -> None:
    """Behind 0.0.0.0 it is asked on the loopback, for which its certificate need not be."""
    certs.init(tmp_path / "identity")
    certs.issue("environment", name="far", host=["environment.example"], folder=tmp_path / "identity")
    own = tls_settings(tmp_path / "identity", "far")
    service = ServiceProcess("environment", tmp_path, **own)
    listen = f"0.0.0.0:{service.address.rpartition(':')[2]}"
    away = health(LISTEN=listen, **own)
    assert (away.returncode, "UNAVAILABLE" in away.stderr) == (1, True), away.stderr
    service.start(wait_seconds=0)
    try:
        deadline = time.monotonic() + 120
        while (done := health(LISTEN=listen, **own)).returncode and time.monotonic() < deadline:
            pass
        assert (done.returncode, done.stderr) == (0, "")
        assert health(LISTEN=service.address).returncode == 1  # it shows no identity
        assert "give it a port" in health(**own).stderr
    finally:
        service.kill()
