"""Auxiliary models in Trinity-RFT's form: OpenAI's clients, as far as judges and graders use them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from trinity.common.refusals import NotMapped

# Of one auxiliary model: (messages, options) -> texts, in the explorer's loop.
Ask = Callable[[Sequence[dict[str, Any]], dict[str, Any]], Coroutine[Any, Any, list[str]]]


class AuxiliaryModel:
    """`chat.completions.create(model=..., messages=..., ...)` has choices, each with message.content.

    `asynchronous`: create is awaited. There are no tokens: nothing of an auxiliary model is trained.
    """

    def __init__(self, name: str, ask: Ask, loop: asyncio.AbstractEventLoop, asynchronous: bool) -> None:
        self.model_path = name
        self._ask, self._loop, self._asynchronous = ask, loop, asynchronous
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotMapped(f"an auxiliary model has no {name!r}, but chat.completions.create", "auxiliary-models")

    def get_openai_client(self) -> "AuxiliaryModel":
        return AuxiliaryModel(self.model_path, self._ask, self._loop, asynchronous=False)

    def get_openai_async_client(self) -> "AuxiliaryModel":
        return AuxiliaryModel(self.model_path, self._ask, self._loop, asynchronous=True)

    def _create(self, *, messages: Sequence[dict[str, Any]], model: str = "", **options: Any) -> Any:
        """Returns a reply in OpenAI's form, or an awaitable of one. `model` may be any name."""
        asked = asyncio.run_coroutine_threadsafe(self._ask(messages, options), self._loop)
        return _awaited(asked) if self._asynchronous else _reply(asked.result())


async def _awaited(asked: Any) -> Any:
    return _reply(await asyncio.wrap_future(asked))


def _reply(texts: Sequence[str]) -> Any:
    choices = [
        SimpleNamespace(index=index, message=SimpleNamespace(role="assistant", content=text), finish_reason="stop")
        for index, text in enumerate(texts)
    ]
    return SimpleNamespace(choices=choices)
