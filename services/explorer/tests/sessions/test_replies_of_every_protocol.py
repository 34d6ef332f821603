"""A reply is the same in every protocol, whole or streamed, and as the history of the next call has it."""

import json
from typing import Any

import pytest

from trinity.explorer.sessions.replies import READERS, Events
from trinity.explorer.sessions.samples import Said

pytestmark = pytest.mark.core

ARGUMENTS = '{"b": 2, "a": 1}'
HEAD, REST = ARGUMENTS[:5], ARGUMENTS[5:]
REPLY = Said("assistant", "Let me add.", (("add", '{"a": 1, "b": 2}'),))

_CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
_ITEMS = [
    {"type": "reasoning", "content": []},
    {"type": "message", "content": [{"type": "output_text", "text": "Let me add."}]},
    {"type": "function_call", "call_id": "x", "name": "add", "arguments": ARGUMENTS},
]
_BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "Hm."},
    {"type": "text", "text": "Let me add."},
    {"type": "tool_use", "id": "x", "name": "add", "input": {"b": 2, "a": 1}},
]
WHOLE: dict[str, Any] = {
    "/v1/chat/completions": {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Let me add.", "tool_calls": [_CALL]}}]
    },
    "/v1/responses": {"output": _ITEMS},
    "/v1/messages": {"content": _BLOCKS},
}


def _chunk(delta: dict[str, Any], finished: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finished}]}


STREAMS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        _chunk({"role": "assistant", "content": ""}),
        _chunk({"content": "Let me "}),
        _chunk({"content": "add."}),
        _chunk({"tool_calls": [{"index": 0, "id": "x", "function": {"name": "add", "arguments": ARGUMENTS[:5]}}]}),
        _chunk({"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[5:]}}]}),
        _chunk({}, "tool_calls"),
        {"choices": [], "usage": {}},
    ],
    "/v1/responses": [
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_text.delta", "delta": "Let me add."},
        {"type": "response.completed", "response": {"output": _ITEMS}},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Let me "}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "add."}},
        {"type": "content_block_start", "index": 2, "content_block": {**_BLOCKS[2], "input": {}}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": HEAD}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": REST}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("protocol", READERS)
def test_whole(protocol: str) -> None:
    assert list(READERS[protocol]().whole(WHOLE[protocol])) == [(0, REPLY)]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("protocol", READERS)
def test_streamed_in_parts_of_any_size(protocol: str, size: int) -> None:
    sent = "".join(f"event: e\ndata: {json.dumps(data)}\n\n" for data in STREAMS[protocol]) + "data: [DONE]\n\n"
    events, reader, found = Events(), READERS[protocol](), []
    for at in range(0, len(sent), size):
        for data in events.feed(sent[at : at + size].encode()):
            found += list(reader.event(data))
    assert found == [(0, REPLY)]
