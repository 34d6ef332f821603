from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TASK_KIND_TRAIN: _ClassVar[TaskKind]
    TASK_KIND_EVALUATION: _ClassVar[TaskKind]
TASK_KIND_UNSPECIFIED: TaskKind
TASK_KIND_TRAIN: TaskKind
TASK_KIND_EVALUATION: TaskKind

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "n", "repetition_penalty", "stop", "ignore_eos", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    min_tokens: int
    n: int
    repetition_penalty: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., n: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: bool = ..., seed: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("run", "task_id", "ordinal", "kind", "taskset", "epoch", "row", "row_json", "format_json", "workflow", "workflow_args_json", "reward_function", "reward_args_json", "repeat_times", "sampling", "gate_step", "evaluation_step", "timeout_seconds", "max_attempts", "requeues", "greedy_baseline", "images")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TASKSET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_JSON_FIELD_NUMBER: _ClassVar[int]
    FORMAT_JSON_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_FIELD_NUMBER: _ClassVar[int]
    WORKFLOW_ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    REWARD_ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    REPEAT_TIMES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GATE_STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_STEP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    REQUEUES_FIELD_NUMBER: _ClassVar[int]
    GREEDY_BASELINE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    run: str
    task_id: str
    ordinal: int
    kind: TaskKind
    taskset: str
    epoch: int
    row: int
    row_json: str
    format_json: str
    workflow: str
    workflow_args_json: str
    reward_function: str
    reward_args_json: str
    repeat_times: int
    sampling: SamplingParams
    gate_step: int
    evaluation_step: int
    timeout_seconds: float
    max_attempts: int
    requeues: int
    greedy_baseline: bool
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run: _Optional[str] = ..., task_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., taskset: _Optional[str] = ..., epoch: _Optional[int] = ..., row: _Optional[int] = ..., row_json: _Optional[str] = ..., format_json: _Optional[str] = ..., workflow: _Optional[str] = ..., workflow_args_json: _Optional[str] = ..., reward_function: _Optional[str] = ..., reward_args_json: _Optional[str] = ..., repeat_times: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., gate_step: _Optional[int] = ..., evaluation_step: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., max_attempts: _Optional[int] = ..., requeues: _Optional[int] = ..., greedy_baseline: bool = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...
