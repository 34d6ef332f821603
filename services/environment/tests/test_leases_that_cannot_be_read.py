"""A folder of leases that cannot be read ends no service: its scorers go on."""

import time
from pathlib import Path

import grpc
import pytest

from support.servers.service import ServiceProcess
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc

pytestmark = pytest.mark.core


def test_a_folder_of_leases_that_cannot_be_made_is_logged_and_the_service_goes_on(tmp_path: Path) -> None:
    service = ServiceProcess("environment", tmp_path, SANDBOX_LEASES="/proc/nowhere").start()
    try:
        end = time.monotonic() + 30
        while "sandbox.not_reaped" not in service.log_file.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        assert "sandbox.not_reaped" in service.log_file.read_text()
        with grpc.insecure_channel(service.address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            items = [pb.ScoreItem(response="42", truth="42")]
            assert stub.Score(pb.ScoreRequest(scorer="accuracy_reward", items=items), timeout=20).scores[0].reward == 1
    finally:
        assert service.stop() == 0
