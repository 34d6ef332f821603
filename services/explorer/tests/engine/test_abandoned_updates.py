"""A worker whose update is abandoned, because another worker failed, forgets its part of it."""

from typing import Any

import pytest
import torch

from trinity.explorer.engine import worker
from trinity.explorer.engine.worker import TrinityTransferEngine, WorkerExtension

pytestmark = pytest.mark.core


class Worker(WorkerExtension):
    """As vLLM's GPU worker, with what the extension uses of it."""

    def __init__(self, engine: Any, active: bool) -> None:
        self.weight_transfer_engine = engine
        self._weight_update_active = active


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real one on a CPU, where vLLM's layerwise reload collects the weights of a layer until they are complete."""
    made: Any = TrinityTransferEngine.__new__(TrinityTransferEngine)
    made.model, made.model_config, made.device = torch.nn.Linear(2, 2), "config", torch.device("cpu")
    made.did = []
    monkeypatch.setattr(worker, "_abandon_reload", lambda model, config: made.did.append((model, config)))
    monkeypatch.setattr(made, "reset_weight_update_target", lambda: made.did.append("reset"), raising=False)
    return made


def test_a_worker_forgets_the_layers_that_it_has_in_part(engine: Any) -> None:
    one = Worker(engine, active=True)
    one.abandon_weight_update()
    assert engine.did == [(engine.model, "config"), "reset"]
    one.abandon_weight_update()
    assert len(engine.did) == 2, "no update is active any more"


def test_a_worker_without_an_update_does_nothing(engine: Any) -> None:
    Worker(engine, active=False).abandon_weight_update()
    assert engine.did == []
