"""`trinity check` refuses a critic that reads images otherwise than the policy, or none where that reads some."""

from pathlib import Path

import pytest

from support.checks.deep_check import check
from support.fakes.data.vision import make_files, pretend_torchvision
from trinity.deep_check import check as deep_check

pytestmark = pytest.mark.core

ROW = {"question": "?", "answer": "2"}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision is no requirement of these tests; nor is a tokenizer."""
    pretend_torchvision(monkeypatch)
    monkeypatch.setattr(deep_check, "check_rendering", lambda *_: [])


@pytest.mark.parametrize("actor", [True, False])
def test_a_critic_that_reads_otherwise_than_the_policy_is_refused(tmp_path: Path, actor: bool) -> None:
    models = [str(make_files(tmp_path / "seeing")), str(tmp_path / "model")]
    policy, critic = models if actor else models[::-1]
    given = [f"model.model_path={policy}", "algorithm.algorithm_type=ppo"]
    code, output = check(tmp_path, ROW, *given, f"model.critic_model_path={critic}")
    assert code == 2, output
    assert "model.critic_model_path: " in output
    assert "reads images otherwise than model.model_path does, or none" in " ".join(output.split())
    code, output = check(tmp_path, ROW, *given, f"model.critic_model_path={policy}")
    assert code == 0, output
