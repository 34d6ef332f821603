"""An entry whose checksum is wrong is read once more; where the stream has let go of it by then, it is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from trinity.buffer.log.reader import LogReader
from trinity.runtime import headers
from trinity.runtime.broker import StoredMessage
from trinity.runtime.errors import InvalidInput, NotFound
from trinity.runtime.names import RunNames

pytestmark = pytest.mark.core


class _Emptied:
    """A broker whose streams hold nothing."""

    async def get(self, stream: str, sequence: int) -> StoredMessage:
        raise NotFound(f"{stream} has no message {sequence}")


async def test_an_entry_that_is_gone_is_refused() -> None:
    context: Any = SimpleNamespace(broker=_Emptied(), names=RunNames("run"))
    entry: Any = SimpleNamespace(sequence=7, subject="", data=b"x", headers={headers.CRC32: "1"})
    with pytest.raises(InvalidInput, match="checksum: of log entry 7 is another than its payload's"):
        await LogReader(context, 1000).take(entry)
