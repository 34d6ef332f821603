"""The pages over HTTP. They change only dead letters, pins and notes, with --writes, and run nothing that a run wrote.

Text reaches the page escaped (Jinja2) and without control characters (`visible`). The policy in every answer lets the
browser load scripts and styles only from here, none of them inline. Requests without the key that `trinity ui` printed
get 403: other users of the machine reach the same port. A form carries a token besides the cookie, which a browser also
sends from pages of other ports.
"""

import asyncio
import contextlib
import hmac
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.convertors import Convertor, StringConvertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trinity.config import make_plan
from trinity.reading.errors import RunError
from trinity.reading.render import age_text, error_text, size_text, visible, when
from trinity.runtime.settings import LOOPBACK
from trinity.study.view import versions
from trinity.ui import (
    compare,
    curves,
    history,
    journeys,
    letters,
    lineage,
    pictures,
    samples,
    screens,
    tenants,
    texts,
    tokens,
    waste,
)
from trinity.ui.places import Places
from trinity.ui.source import UNREADABLE, Source

_HERE = Path(__file__).parent
_LANGUAGE_KEY, _LANGUAGE_COOKIE, _YEAR_SECONDS = "lang", "trinity_ui_language", 365 * 86400
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LONGEST_FORM = 65_536
_Show = Callable[..., Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Pages:
    """Serves the pages of the runs of `places`."""

    places: Places
    templates: dict[str, Environment]  # by language
    token: str = ""  # of the forms

    async def runs(self, request: Request) -> Response:
        return self._page(request, "runs.html", await screens.runs(self.places))

    async def tenants(self, request: Request) -> Response:
        return self._page(request, "tenants.html", await tenants.used(self.places))

    async def lineage(self, request: Request) -> Response:
        return self._page(request, "lineage.html", await lineage.tree(self.places))

    def of_runs(self) -> list[Route]:
        """Routes of the screens: path below the run's, template, and the function that collects the values."""
        one, sample = self._screen, "/step/{step:number}/sample/{index:number}"
        return [
            one("", "overview.html", screens.whole_overview, lambda request: request.path_params["key"]),
            one("/now", "overview_live.html", screens.overview),  # the middle, which a live run's page asks for again
            one("/dead", "dead.html", letters.dead),
            one("/dead/{ordinal:number}", "letter.html", letters.letter),
            one("/versions", "versions.html", history.versions, _axis),
            one("/versions/{number:number}", "version.html", history.version),
            one("/versions/{number:number}/provenance", "provenance.html", lineage.provenance),
            one("/fleet", "fleet.html", history.fleet, _axis),
            one("/waste", "waste.html", waste.waste, lambda request: request.query_params.get("price", "")),
            one("/step/{step:number}", "step.html", screens.step),
            one("/step/{step:number}/group/{ordinal:number}", "group.html", screens.group),
            one("/step/{step:number}/lanes", "lanes.html", journeys.lanes),
            one(sample, "sample.html", screens.sample, _colouring),
            one(sample + "/trace", "trace.html", journeys.trace),
            one(sample + "/tokens/{first:number}", "tokens.html", screens.sample_tokens, _colouring),
            one("/task/{ordinal:number}", "task.html", journeys.task),
            one("/compare", "comparable.html", partial(compare.others, self.places)),
            one("/compare/{other}", "compare.html", partial(compare.overlay, self.places)),
            one(
                "/overlay",
                "compare.html",
                partial(compare.overlay, self.places),
                lambda it: it.query_params.getlist("run"),
            ),
            one("/search", "search.html", samples.search, lambda request: request.query_params.get("text", "")),
            one("/log", "log.html", screens.log, _level),
            one("/log/now", "log_now.html", screens.log, _level),
            one("/config", "config.html", partial(screens.configuration, self.places)),
        ]

    def _screen(self, path: str, template: str, show: _Show, query: Callable[[Request], Any] | None = None) -> Route:
        """`show` gets the run, the parameters of the path in order, and the values of `query` from the address."""

        async def answer(request: Request) -> Response:
            key, *given = request.path_params.values()
            found = self.places.get(key)
            if found is None:
                return self._problem(request, f"no run {key} is known here")
            here = request.scope["path"].removeprefix(f"/run/{key}").strip("/").partition("/")[0]
            publishes = not make_plan(found.job_stage.config).offline  # versions of weights
            known = {"key": key, "title": found.title, "publishes": publishes, "by": _colouring(request), "here": here}
            try:
                shown = await show(found, *given, *([query(request)] if query else []))
            except UNREADABLE as error:
                return self._page(request, "problem.html", known | {"problem": str(error)}, 404)
            return self._page(request, template, known | shown)

        return Route("/run/{key}" + path, answer, methods=["GET"])

    def _problem(self, request: Request, problem: object, status: int = 404) -> Response:
        return self._page(request, "problem.html", {"problem": str(problem)}, status)

    async def go(self, request: Request) -> Response:
        """Redirects the box of the header to the typed step."""
        wanted = request.query_params.get("step", "")
        step = f"/step/{wanted}" if wanted.isascii() and wanted.isdigit() else ""
        return RedirectResponse(f"/run/{quote(request.path_params['key'], safe='~')}{step}", 303)

    async def worst(self, request: Request) -> Response:
        """Redirects to the worst sample of the newest step, or shows why there is none."""
        key = request.path_params["key"]
        try:
            step, place = await samples.newest_worst(self._source(key))
        except UNREADABLE as error:
            return self._problem(request, error)
        return RedirectResponse(f"/run/{quote(key, safe='~')}/step/{step}/sample/{place}", 303)

    async def notes(self, request: Request) -> Response:
        """Keeps the notes of a form; then redirects to the run's page."""
        key, status = request.path_params["key"], 400
        try:
            fields = await _form(request, self.token)
            status = 404
            await asyncio.to_thread(self._source(key).keep_notes, fields.get("notes", ""))
        except UNREADABLE as error:
            return self._problem(request, error, status)
        return RedirectResponse(f"/run/{quote(key, safe='~')}", 303)

    async def change(self, request: Request) -> Response:
        """Feeds tasks of dead letters again, or drops the letters; then redirects to the page of the rest."""
        key, status = request.path_params["key"], 400
        try:
            ordinals = letters.ordinals_of(await _form(request, self.token))
            status = 404
            await letters.change(self._source(key), request.path_params["what"], ordinals)
        except UNREADABLE as error:
            return self._problem(request, error, status)
        return RedirectResponse(f"/run/{quote(key, safe='~')}/dead", 303)

    async def pin(self, request: Request) -> Response:
        """Pins or unpins a version; then redirects to the page of versions."""
        key, status = request.path_params["key"], 400
        try:
            await _form(request, self.token)
            status = 404
            await self._source(key).pin(request.path_params["number"], request.path_params["what"] == "pin")
        except UNREADABLE as error:
            return self._problem(request, error, status)
        return RedirectResponse(f"/run/{quote(key, safe='~')}/versions", 303)

    def _source(self, key: str) -> Source:
        """Raises RunError for an unknown run."""
        if (source := self.places.get(key)) is None:
            raise RunError(f"no run {key} is known here")
        return source

    async def curves(self, request: Request) -> Response:
        """Serves points of metrics as JSON, or 404 with the reason."""
        query = request.query_params
        try:
            source = self._source(request.path_params["key"])
            bounds = {name: int(query[name]) for name in ("first", "last") if name in query}
            return JSONResponse(await asyncio.to_thread(curves.collect, source.curves, query.getlist("name"), **bounds))
        except UNREADABLE as error:
            return JSONResponse({"problem": str(error)}, 404)

    async def picture(self, request: Request) -> Response:
        """Serves the file of a sample's picture, or 404 with the reason."""
        source = self.places.get(request.path_params["key"])
        try:
            image, kind = pictures.read(source.folder if source else None, request.path_params["name"])
        except UNREADABLE as error:
            return self._problem(request, error)
        return Response(image, media_type=kind)

    def _page(self, request: Request, template: str, values: dict[str, Any], status: int = 200) -> Response:
        """Renders the page in the language of the switch, of an earlier choice, or of the browser."""
        chosen = request.query_params.get(_LANGUAGE_KEY, "")
        accepted = request.headers.get("accept-language", "")
        language = texts.language(chosen, request.cookies.get(_LANGUAGE_COOKIE, ""), accepted)
        text = self.templates[language].get_template(template).render(values | texts.functions(language))
        answer = HTMLResponse(text, status)
        if chosen == language:
            answer.set_cookie(_LANGUAGE_COOKIE, language, max_age=_YEAR_SECONDS, httponly=True, samesite="strict")
        return answer

    async def missing(self, request: Request, error: Exception) -> Response:
        return self._problem(request, "there is no such page")

    async def failed(self, request: Request, error: Exception) -> Response:
        """Shows an unexpected error on the page; the service continues."""
        return self._problem(request, f"{type(error).__name__}: {error}", 500)


def make_app(places: Places, key: str, cookie: str = "trinity_ui", writes: bool = False) -> Starlette:
    """Returns the application. `key` must be in the first address as ?key=; `cookie` holds it from then on.

    writes: dead letters and versions have buttons, which act as the operator of the run.
    """
    token = secrets.token_urlsafe(16) if writes else ""
    pages = Pages(places, {one: _environment(token, one) for one in texts.LANGUAGES}, token)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await places.close()

    run = "/run/{key}"
    get = partial(Route, methods=["GET"])
    post = partial(Route, methods=["POST"])
    changes = [
        post(run + "/notes", pages.notes),
        post(run + "/dead/{what:change}", pages.change),
        post(run + "/versions/{number:number}/{what:pin}", pages.pin),
    ]
    return Starlette(
        routes=[
            get("/", pages.runs),
            get("/lineage", pages.lineage),
            get("/tenants", pages.tenants),
            get(f"{run}/go", pages.go),
            get(run + "/picture/{name}", pages.picture),
            get(run + "/curves", pages.curves),
            get(run + "/worst", pages.worst),
            *pages.of_runs(),
            *(changes if writes else []),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ],
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=sorted(LOOPBACK), www_redirect=False),
            Middleware(_Key, key=key, cookie=cookie),
            Middleware(_Look, places=places),
        ],
        exception_handlers={404: pages.missing, 500: pages.failed},
        lifespan=lifespan,
    )


class _Number(Convertor[int]):
    """A step, ordinal or version in a path that fits 64 bits."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


class _Change(StringConvertor):
    """The action of a form on dead letters."""

    regex = "retry|drop"


class _Pin(StringConvertor):
    """The action of a form on a version."""

    regex = "pin|unpin"


register_url_convertor("number", _Number())
register_url_convertor("pin", _Pin())
register_url_convertor("change", _Change())


async def _form(request: Request, token: str) -> dict[str, str]:
    """Returns the fields of a form.

    Raises RunError unless it is complete and comes from a page of this process, or if it is too long.
    """
    found = b""
    try:
        async for part in request.stream():
            found += part
            if len(found) > _LONGEST_FORM:
                raise RunError(f"the form has more than {_LONGEST_FORM} bytes")
    except ClientDisconnect:
        raise RunError("the browser left before the form was complete") from None
    try:
        parsed = parse_qs(found.decode("ascii", "replace"), max_num_fields=8)
    except ValueError:
        parsed = {}
    fields = {name: values[0] for name, values in parsed.items()}
    if not token or not hmac.compare_digest(fields.get("token", "").encode(), token.encode()):
        raise RunError("the form is of no page of this process; load the page again")
    return fields


def _colouring(request: Request) -> str:
    wanted = request.query_params.get("by", "")
    return wanted if wanted in tokens.COLOURINGS else tokens.COLOURINGS[0]


def _axis(request: Request) -> str:
    return request.query_params.get("axis", "")


def _level(request: Request) -> str:
    return request.query_params.get("level", "")


def _environment(token: str, language: str) -> Environment:
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        extensions=[] if language == texts.ENGLISH else [texts.ChinesePunctuation],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["token"] = token
    found.filters |= {
        "versions": versions,
        "when": when,
        "age": age_text,
        "since": _since,
        "size": size_text,
        "error": error_text,
        "number": _number,
    }
    return found


def _shown(value: Any) -> Any:
    """Removes control characters, except newlines and tabs, from every value that a template writes."""
    if value is None:
        return "-"
    return value if isinstance(value, (Markup, int, float)) else visible(str(value), layout=True)


def _since(seconds: float) -> str:
    """Returns the age of a Unix time."""
    return age_text(time.time() - seconds)


def _number(value: Any) -> str:
    """Returns a number in readable digits."""
    if not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class _Headers:
    """Adds _HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *given]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _Look:
    """Lets `places` look where its run lives before each answer."""

    def __init__(self, app: ASGIApp, places: Places) -> None:
        self._app, self._places = app, places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._places.look()
        await self._app(scope, receive, send)


class _Key:
    """Admits requests with the key in the address, which redirects to one without it, or in the cookie."""

    def __init__(self, app: ASGIApp, key: str, cookie: str) -> None:
        self._app, self._key, self._cookie = app, key, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        if self._is_key(connection.query_params.get("key", "")):
            answer: ASGIApp = RedirectResponse("/" + scope["path"].lstrip("/"), 303)
            assert isinstance(answer, Response)
            answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict")
        elif self._is_key(connection.cookies.get(self._cookie, "")):
            answer = self._app
        else:
            answer = HTMLResponse("open the address that trinity ui printed: it has the key\n", 403)
        await answer(scope, receive, send)

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._key.encode())
