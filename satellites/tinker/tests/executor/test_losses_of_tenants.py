"""The sums that a tenant gets are the formulas of docs/tinker.md."""

import numpy as np
import pytest
import torch

from trinity.tinker.executor.losses import token_loss

pytestmark = pytest.mark.core

_LP = np.array([[-1.0, -3.0, -0.1], [-2.0, -0.5, 0.0]], np.float32)
_LQ = np.array([[-1.5, -1.0, -0.1], [-1.0, -3.5, 0.0]], np.float32)
_A = np.array([[2.0, -1.0, 0.5], [-3.0, 1.0, 0.0]], np.float32)
_R = np.exp(_LP - _LQ)


def _clipped(low: float, high: float) -> np.ndarray:
    return np.maximum(-_A * _R, -_A * _R.clip(low, high))


@pytest.mark.parametrize(
    ("loss", "config", "expected"),
    [
        ("cross_entropy", {}, -_A * _LP),
        ("importance_sampling", {}, -_A * _R),
        ("ppo", {}, _clipped(0.8, 1.2)),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}, _clipped(0.5, 3.0)),
        ("cispo", {}, -_A * _R.clip(0.8, 1.2) * _LP),
        ("cispo", {"clip_high_threshold": 5.0}, -_A * _R.clip(0.8, 5.0) * _LP),
    ],
)
def test_a_loss_is_its_formula(loss: str, config: dict[str, float], expected: np.ndarray) -> None:
    inputs = {"weights": _A} if loss == "cross_entropy" else {"logprobs": _LQ, "advantages": _A}
    given = {name: torch.from_numpy(values) for name, values in inputs.items()}
    found = token_loss(loss, config, torch.from_numpy(_LP), given)
    assert float(found) == pytest.approx(float(expected.sum()), rel=1e-6)


def test_cispo_has_no_gradient_through_the_ratio() -> None:
    logprobs = torch.from_numpy(_LP.copy()).requires_grad_()
    token_loss(
        "cispo", {}, logprobs, {"logprobs": torch.from_numpy(_LQ), "advantages": torch.from_numpy(_A)}
    ).backward()
    assert logprobs.grad is not None
    assert np.allclose(logprobs.grad.numpy(), -_A * _R.clip(0.8, 1.2))
