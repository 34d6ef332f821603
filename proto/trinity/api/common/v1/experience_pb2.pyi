from trinity.api.common.v1 import tensor_pb2 as _tensor_pb2
from trinity.api.common.v1 import task_pb2 as _task_pb2
from trinity.api.environment.v1 import environment_pb2 as _environment_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Truncation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATION_UNSPECIFIED: _ClassVar[Truncation]
    TRUNCATION_NONE: _ClassVar[Truncation]
    TRUNCATION_PROMPT: _ClassVar[Truncation]
    TRUNCATION_RESPONSE: _ClassVar[Truncation]
TRUNCATION_UNSPECIFIED: Truncation
TRUNCATION_NONE: Truncation
TRUNCATION_PROMPT: Truncation
TRUNCATION_RESPONSE: Truncation

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end", "precision")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    precision: str
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., precision: _Optional[str] = ...) -> None: ...

class Experience(_message.Message):
    __slots__ = ("rollout", "step", "token_ids", "prompt_length", "logprobs", "action_mask", "reward", "version_spans", "truncation", "metrics", "info_json", "prompt_text", "response_text", "teacher_logprobs", "images", "routes", "teacher_top")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACTION_MASK_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TEXT_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    TEACHER_TOP_FIELD_NUMBER: _ClassVar[int]
    rollout: int
    step: int
    token_ids: _tensor_pb2.Tensor
    prompt_length: int
    logprobs: _tensor_pb2.Tensor
    action_mask: _tensor_pb2.Tensor
    reward: float
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    truncation: Truncation
    metrics: _containers.ScalarMap[str, float]
    info_json: str
    prompt_text: str
    response_text: str
    teacher_logprobs: _tensor_pb2.Tensor
    images: _containers.RepeatedCompositeFieldContainer[PlacedImage]
    routes: Routes
    teacher_top: TopTokens
    def __init__(self, rollout: _Optional[int] = ..., step: _Optional[int] = ..., token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., prompt_length: _Optional[int] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., action_mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reward: _Optional[float] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., info_json: _Optional[str] = ..., prompt_text: _Optional[str] = ..., response_text: _Optional[str] = ..., teacher_logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., images: _Optional[_Iterable[_Union[PlacedImage, _Mapping]]] = ..., routes: _Optional[_Union[Routes, _Mapping]] = ..., teacher_top: _Optional[_Union[TopTokens, _Mapping]] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("ids", "logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    def __init__(self, ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Routes(_message.Message):
    __slots__ = ("layers", "chosen", "id_bytes", "data")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    layers: int
    chosen: int
    id_bytes: int
    data: bytes
    def __init__(self, layers: _Optional[int] = ..., chosen: _Optional[int] = ..., id_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PlacedImage(_message.Message):
    __slots__ = ("digest", "start")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    start: int
    def __init__(self, digest: _Optional[bytes] = ..., start: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("task", "attempt", "explorer_id", "experiences", "started_at_seconds", "finished_at_seconds", "images")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPLORER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERIENCES_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    task: _task_pb2.Task
    attempt: int
    explorer_id: str
    experiences: _containers.RepeatedCompositeFieldContainer[Experience]
    started_at_seconds: float
    finished_at_seconds: float
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, task: _Optional[_Union[_task_pb2.Task, _Mapping]] = ..., attempt: _Optional[int] = ..., explorer_id: _Optional[str] = ..., experiences: _Optional[_Iterable[_Union[Experience, _Mapping]]] = ..., started_at_seconds: _Optional[float] = ..., finished_at_seconds: _Optional[float] = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AttemptFailure(_message.Message):
    __slots__ = ("task", "attempt", "explorer_id", "cause", "error", "final", "failed_at_seconds")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPLORER_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    task: _task_pb2.Task
    attempt: int
    explorer_id: str
    cause: str
    error: str
    final: bool
    failed_at_seconds: float
    def __init__(self, task: _Optional[_Union[_task_pb2.Task, _Mapping]] = ..., attempt: _Optional[int] = ..., explorer_id: _Optional[str] = ..., cause: _Optional[str] = ..., error: _Optional[str] = ..., final: bool = ..., failed_at_seconds: _Optional[float] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("group", "failure", "blob", "requeue", "fence")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    REQUEUE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    group: Group
    failure: AttemptFailure
    blob: BlobReference
    requeue: Requeue
    fence: Fence
    def __init__(self, group: _Optional[_Union[Group, _Mapping]] = ..., failure: _Optional[_Union[AttemptFailure, _Mapping]] = ..., blob: _Optional[_Union[BlobReference, _Mapping]] = ..., requeue: _Optional[_Union[Requeue, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class Requeue(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: _task_pb2.Task
    def __init__(self, task: _Optional[_Union[_task_pb2.Task, _Mapping]] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, versions: _Optional[_Iterable[int]] = ...) -> None: ...

class TurnEntry(_message.Message):
    __slots__ = ("turn", "abandoned", "answered")
    TURN_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    turn: RecordedTurn
    abandoned: Abandoned
    answered: RecordedAnswer
    def __init__(self, turn: _Optional[_Union[RecordedTurn, _Mapping]] = ..., abandoned: _Optional[_Union[Abandoned, _Mapping]] = ..., answered: _Optional[_Union[RecordedAnswer, _Mapping]] = ...) -> None: ...

class RecordedTurn(_message.Message):
    __slots__ = ("episode", "turn", "seen", "token_ids", "logprobs", "version_spans", "finish_reason", "begin", "answer")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    episode: str
    turn: int
    seen: bytes
    token_ids: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: str
    begin: int
    answer: _environment_pb2.EpisodeResponse
    def __init__(self, episode: _Optional[str] = ..., turn: _Optional[int] = ..., seen: _Optional[bytes] = ..., token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., begin: _Optional[int] = ..., answer: _Optional[_Union[_environment_pb2.EpisodeResponse, _Mapping]] = ...) -> None: ...

class RecordedAnswer(_message.Message):
    __slots__ = ("episode", "turn", "reply", "answer")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    episode: str
    turn: int
    reply: bytes
    answer: _environment_pb2.EpisodeResponse
    def __init__(self, episode: _Optional[str] = ..., turn: _Optional[int] = ..., reply: _Optional[bytes] = ..., answer: _Optional[_Union[_environment_pb2.EpisodeResponse, _Mapping]] = ...) -> None: ...

class Abandoned(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class RecordedCall(_message.Message):
    __slots__ = ("experience", "client_sha256", "recorded_at_seconds")
    EXPERIENCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    RECORDED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    experience: Experience
    client_sha256: bytes
    recorded_at_seconds: float
    def __init__(self, experience: _Optional[_Union[Experience, _Mapping]] = ..., client_sha256: _Optional[bytes] = ..., recorded_at_seconds: _Optional[float] = ...) -> None: ...

class CallReward(_message.Message):
    __slots__ = ("id", "reward", "oldest_version", "newest_version")
    ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    id: str
    reward: float
    oldest_version: int
    newest_version: int
    def __init__(self, id: _Optional[str] = ..., reward: _Optional[float] = ..., oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ...) -> None: ...

class BlobReference(_message.Message):
    __slots__ = ("key", "size_bytes", "chunks", "crc32")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    chunks: int
    crc32: int
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...
