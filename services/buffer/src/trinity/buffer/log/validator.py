"""Validates log entries: bytes, fields, versions; and runs the operators on them."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from trinity.api.common.v1 import experience_pb2, task_pb2
from trinity.buffer.log.reader import LogReader, check_owner
from trinity.buffer.operators.pipeline import Pipeline, Processed
from trinity.buffer.state.context import RunContext
from trinity.buffer.window.groups import Kept, StoredGroup
from trinity.data.experience import UNLIMITED, Limits, check_metric_names, is_number
from trinity.data.json_objects import json_object
from trinity.data.outcome_checks import check_attempt, check_header, check_rollouts
from trinity.data.wire import TRUNCATIONS, failure_from_proto, group_from_proto, is_boolean, task_from_proto
from trinity.runtime import headers
from trinity.runtime.broker import Message
from trinity.runtime.errors import InvalidInput, NotFound

# Far more than lie between two checkpoints; their list is part of every later cursor.
MOST_FENCED = 10_000
_SHOWN = 80
_ANY_LENGTH = 2**31


class FedTask(Protocol):
    """Returns the task of an ordinal (and taskset) as it was fed. Raises NotFound."""

    async def __call__(self, ordinal: int, taskset: str = "") -> task_pb2.Task: ...


class Versions(Protocol):
    """The part of LiveVersions that is needed here."""

    async def was_live(self, version: int) -> bool: ...

    async def meets(self, version: int, gate_step: int) -> bool: ...


class EntryValidator:
    """Knows nothing of batches. `fed_task` finds a task as it was fed (NotFound)."""

    def __init__(
        self, context: RunContext, reader: LogReader, pipeline: Pipeline, fed_task: FedTask, versions: Versions
    ) -> None:
        self._context = context
        self._reader = reader
        self.pipeline = pipeline
        self._fed_task = fed_task
        self._versions = versions

    async def read(self, message: Message) -> experience_pb2.Outcome:
        """The outcome in a message. Raises InvalidInput."""
        return await self._reader.take(message)

    def check_kind(self, message: Message, outcome: experience_pb2.Outcome) -> str:
        """Returns the kind of an entry. Raises InvalidInput unless it belongs to this log and to its explorer."""
        kind = outcome.WhichOneof("outcome")
        if kind is None:
            raise InvalidInput("outcome", "holds nothing")
        check_owner(self._context.names, message.subject, outcome)
        if kind == "fence":
            check_fence(outcome.fence.versions)
            return kind
        task = getattr(outcome, kind).task
        if task.run != self._context.run:
            raise InvalidInput("task.run", f"is {_shortened(task.run)}, this log is of {self._context.run!r}")
        if task.ordinal < 1:  # else it would count as ended
            raise InvalidInput("task.ordinal", f"is {task.ordinal}; no such task was fed")
        if task.kind != task_pb2.TASK_KIND_TRAIN:
            raise InvalidInput("task.kind", f"is {task.kind}; only training tasks enter this log")
        if kind == "requeue":
            task_from_proto(task)  # it is fed again
        return kind

    async def check_fed(self, task: task_pb2.Task) -> task_pb2.Task:
        """The task as it was fed. Raises InvalidInput unless it is this very one."""
        try:
            fed = await self._fed_task(task.ordinal, task.taskset)
        except NotFound:
            raise InvalidInput("task.ordinal", f"is {task.ordinal}; no such task was fed") from None
        if task != fed:
            for field in task_pb2.Task.DESCRIPTOR.fields:
                found, expected = getattr(task, field.name), getattr(fed, field.name)
                if found != expected:
                    problem = f"is {_shortened(found)}; task {task.ordinal} was fed with {_shortened(expected)}"
                    raise InvalidInput(f"task.{field.name}", problem)
        return fed

    async def check_failure(self, failure: experience_pb2.AttemptFailure) -> task_pb2.Task:
        """Its task as it was fed. Raises InvalidInput."""
        fed = await self.check_fed(failure.task)
        failure_from_proto(failure)
        check_attempt("failure", failure)
        return fed

    def ordinal(self, message: Message) -> int:
        """The task that a refused message claims to end; 0 if it is none of this run."""
        text = message.headers.get(headers.ORDINAL, "")
        ordinal = int(text) if text.isdecimal() and len(text) < 16 else 0
        return ordinal if ordinal <= self._context.fed else 0

    async def task(self, ordinal: int) -> task_pb2.Task:
        """Returns the task as it was fed, or only its ordinal if it is gone from the queue."""
        try:
            return await self._fed_task(ordinal)
        except NotFound:
            return task_pb2.Task(ordinal=ordinal)

    async def group(
        self, sequence: int, message: experience_pb2.Group, fenced: Collection[int]
    ) -> tuple[StoredGroup, str]:
        """The group as it may enter a batch, and the operator that keeps it out of all. Raises InvalidInput."""
        await self.check_fed(message.task)
        stored = summarise(sequence, message, self._context.limits, task_is_sound=True)
        await self._check_versions(stored, message.task.gate_step, fenced)
        if not self.pipeline.names:
            return stored, ""
        return processed(stored, self.pipeline.run(group_from_proto(message)))

    async def _check_versions(self, group: StoredGroup, gate_step: int, fenced: Collection[int]) -> None:
        # Weights that the task asks for may be withdrawn, so that older ones may start it.
        if gate_step not in fenced and not await self._versions.meets(group.oldest_version, gate_step):
            raise InvalidInput(
                "version_spans",
                f"begin at version {group.oldest_version}; weights of step {gate_step} or newer may start this task",
            )
        if group.newest_version not in fenced and not await self._versions.was_live(group.newest_version):
            newest = self._context.newest_live_step
            raise InvalidInput(
                "version_spans", f"name version {group.newest_version}; the newest that was ever LIVE is {newest}"
            )


def check_fence(versions: Collection[int]) -> None:
    """Raises InvalidInput for versions that no rollback withdraws."""
    if len(versions) > MOST_FENCED:
        raise InvalidInput("versions", f"are {len(versions)}; at most {MOST_FENCED} can be fenced in one call")
    if any(version < 1 for version in versions):
        raise InvalidInput("versions", f"hold {min(versions)}; version 0 and lower cannot be withdrawn")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def processed(group: StoredGroup, result: Processed) -> tuple[StoredGroup, str]:
    """Returns the group after the operators, and the operator that dropped it or ""."""
    if result.is_unchanged or not result.drafts:
        return group, result.dropped_by
    kept = tuple(Kept(draft.index, draft.reward, draft.masked) for draft in result.drafts)
    return replace(group, kept=kept, reward_mean=sum(draft.reward for draft in kept) / len(kept)), ""


def summarise(
    sequence: int, message: experience_pb2.Group, limits: Limits = UNLIMITED, task_is_sound: bool = False
) -> StoredGroup:
    """Summarises a group for the ledger, read in place: a few numpy calls for all rollouts together.

    Raises InvalidInput naming the first field that cannot be right (see Group.check).

    `task_is_sound`: the task equals the fed one.
    """
    if not task_is_sound:
        task_from_proto(message.task)
    check_header(message)
    check_rollouts(message.task.repeat_times, message.experiences)
    if not _plausible(message, limits):
        group_from_proto(message).check(limits)
    return without_check(sequence, message)


def without_check(sequence: int, message: experience_pb2.Group) -> StoredGroup:
    """Summarises a group with any content, also one that failed validation."""
    experiences = message.experiences
    versions = [span.version for experience in experiences for span in experience.version_spans] or [0]
    return StoredGroup(
        log_sequence=sequence,
        task_id=message.task.task_id,
        ordinal=message.task.ordinal,
        num_experiences=len(experiences),
        oldest_version=min(versions),
        newest_version=max(versions),
        num_response_tokens=sum(len(e.action_mask.data) for e in experiences),  # not by shapes, which may be anything
        num_sampled_tokens=sum(e.action_mask.data.count(1) for e in experiences),
        prompt_cut=any(e.truncation == experience_pb2.TRUNCATION_PROMPT for e in experiences),
        moved_episodes=sum(_moved(experience.info_json) for experience in experiences),
        reward_mean=sum(experience.reward for experience in experiences) / max(1, len(experiences)),
    )


def rollout_values(message: experience_pb2.Group) -> dict[str, list[float]]:
    """Reward and metrics of each rollout by name, and how long the group took."""
    values: dict[str, list[float]] = defaultdict(list)
    everything = list(message.experiences)
    for experience in [e for e in everything if _is_rollout(e.info_json)] or everything:
        values["reward"].append(experience.reward)
        for name, value in experience.metrics.items():
            if name != "reward":  # a part of the reward may have the name of the whole
                values[name].append(value)
    values["time/task_execution"] = [message.finished_at_seconds - message.started_at_seconds]
    return values


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


def _plausible(message: experience_pb2.Group, limits: Limits) -> bool:
    """Returns True only if every experience passes Experience.check; never raises."""
    if message.images:
        return False
    all_tokens, all_logprobs, all_masks = [], [], []
    longest = limits.tokens or _ANY_LENGTH
    for experience in message.experiences:
        ids, logs, actions = experience.token_ids, experience.logprobs, experience.action_mask
        tokens, logprobs, mask = ids.data, logs.data, actions.data
        length, response, prompt = len(tokens) // 4, len(mask), experience.prompt_length
        if ids.dtype != "int32" or logs.dtype != "float32" or actions.dtype != "bool":
            return False
        if ids.shape != [length] or logs.shape != [response] or actions.shape != [response]:
            return False
        if len(tokens) != 4 * length or len(logprobs) != 4 * response:
            return False
        if prompt < 1 or prompt + response != length or length > longest or not is_number(experience.reward):
            return False
        if experience.rollout < 0 or experience.step < 0 or experience.truncation not in TRUNCATIONS:
            return False
        if limits.teacher or experience.HasField("teacher_logprobs") or not _is_json_object(experience.info_json):
            return False  # teachers are rare
        if limits.images is not None or experience.images:
            return False  # images are decoded as far as their size
        if limits.numbers and experience.info_json:
            return False
        if not all(map(is_number, experience.metrics.values())) or not _are_names(experience.metrics):
            return False
        if not _covers(experience.version_spans, response):
            return False
        all_tokens.append(tokens)
        all_logprobs.append(logprobs)
        all_masks.append(mask)
    if not all_tokens:
        return False
    sampled = np.frombuffer(b"".join(all_logprobs), np.float32)[np.frombuffer(b"".join(all_masks), bool)]
    # NaN fails both comparisons.
    plausible = ((sampled <= 1e-4) & (sampled > -np.inf)).all()
    plausible &= is_boolean(b"".join(all_masks))
    joined = np.frombuffer(b"".join(all_tokens), np.int32)
    return bool(plausible and joined.min() >= 0 and joined.max() < limits.ids_below)


def _is_json_object(text: str) -> bool:
    try:
        json_object(text, "info_json")
    except InvalidInput:
        return False
    return True


def _are_names(metrics: Collection[str]) -> bool:
    try:
        check_metric_names("metrics", metrics)
    except InvalidInput:
        return False
    return True


def _covers(spans: Iterable[experience_pb2.VersionSpan], response: int) -> bool:
    """Returns True if the spans cover all response tokens in order, with versions that never fall."""
    at, newest = 0, 0
    for span in spans:
        if span.start != at or span.end <= at or span.version < newest:
            return False
        at, newest = span.end, span.version
    return at == response
