"""An OpenAI client whose model is the policy of an episode.

Programs that drive a model themselves get this client. Where they ask it, they wait; the question is the episode's next
observation, and the policy's reply is the completion. Nothing is sent anywhere.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI, BadRequestError

# A phrase by which OpenAI's clients know that a conversation is longer than the model takes.
_TOO_LONG = "the conversation exceeds the model's context length"


@dataclass
class Question:
    """A request for a completion: what the model is shown. `messages` of a chat, or one prompt as text."""

    messages: list[dict[str, Any]] | str
    tools: list[dict[str, Any]]
    answer: "asyncio.Future[dict[str, Any]]" = field(repr=False)


class AskedPolicy(AsyncOpenAI):
    """Turns every request for a completion into a Question."""

    def __init__(self) -> None:
        super().__init__(api_key="none", base_url="http://policy.invalid", max_retries=0)
        self.questions: asyncio.Queue[Question] = asyncio.Queue()

    async def post(self, path: str, *, cast_to: Any, body: Any = None, **options: Any) -> Any:
        """Every resource of the client sends its requests through here."""
        if options.get("stream") or path not in ("/chat/completions", "/completions"):
            raise NotImplementedError(f"the policy answers whole chats and completions, not {path}")
        shown = body["messages"] if path == "/chat/completions" else body["prompt"]
        question = Question(shown, list(body.get("tools") or []), asyncio.get_running_loop().create_future())
        self.questions.put_nowait(question)
        answer = await question.answer
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": "tool_calls" if answer.get("tool_calls") else "stop",
        }
        chat = path == "/chat/completions"
        choice |= {"message": {"role": "assistant", **answer}} if chat else {"text": answer["content"]}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        kind = "chat.completion" if chat else "text_completion"
        given = {"id": "policy", "object": kind, "created": 0, "model": "policy", "choices": [choice], "usage": usage}
        # Some callers parse the HTTP response themselves.
        return cast_to.model_validate(given) if hasattr(cast_to, "model_validate") else cast_to(200, json=given)


class Asking:
    """A program in an event loop of its own, which runs only until it asks the next question or is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, policy: AskedPolicy, work: Coroutine[Any, Any, Any]) -> None:
        self._loop = loop
        self._policy = policy
        self._task = loop.create_task(work)

    def next(self) -> Question | None:
        """The next question; None when the program is over."""
        return self._loop.run_until_complete(self._next())

    async def _next(self) -> Question | None:
        asked = asyncio.create_task(self._policy.questions.get())
        await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None

    def result(self) -> Any:
        """What the program returned. Raises what it raised."""
        return self._task.result()

    def refuse(self, question: Question) -> None:
        """Say that the conversation is too long for the model."""
        response: Any = SimpleNamespace(text=_TOO_LONG, status_code=400, headers={}, request=None)
        question.answer.set_exception(BadRequestError(_TOO_LONG, response=response, body=None))

    def end(self) -> None:
        """Cancel the program, and let it clean up."""
        self._task.cancel()
        self._loop.run_until_complete(asyncio.wait({self._task}))
        if not self._task.cancelled():
            self._task.exception()  # raised already, or no longer awaited
