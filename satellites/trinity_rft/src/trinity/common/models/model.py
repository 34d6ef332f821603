"""Trinity-RFT's model of a workflow: the policy, or an auxiliary model, which the explorer's loop answers.

Each workflow has a thread, and an event loop if it is asynchronous, so that it may block.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from trinity.common.experience import Experience
from trinity.common.refusals import NotMapped

if TYPE_CHECKING:
    import openai

_Result = TypeVar("_Result")


class Sampler(Protocol):
    """Answers in the explorer's loop. `model_path`: the place of the model; an OpenAI client may use it or any other
    name."""

    model_path: str

    async def chat(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[Experience]:
        """`n` replies to a conversation."""

    async def generate(self, prompts: Sequence[str], options: dict[str, Any]) -> list[Experience]:
        """`n` replies to each text."""

    async def logprobs(self, tokens: Sequence[int]) -> Any:
        """Log-probabilities of tokens, float32 [L - 1], at temperature 1."""

    async def converted(self, messages: Sequence[dict[str, Any]], schemas: Any) -> Experience:
        """A conversation that chat() made, as one experience of the tokens that were sampled."""

    async def history(self, clear: bool) -> list[Experience]:
        """All replies so far, to chat, generate and the OpenAI clients."""

    async def endpoint(self) -> tuple[str, str]:
        """The base_url and key of a session of this workflow's."""

    def client(self, endpoint: tuple[str, str], asynchronous: bool) -> Any:
        """Returns OpenAI's client of the session, for the calling thread or loop."""


class ModelWrapper:
    """`chat`, `generate` and what the OpenAI clients ask are recorded: extract_experience_from_history has them."""

    enable_history = True

    def __init__(self, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        self._sampler, self._loop = sampler, loop
        self._closed = False
        self._answering: set[Future[Any]] = set()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotMapped(f"the model of a workflow has no {name!r}", "the-model")

    def close(self) -> None:
        """Answer nothing any more, so that a thread whose attempt is over ends at its call."""
        self._closed = True
        for answer in list(self._answering):
            answer.cancel()

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> list[Experience]:
        """`n` (1) replies to a conversation, each an experience; options are sampling parameters."""
        return self._wait(self._sampler.chat(messages, options))

    async def chat_async(self, messages: list[dict[str, Any]], **options: Any) -> list[Experience]:
        return await self._awaited(self._sampler.chat(messages, options))

    def generate(self, prompts: list[str], **options: Any) -> list[Experience]:
        """`n` (1) replies to each text, without a chat template."""
        return self._wait(self._sampler.generate(prompts, options))

    async def generate_async(self, prompts: list[str], **options: Any) -> list[Experience]:
        return await self._awaited(self._sampler.generate(prompts, options))

    def logprobs(self, tokens: Sequence[int]) -> Any:
        """Tensor float32 [L - 1] of the policy's log-probabilities of each token after the first, at temperature 1."""
        return self._wait(self._sampler.logprobs(tokens))

    async def logprobs_async(self, tokens: Sequence[int]) -> Any:
        return await self._awaited(self._sampler.logprobs(tokens))

    def convert_messages_to_experience(
        self, messages: list[dict[str, Any]], tools: Any = None, temperature: float | None = None
    ) -> Experience:
        """A conversation whose replies all came from chat(), as one experience with the tokens that were sampled.

        `tools`: those of the calls of chat. `temperature` has no effect: log-probabilities are those of the sampling.
        Raises NotMapped for any other conversation: text is not tokenized again.
        """
        return self._wait(self._sampler.converted(messages, tools))

    async def convert_messages_to_experience_async(
        self, messages: list[dict[str, Any]], tools: Any = None, temperature: float | None = None
    ) -> Experience:
        return await self._awaited(self._sampler.converted(messages, tools))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """An experience for each reply so far: all before it is its prompt. `clear_history`: begin a new history."""
        return self._wait(self._sampler.history(clear_history))

    @property
    def model_path(self) -> str:
        return self._sampler.model_path

    @property
    def model_name(self) -> str:
        return self._sampler.model_path

    @property
    def base_url(self) -> str:
        """The address of this workflow's session, which agents in other processes may call too."""
        return self._wait(self._sampler.endpoint())[0]

    @property
    def api_key(self) -> str:
        return self._wait(self._sampler.endpoint())[1]

    def get_openai_client(self) -> "openai.OpenAI":
        """Returns OpenAI's client of this workflow's session, with `model_path`."""
        client: openai.OpenAI = self._sampler.client(self._wait(self._sampler.endpoint()), asynchronous=False)
        return client

    def get_openai_async_client(self) -> "openai.AsyncOpenAI":
        client: openai.AsyncOpenAI = self._sampler.client(self._wait(self._sampler.endpoint()), asynchronous=True)
        return client

    def _wait(self, asked: Coroutine[Any, Any, _Result]) -> _Result:
        return self._asked(asked).result()

    async def _awaited(self, asked: Coroutine[Any, Any, _Result]) -> _Result:
        return await asyncio.wrap_future(self._asked(asked))

    def _asked(self, asked: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
        if self._closed:
            asked.close()
            raise RuntimeError("the attempt is over: the model answers no more")
        answer = asyncio.run_coroutine_threadsafe(asked, self._loop)
        self._answering.add(answer)
        answer.add_done_callback(self._answering.discard)
        return answer
