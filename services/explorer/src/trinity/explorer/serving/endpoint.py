"""The OpenAI-compatible endpoint: vLLM's own HTTP application over this explorer's engines and their newest weights."""

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from trinity.explorer.engine.engine import Engine
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.engine.trial import POLICY
from trinity.explorer.serving.asgi import App, Refused, is_preflight, key_of, send_error
from trinity.explorer.serving.bounds import Bounds, bounded
from trinity.runtime.errors import InvalidInput
from trinity.runtime.settings import LOOPBACK, split_address
from trinity.runtime.trust.keys import KeyFile

log = structlog.get_logger(__name__)

_BACKLOG = 2048  # as uvicorn


class PooledClient:
    """Presents all engines to vLLM's application as one. A conversation stays with its engine.

    Only tokens of GOOD loads are sent, as in rollouts: an output waits until every load since the begin of its request
    is known to be good. Raises WeightsWithdrawn if a load is not.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool.engines[0].llm, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self.good_outputs(*args, **kwargs)) as outputs:
            async for _, _, output in outputs:
                yield output

    async def good_outputs(
        self, prompt: Any, sampling_params: Any = None, *args: Any, tried: bool = True, **kwargs: Any
    ) -> AsyncGenerator[tuple[Engine, Sequence[int], Any]]:
        """Yield outputs of a request, with the engine that samples it and the serials after 0, 1, 2 ... loads.

        tried: a trial of versions may choose who samples it.
        """
        loads, chosen = self._pool.loads, kwargs.pop("lora_request", None)
        await loads.usable()
        tokens = prompt.get("prompt_token_ids", ()) if isinstance(prompt, dict) else ()
        async with self._pool.engine_for(tokens, getattr(sampling_params, "n", 1)) as engine:
            await engine.after_load()
            own = self._pool.adapter_of_call(engine) if tried else POLICY
            adapter = chosen.lora_name if chosen is not None else own
            async with engine.using(adapter) as weights:
                if isinstance(prompt, dict):  # key-value blocks of other weights are not reused
                    prompt = {**prompt, "cache_salt": f"{weights.salt}{prompt.get('cache_salt') or ''}"}
                how = {**kwargs, **weights.arguments}
                async with contextlib.aclosing(engine.llm.generate(prompt, sampling_params, *args, **how)) as outputs:
                    async for output in outputs:
                        for serial in weights.serials[weights.first :]:
                            await loads.require_good(serial)
                        yield engine, weights.serials, output

    async def add_lora(self, lora_request: Any) -> bool:
        """Called by vLLM's application for each of `--lora-modules`."""
        for engine in self._pool.engines:
            await engine.adapters.load(lora_request.lora_name, Path(lora_request.lora_path))
        return True

    async def abort(self, request_id: Any, *args: Any, **kwargs: Any) -> None:
        for engine in self._pool.engines:
            await engine.llm.abort(request_id, *args, **kwargs)


_UNAUTHORIZED = "Incorrect API key provided: send a key of the endpoint's key file as `Authorization: Bearer <key>`."


def open_keys(listen: str, path: Path | None) -> KeyFile | None:
    """The endpoint's keys; None for an open endpoint. Raises InvalidInput for an open one beyond the loopback."""
    if path is not None:
        return KeyFile(path, "TRINITY_EXPLORER_API_KEYS_FILE")
    host, _ = split_address(listen, "TRINITY_EXPLORER_SERVE_LISTEN")
    if host not in LOOPBACK:
        reason = f"is empty, and the endpoint is to listen on {host}; name a file with a key on each line"
        raise InvalidInput("TRINITY_EXPLORER_API_KEYS_FILE", reason)
    log.warning("explorer.endpoint.open", address=listen, reason="TRINITY_EXPLORER_API_KEYS_FILE is empty")
    return None


def with_keys(app: App, keys: KeyFile) -> App:
    """Protect an ASGI application by keys. Requests without a key get 401 in OpenAI's form, or Anthropic's.

    Preflight requests pass, since browsers send them without keys and get no content. Any other OPTIONS needs a key,
    because vLLM's /metrics answers every method.
    """

    async def keyed(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or is_preflight(scope) or keys.allows(f"Bearer {key_of(scope)}"):
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send_error(send, Refused(401, "invalid_api_key", _UNAUTHORIZED), scope["path"])

    return keyed


async def serve(
    pool: EnginePool,
    listen: str,
    keys: KeyFile | None,
    bounds: Bounds,
    model: str,
    name: str,
    chat_template: str,
    parsers: Sequence[str],
    adapters: Mapping[str, Path],
) -> None:
    """Serve until cancelled. `name`: the model's name in requests. `parsers`: options that name parsers of replies.
    `adapters`: folders by further names.
    """
    client, options = PooledClient(pool), ["--model", model, "--served-model-name", name, *parsers]
    if adapters:
        options += ["--lora-modules", *(json.dumps({"name": of, "path": str(path)}) for of, path in adapters.items())]
    app = bounded(await application(client, options, chat_template), bounds)
    listening = listen_at(listen)
    log.info("explorer.endpoint.serving", address=f"http://{listen}/v1", model=name)
    await run(with_keys(app, keys) if keys is not None else app, [listening])


def listen_at(listen: str) -> socket.socket:
    """A socket that listens there. Raises InvalidInput if it cannot, as where another process took the port."""
    host, port = split_address(listen, "TRINITY_EXPLORER_SERVE_LISTEN")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        what = f"{listen} cannot be listened on: {error.strerror}; choose another port (explorer.proxy_port)"
        raise InvalidInput("TRINITY_EXPLORER_SERVE_LISTEN", what) from error


async def application(client: Any, options: list[str], chat_template: str) -> Any:
    """vLLM's ASGI application over `client`, with `options` of `vllm serve`. Raises ValueError for wrong options."""
    build_app, init_app_state, arguments = _vllm()
    args = arguments(options)
    args.chat_template = chat_template  # set here, since its text might begin like an option
    tasks = await client.get_supported_tasks()
    level = logging.getLogger().level
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    logging.getLogger().setLevel(level)  # vLLM's application sets the whole process to errors only
    return app


async def run(app: App, sockets: list[socket.socket]) -> None:
    """Serve an application on listening sockets until cancelled."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave SIGTERM to the service, which drains and then cancels this server."""
            yield

    server = Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    try:
        await server.serve(sockets)
    except asyncio.CancelledError:
        server.force_exit = True  # do not wait for answers
        await server.shutdown(sockets)
        raise


def _vllm() -> tuple[Any, Any, Any]:
    """build_app, init_app_state and their arguments' parser, which moved between vLLM 0.26 and 0.33."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        state = importlib.import_module("vllm.entrypoints.launchers.api_server.app_state")
        app = importlib.import_module("vllm.entrypoints.launchers.app")
    except ImportError:
        state = app = importlib.import_module("vllm.entrypoints.openai.api_server")
    for place in ("openai", "launchers", "common"):  # of 0.28, of 0.32, and newer
        with contextlib.suppress(ImportError):
            cli = importlib.import_module(f"vllm.entrypoints.{place}.cli_args")

    def arguments(options: list[str]) -> argparse.Namespace:
        parsed: argparse.Namespace = cli.make_arg_parser(FlexibleArgumentParser()).parse_args(options)
        return parsed

    return app.build_app, state.init_app_state, arguments
