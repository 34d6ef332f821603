"""A spare of the explorer has loaded vLLM before it begins."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trinity.runtime.spares import Spare

pytestmark = pytest.mark.extended

_SECONDS = 120.0


def test_a_spare_has_loaded_vllm_when_it_begins() -> None:
    command = [sys.executable, "-m", "trinity.explorer.main", "version"]
    spare = Spare(command, {**os.environ}, stdout=subprocess.PIPE)
    try:
        maps, deadline = Path(f"/proc/{spare._process.pid}/maps"), time.monotonic() + _SECONDS
        while "/msgspec/" not in maps.read_text():  # which vLLM imports, and Trinity does not
            assert time.monotonic() < deadline, "it loaded nothing"
            time.sleep(0.1)
        process = spare.begin({**os.environ})
        assert process is not None
        assert process.wait(_SECONDS) == 0
        assert process.stdout is not None and process.stdout.read().strip(), "it did not begin"
    finally:
        spare.end()
