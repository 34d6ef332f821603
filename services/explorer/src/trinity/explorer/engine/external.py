"""Auxiliary models that another program serves by OpenAI's API: a judge, a fixed opponent, a teacher on vLLM."""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import openai

from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.chat import Message
from trinity.explorer.types import Taught
from trinity.runtime.errors import InvalidInput, Unavailable

_NEUTRAL = SamplingParams()
# vLLM extends OpenAI's parameters by these. Other servers refuse or ignore them.
_FURTHER = ("top_k", "min_tokens", "repetition_penalty", "ignore_eos", "seed")
_Made = TypeVar("_Made")


class ExternalJudge:
    """An external model that writes text. `place`: its key in the YAML."""

    step = None  # as of a Judge: its weights are not those of a run

    def __init__(self, config: AuxiliaryModelConfig, place: str) -> None:
        given = config.external_model
        assert given is not None
        self._place, self._model, self._url = place, config.model_path, given.base_url
        self._variable, self._seconds = given.api_key_env, given.timeout_seconds
        self._further: dict[str, Any] = {}
        if config.enable_thinking is not None:
            self._further["chat_template_kwargs"] = {"enable_thinking": config.enable_thinking}

    async def chat(self, messages: Sequence[Message], sampling: SamplingParams) -> list[str]:
        """Sample n texts. Raises InvalidInput if the endpoint refuses, Unavailable if it does not answer."""
        given = {name: getattr(sampling, name) for name in _FURTHER}
        further = {name: value for name, value in given.items() if value != getattr(_NEUTRAL, name)}
        count = (
            sampling.n if sampling.temperature > 0 else 1
        )  # greedy replies are equal, and vLLM refuses to repeat them
        asked: dict[str, Any] = {"messages": list(messages)} | ({"stop": list(sampling.stop)} if sampling.stop else {})
        made = await self._ask(
            self._client.chat.completions.create(
                model=self._model,
                n=count,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                extra_body={**self._further, **further},
                **asked,
            )
        )
        if len(made.choices) != count:
            raise InvalidInput(self._place, f"{self._url} gives {len(made.choices)} of {count} replies (n)")
        return [choice.message.content or "" for choice in made.choices] * (sampling.n // count)

    async def teach(self, token_ids: Sequence[int], prompt_length: int, top: int = 0) -> Taught:
        """Log-probabilities of the tokens after the prompt, and `top` tokens in each place. Raises as `chat` does.

        Requires vLLM's server: OpenAI's API gives no log-probabilities of tokens that it did not sample. The server
        gives at most its --max-logprobs.
        """
        tokens = list(map(int, token_ids))
        made = await self._ask(
            self._client.completions.create(
                model=self._model, prompt=tokens, max_tokens=1, temperature=1.0, extra_body={"prompt_logprobs": top}
            )
        )
        found = (made.choices[0].model_extra or {}).get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(tokens):
            raise InvalidInput(self._place, f"{self._url} gives no prompt_logprobs; a teacher needs vLLM's server")
        places = [{int(token): one["logprob"] for token, one in at.items()} for at in found[prompt_length:]]
        if min(map(len, places), default=top) < top:
            raise InvalidInput(self._place, f"{self._url} gives fewer prompt_logprobs than the {top} it is asked for")
        return Taught.of(tokens[prompt_length:], places, top)

    async def check(self) -> None:
        """Checks nothing: while the endpoint is away, attempts fail and are repeated."""

    async def reach(self) -> None:
        """Ask the endpoint for its models. Raises InvalidInput, Unavailable."""
        names = [model.id for model in (await self._ask(self._client.models.list())).data]
        if self._model not in names:
            known = ", ".join(names[:8]) or "none"
            raise InvalidInput(f"{self._place}.model_path", f"{self._model!r} is not served at {self._url}; {known}")

    def close(self) -> None:
        """Closes nothing: connections end with the process."""

    @cached_property
    def _client(self) -> openai.AsyncOpenAI:
        """Raises InvalidInput if the key's environment variable is not set, or a proxy of the shell is unusable."""
        key = os.environ.get(self._variable, "") if self._variable else "none"
        if not key:
            raise InvalidInput(f"{self._place}.external_model.api_key_env", f"{self._variable} is not set")
        try:
            return openai.AsyncOpenAI(base_url=self._url, api_key=key, timeout=self._seconds)
        except Exception as error:  # of any type, as the library chooses
            what = f"the shell's proxies (ALL_PROXY, HTTPS_PROXY, HTTP_PROXY) are unusable: {error}; unset them"
            raise InvalidInput(f"{self._place}.external_model.base_url", what) from None

    async def _ask(self, call: Awaitable[_Made]) -> _Made:
        """Await a call, with the client's retries. Errors are mapped by kind and do not repeat the request."""
        place = f"{self._place}.external_model"
        try:
            async with asyncio.timeout(self._seconds):
                return await call
        except (TimeoutError, openai.APITimeoutError):
            raise Unavailable(f"{place}: {self._url} did not answer within {self._seconds:g} s") from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise Unavailable(f"{place}.base_url: {self._url} is not reachable: {cause}") from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            what = f"the key in {self._variable}" if self._variable else "a call without a key"
            raise InvalidInput(f"{place}.api_key_env", f"{self._url} refuses {what} ({error.status_code})") from None
        except openai.APIStatusError as error:
            if error.status_code in (408, 429) or error.status_code >= 500:
                raise Unavailable(f"{place}: {self._url} answers {error.status_code}") from None
            said = error.body.get("message") if isinstance(error.body, dict) else None
            text = f"{self._url} answers {error.status_code}" + (f": {said!s:.300}" if said else "")
            raise InvalidInput(place, text) from None
