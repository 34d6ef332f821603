"""Tasks, dead letters and requeues come back from their bytes, also where they hold less than a whole task."""

import dataclasses

import pytest

from support.fakes.data.experience import make_task
from trinity.buffer.log.wire import Letter, LogEntry, TaskMessage
from trinity.data.experience import AttemptFailure
from trinity.data.wire import encode_outcome
from trinity.runtime.errors import FailureCause, InvalidInput

pytestmark = pytest.mark.core

FAILURE = AttemptFailure(make_task(), 2, "explorer", FailureCause.TIMEOUT, "late", True, 1.5)


def test_a_task_message_holds_the_task() -> None:
    task = make_task()
    message = TaskMessage.parse(TaskMessage.of(task).encode())
    assert message is not None
    assert message.decoded() == task
    other = TaskMessage.of(dataclasses.replace(task, gate_step=task.gate_step + 1))
    assert list(message.differences(message)) == []
    assert list(other.differences(message)) == [("gate_step", task.gate_step + 1, task.gate_step)]
    assert TaskMessage.parse(b"\xff") is None


def test_a_letter_comes_back_as_it_was_written() -> None:
    letter = Letter.parse(Letter.of(FAILURE).encode())
    assert letter is not None
    assert (letter.ordinal, letter.fields.task.task_id) == (FAILURE.task.ordinal, FAILURE.task.task_id)
    assert (letter.fields.cause, letter.fields.error) == ("timeout", "late")
    assert Letter.parse(b"\xff") is Letter.parse(b"") is None
    assert LogEntry.parse(letter.requeue()).task.decoded() == dataclasses.replace(FAILURE.task, requeues=1)


def test_a_letter_of_an_unknown_task_has_its_ordinal() -> None:
    letter = Letter.parse(Letter.of_refused(TaskMessage.unknown(7), "odd").encode())
    assert letter is not None
    assert (letter.ordinal, letter.fields.task.task_id, letter.fields.error) == (7, "", "odd")
    with pytest.raises(InvalidInput, match=r"task\.kind"):
        TaskMessage.unknown(7).decoded()


def test_entries_say_their_kind_and_task() -> None:
    requeue = LogEntry.parse(Letter.of(FAILURE).requeue())
    assert (requeue.kind, requeue.explorer_id, requeue.attempt) == ("requeue", "", 0)
    failure = LogEntry.parse(encode_outcome(FAILURE))
    assert (failure.kind, failure.explorer_id, failure.attempt, failure.failure()) == (
        "failure",
        "explorer",
        2,
        FAILURE,
    )
    assert LogEntry.parse(b"").kind == ""
    with pytest.raises(InvalidInput, match="outcome"):
        LogEntry.parse(b"\xff")
