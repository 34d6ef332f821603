"""Entries of the log, fed tasks and dead letters as messages, decoded where their content is used."""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from trinity.api.common.v1 import experience_pb2, task_pb2
from trinity.buffer.window.groups import StoredGroup
from trinity.data.experience import UNLIMITED, AttemptFailure, Group, Limits, Outcome, Task, check_attempt
from trinity.data.wire import (
    failure_from_proto,
    failure_to_proto,
    group_from_proto,
    outcome_from_proto,
    parse_outcome,
    reference_in,
    task_from_proto,
    task_to_proto,
)
from trinity.runtime.errors import FailureCause
from trinity.runtime.names import BlobReference


@dataclass(frozen=True, slots=True)
class TaskMessage:
    """A task of the queue or of a log entry, not validated: its fields may hold any value."""

    fields: task_pb2.Task

    @classmethod
    def parse(cls, data: bytes) -> "TaskMessage | None":
        """None for bytes that are no task."""
        try:
            return cls(task_pb2.Task.FromString(data))
        except DecodeError:
            return None

    @classmethod
    def of(cls, task: Task) -> "TaskMessage":
        return cls(task_to_proto(task))

    @classmethod
    def unknown(cls, ordinal: int) -> "TaskMessage":
        """A task of which only the ordinal is known."""
        return cls(task_pb2.Task(ordinal=ordinal))

    @property
    def ordinal(self) -> int:
        return self.fields.ordinal

    @property
    def is_training(self) -> bool:
        return self.fields.kind == task_pb2.TASK_KIND_TRAIN

    def encode(self) -> bytes:
        return self.fields.SerializeToString()

    def decoded(self) -> Task:
        """Raises InvalidInput for a field that is missing or out of range."""
        return task_from_proto(self.fields)

    def differences(self, fed: "TaskMessage") -> Iterator[tuple[str, object, object]]:
        """Yields the name of each field that is not as it was fed, its value here and its value there."""
        if self.fields == fed.fields:
            return
        for field in task_pb2.Task.DESCRIPTOR.fields:
            found, expected = getattr(self.fields, field.name), getattr(fed.fields, field.name)
            if found != expected:
                yield field.name, found, expected


class LogEntry:
    """One entry of the log. `kind`: group, failure, requeue, fence, blob, or empty."""

    __slots__ = ("_data", "_made", "_outcome", "kind")

    def __init__(self, outcome: experience_pb2.Outcome, data: bytes) -> None:
        self._outcome, self._data = outcome, data
        self.kind = outcome.WhichOneof("outcome") or ""
        self._made: Any = getattr(outcome, self.kind) if self.kind else None

    @classmethod
    def parse(cls, data: bytes) -> "LogEntry":
        """Raises InvalidInput for bytes that are no entry."""
        return cls(parse_outcome(data), data)

    @property
    def task(self) -> TaskMessage:
        """The task of a group, a failure or a requeue."""
        return TaskMessage(self._made.task)

    @property
    def explorer_id(self) -> str:
        """The explorer of a group or a failure; empty for other kinds."""
        return self._made.explorer_id if self.kind in ("group", "failure") else ""

    @property
    def attempt(self) -> int:
        """The attempt of a group or a failure; 0 for other kinds."""
        return self._made.attempt if self.kind in ("group", "failure") else 0

    @property
    def fenced_versions(self) -> Collection[int]:
        return self._outcome.fence.versions

    @property
    def reference(self) -> BlobReference:
        """The blob that holds the outcome."""
        return reference_in(self._outcome)

    def decoded(self) -> Outcome:
        """A group or a failure. Raises InvalidInput for anything else, or malformed fields."""
        return outcome_from_proto(self._outcome)

    def failure(self) -> AttemptFailure:
        """Raises InvalidInput for malformed fields."""
        failure = failure_from_proto(self._outcome.failure)
        check_attempt("failure", failure.attempt, failure.explorer_id)
        return failure

    def group(self) -> Group:
        """Raises InvalidInput for malformed fields; the content of arrays is judged by Group.check."""
        return group_from_proto(self._outcome.group)

    def summary(self, sequence: int, limits: Limits = UNLIMITED) -> StoredGroup:
        """Validates and summarises the group for the ledger. Raises InvalidInput naming the first wrong field."""
        self.group().check(limits)
        return self.unchecked_summary(sequence)

    @property
    def num_response_tokens(self) -> int:
        """Counts the bytes of a group's masks: its shapes may say anything until it is checked."""
        return sum(len(experience.action_mask.data) for experience in self._outcome.group.experiences)

    def unchecked_summary(self, sequence: int) -> StoredGroup:
        """Summarises a group with any content, validated or not."""
        message = self._outcome.group
        experiences = message.experiences
        versions = [span.version for experience in experiences for span in experience.version_spans] or [0]
        return StoredGroup(
            log_sequence=sequence,
            task_id=message.task.task_id,
            ordinal=message.task.ordinal,
            num_experiences=len(experiences),
            oldest_version=min(versions),
            newest_version=max(versions),
            num_response_tokens=self.num_response_tokens,
            num_sampled_tokens=sum(e.action_mask.data.count(1) for e in experiences),
            prompt_cut=any(e.truncation == experience_pb2.TRUNCATION_PROMPT for e in experiences),
            moved_episodes=sum(_moved(experience.info_json) for experience in experiences),
            reward_mean=sum(experience.reward for experience in experiences) / max(1, len(experiences)),
            outcome_sha256=hashlib.sha256(self._data).digest(),
        )

    def of_run(self, run: str) -> bytes:
        """The entry of a group, encoded as one of another run."""
        changed = experience_pb2.Outcome()
        changed.CopyFrom(self._outcome)
        changed.group.task.run = run
        return changed.SerializeToString()

    def rollout_values(self) -> dict[str, list[float]]:
        """Reward and metrics of each rollout by name, and how long the group took."""
        group, values = self._outcome.group, defaultdict[str, list[float]](list)
        everything = list(group.experiences)
        for experience in [e for e in everything if _is_rollout(e.info_json)] or everything:
            values["reward"].append(experience.reward)
            for name, value in experience.metrics.items():
                if name != "reward":  # a part of the reward may have the name of the whole
                    values[name].append(value)
        values["time/task_execution"] = [group.finished_at_seconds - group.started_at_seconds]
        return values


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter: the final failure of a task, of which only the ordinal may be known."""

    fields: experience_pb2.AttemptFailure

    @classmethod
    def parse(cls, data: bytes) -> "Letter | None":
        """None for bytes that are no letter."""
        try:
            message = experience_pb2.AttemptFailure.FromString(data)
        except DecodeError:
            return None
        return cls(message) if message.final else None

    @classmethod
    def of(cls, failure: AttemptFailure) -> "Letter":
        return cls(failure_to_proto(replace(failure, final=True)))

    @classmethod
    def of_refused(cls, task: TaskMessage, error: str, explorer_id: str = "", attempt: int = 0) -> "Letter":
        """The letter of a task whose result is refused."""
        message = experience_pb2.AttemptFailure(
            task=task.fields,
            cause=FailureCause.INVALID_EXPERIENCE,
            error=error,
            explorer_id=explorer_id,
            attempt=attempt,
            failed_at_seconds=time.time(),
            final=True,
        )
        return cls(message)

    @property
    def ordinal(self) -> int:
        return self.fields.task.ordinal

    def without_images(self) -> "Letter":
        """The letter without the images of its task."""
        if not self.fields.task.images:
            return self
        shown = experience_pb2.AttemptFailure()
        shown.CopyFrom(self.fields)  # the letter itself may be another caller's, who feeds its task again
        shown.task.ClearField("images")
        return Letter(shown)

    def requeue(self) -> bytes:
        """The log entry that feeds the task again."""
        entry = experience_pb2.Outcome()
        entry.requeue.task.CopyFrom(self.fields.task)
        entry.requeue.task.requeues += 1
        return entry.SerializeToString()

    def encode(self) -> bytes:
        return self.fields.SerializeToString()


def _is_rollout(info_json: str) -> bool:
    """Returns False for a preliminary turn such as a reflection: it names its own group, and has no task reward."""
    if '"group"' not in info_json:
        return True
    try:
        info = json.loads(info_json)
    except (ValueError, RecursionError):
        return True
    return not (isinstance(info, dict) and info.get("group"))


def _moved(info_json: str) -> bool:
    """Returns True if another explorer continued the episode."""
    try:
        return '"moved"' in info_json and bool(json.loads(info_json).get("moved"))
    except (ValueError, AttributeError, RecursionError):
        return False
