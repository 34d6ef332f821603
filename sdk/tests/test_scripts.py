"""A provider as people write one: a script of its own, with nothing but the SDK."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk import InvalidInput, serving

pytestmark = pytest.mark.core

SCRIPT = '''
import os
from trinity.sdk import Environment, Observation, serve


class WhoAmI(Environment):
    """Says which process it is."""

    isolation = "process"
    processes = 1

    def reset(self, task, args, seed):
        return Observation(f"{os.getpid()} {task['name']} {args} {seed}")

    def step(self, action):
        return Observation(action[::-1], done=True)


def loud(item, args):
    return {"shouts": item.response.isupper(), "length": 0.5}


if __name__ == "__main__":
    serve(WhoAmI, address="127.0.0.1:0", scorers={"loud": loud})
'''


async def test_an_address_that_is_taken_is_named() -> None:
    async with serving() as address:
        with pytest.raises(OSError, match=rf"address '{address}' cannot be listened on: .*; choose another port"):
            async with serving(address=address):
                pass


async def test_a_script_serves_its_own_class_in_worker_processes(tmp_path: Path) -> None:
    script = tmp_path / "who_am_i.py"
    script.write_text(SCRIPT)
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        address = (await process.stdout.readline()).decode().split()[-1]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            (described,) = (await stub.Describe(pb.DescribeRequest())).environments
            assert (described.name, described.summary) == ("who_am_i", "Says which process it is.")
            assert described.max_parallel_episodes == 1
            call = stub.Episode()
            reset = pb.Reset(environment="who_am_i", task_json='{"name": "Ada"}', args_json='{"a": 1}', seed=5)
            await call.write(pb.EpisodeRequest(reset=reset))
            pid, said = (await call.read()).observation.split(" ", 1)
            assert said == "Ada {'a': 1} 5"
            assert int(pid) not in (process.pid, os.getpid())
            await call.write(pb.EpisodeRequest(action=pb.Action(text="abc", turn=1)))
            assert (await call.read()).observation == "cba"
            request = pb.ScoreRequest(scorer="loud", items=[pb.ScoreItem(response="HEY")])
            (score,) = (await stub.Score(request)).scores
            assert (score.reward, dict(score.metrics)) == (1.5, {"shouts": 1.0, "length": 0.5})
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


async def test_a_client_that_says_nothing_for_long_loses_its_episode() -> None:
    from support.fakes.environments.odd_environments import OddInLoop
    from trinity.sdk.arena import Arena
    from trinity.sdk.servicer import ProviderServicer

    arena = Arena([OddInLoop])
    server = grpc.aio.server()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(ProviderServicer(arena, 0.3), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = environment_pb2_grpc.EnvironmentServiceStub(channel).Episode()
        await call.write(pb.EpisodeRequest(reset=pb.Reset(environment="odd")))
        await call.read()
        begin = time.monotonic()
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "sent nothing for 0.3 s" in await call.details()
        assert time.monotonic() - begin < 5
    assert arena.open == 0
    await server.stop(grace=0)


def test_the_sdk_needs_grpc_and_protobuf_alone() -> None:
    code = (
        "import sys, json, trinity.sdk, trinity.sdk.provider.client\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
        "print([name for name in sys.modules if name.startswith('trinity.')"
        " and not name.startswith(('trinity.sdk', 'trinity.api'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    packages, others = done.stdout.splitlines()
    assert others == "[]"
    heavy = {"torch", "numpy", "pydantic", "structlog", "opentelemetry", "typer", "nats"}
    assert not heavy & set(json.loads(packages))


async def test_two_environments_of_one_name_are_refused() -> None:
    from support.fakes.environments.odd_environments import Odd, OddInLoop

    with pytest.raises(ValueError, match="two environments are named 'odd'"):
        async with serving(Odd, OddInLoop):
            pass


def test_invalid_input_names_its_field() -> None:
    assert str(InvalidInput("task.nums", "is missing")) == "task.nums: is missing"
