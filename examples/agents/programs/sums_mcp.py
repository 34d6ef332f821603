"""An ordinary agent on OpenAI's Agents SDK with the tools of an MCP server, without a line about training.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/agents/programs/sums_mcp.py 35+8
"""

import asyncio
import sys
from pathlib import Path

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio

SERVER = Path(__file__).with_name("sums_server.py")


async def answer(question: str, turns: int = 3) -> str:
    """Returns the reply without a call; "" if `turns` pass without it, or for a call of an unknown tool."""
    async with MCPServerStdio({"command": sys.executable, "args": [str(SERVER)]}) as sums:
        agent = Agent("sums", mcp_servers=[sums], model="policy")
        try:
            done = await Runner.run(agent, question, max_turns=turns)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return ""
        return str(done.final_output)


if __name__ == "__main__":
    set_tracing_disabled(True)
    print(asyncio.run(answer(sys.argv[1])))
