"""An ordinary AgentScope agent with a tool, without a line about training.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/agents/programs/sums_agentscope.py 35+8
"""

import asyncio
import os
import sys

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.tool import FunctionTool, Toolkit


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


async def answer(question: str, turns: int = 3) -> str:
    """Returns the text of the agent's reply."""
    key = OpenAICredential(api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])
    model = OpenAIChatModel(key, "policy", stream=False)
    tools = Toolkit([FunctionTool(add, is_read_only=True)])
    no_time = InjectionConfig(
        inject_runtime_state=False
    )  # the name is in the prompt, which must be short for a small policy
    agent = Agent("sums", "", model, tools, react_config=ReActConfig(max_iters=turns), injection_config=no_time)
    reply = await agent.reply(UserMsg("user", question))
    return reply.get_text_content() or ""


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[1])))
