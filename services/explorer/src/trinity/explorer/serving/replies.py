"""Reads the replies in what the endpoint sends, whole or streamed, for each of its protocols."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from trinity.explorer.serving.samples import Said


class Reader(Protocol):
    """Of one response. Both give (index, reply) of each reply that is complete."""

    def whole(self, body: dict[str, Any]) -> Iterable[tuple[int, Said]]:
        """Of a response that is not streamed."""

    def event(self, data: dict[str, Any]) -> Iterable[tuple[int, Said]]:
        """Of the next event of a stream."""


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


READERS: dict[str, type[Reader]] = {"/v1/chat/completions": ChatReader}


class Events:
    """The data of server-sent events, from bytes that may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> Iterator[dict[str, Any]]:
        *whole, self._rest = (self._rest + part).split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield json.loads(data)
