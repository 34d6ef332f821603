"""An ordinary agent on OpenAI's SDK, without a line about training.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/agents/plugins/sums_agent.py 35+8
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def add(arguments: str) -> str:
    """Returns the tool's answer to a call."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {type(error).__name__}"


async def answer(client: AsyncOpenAI, question: str, turns: int = 3) -> str:
    """Returns the first reply without a call, or the last reply."""
    messages: list = [{"role": "user", "content": question}]
    for _ in range(turns):
        done = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        reply = done.choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            result = add(call.function.arguments) if call.function.name == "add" else "Error: no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return reply.content or ""


if __name__ == "__main__":
    print(asyncio.run(answer(AsyncOpenAI(), sys.argv[1])))
