"""WebShop behind HTTP, by the protocol of AgentGym's server: one environment number per visit."""

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request

from trinity.environments.allowed import check_address, opener
from trinity.environments.webshop.backend import Page
from trinity.runtime.errors import InvalidInput, TimedOut, Unavailable

MAX_RESPONSE_BYTES = 4 * 1024 * 1024


class HttpShop:
    """A visit on a server. Raises Unavailable, TimedOut, or InvalidInput for an answer that is none."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidInput("args.url", f"is {url!r}, must begin with http:// or https://")
        check_address(url, "args.url")
        self._url = url.rstrip("/")
        self._timeout = timeout_seconds
        self._opener = opener()
        self._number: int | None = None

    def reset(self, session: int) -> Page:
        number = self._call("create", {})
        self._number = number if type(number) is int else int(_field(number, "env_idx", int))
        self._call("reset", {"env_idx": self._number, "session_id": session})
        self._instruction = str(self._get("instruction_text"))
        return self._page(str(self._get("observation")))

    def step(self, action: str) -> tuple[Page, float, bool]:
        answer = self._call("step", {"env_idx": self._number, "action": action})
        reward, done = _field(answer, "reward", (int, float)), _field(answer, "done", bool)
        return self._page(str(_field(answer, "state", str)), done), float(reward), done

    def close(self) -> None:
        if self._number is not None:
            number, self._number = self._number, None
            self._call("close", {"env_idx": number})

    def _page(self, text: str, done: bool = False) -> Page:
        if done:
            return Page(text, False, (), self._instruction)
        available = self._get("available_actions")
        clickables = tuple(str(c).lower() for c in _field(available, "clickables", list))
        return Page(text, bool(_field(available, "has_search_bar", bool)), clickables, self._instruction)

    def _get(self, path: str) -> Any:
        return self._send(Request(f"{self._url}/{path}?{urlencode({'env_idx': self._number})}"))

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._send(Request(f"{self._url}/{path}", json.dumps(body).encode(), headers, method="POST"))

    def _send(self, request: Request) -> Any:
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                text = response.read(MAX_RESPONSE_BYTES + 1)
        except TimeoutError:
            raise TimedOut(f"webshop: {request.full_url} took longer than {self._timeout:g} s") from None
        except HTTPError as error:
            raise Unavailable(f"webshop: {request.full_url} answered {error.code} {error.reason}") from None
        except (URLError, OSError, HTTPException) as error:
            raise Unavailable(f"webshop: {request.full_url} does not answer: {error}") from None
        if len(text) > MAX_RESPONSE_BYTES:
            raise InvalidInput("webshop", f"{request.full_url} answered more than {MAX_RESPONSE_BYTES} bytes")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidInput("webshop", f"{request.full_url} did not answer JSON: {text[:80]!r}") from None


def _field(answer: Any, name: str, kind: Any) -> Any:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise InvalidInput("webshop", f"the server's answer has {name} = {value!r}")
    return value
