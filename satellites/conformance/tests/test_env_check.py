"""`trinity env check`: a table, and exit code 1 for a provider that breaks the contract."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.fakes.environments.environment_provider import ScriptedProvider, serving
from support.fakes.environments.odd_environments import OddInLoop
from support.servers.service import ServiceProcess
from trinity import sdk
from trinity.cli.main import app
from trinity.conformance import Sample, Verdict, suite
from trinity.plugins import satellites
from trinity.runtime.process import free_port
from trinity.runtime.trust.tokens import make_tokens

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


@pytest.mark.parametrize("task", ["{", "[1]", "[" * 3000])
async def test_a_task_that_is_no_object_is_refused(task: str) -> None:
    code, _, err = await trinity("127.0.0.1:1", "--task", task)
    assert code == 2
    assert "--task: is no JSON" in err


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "http://127.0.0.1/", "127.0.0.1:99999"])
def test_an_address_without_port_is_refused(address: str) -> None:
    done = CliRunner().invoke(app, ["env", "check", address])
    assert done.exit_code == 1
    assert f"ADDRESS: is {address!r}, must be host:port" in done.output


async def test_where_nothing_listens_the_check_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_CALL_SECONDS", 1.0)
    [result] = [result async for result in suite.check_provider(f"127.0.0.1:{free_port()}", Sample())]
    assert result.verdict is Verdict.FAILED
    assert "no answer in 1 s; start the provider" in result.detail


def test_the_distribution_of_the_checks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(satellites, "find", lambda hook: None)
    done = CliRunner().invoke(app, ["env", "check", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "the checks are in trinity-conformance, which is not installed" in done.output


@pytest.mark.timeout(300)
async def test_a_runs_own_service_is_checked_with_its_identity(tmp_path: Path) -> None:
    """Without it the check fails, and it is not shown where it is not asked for."""
    make_tokens(tmp_path / "identity")
    service = ServiceProcess("environment", tmp_path, IDENTITY_FOLDER=str(tmp_path / "identity"))
    await asyncio.to_thread(service.start)
    try:
        given = (service.address, "--name", "arithmetic", "--task", '{"question": "6 x 7?", "answer": "42"}')
        code, out, _ = await trinity(*given)
        assert (code, "UNAUTHENTICATED" in out) == (1, True)
        code, out, err = await trinity(*given, "--identity", str(tmp_path / "identity"))
        assert "ok       provider" in out and "UNAUTHENTICATED" not in out, err
    finally:
        service.kill()
    code, _, err = await trinity("127.0.0.1:1", "--identity", str(tmp_path))
    assert (code, "has neither tokens/explorer" in err) == (2, True)
