"""The OpenAI-compatible endpoint: vLLM's own HTTP application over this explorer's engines and their newest weights."""

import argparse
import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import structlog

from trinity.explorer.engine.pool import EnginePool
from trinity.runtime.settings import split_address

log = structlog.get_logger(__name__)


class PooledClient:
    """All engines as the one that vLLM's application talks to: a request goes to the engine with the fewest."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._first: Any = pool.engines[0].llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with self._pool.least_busy() as engine:
            if isinstance(prompt, dict):  # key-value blocks of other weights are not reused
                prompt = {**prompt, "cache_salt": f"{engine.cache_salt}{prompt.get('cache_salt') or ''}"}
            async for output in engine.llm.generate(prompt, *args, **kwargs):
                yield output

    async def abort(self, request_id: Any, *args: Any, **kwargs: Any) -> None:
        for engine in self._pool.engines:
            await engine.llm.abort(request_id, *args, **kwargs)


async def serve(pool: EnginePool, listen: str, model: str, name: str, chat_template: str | None) -> None:
    """Serve until cancelled. `name` is the model's name in requests."""
    import uvicorn

    host, port = split_address(listen, "TRINITY_EXPLORER_SERVE_LISTEN")
    client: Any = PooledClient(pool)
    build_app, init_app_state, arguments = _vllm()
    options = ["--model", model, "--served-model-name", name]
    args = arguments(options + (["--chat-template", chat_template] if chat_template else []))
    tasks = await client.get_supported_tasks()
    level = logging.getLogger().level
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    logging.getLogger().setLevel(level)  # vLLM's application sets the whole process to errors only

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """SIGTERM is the service's: it drains, and cancels this."""
            yield

    log.info("explorer.endpoint.serving", address=f"http://{listen}/v1", model=name)
    await Server(uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="off")).serve()


def _vllm() -> tuple[Any, Any, Any]:
    """build_app, init_app_state and the parser of their arguments; they moved between vLLM 0.26 and 0.32."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        state = importlib.import_module("vllm.entrypoints.launchers.api_server.app_state")
        app = importlib.import_module("vllm.entrypoints.launchers.app")
        cli = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    except ImportError:
        state = app = importlib.import_module("vllm.entrypoints.openai.api_server")
        cli = importlib.import_module("vllm.entrypoints.openai.cli_args")

    def arguments(options: list[str]) -> argparse.Namespace:
        parsed: argparse.Namespace = cli.make_arg_parser(FlexibleArgumentParser()).parse_args(options)
        return parsed

    return app.build_app, state.init_app_state, arguments
