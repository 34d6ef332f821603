from trinity.api.common.v1 import experience_pb2 as _experience_pb2
from trinity.api.common.v1 import task_pb2 as _task_pb2
from trinity.api.common.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExplorerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPLORER_STATE_UNSPECIFIED: _ClassVar[ExplorerState]
    EXPLORER_STATE_STARTING: _ClassVar[ExplorerState]
    EXPLORER_STATE_RUNNING: _ClassVar[ExplorerState]
    EXPLORER_STATE_WAITING: _ClassVar[ExplorerState]
    EXPLORER_STATE_WAITING_FOR_LOG: _ClassVar[ExplorerState]
    EXPLORER_STATE_UPDATING: _ClassVar[ExplorerState]
    EXPLORER_STATE_EVALUATING: _ClassVar[ExplorerState]
    EXPLORER_STATE_SERVING: _ClassVar[ExplorerState]
    EXPLORER_STATE_DRAINING: _ClassVar[ExplorerState]
    EXPLORER_STATE_WAITING_FOR_PROVIDER: _ClassVar[ExplorerState]
EXPLORER_STATE_UNSPECIFIED: ExplorerState
EXPLORER_STATE_STARTING: ExplorerState
EXPLORER_STATE_RUNNING: ExplorerState
EXPLORER_STATE_WAITING: ExplorerState
EXPLORER_STATE_WAITING_FOR_LOG: ExplorerState
EXPLORER_STATE_UPDATING: ExplorerState
EXPLORER_STATE_EVALUATING: ExplorerState
EXPLORER_STATE_SERVING: ExplorerState
EXPLORER_STATE_DRAINING: ExplorerState
EXPLORER_STATE_WAITING_FOR_PROVIDER: ExplorerState

class GenerateRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "sampling")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _task_pb2.SamplingParams
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_task_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("completions",)
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    def __init__(self, completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("token_ids", "logprobs", "version_spans", "finish_reason", "text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    version_spans: _containers.RepeatedCompositeFieldContainer[_experience_pb2.VersionSpan]
    finish_reason: str
    text: str
    def __init__(self, token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., version_spans: _Optional[_Iterable[_Union[_experience_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("messages_json", "sampling")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    messages_json: str
    sampling: _task_pb2.SamplingParams
    def __init__(self, messages_json: _Optional[str] = ..., sampling: _Optional[_Union[_task_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("prompt_token_ids", "completions")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("taskset", "task_id", "wait_seconds", "limit_seconds")
    TASKSET_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    taskset: str
    task_id: str
    wait_seconds: float
    limit_seconds: float
    def __init__(self, taskset: _Optional[str] = ..., task_id: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., limit_seconds: _Optional[float] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("key", "base_url", "task_id", "taskset", "row_json", "rollout", "repeat_times", "evaluation", "limit_seconds")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    TASKSET_FIELD_NUMBER: _ClassVar[int]
    ROW_JSON_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    REPEAT_TIMES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    key: str
    base_url: str
    task_id: str
    taskset: str
    row_json: str
    rollout: int
    repeat_times: int
    evaluation: bool
    limit_seconds: float
    def __init__(self, key: _Optional[str] = ..., base_url: _Optional[str] = ..., task_id: _Optional[str] = ..., taskset: _Optional[str] = ..., row_json: _Optional[str] = ..., rollout: _Optional[int] = ..., repeat_times: _Optional[int] = ..., evaluation: bool = ..., limit_seconds: _Optional[float] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("key", "rewards", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    key: str
    rewards: _containers.RepeatedScalarFieldContainer[float]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, key: _Optional[str] = ..., rewards: _Optional[_Iterable[float]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("branches", "sampled_tokens", "trained_tokens")
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    branches: int
    sampled_tokens: int
    trained_tokens: int
    def __init__(self, branches: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., trained_tokens: _Optional[int] = ...) -> None: ...

class AbandonSessionRequest(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: str
    reason: str
    def __init__(self, key: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AbandonSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished", "returned")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    finished: int
    returned: int
    def __init__(self, finished: _Optional[int] = ..., returned: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("explorer_id", "run", "state", "weight_version", "weight_step", "running_tasks", "groups_stored", "failed_attempts", "tokens_generated", "tokens_per_second", "weight_updates", "last_pause_seconds", "sessions_waiting", "sessions_open")
    EXPLORER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_STEP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TASKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_STORED_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_UPDATES_FIELD_NUMBER: _ClassVar[int]
    LAST_PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_WAITING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_OPEN_FIELD_NUMBER: _ClassVar[int]
    explorer_id: str
    run: str
    state: ExplorerState
    weight_version: int
    weight_step: int
    running_tasks: int
    groups_stored: int
    failed_attempts: int
    tokens_generated: int
    tokens_per_second: float
    weight_updates: int
    last_pause_seconds: float
    sessions_waiting: int
    sessions_open: int
    def __init__(self, explorer_id: _Optional[str] = ..., run: _Optional[str] = ..., state: _Optional[_Union[ExplorerState, str]] = ..., weight_version: _Optional[int] = ..., weight_step: _Optional[int] = ..., running_tasks: _Optional[int] = ..., groups_stored: _Optional[int] = ..., failed_attempts: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., weight_updates: _Optional[int] = ..., last_pause_seconds: _Optional[float] = ..., sessions_waiting: _Optional[int] = ..., sessions_open: _Optional[int] = ...) -> None: ...
