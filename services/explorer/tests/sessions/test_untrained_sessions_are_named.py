"""A session of which nothing is trained is logged with the reasons: its run would only be seen not to learn."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from trinity.data.experience import SamplingParams, VersionSpan
from trinity.explorer.sessions import session as sessions
from trinity.explorer.sessions.recording import Recording, untrained_reason
from trinity.explorer.sessions.samples import Place, Said
from trinity.explorer.sessions.session import Call, Session, Sessions
from trinity.explorer.types import Completion

pytestmark = pytest.mark.core

TASK = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1)


def sampling(**changes: Any) -> Any:
    """vLLM's parameters of a call, as far as they are read."""
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "structured_outputs": None}
    more = {"max_tokens": 8, "min_tokens": 0, "logprobs": None, "n": 1, "min_p": 0.0, "bad_words": []}
    return SimpleNamespace(**{**values, **more, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"temperature": 0.2}, "temperature is 0.2, the task's 1"),
        ({"top_k": 5}, "top_k is 5, the task's -1"),
        ({"min_p": 0.1}, "min_p is set"),
        ({"thinking_token_budget": 8}, "thinking_token_budget is set"),
        (
            {"structured_outputs": object()},
            "a constraint: response_format, parallel_tool_calls false, or tool_choice required or of a name",
        ),
    ],
)
def test_the_parameter_that_keeps_a_reply_from_training_is_named(changes: dict[str, Any], reason: str) -> None:
    assert untrained_reason(sampling(**changes), TASK) == reason


def played(*calls: dict[str, Any]) -> Session:
    """A session with a reply of two tokens to each call."""
    session, _ = Sessions().open(TASK)
    for number, changes in enumerate(calls):
        call = Call(session, place=Place(None, (number,)))
        Recording(call, sampling(**changes))
        completion = Completion(np.array([7, 8], np.int32), np.zeros(2, np.float32), (VersionSpan(0, 0, 2),), "stop")
        call.sampled[0] = (completion, not untrained_reason(sampling(**changes), TASK))
        call.reply(0, Said("assistant", str(number)))
    return session


def test_a_session_of_constrained_calls_alone_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_warned", set())
    with capture_logs() as logs:
        for _ in range(2):
            made = played({"structured_outputs": 1}, {"temperature": 0.0}).finish(0, 1.0)
            assert not any(experience.action_mask.any() for experience in made)
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("explorer.session.untrained", "warning")
    assert "a constraint" in line["reasons"] and "temperature is 0, the task's 1" in line["reasons"]


def test_a_session_with_one_trained_reply_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_warned", set())
    with capture_logs() as logs:
        played({"structured_outputs": 1}, {}).finish(0, 1.0)
    assert not logs
