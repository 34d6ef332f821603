"""Questions that are answered with the tools of an MCP server.

The operator of the environment service configures the servers, never a task, because starting one runs a program. They
are in the file that $MCP_SERVERS_FILE names: {"mcpServers": {name: {"command", "args", "env"}}}, as for other MCP
clients.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.extras import needs, require
from trinity.environments.game import ToolGame, Turn, TurnRules
from trinity.environments.maths import question_and_truth
from trinity.environments.replies import Reply, between, thought
from trinity.environments.scorers.answers import reference_answer, same_answer
from trinity.runtime.errors import Conflict, InvalidInput, TimedOut, Unavailable
from trinity.sdk.environment import Description

SERVERS_VARIABLE = "MCP_SERVERS_FILE"
MAX_RESULT_CHARACTERS = 20_000
START_SECONDS = 30.0
_CONNECTION_CLOSED = -32000  # mcp.types.CONNECTION_CLOSED


@needs("mcp", "mcp", "mcp")
class McpTools(ToolGame):
    """A question, tools to answer it with, one answer. Reward 1 for a right answer, else 0.

    A row is {"question", "answer"}. `server`: a name in the file of $MCP_SERVERS_FILE; `timeout_seconds` (30) of one
    call. A reply holds <tool_call>{"name", "arguments"}</tool_call>, or <answer>...</answer>, which ends the episode.
    A tool that fails says so in its result. Metrics: tool_calls, tool_errors.
    """

    description = Description(
        "mcp", "A question and the tools of an MCP server.", step_timeout_seconds=120, reset_timeout_seconds=60
    )
    isolation = "thread"
    defaults = TurnRules(max_steps=10)

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.goal, self._truth = question_and_truth(task)
        command = server_command(args.text("server"))
        self._timeout = args.number("timeout_seconds", 30.0, low=0.1, high=100)
        self._session = self.held.enter_context(contextlib.closing(ToolSession(command)))
        self.tools = self._session.tools
        return (
            f"{self.goal}\n\nYou may use these tools:\n{json.dumps(self.tools, ensure_ascii=False)}\n"
            'Call one with <tool_call>{"name": "...", "arguments": {...}}</tool_call> and wait for its result. '
            "When you know the answer, reply with <answer>...</answer>."
        )

    def read(self, reply: str) -> Reply:
        if len(reply) > self.rules.max_reply_characters:
            return super().read(reply)
        rest = reply.rpartition("</think>")[2]
        for tag in ("answer", "tool_call"):
            found = between(rest, f"<{tag}>", f"</{tag}>")
            if found is not None and found.strip():
                return Reply(f"{tag} {found.strip()}", thought(reply))
        return Reply(problem="there is neither a <tool_call> nor an <answer> in the reply")

    def refusal(self, action: str) -> str:
        kind, _, text = action.partition(" ")
        return "" if kind == "answer" else self.parse_call(text)[2]

    def play(self, action: str) -> Turn:
        kind, _, text = action.partition(" ")
        if kind == "answer":
            right = same_answer(text, reference_answer(self._truth))
            return Turn("Correct." if right else "Incorrect.", float(right), True, right, self.tool_metrics())
        name, arguments, _ = self.parse_call(text)
        return self.called(*self._session.call(name, arguments, self._timeout))


class ToolSession:
    """A running server and its tools. Its connection lives in one task of one thread, as the library demands."""

    def __init__(self, command: dict[str, Any]) -> None:
        require("mcp", "mcp")
        self.tools: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._serving = self._loop.create_task(self._serve(command))
        self._thread = threading.Thread(target=self._run, daemon=True, name="mcp")
        self._thread.start()
        try:
            self._session = self._ready.result(START_SECONDS)
        except Exception as error:
            self.close()
            said = f"no answer in {START_SECONDS:g} s" if isinstance(error, TimeoutError) else _error_text(error)
            raise Unavailable(f"mcp: the server {command['command']!r} does not start: {said}") from None

    def call(self, name: str, arguments: dict[str, Any], seconds: float) -> tuple[str, bool]:
        """The result's text, and whether the tool failed. Raises TimedOut, or Unavailable if the server is gone."""
        running = asyncio.run_coroutine_threadsafe(self._session.call_tool(name, arguments), self._loop)
        try:
            result = running.result(seconds)
        except TimeoutError:
            running.cancel()
            raise TimedOut(f"mcp: the tool {name} took longer than {seconds:g} s") from None
        except Exception as error:
            if not self._thread.is_alive() or _is_connection_lost(error):
                raise Unavailable(f"mcp: the server is gone: {_error_text(error)}") from None
            return _error_text(error), True
        failed = getattr(result, "is_error", getattr(result, "isError", False))
        texts = [text for block in result.content if isinstance(text := getattr(block, "text", None), str)]
        return "\n".join(texts)[:MAX_RESULT_CHARACTERS], bool(failed)

    def close(self) -> None:
        """Ends the server, even if it never answered. The library kills a server that does not exit."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self, command: dict[str, Any]) -> None:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        with open(os.devnull, "w") as errors:  # noqa: ASYNC230 - the loop has nothing else to do
            async with (
                stdio_client(StdioServerParameters(**command), errlog=errors) as (read, write),
                ClientSession(read, write) as session,
            ):
                await session.initialize()
                self.tools = [_described(tool) for tool in (await session.list_tools()).tools]
                self._ready.set_result(session)
                await asyncio.Event().wait()  # until close


def _described(tool: Any) -> dict[str, Any]:
    schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)  # library 2 and 1
    return {"name": tool.name, "description": tool.description or "", "parameters": schema}


def _is_connection_lost(error: Exception) -> bool:
    """Tells if the library reports a lost server, in contrast to an error that a server sent."""
    import anyio

    if isinstance(error, (anyio.ClosedResourceError, anyio.BrokenResourceError)):
        return True
    told = getattr(error, "error", None)  # of both versions of the library
    return (getattr(told, "code", None), getattr(told, "message", None)) == (_CONNECTION_CLOSED, "Connection closed")


def _error_text(error: BaseException) -> str:
    """The text of an error, or of the first in a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:500]


def server_command(name: str) -> dict[str, Any]:
    """Returns the command of a server. Raises Conflict without a file of servers, InvalidInput for an unknown name."""
    path = os.environ.get(SERVERS_VARIABLE, "")
    if not path:
        raise Conflict(f"mcp: set {SERVERS_VARIABLE} of the environment service to a JSON file with mcpServers")
    try:
        servers = json.loads(Path(path).read_text())["mcpServers"]
        known = {str(key): dict(value) for key, value in servers.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Conflict(f"mcp: {SERVERS_VARIABLE}={path} is no JSON file with mcpServers: {error}") from None
    if name not in known:
        raise InvalidInput("args.server", f"is {name!r}, must be one of {', '.join(sorted(known))}")
    command = known[name]
    if not isinstance(command.get("command"), str):
        raise Conflict(f"mcp: {path}: the server {name} has no command")
    return {key: command[key] for key in ("command", "args", "env", "cwd") if key in command}
