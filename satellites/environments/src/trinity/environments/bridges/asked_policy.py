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

from trinity.runtime.errors import InvalidInput

# A phrase by which OpenAI's clients know that a conversation is longer than the model takes.
_TOO_LONG = "the conversation exceeds the model's context length"


_MAX_CHOICES = 16


@dataclass
class Question:
    """A request for a completion: what the model is shown. `messages` of a chat, or one prompt as text.

    `sampling`: those of temperature, max_tokens and stop (a list) that the request has.
    """

    messages: list[dict[str, Any]] | str
    tools: list[dict[str, Any]]
    sampling: dict[str, Any]
    answer: "asyncio.Future[dict[str, Any]]" = field(repr=False)


class AskedPolicy(AsyncOpenAI):
    """Turns every request for a completion into a Question, or into `n` of them, one after the other."""

    def __init__(self) -> None:
        super().__init__(api_key="none", base_url="http://policy.invalid", max_retries=0)
        self.questions: asyncio.Queue[Question] = asyncio.Queue()

    async def post(self, path: str, *, cast_to: Any, body: Any = None, **options: Any) -> Any:
        """Every resource of the client sends its requests through here."""
        if options.get("stream") or path not in ("/chat/completions", "/completions"):
            raise NotImplementedError(f"the policy answers whole chats and completions, not {path}")
        shown = body["messages"] if path == "/chat/completions" else body["prompt"]
        sampling, chat = _sampling(body), path == "/chat/completions"
        choices = []
        for index in range(_number(body.get("n"), "n", 1, _MAX_CHOICES, 1)):
            answer = asyncio.get_running_loop().create_future()
            question = Question(shown, list(body.get("tools") or []), sampling, answer)
            self.questions.put_nowait(question)
            choices.append(_choice(index, await question.answer, chat))
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        kind = "chat.completion" if chat else "text_completion"
        given = {"id": "policy", "object": kind, "created": 0, "model": "policy", "choices": choices, "usage": usage}
        # Some callers parse the HTTP response themselves.
        return cast_to.model_validate(given) if hasattr(cast_to, "model_validate") else cast_to(200, json=given)


def _choice(index: int, answer: dict[str, Any], chat: bool) -> dict[str, Any]:
    reason = "tool_calls" if answer.get("tool_calls") else "stop"
    said = {"message": {"role": "assistant", **answer}} if chat else {"text": answer["content"]}
    return {"index": index, "logprobs": None, "finish_reason": reason, **said}


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidInput for a value that no engine takes."""
    found: dict[str, Any] = {}
    if (temperature := body.get("temperature")) is not None:
        if type(temperature) not in (int, float) or not 0 <= temperature <= 100:
            raise InvalidInput("temperature", f"is {temperature!r}, must be a number from 0 to 100")
        found["temperature"] = float(temperature)
    given = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    if limits := [_number(value, "max_tokens", 1, 2**31 - 1, 1) for value in given if value is not None]:
        found["max_tokens"] = min(limits)
    if stop := body.get("stop"):
        found["stop"] = [stop] if isinstance(stop, str) else stop
        if not isinstance(found["stop"], list) or not all(isinstance(one, str) and one for one in found["stop"]):
            raise InvalidInput("stop", f"is {stop!r}, must be a text or a list of texts")
    return found


def _number(value: Any, name: str, low: int, high: int, default: int) -> int:
    value = default if value is None else value
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(name, f"is {value!r}, must be an integer from {low} to {high}")
    return value


class Asking:
    """A program in a separate event loop, which runs only until the program's next question or its end."""

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
        """Returns the program's result. Raises the exception that ended the program."""
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
