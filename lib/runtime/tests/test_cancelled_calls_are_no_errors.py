"""gRPC logs an error with a traceback for a handler that the end of its process cancelled; real errors stay."""

import asyncio
import io
import logging

import pytest

from trinity.runtime import logs

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("error", "is_logged"), [(asyncio.CancelledError(), False), (ZeroDivisionError("x"), True), (None, True)]
)
def test_only_errors_are_logged(error: BaseException | None, is_logged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", root.handlers)
    monkeypatch.setattr(root, "level", root.level)
    logs.configure("test", stream=stream)
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    grpc_log.error("Exception not handled by _handle_exceptions in servicer method [/a/Watch]", exc_info=error)
    assert bool(stream.getvalue()) is is_logged
    assert ("Traceback" in stream.getvalue() or "ZeroDivisionError" in stream.getvalue()) is (is_logged and bool(error))
