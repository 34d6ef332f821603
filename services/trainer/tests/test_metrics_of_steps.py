"""What the trainer's metrics show of a step: values of the newest one, and counts of all."""

import pytest
from prometheus_client import REGISTRY

from trinity.trainer.observers import show_memory, show_step

pytestmark = pytest.mark.core


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"trinity_trainer_{name}", labels)


def test_a_step_replaces_the_one_before() -> None:
    tokens, bad = value("tokens_total") or 0, value("bad_steps_total") or 0
    first = {"actor/pg_loss": 0.5, "actor/kl_loss": 0.25, "actor/grad_norm": 2.0, "sample/reward_mean": 0.75}
    show_step(7, {**first, "actor/mismatch/stale_kl": 0.125, "critic/value_loss": 3.0}, 100)
    assert (value("step"), value("reward_mean"), value("gradient_norm")) == (7, 0.75, 2.0)
    assert (value("loss", loss="pg_loss"), value("loss", loss="value_loss")) == (0.5, 3.0)
    assert (value("kl_nats", to="reference"), value("kl_nats", to="stale")) == (0.25, 0.125)
    show_step(8, {"actor/pg_loss": 0.25}, 50)
    assert (value("loss", loss="pg_loss"), value("loss", loss="value_loss"), value("kl_nats", to="stale")) == (
        0.25,
        None,
        None,
    )
    show_step(9, {"actor/bad_step": 1.0}, 0)
    assert value("tokens_total") == tokens + 150
    assert value("bad_steps_total") == bad + 1


def test_memory_of_the_gpu_is_shown_by_kind() -> None:
    show_memory(1, 2, 3)
    assert [value("gpu_memory_bytes", kind=kind) for kind in ("allocated", "reserved", "peak")] == [1, 2, 3]
