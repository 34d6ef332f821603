"""A prompt that vLLM shortens (`truncation: auto` of /v1/responses) is recorded as the engine gets it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trinity.data.experience import SamplingParams, VersionSpan
from trinity.explorer.sessions.recording import RecordingRenderer
from trinity.explorer.sessions.samples import Said
from trinity.explorer.sessions.session import CALL, Call, Session
from trinity.explorer.types import Completion

pytestmark = pytest.mark.core

HISTORY = [("user", "1+1"), ("assistant", "2"), ("user", "2+2")]


class Renderer:
    """Renders a token for each character, and keeps the last `longest` of them."""

    async def render_messages_async(self, messages: list[Any], _: Any) -> Any:
        return messages, {"prompt": "|".join(message["content"] for message in messages)}

    async def render_cmpl_async(self, prompts: list[Any], longest: int) -> Any:
        return [{"prompt_token_ids": prompt["prompt_token_ids"][-longest:]} for prompt in prompts]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=lambda text, add_special_tokens: [ord(character) for character in text])


@pytest.mark.parametrize(("longest", "continues"), [(100, True), (5, False)])
async def test_the_recorded_prompt_is_the_engines(longest: int, continues: bool) -> None:
    session = Session("agent", b"", SamplingParams())
    asked, said = [ord(character) for character in "1+1|"], np.array([ord("2")], np.int32)
    completion = Completion(said, np.zeros(1, np.float32), (VersionSpan(0, 0, 1),), "stop")
    first = session.tree.add(session.tree.place([asked], []), completion, Said("assistant", "2"))
    call = Call(session)
    CALL.set(call)
    llm, options = SimpleNamespace(renderer=Renderer()), SimpleNamespace(images=None)
    engine: Any = SimpleNamespace(llm=llm, options=options)
    messages = [{"role": role, "content": content} for role, content in HISTORY]
    _, (prompt,) = await RecordingRenderer(engine, False).render_chat_async([messages], None, longest)
    assert call.place is not None and call.place.tokens == prompt["prompt_token_ids"]
    assert (call.place.parent is first) == continues
    assert "".join(map(chr, prompt["prompt_token_ids"])) == "1+1|2|2+2"[-longest:]
