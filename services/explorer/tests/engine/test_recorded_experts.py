"""Recorded experts of a request's tokens, and of a conversation of several requests."""

from dataclasses import replace

import numpy as np
import pytest

from trinity.data.experience import VersionSpan
from trinity.explorer.engine.engine import Engine
from trinity.explorer.engine.routes import Recorder
from trinity.explorer.engine.start import _arguments_of
from trinity.explorer.journal.turns import joined
from trinity.explorer.types import Completion, EngineFailed, EngineOptions
from trinity.explorer.workflows.conversation import Conversation

pytestmark = pytest.mark.core


def rows(count: int, value: int) -> np.ndarray:
    return np.full((count, 2, 1), value, np.uint8)


def reply(prompt: int, sampled: int, value: int) -> Completion:
    tokens = np.arange(sampled, dtype=np.int32)
    spans = (VersionSpan(0, 0, sampled),)
    return Completion(tokens, np.zeros(sampled, np.float32), spans, "length", rows(prompt + sampled - 1, value))


def test_parts_of_a_request_are_joined_and_a_token_computed_again_keeps_its_first_route() -> None:
    recorder = Recorder()
    for name in ("a", "b"):
        recorder.note(name, 0, rows(3, 1))
    recorder.note("a", 3, rows(1, 2))
    recorder.note("a", 0, rows(4, 3))  # after a preemption
    recorder.note("a", 4, rows(2, 4))
    assert recorder.take("a", 5)[:, 0, 0].tolist() == [1, 1, 1, 2, 4]
    assert "a" not in recorder
    assert "b" in recorder
    recorder.forget("b")
    assert "b" not in recorder


def test_a_token_of_a_conversation_has_the_route_of_the_request_that_first_read_it() -> None:
    talk = Conversation((1, 2, 3)).replied(reply(3, 2, 1)).told([7, 8])
    talk = talk.replied(reply(7, 3, 2))
    routes = talk.experience(0, 1.0).routes
    assert routes is not None
    assert routes.ids(10)[:, 0, 0].tolist() == [1] * 4 + [2] * 5
    last = talk.step_experience(1, 0, 1.0).routes
    assert last is not None
    assert last.ids(10)[:, 0, 0].tolist() == [2] * 9


def test_a_reply_without_a_record() -> None:
    unknown = replace(reply(3, 2, 1), routes=None)
    talk = Conversation((1, 2, 3)).replied(unknown)
    assert talk.experience(0, 1.0).routes is None
    then = talk.told([7]).replied(reply(6, 1, 2)).experience(0, 1.0).routes
    assert then is not None, "the next request has read its tokens"
    assert then.ids(7)[:, 0, 0].tolist() == [2] * 6
    cut = replace(reply(3, 2, 1), routes=rows(3, 1))
    assert Conversation((1, 2, 3)).replied(cut).experience(0, 1.0).routes is None


def test_two_parts_of_a_reply() -> None:
    whole = joined(reply(3, 2, 1), reply(5, 2, 2))
    assert whole.routes is not None
    assert whole.routes[:, 0, 0].tolist() == [1] * 4 + [2] * 2
    again = joined(replace(reply(3, 2, 1), routes=None), reply(5, 2, 2))
    assert again.routes is not None
    assert again.routes[:, 0, 0].tolist() == [2] * 6
    assert joined(reply(3, 2, 1), replace(reply(5, 2, 2), routes=None)).routes is None


def test_an_engine_that_records_nothing_is_a_fault() -> None:
    engine = Engine(None, EngineOptions("m", "cpu", 64, routes=True))
    engine._check_routes(3, [reply(3, 2, 1)])
    for wrong in (replace(reply(3, 2, 1), routes=None), reply(4, 2, 1)):
        with pytest.raises(EngineFailed, match="gave the experts of"):
            engine._check_routes(3, [wrong])
    Engine(None, EngineOptions("m", "cpu", 64))._check_routes(3, [replace(reply(3, 2, 1), routes=None)])


def test_cpus_record_without_prefix_cache_and_gpus_by_vllms_own_option() -> None:
    cpu = _arguments_of(EngineOptions("m", "cpu", 64, routes=True))
    assert not cpu["enable_prefix_caching"]
    assert cpu["additional_config"]
    gpu = _arguments_of(EngineOptions("m", "cuda", 64, routes=True))
    assert gpu["enable_return_routed_experts"]
    assert gpu["enable_prefix_caching"]
    assert "enable_return_routed_experts" not in _arguments_of(EngineOptions("m", "cuda", 64))
