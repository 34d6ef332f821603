"""Trains the programs in build/agents/venv, with a process for each session."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from pathlib import Path

from trinity.explorer.workflows.agents import AgentWorkflow
from trinity.plugins import workflow

HERE = Path(__file__).resolve().parent
PROGRAMS = Path(os.environ.get("AGENT_PROGRAMS", HERE.parent / "programs"))
BIN = Path(os.environ.get("AGENT_BIN", HERE.parents[2] / "build/agents/venv/bin"))


async def run(agent, *command, **variables) -> str:
    """Returns a program's output. Raises RuntimeError if the program fails, which fails the attempt."""
    found = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environment = {**found, "PATH": f"{BIN}:/usr/bin:/bin", **agent.environment, **variables}
    pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    program = await asyncio.create_subprocess_exec(*map(str, command), env=environment, start_new_session=True, **pipes)
    try:
        said, errors = await program.communicate()
    finally:  # also if the attempt ends before the program
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    if program.returncode:
        raise RuntimeError(f"{command[0]} ended with {program.returncode}: {errors.decode(errors='replace')[-1000:]}")
    return said.decode(errors="replace")


@workflow("mcp_agent")
class McpAgent(AgentWorkflow):
    """sums_mcp.py: OpenAI's Agents SDK, with the tools of an MCP server."""

    async def play(self, agent):
        return await self.score(await run(agent, BIN / "python", PROGRAMS / "sums_mcp.py", self.column("prompt_key")))


@workflow("scope_agent")
class ScopeAgent(AgentWorkflow):
    """sums_agentscope.py: an agent of AgentScope."""

    async def play(self, agent):
        program = PROGRAMS / "sums_agentscope.py"
        return await self.score(await run(agent, BIN / "python", program, self.column("prompt_key")))


@workflow("verifiers_agent")
class VerifiersAgent(AgentWorkflow):
    """sums_verifiers.py: the loop of verifiers, whose rubric gives the reward."""

    async def play(self, agent):
        row = self.column("prompt_key"), self.column("response_key").split("####")[-1].strip()
        return float((await run(agent, BIN / "python", PROGRAMS / "sums_verifiers.py", *row)).split()[-1])


@workflow("mini_agent")
class MiniAgent(AgentWorkflow):
    """mini-swe-agent, a coding agent in a shell, which submits its answer."""

    async def play(self, agent):
        with tempfile.TemporaryDirectory(prefix="mini-") as folder:
            trajectory = Path(folder, "trajectory.json")
            options = ["-c", PROGRAMS / "mini.yaml", "-t", self.column("prompt_key"), "-y", "-o", trajectory]
            settings = {"MSWEA_CONFIGURED": "true", "MSWEA_GLOBAL_CONFIG_DIR": folder, "MSWEA_SILENT_STARTUP": "1"}
            settings["MSWEA_BUBBLEWRAP_EXECUTABLE"] = str(BIN / "bwrap")
            settings["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is downloaded
            await run(agent, BIN / "mini", *options, "--exit-immediately", **settings, TMPDIR=folder)
            return await self.score(json.loads(trajectory.read_text())["info"]["submission"])
