"""Conversion of messages of buffer and sync to rows of tables and facts for --json."""

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from trinity.api.buffer.v1 import buffer_pb2
from trinity.api.common.v1 import experience_pb2
from trinity.api.sync.v1 import sync_pb2
from trinity.data.experience import Group
from trinity.data.wire import decode_outcome
from trinity.reading.errors import RunError
from trinity.reading.render import size_text, visible
from trinity.runtime.messages import from_message
from trinity.weights.client import Version
from trinity.weights.manifest import CollectiveOffer, FolderOffer, JetStreamOffer, Manifest, Offer, S3Offer
from trinity.weights.wire import ExplorerState

_JSON_FIELDS = ("row", "format", "workflow_args", "reward_args")
_TASK_FIELDS = (
    "task_id", "ordinal", "requeues", "taskset", "epoch", "workflow", "reward_function", "repeat_times", "gate_step",
    "timeout_seconds", "max_attempts",
)  # fmt: skip
_COUNTS = (
    "fed", "stored", "dead_letters", "outstanding", "duplicates_dropped", "failed_attempts", "ledger_step",
    "committed_step", "last_step", "max_staleness_steps", "groups_per_step", "live_step", "sampled_tokens",
    "reward_mean", "staleness_max", "waiting_for", "finished", "log_bytes", "log_limit_bytes", "refused",
    "moved_episodes", "cut_tasks", "late_groups",
)  # fmt: skip
_SHOWN_ERROR = 200  # characters

Facts = dict[str, Any]


@dataclass(frozen=True)
class Letter:
    """A dead letter in a list."""

    ordinal: int
    task_id: str
    cause: str
    attempts: int
    error: str
    failed_at_seconds: float


@dataclass(frozen=True)
class Member:
    """An explorer. `canary_max_error` is None if it was not finite."""

    name: str
    state: str
    version: int
    lag: int
    transport: str
    transports: list[str]
    dtype: str
    engines: int
    tensor_parallel_size: int
    tokens_per_second: float
    tokens_generated: int
    last_pause_seconds: float
    canary_max_error: float | None
    host: str
    pid: int
    address: str
    seconds_since_report: float
    failure: str


@dataclass(frozen=True)
class VersionRow:
    """A weight version in a list. `judged`: an explorer has computed its canary."""

    version: int
    step: int
    state: str
    explorers: int
    size_bytes: int
    delta_bytes: int | None
    base_version: int | None
    transports: list[str]
    canary: bool
    canary_max_error: float | None
    pinned: bool
    made_at_seconds: float
    reason: str
    judged: bool
    files_gone: bool = False


def finite(value: float) -> float | None:
    """Returns None for NaN and infinities, which JSON lacks."""
    return value if math.isfinite(value) else None


def letter(message: experience_pb2.AttemptFailure) -> Letter:
    task, first = message.task, next(iter(message.error.strip().splitlines()), "")
    return from_message(
        Letter, message, ordinal=task.ordinal, task_id=task.task_id, attempts=message.attempt, error=first
    )


def whole_letter(message: experience_pb2.AttemptFailure) -> Facts:
    """Returns all fields: the failure, the task, its row."""
    task: Facts = {name: getattr(message.task, name) for name in _TASK_FIELDS}
    task["row_number"] = message.task.row
    task |= {name: _parsed(getattr(message.task, f"{name}_json")) for name in _JSON_FIELDS}
    sampling = ((field.name, value) for field, value in message.task.sampling.ListFields())
    plain = (str, int, float, bool)
    task["sampling"] = {name: value if isinstance(value, plain) else list(value) for name, value in sampling}
    return {**asdict(letter(message)), "error": message.error, "explorer": message.explorer_id, "task": task}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def batch(entry: buffer_pb2.LedgerEntry) -> Facts:
    """Converts a ledger entry, without the reader's cursor."""
    return {
        **{name: getattr(entry, name) for name in ("run", "step", "policy", "partial", "skip_reason", "reward_mean")},
        "written_at_seconds": entry.created_at_seconds,
        "operators": list(entry.operators),
        "groups": [_group(group) for group in entry.groups],
        "rows": list(entry.rows),
        "auxiliary": [{"buffer": row.buffer, "row": row.row} for row in entry.auxiliary],
        "dropped": [
            {
                **{name: getattr(group, name) for name in ("ordinal", "log_sequence", "reason")},
                "response_tokens": group.num_response_tokens,
            }
            for group in entry.dropped
        ],
        "cut": [{"ordinal": task.ordinal, "task_id": task.task_id} for task in entry.cut],
    }


def account(entry: buffer_pb2.LedgerEntry) -> Facts | None:
    """Returns the fate of every task when an entry was written, by ordinals; None if the ledger keeps it elsewhere.

    Every task up to `ended_through` and those in `ended` had ended. Apart from `dead`, `requeued` and the cut tasks of
    all entries, each of them has a stored group: in an entry, dropped, or `pending` for a later one. `stored`,
    `dead_letters` and `cut_tasks` are numbers.
    """
    cursor = entry.cursor
    if entry.cursor_sequence or not cursor.log_sequence:
        return None
    return {
        **{name: getattr(cursor, name) for name in ("ended_through", "stored", "dead_letters", "cut_tasks")},
        **{name: list(getattr(cursor, name)) for name in ("ended", "dead", "requeued")},
        "pending": [group.ordinal for group in cursor.pending],
    }


def counts(stats: buffer_pb2.StatsResponse) -> Facts:
    """Returns the counts of a buffer: tasks, groups, the log, and the reason it waits for."""
    return {
        **{name: getattr(stats, name) for name in _COUNTS},
        "dropped": dict(stats.dropped),
        "waiting_by_version": dict(stats.waiting_by_version),
        "failing": failing(stats),
        "prompts_cut": prompts_cut(stats),
    }


def waiting_after(counts: Facts, version: int) -> int:
    """Returns how many stored groups outside batches a newer version sampled. `counts`: as `counts` returns them."""
    return sum(number for newest, number in counts["waiting_by_version"].items() if newest > version)


def _group(group: buffer_pb2.LedgerGroup) -> Facts:
    names = ("task_id", "ordinal", "log_sequence", "reward_mean", "staleness_steps", "use_count")
    return {
        **{name: getattr(group, name) for name in names},
        "stored": group.num_experiences,
        "kept": len(group.experiences) or group.num_experiences,
        "masked": sum(kept.masked for kept in group.experiences),
        "versions": [group.oldest_version, group.newest_version],
        "response_tokens": group.num_response_tokens,
    }


def experiences(member: buffer_pb2.LedgerGroup, outcome: bytes) -> list[Facts]:
    """Returns the experiences of a group that the step trained on, after the operators."""
    group = decode_outcome(outcome)
    if not isinstance(group, Group):
        raise RunError(f"log entry {member.log_sequence} holds no group")
    masked = {kept.index: kept.masked for kept in member.experiences}
    indices = list(masked) or range(len(group.experiences))
    return [
        {
            "index": index,
            "rollout": experience.rollout,
            "turn": experience.step,
            "reward": experience.reward,
            "masked": masked.get(index, False),
            "versions": [[span.version, span.start, span.end] for span in experience.version_spans],
            "precisions": experience.precisions,
            "prompt_tokens": experience.prompt_length,
            "response_tokens": experience.response_length,
            "truncation": experience.truncation.name.lower(),
            "metrics": dict(experience.metrics),
            **experience.moved,
            "prompt": experience.prompt_text,
            "response": experience.response_text,
        }
        for index, experience in zip(indices, group.as_kept(member.experiences).experiences, strict=True)
    ]


def attempt(outcome: bytes) -> Facts:
    """Returns the attempt that made a group: number, explorer, and Unix times of start and end."""
    group = decode_outcome(outcome)
    if not isinstance(group, Group):
        raise RunError("the log's entry holds no group")
    times = {name: getattr(group, name) for name in ("started_at_seconds", "finished_at_seconds")}
    return {"attempt": group.attempt, "explorer": group.explorer_id, **times}


def member(message: sync_pb2.Member) -> Member:
    able = message.capabilities
    return from_message(
        Member, message, name=message.explorer_id, state=ExplorerState(message.state).text,
        transports=list(able.transports), dtype=able.dtype,
        engines=able.engines, tensor_parallel_size=able.tensor_parallel_size,
        canary_max_error=finite(message.canary_max_error),
    )  # fmt: skip


def version_row(version: Version) -> VersionRow:
    manifest, measured, delta = version.manifest, version.measured, version.manifest.delta
    return VersionRow(
        version=version.version,
        step=manifest.step,
        state=version.state.name,
        explorers=version.holders,
        size_bytes=manifest.size_bytes,
        delta_bytes=sum(file.size_bytes for file in delta.files) if delta else None,
        base_version=delta.base_version if delta else None,
        transports=sorted({offer.transport for offer in manifest.offers}),
        canary=manifest.canary is not None,
        canary_max_error=finite(measured.max_error) if measured else None,
        pinned=version.pinned,
        made_at_seconds=manifest.created_at_seconds,
        reason=version.reason,
        judged=measured is not None,
        files_gone=version.files_gone,
    )


def whole_version(version: Version) -> Facts:
    """Returns all fields."""
    manifest = version.manifest
    dtypes: dict[str, dict[str, int]] = {}
    for tensor in manifest.tensors:
        sums = dtypes.setdefault(tensor.dtype, {"tensors": 0, "bytes": 0})
        sums["tensors"] += 1
        sums["bytes"] += tensor.size_bytes
    return {
        **asdict(version_row(version)),
        "base_model": manifest.base_model,
        "offers": [_offer(manifest, offer) for offer in manifest.offers],
        "files": len(manifest.files),
        "tensors": len(manifest.tensors),
        "dtypes": dtypes,
        "canary": _canary(version),
    }


def _offer(manifest: Manifest, offer: Offer) -> Facts:
    """Returns one transport: its address and content."""
    match offer:
        case FolderOffer(path):
            where = path
        case S3Offer(bucket, prefix, endpoint):
            where = f"s3://{bucket}/{prefix}" + (f" at {endpoint}" if endpoint else "")
        case JetStreamOffer(prefix):
            where = f"{prefix} in the run's stream of weights"
        case CollectiveOffer(epoch, bucket_bytes):
            where = f"group {epoch}, buckets of {size_text(bucket_bytes)}"
    is_delta = getattr(offer, "delta", False)
    files = manifest.delta.files if is_delta and manifest.delta else manifest.files
    size = sum(file.size_bytes for file in files)
    return {"transport": offer.transport, "where": where, "delta": is_delta, "bytes": size}


def _canary(version: Version) -> Facts | None:
    """Returns expected and measured log-probabilities; None for a version without canary."""
    canary, measured = version.manifest.canary, version.measured
    if canary is None:
        return None
    return {
        "probes": len(canary.probes),
        "tokens": sum(len(probe.token_ids) for probe in canary.probes),
        "mean_tolerance": canary.mean_tolerance,
        "max_tolerance": canary.max_tolerance,
        "measured": measured
        and {"explorer": version.measured_by, **{name: finite(value) for name, value in asdict(measured).items()}},
    }


def provider_line(one: Facts) -> str:
    """Describes one provider in a line."""
    since = one["since_seconds"]
    about = f"{one['provider']}: {one['health']}" + (f" for {time.time() - since:.0f} s" if since is not None else "")
    about += f"; offers {', '.join(one['offers'])}"
    return visible(about + (f"; {one['reason']}" if one["reason"] else ""))


def failing(stats: buffer_pb2.StatsResponse) -> str:
    """Describes failed attempts since the buffer started: number, commonest cause, newest error; empty without any."""
    if not stats.failure_causes:
        return ""
    cause = max(stats.failure_causes, key=lambda name: (stats.failure_causes[name], name))
    count = sum(stats.failure_causes.values())
    error = visible(" ".join(stats.last_failure.split()))[:_SHOWN_ERROR]
    return f"{count} attempts failed, mostly of {visible(cause)}; the newest: {error}"


def prompts_cut(stats: buffer_pb2.StatsResponse) -> str:
    """Describes prompts longer than model.max_prompt_tokens and their treatment; empty if there are none."""
    if not stats.prompts_cut:
        return ""
    if every_prompt_is_cut(stats):
        return (
            f"all {stats.stored} prompts are longer than model.max_prompt_tokens, so no token is trained: stop the "
            "run, and raise model.max_prompt_tokens or shorten the prompts (`trinity check --deep` measures them)"
        )
    return (
        f"{stats.prompts_cut} of {stats.stored} prompts are longer than model.max_prompt_tokens: they were cut, and "
        "nothing of them is trained"
    )


def every_prompt_is_cut(stats: buffer_pb2.StatsResponse) -> bool:
    """Returns True if the prompts of the first batch and all later ones were cut."""
    return 0 < max(1, stats.groups_per_step) <= stats.stored == stats.prompts_cut
