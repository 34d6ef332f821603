"""What a program sets as rewards and metrics is sent as numbers; what is none is refused, and its session abandoned."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest

from trinity.sdk import InvalidInput, Session, open_session, sessions

pytestmark = pytest.mark.core

URL = "http://127.0.0.1:1/v1"
OPENED = {
    "base_url": URL, "key": "session", "task_id": "a", "taskset": "sums", "row": {}, "rollout": 0, "repeat_times": 1,
    "evaluation": False, "limit_seconds": 60.0,
}  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the explorer is told: (path, body)."""
    found: list[tuple[str, Any]] = []

    def post(url: str, key: str, body: Mapping[str, Any], wait_seconds: float = 0.0) -> Any:
        found.append((url.removeprefix(URL), json.loads(json.dumps(body))))
        return OPENED

    monkeypatch.setattr(sessions, "_post", post)
    return found


class Numbers(Sequence[Any]):
    """As an array: whether it is true is not defined."""

    def __getitem__(self, at: Any) -> Any:
        return [Fraction(1, 2), 1][at]

    def __len__(self) -> int:
        return 2

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"reward": Fraction(1, 2)}, {"reward": 0.5, "metrics": {}}),
        ({"rewards": Numbers()}, {"rewards": [0.5, 1.0], "metrics": {}}),
        ({"reward": True, "metrics": {"calls": Fraction(3)}}, {"reward": 1.0, "metrics": {"calls": 3.0}}),
    ],
)
def test_numbers_of_every_kind_are_sent(told: list[Any], changes: dict[str, Any], sent: dict[str, Any]) -> None:
    with open_session(URL, "key") as session:
        vars(session).update(changes)
    assert told[1:] == [("/sessions/close", sent)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reward": 1.0, "rewards": [1.0]}, "rewards: are given, and so is reward; give one of them"),
        ({"reward": "1"}, "reward: is '1', must be a number"),
        ({"reward": [1.0]}, "reward: is [1.0], must be a number"),
        ({"reward": 10**400}, f"reward: is 1{'0' * 99}, must be a number"),
        ({"rewards": [1.0, None]}, "rewards[1]: is None, must be a number"),
        ({"reward": 1.0, "metrics": {"x": {}}}, "metrics.x: is {}, must be a number"),
    ],
)
@pytest.mark.parametrize("closes", [True, False])
def test_what_is_no_number_abandons_the_session(
    told: list[Any], changes: dict[str, Any], problem: str, closes: bool
) -> None:
    session: Session
    with pytest.raises(InvalidInput) as refused, open_session(URL, "key") as session:
        vars(session).update(changes)
        if closes:
            session.close()
    assert str(refused.value) == problem and session.ended
    assert told[1:] == [("/sessions/abandon", {"reason": f"InvalidInput: {problem}"})]
