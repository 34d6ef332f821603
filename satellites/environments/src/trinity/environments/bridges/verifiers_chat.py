"""The agent of verifiers' v1 interface that the bridge plays: a chat with the task's tools, in this process.

The harnesses of verifiers that chat (`null`, `bash`) install their program when it runs, which needs a network.
"""

import contextlib
import json
from typing import Any

import verifiers.v1 as v1
from openai import AsyncOpenAI, BadRequestError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

_TOO_LONG = "context_length_exceeded"


class ChatHarness(v1.Harness[v1.HarnessConfig]):
    """Asks the model until it replies without a call of a tool, or until its conversation is too long."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with contextlib.AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, clients = await connect_mcp({"mcpServers": servers}, stack)
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            model = await stack.enter_async_context(client)
            with contextlib.suppress(_ConversationTooLong):
                while calls := await _reply(model, ctx.model, messages, tools):
                    for call in calls:
                        answer = await _called(call["function"], dispatch, clients)
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        return v1.ProgramResult(0, "", "")


class _ConversationTooLong(Exception):
    """The run ends here and is scored as it stands."""


async def _reply(client: Any, model: str, messages: list[dict[str, Any]], tools: list[Any]) -> list[dict[str, Any]]:
    """Appends the model's reply to the messages. Returns its calls of tools."""
    try:
        given = await client.chat.completions.create(
            model=model, messages=messages, **({"tools": tools} if tools else {})
        )
    except BadRequestError as error:
        if _TOO_LONG in str(error.body):
            raise _ConversationTooLong from None
        raise
    said = given.choices[0].message
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in said.tool_calls or []
    ]
    messages.append({"role": "assistant", "content": said.content or "", **({"tool_calls": calls} if calls else {})})
    return calls


async def _called(function: dict[str, str], dispatch: dict[str, Any], clients: dict[str, Any]) -> Any:
    """Returns the result of a call, or says why it cannot be made."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    if function["name"] not in dispatch:
        return f"error: there is no tool {function['name']!r}; known: {', '.join(dispatch)}"
    return await call_mcp(clients, dispatch, function["name"], arguments)
