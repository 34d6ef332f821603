"""The explorer finds saved adapters with their canary, and says which are gone or cannot be read."""

import json
from pathlib import Path

import pytest

from trinity.runtime.errors import DataLoss, NotFound
from trinity.tinker.saved_adapters import folder_of, save, saved_in
from trinity.weights.manifest import Canary, Probe

pytestmark = pytest.mark.core


async def test_adapters_that_are_gone_are_not_found(tmp_path: Path) -> None:
    source, canary = saved_in(tmp_path), Canary((Probe((1, 2, 3), (-1.0, -1.0)),), 0.1, 0.2)
    with pytest.raises(NotFound, match="no longer kept"):
        async with source(7):
            pass
    save(tmp_path, 7, lambda folder: (folder / "adapter").touch(), canary)
    async with source(7) as (folder, found):
        assert (folder / "adapter").exists() and found == canary
    (folder_of(tmp_path, 7) / "canary.json").write_text(json.dumps({"probes": 1}))
    with pytest.raises(DataLoss, match=r"canary\.json cannot be read"):
        async with source(7):
            pass
