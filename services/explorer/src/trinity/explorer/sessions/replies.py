"""Reads replies from the endpoint's answers, whole or streamed, in each of its protocols."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from trinity.explorer.sessions.samples import Said


class Reader(Protocol):
    """Reads one response. Both methods yield (index, reply) of each complete reply."""

    def whole(self, body: dict[str, Any]) -> Iterable[tuple[int, Said]]:
        """Read a response that is not streamed."""

    def event(self, data: dict[str, Any]) -> Iterable[tuple[int, Said]]:
        """Read the next event of a stream."""


class ChatReader:
    """Chat completions."""

    def __init__(self) -> None:
        self._content: dict[int, str] = {}
        self._calls: dict[int, dict[int, dict[str, str]]] = {}

    def whole(self, body: dict[str, Any]) -> Iterator[tuple[int, Said]]:
        for choice in body.get("choices") or ():
            yield choice["index"], Said.of(choice["message"])

    def event(self, data: dict[str, Any]) -> Iterator[tuple[int, Said]]:
        for choice in data.get("choices") or ():
            index, delta = choice["index"], choice.get("delta") or {}
            self._content[index] = self._content.get(index, "") + (delta.get("content") or "")
            calls = self._calls.setdefault(index, {})
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                function = part.get("function") or {}
                for name in call:
                    call[name] += function.get(name) or ""
            if choice.get("finish_reason"):
                functions = [{"function": calls[at]} for at in sorted(calls)]
                message = {"role": "assistant", "content": self._content[index], "tool_calls": functions}
                yield index, Said.of(message)


class ResponsesReader:
    """Responses: one reply, whose text and calls are items."""

    def whole(self, body: dict[str, Any]) -> Iterator[tuple[int, Said]]:
        items = body.get("output") or ()
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        calls = [{"function": item} for item in items if item["type"] == "function_call"]
        text = "".join(part.get("text") or "" for part in parts)
        yield 0, Said.of({"role": "assistant", "content": text, "tool_calls": calls})

    def event(self, data: dict[str, Any]) -> Iterator[tuple[int, Said]]:
        if data.get("type") in ("response.completed", "response.incomplete"):
            yield from self.whole(data["response"])


class MessagesReader:
    """Anthropic's messages: one reply, whose text and calls are blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, str] = {}

    def whole(self, body: dict[str, Any]) -> Iterator[tuple[int, Said]]:
        blocks = body.get("content") or ()
        calls = [{"function": {**b, "arguments": b["input"]}} for b in blocks if b["type"] == "tool_use"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        yield 0, Said.of({"role": "assistant", "content": text, "tool_calls": calls})

    def event(self, data: dict[str, Any]) -> Iterator[tuple[int, Said]]:
        kind, index, delta = data.get("type"), data.get("index", 0), data.get("delta") or {}
        if kind == "content_block_start":
            self._blocks[index] = dict(data["content_block"])
        elif delta.get("type") == "text_delta":
            self._blocks[index]["text"] += delta["text"]
        elif delta.get("type") == "input_json_delta":
            self._inputs[index] = self._inputs.get(index, "") + delta["partial_json"]
        elif kind == "message_delta":
            for at, text in self._inputs.items():
                self._blocks[at]["input"] = text
            yield from self.whole({"content": [self._blocks[at] for at in sorted(self._blocks)]})


READERS: dict[str, type[Reader]] = {
    "/v1/chat/completions": ChatReader,
    "/v1/responses": ResponsesReader,
    "/v1/messages": MessagesReader,
}


class Events:
    """Parses server-sent events from parts that may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> Iterator[dict[str, Any]]:
        *whole, self._rest = (self._rest + part).split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield json.loads(data)
