"""`trinity env check`: a table, and exit code 1 for a provider that breaks the contract."""

import asyncio
import json
import subprocess
import sys

import pytest

from support.environment_provider import ScriptedProvider, serving
from support.odd_environments import OddInLoop
from trinity import sdk

pytestmark = pytest.mark.core


async def trinity(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "trinity.cli.main", "env", "check", *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


async def test_a_sound_provider_gets_a_table_and_exit_code_0() -> None:
    async with sdk.serving(OddInLoop) as address:
        code, out, err = await trinity(address, "--max-steps", "3")
    assert code == 0, err
    assert "ok       odd" in out
    assert "FAILED" not in out
    assert out.splitlines()[-1].startswith(f"{address}: ")


async def test_a_lying_provider_gets_exit_code_1() -> None:
    async with serving(ScriptedProvider("nan")) as liar:
        code, out, _ = await trinity(liar.address, "--json")
    assert code == 1
    failed = {one["check"]: one["detail"] for one in json.loads(out) if one["verdict"] == "FAILED"}
    assert "reward is nan" in failed["an episode is played, one sound answer per action"]


@pytest.mark.parametrize("task", ["{", "[1]"])
async def test_a_task_that_is_no_object_is_refused(task: str) -> None:
    code, _, err = await trinity("127.0.0.1:1", "--task", task)
    assert code == 2
    assert "--task: is no JSON" in err
