from trinity.api.common.v1 import experience_pb2 as _experience_pb2
from trinity.api.common.v1 import task_pb2 as _task_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PublishTasksRequest(_message.Message):
    __slots__ = ("run", "tasks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    run: str
    tasks: _containers.RepeatedCompositeFieldContainer[_task_pb2.Task]
    def __init__(self, run: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[_task_pb2.Task, _Mapping]]] = ...) -> None: ...

class PublishTasksResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    def __init__(self, stored: _Optional[int] = ...) -> None: ...

class StreamBatchesRequest(_message.Message):
    __slots__ = ("run", "from_step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    from_step: int
    def __init__(self, run: _Optional[str] = ..., from_step: _Optional[int] = ...) -> None: ...

class BatchPart(_message.Message):
    __slots__ = ("entry", "group", "example", "end", "waiting")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    entry: LedgerEntry
    group: BatchGroup
    example: Example
    end: BatchEnd
    waiting: Waiting
    def __init__(self, entry: _Optional[_Union[LedgerEntry, _Mapping]] = ..., group: _Optional[_Union[BatchGroup, _Mapping]] = ..., example: _Optional[_Union[Example, _Mapping]] = ..., end: _Optional[_Union[BatchEnd, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ...) -> None: ...

class BatchGroup(_message.Message):
    __slots__ = ("outcome", "traceparent", "ordinal")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    outcome: bytes
    traceparent: str
    ordinal: int
    def __init__(self, outcome: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., ordinal: _Optional[int] = ...) -> None: ...

class BatchEnd(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("step", "missing_groups", "reason")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MISSING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    step: int
    missing_groups: int
    reason: str
    def __init__(self, step: _Optional[int] = ..., missing_groups: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Example(_message.Message):
    __slots__ = ("row", "messages_json")
    ROW_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    row: int
    messages_json: str
    def __init__(self, row: _Optional[int] = ..., messages_json: _Optional[str] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("run", "step", "groups", "rows", "cursor", "created_at_seconds", "policy", "reward_mean")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    groups: _containers.RepeatedCompositeFieldContainer[LedgerGroup]
    rows: _containers.RepeatedScalarFieldContainer[int]
    cursor: LedgerCursor
    created_at_seconds: float
    policy: str
    reward_mean: float
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[LedgerGroup, _Mapping]]] = ..., rows: _Optional[_Iterable[int]] = ..., cursor: _Optional[_Union[LedgerCursor, _Mapping]] = ..., created_at_seconds: _Optional[float] = ..., policy: _Optional[str] = ..., reward_mean: _Optional[float] = ...) -> None: ...

class LedgerGroup(_message.Message):
    __slots__ = ("log_sequence", "task_id", "ordinal", "num_experiences", "oldest_version", "newest_version", "staleness_steps", "use_count", "num_response_tokens", "reward_mean")
    LOG_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERIENCES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_STEPS_FIELD_NUMBER: _ClassVar[int]
    USE_COUNT_FIELD_NUMBER: _ClassVar[int]
    NUM_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    log_sequence: int
    task_id: str
    ordinal: int
    num_experiences: int
    oldest_version: int
    newest_version: int
    staleness_steps: int
    use_count: int
    num_response_tokens: int
    reward_mean: float
    def __init__(self, log_sequence: _Optional[int] = ..., task_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., num_experiences: _Optional[int] = ..., oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., staleness_steps: _Optional[int] = ..., use_count: _Optional[int] = ..., num_response_tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ...) -> None: ...

class LedgerCursor(_message.Message):
    __slots__ = ("log_sequence", "consumed_ordinal", "stored", "dead_letters", "duplicates_dropped", "dead_ordinals", "pending", "failed_attempts", "response_tokens", "failures")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    LOG_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    DEAD_ORDINALS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    log_sequence: int
    consumed_ordinal: int
    stored: int
    dead_letters: int
    duplicates_dropped: int
    dead_ordinals: _containers.RepeatedScalarFieldContainer[int]
    pending: _containers.RepeatedCompositeFieldContainer[LedgerGroup]
    failed_attempts: int
    response_tokens: int
    failures: _containers.ScalarMap[int, int]
    def __init__(self, log_sequence: _Optional[int] = ..., consumed_ordinal: _Optional[int] = ..., stored: _Optional[int] = ..., dead_letters: _Optional[int] = ..., duplicates_dropped: _Optional[int] = ..., dead_ordinals: _Optional[_Iterable[int]] = ..., pending: _Optional[_Iterable[_Union[LedgerGroup, _Mapping]]] = ..., failed_attempts: _Optional[int] = ..., response_tokens: _Optional[int] = ..., failures: _Optional[_Mapping[int, int]] = ...) -> None: ...

class CommitStepRequest(_message.Message):
    __slots__ = ("run", "step", "oldest_kept_step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OLDEST_KEPT_STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    oldest_kept_step: int
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., oldest_kept_step: _Optional[int] = ...) -> None: ...

class CommitStepResponse(_message.Message):
    __slots__ = ("oldest_step",)
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    oldest_step: int
    def __init__(self, oldest_step: _Optional[int] = ...) -> None: ...

class RewindRequest(_message.Message):
    __slots__ = ("run", "step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RewindResponse(_message.Message):
    __slots__ = ("newest_step", "last_step")
    NEWEST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    newest_step: int
    last_step: int
    def __init__(self, newest_step: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class GetLedgerEntryRequest(_message.Message):
    __slots__ = ("run", "step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class GetLedgerEntryResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: LedgerEntry
    def __init__(self, entry: _Optional[_Union[LedgerEntry, _Mapping]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("run", "fed", "stored", "dead_letters", "outstanding", "duplicates_dropped", "failed_attempts", "ledger_step", "committed_step", "last_step", "max_staleness_steps", "groups_per_step", "live_step", "response_tokens", "reward_mean", "staleness_max", "evaluations", "evaluations_outstanding", "waiting_for", "finished", "log_bytes", "evaluation_tokens")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_STEP_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_STEPS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    LIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    run: str
    fed: int
    stored: int
    dead_letters: int
    outstanding: int
    duplicates_dropped: int
    failed_attempts: int
    ledger_step: int
    committed_step: int
    last_step: int
    max_staleness_steps: int
    groups_per_step: int
    live_step: int
    response_tokens: int
    reward_mean: float
    staleness_max: int
    evaluations: _containers.RepeatedCompositeFieldContainer[Evaluation]
    evaluations_outstanding: int
    waiting_for: str
    finished: bool
    log_bytes: int
    evaluation_tokens: int
    def __init__(self, run: _Optional[str] = ..., fed: _Optional[int] = ..., stored: _Optional[int] = ..., dead_letters: _Optional[int] = ..., outstanding: _Optional[int] = ..., duplicates_dropped: _Optional[int] = ..., failed_attempts: _Optional[int] = ..., ledger_step: _Optional[int] = ..., committed_step: _Optional[int] = ..., last_step: _Optional[int] = ..., max_staleness_steps: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., live_step: _Optional[int] = ..., response_tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ..., staleness_max: _Optional[int] = ..., evaluations: _Optional[_Iterable[_Union[Evaluation, _Mapping]]] = ..., evaluations_outstanding: _Optional[int] = ..., waiting_for: _Optional[str] = ..., finished: bool = ..., log_bytes: _Optional[int] = ..., evaluation_tokens: _Optional[int] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("step", "taskset", "metrics", "oldest_version", "newest_version")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TASKSET_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    step: int
    taskset: str
    metrics: _containers.ScalarMap[str, float]
    oldest_version: int
    newest_version: int
    def __init__(self, step: _Optional[int] = ..., taskset: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("run", "limit")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run: str
    limit: int
    def __init__(self, run: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters",)
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[_experience_pb2.AttemptFailure]
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[_experience_pb2.AttemptFailure, _Mapping]]] = ...) -> None: ...
