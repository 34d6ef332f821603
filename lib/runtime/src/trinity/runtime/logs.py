"""structlog everywhere: JSON lines in a file, readable lines on the terminal. Standard logging goes the same way."""

import json
import logging
import logging.handlers
import re
import sys
from pathlib import Path
from typing import Any, TextIO

import structlog
from opentelemetry import trace

_FILES = 4
_CREDENTIALS = re.compile(r"(\w://)[^/\s]*@")


def without_credentials(text: str) -> str:
    """The text, with *** for the user, password or token of each URL in it."""
    return _CREDENTIALS.sub(r"\1***@", text)


def bare_url(url: str) -> str:
    """A URL, or several, without user, password and token."""
    return _CREDENTIALS.sub(r"\1", url)


def _hide_credentials(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: without_credentials(value) if isinstance(value, str) else value for name, value in event.items()}


def _add_trace(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = format(context.trace_id, "032x")
    return event


_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    structlog.processors.StackInfoRenderer(),
    _add_trace,
    _hide_credentials,
]


def configure(
    service: str,
    *,
    level: str = "INFO",
    file: Path | None = None,
    mib: int = 400,
    stream: TextIO | None = None,
) -> None:
    """Send every log line of this process to `stream` (default: standard error) and, as JSON, to `file`.

    `mib`: the most that the file and its three older ones may take.
    """
    # A stream that its client leaves is closed in another context than it was opened in; that is no error.
    logging.getLogger("opentelemetry.context").setLevel(logging.CRITICAL)
    stream = stream or sys.stderr
    formatted: list[logging.Handler] = []
    console = logging.StreamHandler(stream)
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=True)
        if stream.isatty()
        else structlog.processors.KeyValueRenderer(key_order=["time", "level", "event"], drop_missing=True)
    )
    console.setFormatter(_formatter(structlog.processors.format_exc_info, renderer))
    formatted.append(console)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        to_file = logging.handlers.RotatingFileHandler(file, maxBytes=mib * 2**20 // _FILES, backupCount=_FILES - 1)
        to_file.setFormatter(json_formatter())
        formatted.append(to_file)
    root = logging.getLogger()
    root.handlers = formatted
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)


def json_formatter(**fields: str) -> logging.Formatter:
    """A line as JSON, with these fields. No line has local variables of a traceback, or credentials of a URL."""

    def render(_: Any, __: str, event: structlog.typing.EventDict) -> str:
        return without_credentials(json.dumps({**event, **fields}, default=str))

    return _formatter(_TRACEBACKS, render)


_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def _formatter(*renderers: structlog.typing.Processor) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers]
    )
