from trinity.api.common.v1 import experience_pb2 as _experience_pb2
from trinity.api.common.v1 import task_pb2 as _task_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinedTaskset(_message.Message):
    __slots__ = ("name", "weight", "first_position")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    first_position: int
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., first_position: _Optional[int] = ...) -> None: ...

class PublishTasksRequest(_message.Message):
    __slots__ = ("run", "tasks", "joined")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    run: str
    tasks: _containers.RepeatedCompositeFieldContainer[_task_pb2.Task]
    joined: JoinedTaskset
    def __init__(self, run: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[_task_pb2.Task, _Mapping]]] = ..., joined: _Optional[_Union[JoinedTaskset, _Mapping]] = ...) -> None: ...

class PublishTasksResponse(_message.Message):
    __slots__ = ("stored", "position")
    STORED_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    stored: int
    position: int
    def __init__(self, stored: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class StreamBatchesRequest(_message.Message):
    __slots__ = ("run", "from_step", "waits")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    run: str
    from_step: int
    waits: bool
    def __init__(self, run: _Optional[str] = ..., from_step: _Optional[int] = ..., waits: bool = ...) -> None: ...

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
    __slots__ = ("outcome", "traceparent", "ordinal", "parent_sha256", "left_out")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    PARENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    outcome: bytes
    traceparent: str
    ordinal: int
    parent_sha256: bytes
    left_out: str
    def __init__(self, outcome: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., ordinal: _Optional[int] = ..., parent_sha256: _Optional[bytes] = ..., left_out: _Optional[str] = ...) -> None: ...

class BatchEnd(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("step", "missing_groups", "reason", "checkpoint_wanted")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MISSING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_WANTED_FIELD_NUMBER: _ClassVar[int]
    step: int
    missing_groups: int
    reason: str
    checkpoint_wanted: bool
    def __init__(self, step: _Optional[int] = ..., missing_groups: _Optional[int] = ..., reason: _Optional[str] = ..., checkpoint_wanted: bool = ...) -> None: ...

class Example(_message.Message):
    __slots__ = ("row", "messages_json", "buffer", "rejected_json", "text", "tools_json")
    ROW_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    REJECTED_JSON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    row: int
    messages_json: str
    buffer: str
    rejected_json: str
    text: str
    tools_json: str
    def __init__(self, row: _Optional[int] = ..., messages_json: _Optional[str] = ..., buffer: _Optional[str] = ..., rejected_json: _Optional[str] = ..., text: _Optional[str] = ..., tools_json: _Optional[str] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("run", "step", "groups", "rows", "cursor", "created_at_seconds", "policy", "reward_mean", "operators", "dropped", "auxiliary", "partial", "floor_sequence", "cursor_sequence", "skip_reason", "cut", "previous_sha256", "sha256")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    AUXILIARY_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    FLOOR_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SKIP_REASON_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    groups: _containers.RepeatedCompositeFieldContainer[LedgerGroup]
    rows: _containers.RepeatedScalarFieldContainer[int]
    cursor: LedgerCursor
    created_at_seconds: float
    policy: str
    reward_mean: float
    operators: _containers.RepeatedScalarFieldContainer[str]
    dropped: _containers.RepeatedCompositeFieldContainer[DroppedGroup]
    auxiliary: _containers.RepeatedCompositeFieldContainer[AuxiliaryRow]
    partial: bool
    floor_sequence: int
    cursor_sequence: int
    skip_reason: str
    cut: _containers.RepeatedCompositeFieldContainer[CutTask]
    previous_sha256: bytes
    sha256: bytes
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[LedgerGroup, _Mapping]]] = ..., rows: _Optional[_Iterable[int]] = ..., cursor: _Optional[_Union[LedgerCursor, _Mapping]] = ..., created_at_seconds: _Optional[float] = ..., policy: _Optional[str] = ..., reward_mean: _Optional[float] = ..., operators: _Optional[_Iterable[str]] = ..., dropped: _Optional[_Iterable[_Union[DroppedGroup, _Mapping]]] = ..., auxiliary: _Optional[_Iterable[_Union[AuxiliaryRow, _Mapping]]] = ..., partial: bool = ..., floor_sequence: _Optional[int] = ..., cursor_sequence: _Optional[int] = ..., skip_reason: _Optional[str] = ..., cut: _Optional[_Iterable[_Union[CutTask, _Mapping]]] = ..., previous_sha256: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class CutTask(_message.Message):
    __slots__ = ("ordinal", "task_id")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    task_id: str
    def __init__(self, ordinal: _Optional[int] = ..., task_id: _Optional[str] = ...) -> None: ...

class SkippedStep(_message.Message):
    __slots__ = ("run", "step", "reason", "skipped_at_seconds")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    reason: str
    skipped_at_seconds: float
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ..., skipped_at_seconds: _Optional[float] = ...) -> None: ...

class LedgerExperience(_message.Message):
    __slots__ = ("index", "reward", "masked")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    index: int
    reward: float
    masked: bool
    def __init__(self, index: _Optional[int] = ..., reward: _Optional[float] = ..., masked: bool = ...) -> None: ...

class DroppedGroup(_message.Message):
    __slots__ = ("ordinal", "log_sequence", "reason", "num_response_tokens", "task_id")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    LOG_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    log_sequence: int
    reason: str
    num_response_tokens: int
    task_id: str
    def __init__(self, ordinal: _Optional[int] = ..., log_sequence: _Optional[int] = ..., reason: _Optional[str] = ..., num_response_tokens: _Optional[int] = ..., task_id: _Optional[str] = ...) -> None: ...

class AuxiliaryRow(_message.Message):
    __slots__ = ("buffer", "row")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    row: int
    def __init__(self, buffer: _Optional[str] = ..., row: _Optional[int] = ...) -> None: ...

class LedgerGroup(_message.Message):
    __slots__ = ("log_sequence", "task_id", "ordinal", "num_experiences", "oldest_version", "newest_version", "staleness_steps", "use_count", "num_response_tokens", "reward_mean", "experiences", "reusable_at_seconds", "num_sampled_tokens", "prompt_cut", "moved_episodes", "outcome_sha256", "parent_steps", "parent_sha256")
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
    EXPERIENCES_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CUT_FIELD_NUMBER: _ClassVar[int]
    MOVED_EPISODES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_SHA256_FIELD_NUMBER: _ClassVar[int]
    PARENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    PARENT_SHA256_FIELD_NUMBER: _ClassVar[int]
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
    experiences: _containers.RepeatedCompositeFieldContainer[LedgerExperience]
    reusable_at_seconds: float
    num_sampled_tokens: int
    prompt_cut: bool
    moved_episodes: int
    outcome_sha256: bytes
    parent_steps: int
    parent_sha256: bytes
    def __init__(self, log_sequence: _Optional[int] = ..., task_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., num_experiences: _Optional[int] = ..., oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., staleness_steps: _Optional[int] = ..., use_count: _Optional[int] = ..., num_response_tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ..., experiences: _Optional[_Iterable[_Union[LedgerExperience, _Mapping]]] = ..., reusable_at_seconds: _Optional[float] = ..., num_sampled_tokens: _Optional[int] = ..., prompt_cut: bool = ..., moved_episodes: _Optional[int] = ..., outcome_sha256: _Optional[bytes] = ..., parent_steps: _Optional[int] = ..., parent_sha256: _Optional[bytes] = ...) -> None: ...

class LedgerCursor(_message.Message):
    __slots__ = ("log_sequence", "ended_through", "stored", "dead_letters", "duplicates_dropped", "ended", "pending", "failed_attempts", "sampled_tokens", "failures", "requeued", "dropped", "fenced", "reusable", "refused", "dead", "fresh_drops", "prompts_cut", "moved_episodes", "cut_tasks", "late_groups", "cut")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class RequeuedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LOG_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENDED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    FRESH_DROPS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_CUT_FIELD_NUMBER: _ClassVar[int]
    MOVED_EPISODES_FIELD_NUMBER: _ClassVar[int]
    CUT_TASKS_FIELD_NUMBER: _ClassVar[int]
    LATE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    log_sequence: int
    ended_through: int
    stored: int
    dead_letters: int
    duplicates_dropped: int
    ended: _containers.RepeatedScalarFieldContainer[int]
    pending: _containers.RepeatedCompositeFieldContainer[LedgerGroup]
    failed_attempts: int
    sampled_tokens: int
    failures: _containers.ScalarMap[int, int]
    requeued: _containers.ScalarMap[int, int]
    dropped: _containers.ScalarMap[str, int]
    fenced: _containers.RepeatedScalarFieldContainer[int]
    reusable: _containers.RepeatedCompositeFieldContainer[LedgerGroup]
    refused: int
    dead: _containers.RepeatedScalarFieldContainer[int]
    fresh_drops: _containers.RepeatedCompositeFieldContainer[DroppedGroup]
    prompts_cut: int
    moved_episodes: int
    cut_tasks: int
    late_groups: int
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, log_sequence: _Optional[int] = ..., ended_through: _Optional[int] = ..., stored: _Optional[int] = ..., dead_letters: _Optional[int] = ..., duplicates_dropped: _Optional[int] = ..., ended: _Optional[_Iterable[int]] = ..., pending: _Optional[_Iterable[_Union[LedgerGroup, _Mapping]]] = ..., failed_attempts: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., failures: _Optional[_Mapping[int, int]] = ..., requeued: _Optional[_Mapping[int, int]] = ..., dropped: _Optional[_Mapping[str, int]] = ..., fenced: _Optional[_Iterable[int]] = ..., reusable: _Optional[_Iterable[_Union[LedgerGroup, _Mapping]]] = ..., refused: _Optional[int] = ..., dead: _Optional[_Iterable[int]] = ..., fresh_drops: _Optional[_Iterable[_Union[DroppedGroup, _Mapping]]] = ..., prompts_cut: _Optional[int] = ..., moved_episodes: _Optional[int] = ..., cut_tasks: _Optional[int] = ..., late_groups: _Optional[int] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

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

class ForkRequest(_message.Message):
    __slots__ = ("run", "step", "through_step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    THROUGH_STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    through_step: int
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., through_step: _Optional[int] = ...) -> None: ...

class SkipStepRequest(_message.Message):
    __slots__ = ("run", "step", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    reason: str
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SkipStepResponse(_message.Message):
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
    __slots__ = ("run", "fed", "stored", "dead_letters", "outstanding", "duplicates_dropped", "failed_attempts", "ledger_step", "committed_step", "last_step", "max_staleness_steps", "groups_per_step", "live_step", "sampled_tokens", "reward_mean", "staleness_max", "evaluations", "evaluations_outstanding", "waiting_for", "finished", "log_bytes", "evaluation_tokens", "dropped", "refused", "log_limit_bytes", "archive_behind", "skipped_steps", "failure_causes", "last_failure", "prompts_cut", "moved_episodes", "waiting_by_version", "cut_tasks", "late_groups")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FailureCausesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class WaitingByVersionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
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
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOG_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_CAUSES_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_CUT_FIELD_NUMBER: _ClassVar[int]
    MOVED_EPISODES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CUT_TASKS_FIELD_NUMBER: _ClassVar[int]
    LATE_GROUPS_FIELD_NUMBER: _ClassVar[int]
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
    sampled_tokens: int
    reward_mean: float
    staleness_max: int
    evaluations: _containers.RepeatedCompositeFieldContainer[Evaluation]
    evaluations_outstanding: int
    waiting_for: str
    finished: bool
    log_bytes: int
    evaluation_tokens: int
    dropped: _containers.ScalarMap[str, int]
    refused: int
    log_limit_bytes: int
    archive_behind: int
    skipped_steps: _containers.RepeatedScalarFieldContainer[int]
    failure_causes: _containers.ScalarMap[str, int]
    last_failure: str
    prompts_cut: int
    moved_episodes: int
    waiting_by_version: _containers.ScalarMap[int, int]
    cut_tasks: int
    late_groups: int
    def __init__(self, run: _Optional[str] = ..., fed: _Optional[int] = ..., stored: _Optional[int] = ..., dead_letters: _Optional[int] = ..., outstanding: _Optional[int] = ..., duplicates_dropped: _Optional[int] = ..., failed_attempts: _Optional[int] = ..., ledger_step: _Optional[int] = ..., committed_step: _Optional[int] = ..., last_step: _Optional[int] = ..., max_staleness_steps: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., live_step: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ..., staleness_max: _Optional[int] = ..., evaluations: _Optional[_Iterable[_Union[Evaluation, _Mapping]]] = ..., evaluations_outstanding: _Optional[int] = ..., waiting_for: _Optional[str] = ..., finished: bool = ..., log_bytes: _Optional[int] = ..., evaluation_tokens: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., refused: _Optional[int] = ..., log_limit_bytes: _Optional[int] = ..., archive_behind: _Optional[int] = ..., skipped_steps: _Optional[_Iterable[int]] = ..., failure_causes: _Optional[_Mapping[str, int]] = ..., last_failure: _Optional[str] = ..., prompts_cut: _Optional[int] = ..., moved_episodes: _Optional[int] = ..., waiting_by_version: _Optional[_Mapping[int, int]] = ..., cut_tasks: _Optional[int] = ..., late_groups: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("run", "limit", "ordinal")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    run: str
    limit: int
    ordinal: int
    def __init__(self, run: _Optional[str] = ..., limit: _Optional[int] = ..., ordinal: _Optional[int] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters",)
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[_experience_pb2.AttemptFailure]
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[_experience_pb2.AttemptFailure, _Mapping]]] = ...) -> None: ...

class RetryDeadLettersRequest(_message.Message):
    __slots__ = ("run", "ordinals")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ORDINALS_FIELD_NUMBER: _ClassVar[int]
    run: str
    ordinals: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., ordinals: _Optional[_Iterable[int]] = ...) -> None: ...

class RetryDeadLettersResponse(_message.Message):
    __slots__ = ("ordinals",)
    ORDINALS_FIELD_NUMBER: _ClassVar[int]
    ordinals: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ordinals: _Optional[_Iterable[int]] = ...) -> None: ...

class DropDeadLettersRequest(_message.Message):
    __slots__ = ("run", "ordinals")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ORDINALS_FIELD_NUMBER: _ClassVar[int]
    run: str
    ordinals: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., ordinals: _Optional[_Iterable[int]] = ...) -> None: ...

class DropDeadLettersResponse(_message.Message):
    __slots__ = ("ordinals",)
    ORDINALS_FIELD_NUMBER: _ClassVar[int]
    ordinals: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ordinals: _Optional[_Iterable[int]] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("run", "versions")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    run: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    def __init__(self, dropped: _Optional[int] = ...) -> None: ...
