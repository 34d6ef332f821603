"""The auditor of the chaos tests finds what it is there to find: records are doctored, one at a time."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from support.checks.audit import Acknowledged, LogEntry, Member, Records, TrainerRecord, audit

pytestmark = pytest.mark.core

STEPS, GROUPS = 3, 2


def good_records() -> Records:
    """Six groups in three steps; task 3 was answered twice, task 5 failed once, task 7 is dead."""
    order = [1, 2, 3, 3, 4, 5, 6]
    log = [_group(sequence, ordinal) for sequence, ordinal in enumerate(order, 1)]
    log.append(LogEntry(8, "failure", "t/5", 5, 108))
    log.append(LogEntry(9, "failure", "t/7", 7, 109, final=True))
    acknowledged = [Acknowledged(e.task_id, e.ordinal, e.sequence, e.crc32) for e in log if e.kind == "group"]
    used = [entry for entry in log if entry.kind == "group" and entry.sequence != 4]
    members = [Member(entry.sequence, entry.task_id, entry.ordinal) for entry in used]
    ledger = [(step, tuple(members[2 * step - 2 : 2 * step])) for step in range(1, STEPS + 1)]
    return Records(
        log=log,
        acknowledged=[*acknowledged, Acknowledged("t/1", 1, 1, 999, duplicate=True)],
        ledger=ledger,
        letters=[7],
        tasks=[(ordinal, f"t/{ordinal}") for ordinal in range(4, 7)],  # those before are no longer in the queue
        fed=7,
        said={step: {tuple(member.sequence for member in batch)} for step, batch in ledger},
        summary={
            "groups_fed": 7,
            "groups_stored": 6,
            "dead_letters": 1,
            "outstanding": 0,
            "duplicates_dropped": 1,
        },
        counts=[{"fed": 4, "stored": 2, "dead_letters": 0, "outstanding": 2, "duplicates_dropped": 0}],
    )


def _group(sequence: int, ordinal: int) -> LogEntry:
    return LogEntry(sequence, "group", f"t/{ordinal}", ordinal, 100 + sequence)


def test_good_records_have_no_differences() -> None:
    findings = audit(good_records(), STEPS, GROUPS)
    assert findings.differences == []
    assert findings.stored == findings.acknowledged == STEPS * GROUPS


def an_acknowledged_group_is_gone(records: Records) -> None:
    del records.log[-3:]  # the newest: sequences have no gap
    records.log += [LogEntry(7, "failure", "t/5", 5, 108), LogEntry(8, "failure", "t/7", 7, 109, final=True)]


def no_acknowledgement_was_written_down(records: Records) -> None:
    records.acknowledged.clear()


def another_group_is_in_its_place(records: Records) -> None:
    records.log[0] = replace(records.log[0], crc32=1)


def another_task_is_in_its_place(records: Records) -> None:
    records.acknowledged[0] = replace(records.acknowledged[0], task_id="t/2", ordinal=2)


def the_log_has_a_gap(records: Records) -> None:
    del records.log[3]  # of the duplicate: its loss would go unnoticed
    del records.acknowledged[3]


def a_payload_is_damaged(records: Records) -> None:
    records.log[5] = replace(records.log[5], intact=False)


def a_stored_group_is_in_no_batch(records: Records) -> None:
    records.log.append(_group(10, 8))
    records.tasks.append((8, "t/8"))


def a_group_is_in_two_steps(records: Records) -> None:
    records.ledger[1] = (2, (records.ledger[0][1][0], records.ledger[1][1][1]))


def the_second_answer_is_trained_too(records: Records) -> None:
    records.ledger[2] = (3, (Member(4, "t/3", 3), records.ledger[2][1][1]))


def a_task_is_fed_twice(records: Records) -> None:
    records.tasks.append((8, "t/1"))


def a_task_is_in_the_queue_twice(records: Records) -> None:
    records.tasks.append((6, "t/6"))


def a_row_is_fed_again_and_answered(records: Records) -> None:
    records.log.append(LogEntry(10, "group", "t/1", 8, 110))


def a_step_is_missing(records: Records) -> None:
    del records.ledger[1]


def a_step_is_there_twice(records: Records) -> None:
    records.ledger.append(records.ledger[-1])


def a_step_is_short(records: Records) -> None:
    records.ledger[2] = (3, records.ledger[2][1][:1])


def the_ledger_names_what_the_log_does_not_have(records: Records) -> None:
    records.ledger[2] = (3, (records.ledger[2][1][0], Member(77, "t/6", 6)))


def the_trainer_said_something_else_before_it_was_killed(records: Records) -> None:
    records.said[2].add((3, 9))


def the_trainer_never_said_a_step(records: Records) -> None:
    del records.said[3]


def the_trainer_said_a_step_too_much(records: Records) -> None:
    records.said[4] = {(8, 9)}


def the_summary_counts_another_way(records: Records) -> None:
    records.summary = {**records.summary, "groups_stored": 5}


def a_task_is_stored_and_has_a_letter(records: Records) -> None:
    records.letters.append(6)


def a_dead_task_has_no_letter(records: Records) -> None:
    records.letters.clear()


def a_task_was_fed_and_is_nowhere(records: Records) -> None:
    records.fed = 8
    records.summary = {**records.summary, "groups_fed": 8, "outstanding": 1}


def an_answer_is_of_a_task_that_was_not_fed(records: Records) -> None:
    records.fed = 6


def an_answer_is_of_another_task_than_was_fed(records: Records) -> None:
    records.tasks[-1] = (6, "t/60")


def the_buffer_did_not_add_up_on_the_way(records: Records) -> None:
    records.counts.append({"fed": 5, "stored": 3, "dead_letters": 0, "outstanding": 1, "duplicates_dropped": 0})


def outstanding_fell_below_zero(records: Records) -> None:
    records.counts.append({"fed": 5, "stored": 6, "dead_letters": 0, "outstanding": -1, "duplicates_dropped": 0})


DOCTORED: dict[Callable[[Records], None], str] = {
    an_acknowledged_group_is_gone: "lost",
    no_acknowledgement_was_written_down: "lost",
    another_group_is_in_its_place: "lost",
    another_task_is_in_its_place: "lost",
    the_log_has_a_gap: "lost",
    a_payload_is_damaged: "lost",
    a_stored_group_is_in_no_batch: "lost",
    a_group_is_in_two_steps: "doubled",
    the_second_answer_is_trained_too: "doubled",
    a_task_is_fed_twice: "doubled",
    a_task_is_in_the_queue_twice: "doubled",
    a_row_is_fed_again_and_answered: "doubled",
    a_step_is_missing: "ledger",
    a_step_is_there_twice: "ledger",
    a_step_is_short: "ledger",
    the_ledger_names_what_the_log_does_not_have: "ledger",
    the_trainer_said_something_else_before_it_was_killed: "ledger",
    the_trainer_never_said_a_step: "ledger",
    the_trainer_said_a_step_too_much: "ledger",
    the_summary_counts_another_way: "counts",
    a_task_is_stored_and_has_a_letter: "counts",
    a_dead_task_has_no_letter: "counts",
    a_task_was_fed_and_is_nowhere: "counts",
    an_answer_is_of_a_task_that_was_not_fed: "counts",
    an_answer_is_of_another_task_than_was_fed: "counts",
    the_buffer_did_not_add_up_on_the_way: "counts",
    outstanding_fell_below_zero: "counts",
}


@pytest.mark.parametrize("doctor", DOCTORED, ids=lambda doctor: doctor.__name__)
def test_the_auditor_finds(doctor: Callable[[Records], None]) -> None:
    records = good_records()
    doctor(records)
    findings = audit(records, STEPS, GROUPS)
    assert getattr(findings, DOCTORED[doctor]), findings


def test_what_the_trainer_said_once_stays_said(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "batches.jsonl"
    record = TrainerRecord(path)
    record.read()
    path.write_text('{"step": 1, "groups": [1, 2]}\n{"step": 2, "gro')
    record.read()
    path.write_text('{"step": 1, "groups": [1, 3]}\n')
    record.read()
    assert record.said == {1: {(1, 2), (1, 3)}}
