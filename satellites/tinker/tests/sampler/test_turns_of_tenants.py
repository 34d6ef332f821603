"""A tenant with few requests does not wait for all of another one's."""

import contextlib

import pytest

from trinity.explorer.types import EngineFailed
from trinity.tinker.sampler.turns import Turns

pytestmark = pytest.mark.core


def test_the_first_request_of_a_light_tenant_goes_before_the_queue_of_another() -> None:
    turns = Turns()
    with contextlib.ExitStack() as heavy:
        first = heavy.enter_context(contextlib.ExitStack())
        waiting = [(heavy if number else first).enter_context(turns.of("heavy", 10)).priority for number in range(5)]
        assert waiting == [0, 10, 20, 30, 40]
        with turns.of("light", 10) as turn:
            assert turn.priority == 0  # the tag of the running request
        with turns.of("light", 10) as turn:
            assert turn.priority == 10
        first.close()
        with turns.of("third", 10) as turn:
            assert turn.priority == 10  # what it left unused before is not saved up


def test_tokens_that_a_request_did_not_take_are_given_back() -> None:
    turns = Turns()
    with turns.of("other", 1000):
        with turns.of("frugal", 100) as turn:
            turn.took = 8
        with pytest.raises(EngineFailed), turns.of("frugal", 100) as turn:
            assert turn.priority == 8
            raise EngineFailed
        with turns.of("frugal", 100) as turn:
            assert turn.priority == 108
    with turns.of("frugal", 100) as turn:
        assert turn.priority == 0  # no request waits, so that all tags are reset
